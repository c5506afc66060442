"""Rotates q and k by their positions: rotary embedding (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool = False, back: bool = False
) -> Tensor:
    """Apply rotary embedding, or its backward.

    Args:
        x: [..., d].
        cos: [..., d_rot]. Dims of ``x`` from d_rot on pass through.
        sin: [..., d_rot].
        neighbours: Whether dims 2i and 2i + 1 form a pair, instead of dims i and i + d_rot / 2.
        back: Whether to compute the backward: ``x`` is the gradient of the output, and the result
            is the gradient of the input.

    Returns:
        A tensor of the shape of ``x``, in the dtype that ``x`` and the tables promote to.
    """
    if (width := cos.shape[-1]) < x.shape[-1]:
        rotated = rotate(x[..., :width], cos, sin, neighbours=neighbours, back=back)
        return torch.cat((rotated, x[..., width:]), dim=-1)
    if back:
        # The transpose of the quarter turn is the opposite quarter turn.
        return x * cos - _quarter(x * sin, neighbours)
    return x * cos + _quarter(x, neighbours) * sin


def _quarter(x: Tensor, neighbours: bool) -> Tensor:
    """Rotate each pair of dims by 90 degrees: (a, b) -> (-b, a)."""
    if neighbours:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def check_tables(tables: tuple[Tensor, Tensor], head_dim: int, partial: bool) -> None:
    """Check that rotary tables fit heads of ``head_dim``.

    Args:
        tables: (cos, sin), each [..., d_rot].
        head_dim: ``d``.
        partial: Whether d_rot may be less than d.

    Raises:
        ValueError: if the tables don't fit.
    """
    pair = isinstance(tables, (tuple, list)) and len(tables) == 2
    if not (pair and all(isinstance(table, Tensor) for table in tables)):
        raise ValueError(
            f"rotary tables must be (cos, sin), two tensors, got {type(tables).__name__}"
        )
    cos, sin = tables
    width = cos.shape[-1]
    fits = width == head_dim or partial and width < head_dim
    if fits and width == sin.shape[-1] and width % 2 == 0:  # guard: heads rotate whole
        return
    limit = "head, and even; ask for partial rotary embedding with partial=True"
    if partial:
        limit = "head or less, and even"
    raise ValueError(
        f"rotary tables are {width} (cos) and {sin.shape[-1]} (sin) wide for heads of "
        f"{head_dim}; both must be as wide as the {limit}"
    )


@dataclass(frozen=True)
class Rotary:
    """Rotates q and k of a layer by the ``position_embeddings`` of each call.

    Attributes:
        tables: A function that turns ``position_embeddings`` into (cos, sin), or into None if the
            layer does not rotate. Both tables hold this rank's positions and broadcast to q and k:
            ``[b or 1, s/P, 1, d_rot]`` for batch first.
        partial: Whether d_rot may be less than d; the dims from d_rot on pass through.
        neighbours: Whether dims 2i and 2i + 1 form a pair, instead of dims i and i + d_rot / 2.
        rounding: "promoted": compute and return in the dtype that q and the tables promote to.
            "kept": compute in this dtype, and round to the dtype of q. "fp32": convert q to fp32
            first, and round the result to the dtype of q.
        optional: Whether missing position embeddings mean no rotation, instead of an error.
    """

    tables: Callable[[Any], tuple[Tensor, Tensor] | None]
    partial: bool = False
    neighbours: bool = False
    rounding: str = "promoted"
    optional: bool = False

    def __call__(self, x: Tensor, position_embeddings: Any) -> Tensor:
        """Rotate ``x``, q or k [..., d]; return ``x`` unchanged if the layer does not rotate."""
        tables = self.of(position_embeddings, x.shape[-1])
        return x if tables is None else self.rotate(x, *tables)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
        """Apply `rotate` with the layer's order of dims and rounding."""
        exact = x.float() if self.rounding == "fp32" else x
        y = rotate(exact, cos, sin, neighbours=self.neighbours, back=back)
        return y if self.rounding == "promoted" else y.to(x.dtype)

    def of(self, position_embeddings: Any, head_dim: int) -> tuple[Tensor, Tensor] | None:
        """Return (cos, sin) of ``position_embeddings``; None if the layer does not rotate.

        Raises:
            ValueError: if ``position_embeddings`` are missing, or don't fit heads of ``head_dim``.
        """
        if position_embeddings is None and self.optional:
            return None
        if position_embeddings is None:  # guard: RoPE needs its tables
            raise ValueError(
                "position_embeddings are missing, and without them RoPE would be left out; "
                "give what `rope` expects"
            )
        tables = self.tables(position_embeddings)
        if tables is not None:
            check_tables(tables, head_dim, self.partial)
        return tables

    def of_tokens(
        self, position_embeddings: Any, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Return (cos, sin) without the dimension of heads, for the operator `ops.rotate_pack`.

        None if the layer does not rotate, or if ``rotate_pack`` can't rotate heads of ``dtype`` by
        these tables.
        """
        tables = self.of(position_embeddings, head_dim)
        if tables is None:
            return None
        cos, sin = tables
        # ``rotate_pack`` only pairs dims i and i + d_rot / 2, computes no gradients of its tables,
        # and uses the same tables for all heads.
        if self.neighbours or cos.requires_grad or sin.requires_grad or cos.shape[-2] != 1:
            return None
        accepted = (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)
        if not (cos.dtype == sin.dtype and cos.dtype in accepted):
            return None
        return cos.squeeze(-2), sin.squeeze(-2)
