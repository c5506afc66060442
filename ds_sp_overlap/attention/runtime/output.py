"""The output projection of o, one head group after another, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ...exchange.geometry import Geometry
from .execution import Call
from .products import autocast, by_rank, matrix
from .slices import Parts, batched, cutter, mm_of_slices, parts_of


class OutputProjection:
    """The output projection of o, one head group after another.

    Forward and backward of a node share this object. The weight w is [m, k]; w_g = w[:, c_g] are
    its columns for group g.

    Attributes:
        call: The call.
        shape: The shape of the weight.
        head_dim: ``d`` of o.
        columns: c_g of each group.
    """

    def __init__(self, call: Call, shape: torch.Size):
        self.call, self.shape = call, shape
        self.head_dim = shape[1] // call.geometry.heads
        self.columns = _columns(call.geometry, self.head_dim)

    def merging(
        self, weight: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor | None, int, Tensor], tuple[Tensor, Tensor]]:
        """Return the function that adds the product of a group to y.

        It takes y [s/P, b, m] (None for the first group), the group, and local o of the group. It
        returns y + o_g w_g^T, in place; or b + o_g w_g^T for the first group. It also returns the o
        that was multiplied, [tokens, k_g], which the wgrad reads.
        """
        cut = cutter(weight.t(), 0, self.columns)
        is_cast = torch.is_autocast_enabled(weight.device.type)

        def merge(y: Tensor | None, group: int, o: Tensor) -> tuple[Tensor, Tensor]:
            tokens, o = o.shape[:2], matrix(o)
            # The weight is cast already, before the node, by `autocast`.
            if is_cast:
                (o,) = autocast(o)
            operands = o, cut(self.columns[group])
            if y is not None:
                matrix(y).addmm_(*operands)
                return y, o
            # The product is written into y, so that y is no view: autograd forbids to update in
            # place a view that a node returns.
            y = o.new_empty(*tokens, weight.shape[0])
            if bias is None:
                torch.mm(*operands, out=matrix(y))
            else:
                torch.addmm(bias, *operands, out=matrix(y))
            return y, o

        return merge

    def dgrads(self, dy: Tensor, weight: Tensor) -> Callable[[int], Tensor]:
        """Return the function that computes do_g = dy w_g of a group, from dy [s/P, b, m].

        do_g is [s/P, b, h_g, d]; or [s/P, b, P, h_g/P, d], where o has a dimension for the ranks
        (`Call.by_rank`). It may be the very tensor that is sent. The weight is read as views, never
        copied.
        """
        rows, cut, head_dim = matrix(dy), cutter(weight, 1, self.columns), self.head_dim
        tokens = dy.shape[:2]

        def dgrad(group: int) -> Tensor:
            columns = self.columns[group]
            # Three ways to the same do: into the send buffer, of several slices, of one slice.
            if "o" in self.call.by_rank:
                do = by_rank(rows, batched(weight, 1, columns, self.call.geometry.parts))
            elif len(columns) > 1:
                do = mm_of_slices(rows, weight, columns)
            else:
                do = torch.mm(rows, cut(columns))
            _, *parts, width = do.shape
            return do.view(*tokens, *parts, width // head_dim, head_dim)

        return dgrad


@lru_cache(maxsize=4096)
def _columns(geometry: Geometry, head_dim: int) -> Parts:
    """Return for each head group the columns of the weight that its heads are multiplied with."""
    groups = range(geometry.groups)
    return parts_of(*(geometry.rows_of("o", group, 0, head_dim) for group in groups))
