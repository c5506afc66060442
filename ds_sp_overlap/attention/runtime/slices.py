"""Multiplies with parts of weights.

A part is a tuple of ranges along one dimension. If two ranks need the same KV heads, parts overlap.
Then the gradients of these parts are summed (`parts.Pieces`).

Note [Slices of weights]
~~~~~~~~~~~~~~~~~~~~~~~~
The rows of a weight for the heads of a group may lie apart: one slice for each rank (see
Note [Groups first] in `heads`). There are two kinds of products with such slices:

    y = x w_g^T, do = dy w_g, dw_g = dy^T x     the slices belong to the columns of the result
    dx += dy w_g, y += o_g w_g^T                the slices are summed over

A product of the first kind is one batched product over a view of the slices, [slices, .., ..],
which copies no weight (`mm_of_slices`, `mm_to_slices`).

A product of the second kind copies the slices (`cut_ranges`), since no strided view joins slices
along the dimension of the sum, and the alternatives move more bytes. Beside the product itself,
these elements are moved, for K rows of a group in S slices, t tokens, model dim m:

    copy the slices                             2 K m           read once, written once
    one product a slice, added in place         2 (S - 1) t m   reads and writes dx or y each time
    one batched product, then a sum             2 S t m         writes and reads S terms of dx or y

So the copy is the cheapest for t > K / (S - 1). The table shows MB per product for Llama at P = 8
and G = 2, with 8192 tokens per rank in bf16. A layer has four such products in a step: for each of
two groups, the dgrad of q and the merge of o. (With 8 KV heads, k and v of a group are one slice.)

              K      copy   added in place   batched and summed   copy is cheaper from
    8B     2048        34              939                 1074             293 tokens
    70B    4096       134             1879                 2147             586 tokens

In half precision, adding in place would also round once for each slice.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...exchange.layout import Range, total

# A part is a tuple of ranges along one dimension.
Ranges = tuple[Range, ...]
Parts = tuple[Ranges, ...]
# Devices on which batched products in half precision into views are slow: up to a hundred times as
# slow as one product. The planner empties this set, since it records a GPU's work on a CPU.
unbatched = {"cpu"}


def batched_is_slow(x: Tensor) -> bool:
    """Return whether batched products with ``x`` are slow: in half precision, on ``unbatched``."""
    if x.device.type not in unbatched or x.dtype == torch.float64:
        return False
    return x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type)


def cut_ranges(parameter: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return the slices of ``parameter`` along ``dim``, joined in order.

    The result is the parameter or a view of it if the slices are adjacent, else a copy.
    """
    if len(ranges) == 1:
        ((start, stop),) = ranges
        if stop - start == parameter.shape[dim]:
            return parameter
        # Indexing costs the host less time than `narrow`.
        return parameter[(slice(None),) * dim + (slice(start, stop),)]
    runs = _runs(ranges)
    if len(runs) == 1:
        # The flatten copies all slices in one kernel.
        return runs[0][0].view(parameter, dim, in_place=True).flatten(dim, dim + 1)
    return torch.cat([parameter.narrow(dim, start, stop - start) for start, stop in ranges], dim)


class Run(NamedTuple):
    """Describes slices of equal size that ascend, are evenly spaced and don't overlap.

    Attributes:
        slices: The number of slices.
        size: The length of each slice.
        start: The start of the first slice.
        step: The distance between the starts of successive slices.
    """

    slices: int
    size: int
    start: int
    step: int

    @classmethod
    def dealt(cls, part: Ranges, count: int) -> Run:
        """Return ``part`` as a run of ``count`` slices, also if all slices are one range of it."""
        start, size = part[0][0], total(part) // count
        return cls(count, size, start, part[1][0] - start if len(part) > 1 else size)

    def view(self, x: Tensor, dim: int = 1, in_place: bool = False) -> Tensor:
        """Return the slices of ``x`` along ``dim`` as one view.

        Returns:
            If ``in_place``, ``dim`` becomes two dimensions: [.., slices, size, ..]. Otherwise
            [slices, other dim, size], for a matrix.
        """
        # Slicing a plain tuple takes the host less time than slicing a `torch.Size`.
        shape, strides = tuple(x.shape), x.stride()
        one, step = strides[dim], self.step * strides[dim]
        if in_place:
            wide = shape[:dim] + (self.slices, self.size) + shape[dim + 1 :]
            steps = strides[:dim] + (step, one) + strides[dim + 1 :]
        else:
            # One `as_strided` takes the host less time than a view and a transpose.
            wide, steps = (self.slices, shape[1 - dim], self.size), (step, strides[1 - dim], one)
        return x.as_strided(wide, steps, x.storage_offset() + self.start * one)


