"""Describes the shape of a layer, and the ways to run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...exchange.geometry import Geometry


@dataclass(frozen=True)
class LayerShape:
    """Describes the shape of a transformer layer.

    Attributes:
        width: Model dim ``m``.
        heads: Query heads, ``h``.
        kv_heads: KV heads, ``h_kv``.
        head_dim: ``d``.
        seq: Global sequence, in tokens; divides by the sp size.
        sp_size: ``P``.
        batch: ``b``.
        element_bytes: The size of an exchanged element, in bytes.
        intermediate: The width of a gated MLP; 0 for an attention layer without MLP. The MLP adds
            to the layer's time, but no exchange runs during the MLP.
        shares: The number of ranks that share their query heads, ``r``.

    Raises:
        ValueError: if the tokens or heads can't be split over ``sp_size`` ranks.
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
    """Describes a way to run a layer.

    Attributes:
        groups: The number of head groups, G; 0 for DeepSpeed's own class.
        window: W, the number of head groups whose tensors are in memory at a time; None for all.
    """

    groups: int
    window: int | None = None

    def __str__(self) -> str:
        name = f"G = {self.groups}" if self.groups else "stock"
        return name if self.window is None else f"{name}, W = {self.window}"


# The windows that `plan` shows. Windows of more groups save little memory.
WINDOWS = (Way(2, 1), Way(4, 1), Way(4, 2), Way(8, 1), Way(8, 2))
