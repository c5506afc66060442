"""Rotary position embedding (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotated rotary embedding of ``x`` [..., d]; dims past those of ``cos``, ``sin`` [..., d_rot] pass through."""
    dims = cos.shape[-1]
    rotary, rest = x[..., :dims], x[..., dims:]
    low, high = rotary.chunk(2, dim=-1)
    rotary = rotary * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((rotary, rest), dim=-1) if rest.shape[-1] else rotary


def rotate_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transpose of `rotate`, which is its backward."""
    dims = cos.shape[-1]
    rotary, rest = dy[..., :dims], dy[..., dims:]
    low, high = (rotary * sin).chunk(2, dim=-1)
    rotary = rotary * cos + torch.cat((high, -low), dim=-1)
    return torch.cat((rotary, rest), dim=-1) if rest.shape[-1] else rotary


def check_tables(tables: tuple[Tensor, Tensor], head_dim: int, partial: bool) -> None:
    """Raises ValueError for (cos, sin) [..., d_rot] that don't rotate heads of ``head_dim``: all of them, unless ``partial``."""
    cos, sin = tables
    width = cos.shape[-1]
    if (
        width == sin.shape[-1] and width % 2 == 0 and (width == head_dim or partial and width < head_dim)
    ):  # guard: heads rotate whole
        return
    raise ValueError(
        f"rotary tables are {width} (cos) and {sin.shape[-1]} (sin) wide for heads of {head_dim}; both must be as wide as the "
        + ("head or less, and even" if partial else "head, and even; ask for partial rotary embedding with partial=True")
    )


@dataclass(frozen=True)
class Rotary:
    """A layer's rotary embedding: `rotate`, by what its ``position_embeddings`` say.

    tables    position embeddings -> (cos, sin), each broadcast to q and k from the right, ``[b or 1, s/P, 1, d_rot]`` for
              batch first; the rank's own positions. None where they say that there is nothing to rotate by
    partial   whether d_rot may be less than d: the dims past it pass through
    """

    tables: Callable[[Any], tuple[Tensor, Tensor] | None]
    partial: bool = False

    def __call__(self, x: Tensor, position_embeddings: Any) -> Tensor:
        """Rotate q or k [..., d]."""
        tables = self.of(position_embeddings, x.shape[-1])
        return x if tables is None else rotate(x, *tables)

    def of(self, position_embeddings: Any, head_dim: int) -> tuple[Tensor, Tensor] | None:
        """The tables. Raises ValueError where ``position_embeddings`` are missing, or don't fit heads of ``head_dim``."""
        if position_embeddings is None:  # guard: RoPE needs its tables
            raise ValueError("position_embeddings are missing, and without them RoPE would be left out; give what `rope` expects")
        tables = self.tables(position_embeddings)
        if tables is not None:
            check_tables(tables, head_dim, self.partial)
        return tables

    def of_tokens(self, position_embeddings: Any, head_dim: int) -> tuple[Tensor, Tensor] | None:
        """The tables without the dimension of heads, as `ops.rotate_pack` takes them; None where it can't have them."""
        tables = self.of(position_embeddings, head_dim)
        if tables is None:
            return None
        cos, sin = tables
        if cos.requires_grad or sin.requires_grad or cos.shape[-2] != 1:
            return None
        return cos.squeeze(-2), sin.squeeze(-2)
