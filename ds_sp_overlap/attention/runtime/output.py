"""The output projection of o, group by group, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ...exchange.geometry import Geometry
from .execution import Call
from .linear import autocast, by_rank, matrix
from .slices import Parts, Pieces, batched, cutter, parts_of


class OutputProjection:
    """The output projection of o, one group after another; shared by forward and backward of a
    node.

    w [m, k], w_g = w[:, c_g] its columns for a group
    """

    def __init__(self, call: Call, shape: torch.Size):
        self.call, self.shape = call, shape
        self.head_dim = shape[1] // call.geometry.heads
        self.columns = _columns(call.geometry, self.head_dim)

    def merging(
        self, weight: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor | None, int, Tensor], tuple[Tensor, Tensor]]:
        """What makes y + o_g w_g^T of y and o of a group, or b + o_g w_g^T for the first; with o
        [tokens, k_g] as it was multiplied.
        """
        cut, is_cast = (
            cutter(weight.t(), 0, self.columns),
            torch.is_autocast_enabled(weight.device.type),
        )

        def merge(y: Tensor | None, group: int, o: Tensor) -> tuple[Tensor, Tensor]:
            tokens, o = o.shape[:2], matrix(o)
            if is_cast:
                (o,) = autocast(o)
            operands = o, cut(self.columns[group])
            if y is not None:
                matrix(y).addmm_(*operands)
                return y, o
            y = o.new_empty(
                *tokens, weight.shape[0]
            )  # no view, so that the caller may update it in place
            torch.mm(*operands, out=matrix(y)) if bias is None else torch.addmm(
                bias, *operands, out=matrix(y)
            )
            return y, o

        return merge

    def dgrads(self, dy: Tensor, weight: Tensor) -> Callable[[int], Tensor]:
        """What makes do_g = dy w_g, [s/P, b, h_g, d], of a group."""
        rows, cut, head_dim = matrix(dy), cutter(weight, 1, self.columns), self.head_dim

        def dgrad(group: int) -> Tensor:
            if "o" in self.call.by_rank:
                do = by_rank(
                    rows, batched(weight, 1, self.columns[group], self.call.geometry.sp_size)
                )
            else:
                do = torch.mm(rows, cut(self.columns[group]))
            return do.view(*dy.shape[:2], *do.shape[1:-1], do.shape[-1] // head_dim, head_dim)

        return dgrad

    def pieces(self, late: bool = False) -> Pieces:
        """Of dw."""
        return Pieces(self.shape, 1, self.columns, late=late)


@lru_cache(maxsize=4096)
def _columns(geometry: Geometry, head_dim: int) -> Parts:
    return parts_of(
        *(geometry.elements_of("o", group, 0, head_dim) for group in range(geometry.groups))
    )