@lru_cache(maxsize=4096)
def _runs(part: Ranges) -> tuple[tuple[Run, Run], ...]:
    """Group the ranges of a part into runs of slices; adjacent ranges are one slice.

    Returns:
        For each run: the places of its slices in the whole dimension, and their places in the
        joined part, where slices lie end to end.
    """
    merged: list[Range] = []
    for start, stop in part:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    runs: list[Run] = []
    for start, stop in merged:
        size = stop - start
        if runs:
            count, last_size, first, step = runs[-1]
            # The slices of a run ascend, since a view has no negative stride. They don't overlap,
            # since a batched product must not write an element twice.
            is_next = last_size == size <= start - first
            # The second slice of a run sets the run's step. Later slices must have the same step.
            if is_next and (count == 1 or start == first + count * step):
                runs[-1] = Run(count + 1, size, first, (start - first) // count)
                continue
        runs.append(Run(1, size, start, size))
    pairs, place = [], 0
    for run in runs:
        pairs.append((run, run._replace(start=place, step=run.size)))
        place += run.slices * run.size
    return tuple(pairs)


def by_rank(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` by each rank's weights, to a result in the order of the send buffer.

    Args:
        x: [tokens, k].
        weights: [P, k, n].
        bias: [P, 1, n]; None without bias.

    Returns:
        [tokens, P, n]; in memory [P, tokens, n], as in the send buffer.
    """
    operands = x.expand(weights.size(0), -1, -1), weights
    out = torch.bmm(*operands) if bias is None else torch.baddbmm(bias, *operands)
    return out.transpose(0, 1)


def mm_of_slices(a: Tensor, whole: Tensor, part: Ranges, bias: Tensor | None = None) -> Tensor:
    """Multiply by several slices of the columns of a matrix, see Note [Slices of weights].

    Only nodes of autograd call this function, since autograd does not support ``out=``. The matrix
    is a transposed weight; or Wo, in its dgrad.

    Args:
        a: [m, k].
        whole: [k, n]. The matrix.
        part: The slices of n.
        bias: [n], for all columns; None for no bias.

    Returns:
        ``a @ whole[:, part]``, contiguous.
    """
    if part and batched_is_slow(a):
        y = a @ cut_ranges(whole, 1, part)
        return y if bias is None else y.add_(cut_ranges(bias, 0, part))
    y = a.new_empty(a.size(0), sum(stop - start for start, stop in part))
    for run, own in _runs(part):
        batch, weights, out = a.expand(run.slices, *a.shape), run.view(whole), own.view(y)
        if bias is None:
            torch.bmm(batch, weights, out=out)
        else:
            torch.baddbmm(run.view(bias[None]), batch, weights, out=out)
    return y


def mm_to_slices(a: Tensor, b: Tensor, whole: Tensor, part: Ranges, add: bool) -> None:
    """Write ``a @ b`` to slices of the columns of ``whole``, see Note [Slices of weights].

    Args:
        a: [m, k].
        b: [k, n].
        whole: [m, N].
        part: The slices of N, with n columns in all.
        add: Whether to add the product to the slices instead of overwriting them.
    """
    if batched_is_slow(a):
        return put_ranges(whole, 1, part, a @ b, add)
    for run, own in _runs(part):
        batch, columns, out = a.expand(run.slices, *a.shape), own.view(b), run.view(whole)
        if add:
            out.baddbmm_(batch, columns)
        else:
            torch.bmm(batch, columns, out=out)


def put_ranges(whole: Tensor, dim: int, ranges: Ranges, piece: Tensor, add: bool) -> None:
    """Write ``piece`` to slices of ``whole``: the inverse of `cut_ranges`.

    Args:
        whole: The tensor to write to.
        dim: The dimension of the slices.
        ranges: The slices.
        piece: The new values of the slices, one slice after another.
        add: Whether to add the values to the slices instead of overwriting them.
    """
    # The slices of a run don't overlap, so an in-place sum loses no terms.
    for run, own in _runs(ranges):
        target = run.view(whole, dim, in_place=True)
        source = own.view(piece, dim, in_place=True)
        target.add_(source) if add else target.copy_(source)


@lru_cache(maxsize=4096)
def tile(parts: Parts, size: int) -> bool:
    """Return whether ``parts`` cover a dimension of ``size`` without gaps and overlaps."""
    covered = 0
    for start, stop in sorted(chain.from_iterable(parts)):
        if start != covered:
            return False
        covered = stop
    return covered == size
