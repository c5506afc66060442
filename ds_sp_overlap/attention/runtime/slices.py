"""Multiplies with parts of weights.

A part is a tuple of ranges along one dimension. Parts may overlap (KV heads that two ranks need);
their gradients are summed then (`pieces`). `parts` cuts and joins differentiably.

Note [Slices of weights]
~~~~~~~~~~~~~~~~~~~~~~~~
The rows of a weight that make the heads of a group may lie apart, one slice for each rank (see
Note [Groups first] in `heads`). Products of two kinds read or write them:

    y = x w_g^T, do = dy w_g, dw_g = dy^T x     the slices belong to the columns of the result
    dx += dy w_g, y += o_g w_g^T                the slices are summed over

A product of the first kind is one batched product over a view of the slices, [slices, .., ..]; it
copies no weight (`mm_of_slices`, `mm_to_slices`).

A product of the second kind copies the slices (`cut_ranges`), since that moves the fewest bytes.
No strided view joins slices along the dimension that is summed over. The ways, for a group of K
rows in S slices, t tokens of the rank, model dim m; in elements beyond those of one product:

    copy the slices                             2 K m           read once, written once
    one product a slice, added in place         2 (S - 1) t m   reads and writes dx or y each time
    one batched product, then a sum             2 S t m         writes and reads S terms of dx or y

So the copy is the cheapest from t > K / (S - 1) tokens on. For Llama at P = 8 and G = 2, 8192
tokens a rank, bf16, MB a product; there are four of them a layer and step (dgrad of q and merge of
o, for each group; with 8 KV heads, k and v of a group are one slice):

              K      copy   added in place   batched and summed   copy is cheaper from
    8B     2048        34              939                 1074             293 tokens
    70B    4096       134             1879                 2147             586 tokens

Adding in place would also round half precision once a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...exchange.layout import Range
from .products import batched_is_slow

# A part.
Ranges = tuple[Range, ...]
Parts = tuple[Ranges, ...]


class Cover(NamedTuple):
    """Tells how parts cover a dimension.

    Attributes:
        once: Whether they cover all of it, and don't overlap.
        order: The parts in order, if they do, and each is one range; else empty.
        sizes: The size of each of those.
    """

    once: bool
    order: Sequence[Ranges] = ()
    sizes: Sequence[int] = ()


def _slices(x: Tensor, dim: int, ranges: Ranges) -> Tensor | None:
    """Return slices of ``x`` as one view, [.., slices, size, ..] in place of ``dim``.

    Returns None unless the slices are one `_Run`.
    """
    runs = _runs(ranges)
    if len(runs) > 1:
        return None
    (run,), shape, strides = runs, x.shape, x.stride()
    wide = (*shape[:dim], run.slices, run.size, *shape[dim + 1 :])
    steps = (*strides[:dim], run.step * strides[dim], *strides[dim:])
    return x.as_strided(wide, steps, x.storage_offset() + run.start * strides[dim])


def cut_ranges(parameter: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return the slices of ``parameter`` along ``dim``, one after another.

    The result is a view of the parameter where one can have this form, else a copy.
    """
    if len(ranges) == 1:
        ((start, stop),) = ranges
        if stop - start == parameter.shape[dim]:
            return parameter
        # Costs the host less than `narrow`.
        return parameter[(slice(None),) * dim + (slice(start, stop),)]
    # One copy instead of one for each slice.
    slices = _slices(parameter, dim, ranges)
    if slices is not None:
        return slices.flatten(dim, dim + 1)
    return torch.cat([parameter.narrow(dim, start, stop - start) for start, stop in ranges], dim)


class _Run(NamedTuple):
    """Slices of one size that ascend, evenly spaced, and don't overlap.

    Attributes:
        slices: The number of slices.
        size: The length of each.
        start: The place of the first one in the whole dimension.
        step: From one slice to the next in the whole dimension.
        place: The place of the first one in the part, where the slices lie end to end.
    """

    slices: int
    size: int
    start: int
    step: int
    place: int

    def view(self, x: Tensor, is_whole: bool) -> Tensor:
        """Return the slices of the columns of ``x`` as a view [slices, n, size].

        ``x`` is [n, whole] if ``is_whole``, else [n, part].
        """
        start, step = (self.start, self.step) if is_whole else (self.place, self.size)
        rows, columns = x.stride()
        shape, strides = (self.slices, x.size(0), self.size), (step * columns, rows, columns)
        return x.as_strided(shape, strides, x.storage_offset() + start * columns)


@lru_cache(maxsize=4096)
def _runs(part: Ranges) -> tuple[_Run, ...]:
    """Return the slices of a part as few runs; ranges that touch are one slice."""
    merged: list[Range] = []
    for start, stop in part:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    runs: list[_Run] = []
    place = 0
    for start, stop in merged:
        size = stop - start
        last = runs[-1] if runs else None
        # A view has no negative stride, and a batched product may not add to a number twice.
        if last is not None and start - last.start < size:
            last = None
        # The second slice of a run gives its step; later ones must follow.
        if last is not None and size == last.size and last.slices == 1:
            runs[-1] = last._replace(slices=2, step=start - last.start)
        elif last is not None and (size, start) == (
            last.size,
            last.start + last.slices * last.step,
        ):
            runs[-1] = last._replace(slices=last.slices + 1)
        else:
            runs.append(_Run(1, size, start, size, place))
        place += size
    return tuple(runs)


