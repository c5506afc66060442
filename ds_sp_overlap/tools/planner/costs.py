"""Describes a layer, and the ways to run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...exchange.geometry import Geometry


@dataclass(frozen=True)
class LayerShape:
    """Shape of a transformer layer.

    Attributes:
        width: Model dim ``m``.
        heads: Query heads, ``h``.
        kv_heads: KV heads, ``h_kv``.
        head_dim: ``d``.
        seq: Global sequence, in tokens; divides by the sp size.
        sp_size: ``P``.
        batch: ``b``.
        element_bytes: Bytes of an element that is exchanged.
        intermediate: Width of a gated MLP, which counts towards the layer's time and hides nothing;
            0: the attention layer alone.
        shares: Ranks that share their query heads, ``r``.

    Raises:
        ValueError: where no sp group of this size can hold the layer.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    sp_size: int
    batch: int = 1
    element_bytes: int = 2
    intermediate: int = 0
    shares: int = 1

    def __post_init__(self) -> None:
        if self.seq % self.sp_size:
            raise ValueError(
                f"{self.seq} tokens do not divide by sp size {self.sp_size}; take a multiple of it"
            )
        self.geometry(1)

    def geometry(self, groups: int) -> Geometry:
        """Return the geometry of rank 0 with ``groups`` head groups."""
        lengths = (self.seq // self.sp_size,) * self.sp_size
        heads = self.heads, self.kv_heads, groups
        return Geometry(self.sp_size, 0, lengths, self.batch, *heads, shares=self.shares)


class Way(NamedTuple):
    """Describes how a layer runs.

    Attributes:
        groups: G; 0 is DeepSpeed's own class.
        window: W; None: all groups are live.
    """

    groups: int
    window: int | None = None

    def __str__(self) -> str:
        name = f"G = {self.groups}" if self.groups else "stock"
        return name if self.window is None else f"{name}, W = {self.window}"


# The windows that `plan` shows. Windows of more groups save little memory.
WINDOWS = (Way(2, 1), Way(4, 1), Way(4, 2), Way(8, 1), Way(8, 2))