def mm_of_slices(a: Tensor, whole: Tensor, part: Ranges, bias: Tensor | None = None) -> Tensor:
    """Multiply by several slices of the columns of a matrix, see Note [Slices of weights].

    For use inside nodes of autograd, which does not see through ``out=``. The columns are rows of a
    projection's weight, given as ``weight.t()``, or those of the output projection in dgrad.

    Args:
        a: [m, k].
        whole: [k, n].
        part: The slices of n.
        bias: [n]; None without bias.

    Returns:
        ``a @ whole[:, part]``, contiguous.
    """
    if part and batched_is_slow(a):
        y = a @ cut_ranges(whole, 1, part)
        return y if bias is None else y.add_(cut_ranges(bias, 0, part))
    y = a.new_empty(a.size(0), sum(stop - start for start, stop in part))
    for run in _runs(part):
        operands = a.expand(run.slices, *a.shape), run.view(whole, True)
        if bias is None:
            torch.bmm(*operands, out=run.view(y, False))
        else:
            torch.baddbmm(run.view(bias[None], True), *operands, out=run.view(y, False))
    return y


def mm_to_slices(a: Tensor, b: Tensor, whole: Tensor, part: Ranges, add: bool) -> None:
    """Write ``a @ b`` to slices of the columns of ``whole``, see Note [Slices of weights].

    Args:
        a: [m, k].
        b: [k, n].
        whole: [m, N].
        part: The slices of N; n columns in all.
        add: Whether to add the product instead.
    """
    if batched_is_slow(a):
        return put_ranges(whole, 1, part, a @ b, add)
    for run in _runs(part):
        operands = a.expand(run.slices, *a.shape), run.view(b, False)
        if add:
            run.view(whole, True).baddbmm_(*operands)
        else:
            torch.bmm(*operands, out=run.view(whole, True))


def put_ranges(whole: Tensor, dim: int, ranges: Ranges, piece: Tensor, add: bool) -> None:
    """Write ``piece`` to the slices of ``whole`` from which `cut_ranges` takes it.

    Args:
        whole: The tensor to write to.
        dim: The dimension of the slices.
        ranges: The slices.
        piece: Their new values.
        add: Whether to add the values instead.
    """
    # One copy for all slices, where they are one view. Not for a sum: slices may overlap, and an
    # overlapping view would lose terms.
    slices = _slices(whole, dim, ranges) if len(ranges) > 1 and not add else None
    if slices is not None:
        slices.copy_(piece.unflatten(dim, slices.shape[dim : dim + 2]))
        return
    place = 0
    for start, stop in ranges:
        size = stop - start
        target, source = whole.narrow(dim, start, size), piece.narrow(dim, place, size)
        target.add_(source) if add else target.copy_(source)
        place += size


@lru_cache(maxsize=4096)
def cover_of(parts: Parts, size: int) -> Cover:
    """Return how parts cover a dimension of ``size``."""
    covered = 0
    for start, stop in sorted(chain.from_iterable(parts)):
        if start != covered:
            return Cover(once=False)
        covered = stop
    if covered != size or any(len(part) != 1 for part in parts):
        return Cover(once=covered == size)
    order = sorted(parts)
    return Cover(True, order, [stop - start for ((start, stop),) in order])


def cutter(parameter: Tensor, dim: int, cover: Cover) -> Callable[[Ranges], Tensor]:
    """Return a function that does for each of the parts what `cut_ranges` does.

    Where each part is one range and the parts tile ``dim``, all views are made now, at once.
    """
    order, sizes = cover.order, cover.sizes
    if not order:
        return partial(cut_ranges, parameter, dim)
    views = parameter.split_with_sizes(sizes, dim) if len(sizes) > 1 else (parameter,)
    return dict(zip(order, views)).__getitem__


def batched(parameter: Tensor, dim: int, part: Ranges, count: int) -> Tensor:
    """Return the slices of a part as one view, [count, .., slice], with ``dim`` last.

    Args:
        parameter: The tensor.
        dim: The dimension of the slices.
        part: Slices of one size, evenly spaced; slices that touch may be given as one range.
        count: The number of slices, one for each part of the ranks.
    """
    first, size, step = _spacing(part, count)
    shape, strides, start = parameter.shape, parameter.stride(), parameter.storage_offset()
    wide = (count, *shape[:dim], *shape[dim + 1 :], size)
    steps = (step * strides[dim], *strides[:dim], *strides[dim + 1 :], strides[dim])
    return parameter.as_strided(wide, steps, start + first * strides[dim])


@lru_cache(maxsize=4096)
def _spacing(part: Ranges, count: int) -> tuple[int, int, int]:
    """Return the begin of the slices of `batched`, their size, and their distance."""
    first, size = part[0][0], sum(stop - start for start, stop in part) // count
    return first, size, part[1][0] - first if len(part) > 1 else size
