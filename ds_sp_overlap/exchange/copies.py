"""Packs tensors into the wire (the flat buffer that travels), and unpacks them, by few copies.

For each end of an exchange, and the strides of its tensors, `copies_of` finds pairs of strided
views: one of a tensor, one of the wire. A pair is one copy, and the number of pairs does not grow
with the number of ranks. The pairs are found once; `pack` and `unpack` only run the copies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..relayout.ops import sum_dtype
from .layout import Side, Sides, shape_of

Strides = tuple[int, ...]


class Run(NamedTuple):
    """Describes one copy by two strided views of equal shape: one of a tensor, one of the wire.

    Strides and offsets are in elements.

    Attributes:
        tensor: Index of the tensor.
        shape: Shape of both views.
        strides: Strides in the tensor; 0 along a dimension of several peers with the same slice.
        offset: Offset in the tensor.
        wire_strides: Strides in the wire.
        wire_offset: Offset in the wire.
        repeats: The dimensions of several peers with the same slice: those of stride 0.
    """

    tensor: int
    shape: tuple[int, ...]
    strides: Strides
    offset: int
    wire_strides: Strides
    wire_offset: int
    repeats: list[int]

    @property
    def dims(self) -> list[tuple[int, int, int]]:
        """Return size, stride and stride in the wire of each dimension."""
        return list(zip(self.shape, self.strides, self.wire_strides))


@dataclass(frozen=True)
class Copies:
    """Holds the copies between tensors and the wire.

    Attributes:
        runs: The copies.
        elements: The number of elements of the wire.
        flat: The offset of the tensor's first element, if there is a single tensor and its memory
            has the order of the wire, so that it needs no copy; else None.
        disjoint: Whether the parts of each tensor cover the tensor without overlap, so that unpack
            copies each part. Otherwise unpack adds the parts to zeros.
        is_wire: Whether a contiguous clone of a single view of a single tensor is the wire.
        in_order: For each tensor, (view, shape). ``view`` is (shape, strides, offset) of a view of
            the wire; a contiguous clone of this view, reshaped to ``shape``, is the tensor. Empty
            if some tensor needs more than one view.
    """

    runs: tuple[Run, ...]
    elements: int
    flat: int | None
    disjoint: bool
    is_wire: bool
    in_order: tuple[tuple[tuple[tuple[int, ...], Strides, int], tuple[int, ...]], ...]


@lru_cache(maxsize=4096)
def copies_of(sides: Sides, strides: tuple[Strides, ...] | None = None) -> Copies:
    """Find the copies between the wire and tensors with these strides.

    Args:
        sides: The parts of each tensor.
        strides: The strides of each tensor; None if all are contiguous.
    """
    of_tensors = strides or tuple(contiguous(shape) for shape in sides.shapes)
    runs = runs_of(sides, of_tensors)
    sizes, held = [math.prod(shape) for shape in sides.shapes], [0] * len(sides.shapes)
    for run in runs:
        # Count an element once, even if several peers have the element.
        held[run.tensor] += math.prod(size for size, stride, _ in run.dims if stride)
    disjoint = held == sizes  # guard: disjoint parts need no sum
    flat = None
    if runs and [sides.elements] == sizes:
        shifts = {run.offset - run.wire_offset for run in runs}
        dims = chain.from_iterable(run.dims for run in runs)
        # The stride of a dimension of one element does not matter.
        alike = all(size == 1 or stride == in_wire for size, stride, in_wire in dims)
        if alike and len(shifts) == 1:  # guard: lies as it travels
            flat = shifts.pop()
    in_order = []
    is_one_each = [run.tensor for run in runs] == list(range(len(sizes)))
    if strides is None and disjoint and is_one_each and not any(run.repeats for run in runs):
        for run in runs:
            # Order the dimensions as in the tensor's memory, largest stride first.
            shape, _, wire_strides = zip(*sorted(run.dims, key=lambda dim: -dim[1]))
            in_order.append(((shape, wire_strides, run.wire_offset), sides.shapes[run.tensor]))
    return Copies(
        tuple(runs),
        sides.elements,
        flat,
        disjoint=disjoint,
        is_wire=len(runs) == len(sizes) == 1 and runs[0].wire_strides == contiguous(runs[0].shape),
        in_order=tuple(in_order),
    )


def contiguous(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def pack(tensors: Sequence[Tensor], copies: Copies, new_empty: Callable[..., Tensor]) -> Tensor:
    """Copy the parts of ``tensors`` to a new contiguous buffer.

    Args:
        tensors: The tensors that are sent.
        copies: The copies for these tensors.
        new_empty: Allocates the buffer, given its number of elements; decides its dtype.
    """
    if copies.is_wire:
        # A clone costs the host less time than ``new_empty`` and ``copy_``.
        return _part(tensors, copies.runs[0]).clone(memory_format=torch.contiguous_format)
    wire = new_empty(copies.elements)
    for run in copies.runs:
        wire.as_strided(run.shape, run.wire_strides, run.wire_offset).copy_(_part(tensors, run))
    return wire


def unpack(wire: Tensor, copies: Copies, tensors: Sequence[Tensor]) -> None:
    """Copy the flat buffer ``wire`` to ``tensors``; the inverse of `pack`.

    If ``wire`` holds several values for an element of a tensor, the element becomes their sum,
    computed in fp32 for half precision. If ``wire`` holds no value for an element, the element
    becomes zero.
    """
    totals = tensors
    if not copies.disjoint:
        totals = [  # guard: halves are summed in fp32
            torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in tensors
        ]
    for run in copies.runs:
        part = _part(totals, run)
        place = wire.as_strided(run.shape, run.wire_strides, run.wire_offset)
        if run.repeats:
            exact = sum_dtype(part.dtype)
            place = place.sum(run.repeats, dtype=exact)  # guard: repeats are summed
            for dim in reversed(run.repeats):
                part = part.select(dim, 0)
        if copies.disjoint:
            part.copy_(place)
        else:
            part.add_(place)  # guard: overlaps are summed
    if not copies.disjoint:
        for x, total in zip(tensors, totals):
            x.copy_(total)


def unpacked(wire: Tensor, copies: Copies) -> list[Tensor]:
    """Copy the flat buffer ``wire`` to new tensors, by the views of `Copies.in_order`."""
    outs = []
    for view, shape in copies.in_order:
        x = wire.as_strided(*view)
        # Don't return a view of a clone: a clone takes the host longer, and autograd forbids
        # in-place changes of a view that a node returns.
        out = x.reshape(*shape)
        if out.data_ptr() == x.data_ptr():  # guard: a copy, no view
            out = out.clone(memory_format=torch.contiguous_format)
        outs.append(out)
    return outs


def _part(tensors: Sequence[Tensor], run: Run) -> Tensor:
    """Return the view of a tensor that a copy reads or writes."""
    x = tensors[run.tensor]
    # ``as_strided`` counts from the storage, which other tensors may share.
    return x.as_strided(run.shape, run.strides, x.storage_offset() + run.offset)


def runs_of(sides: Sides, strides: tuple[Strides, ...]) -> list[Run]:
    """Return few copies that move all parts of tensors with these strides.

    Args:
        sides: The parts of each tensor.
        strides: The strides of each tensor.
    """
    runs = []
    place = 0  # in the wire
    for peer in range(len(sides.sizes)):
        for tensor, side in enumerate(sides.each):
            for block in side.parts[peer]:
                shape, offset, dims = shape_of(block), 0, []
                for dim, ((start, _), stride) in enumerate(zip(block, strides[tensor])):
                    offset += start * stride
                    # Leave out dimensions of one element, except the last dimension.
                    if side.shape[dim] > 1 or dim == len(shape) - 1:
                        dims.append((shape[dim], stride, math.prod(shape[dim + 1 :])))
                if math.prod(shape):
                    runs.append(_run(tensor, dims, offset, place))
                place += math.prod(shape)
    # Sort by tensor, since only views of one tensor are joined.
    runs.sort(key=lambda run: run.tensor)
    # Joined views may fit together again, so join until nothing changes.
    count = 0
    while len(runs) != count:
        count, separate = len(runs), runs
        runs = separate[:1]
        for run in separate[1:]:
            if (both := _joined(runs[-1], run)) is None:
                runs.append(run)
            else:
                runs[-1] = both
    return runs


def _run(tensor: int, dims: Sequence[Sequence[int]], offset: int, wire_offset: int) -> Run:
    """Return the copy with these `Run.dims`."""
    shape, strides, wire_strides = zip(*dims)
    repeats = [dim for dim, stride in enumerate(strides) if stride == 0]
    return Run(tensor, shape, strides, offset, wire_strides, wire_offset, repeats)


def _joined(first: Run, second: Run) -> Run | None:
    """Return one copy that replaces two successive copies; None if no single view can do so."""
    shift = [second.offset - first.offset, second.wire_offset - first.wire_offset]
    (size, *steps), *inner = first.dims
    (more, *others), *rest = second.dims
    # Whether the second copy begins where the first dimension of the first copy ends.
    continues = shift == [size * step for step in steps]
    if continues and second.dims == inner:
        more = 1
    elif first.dims == second.dims and not continues:
        size, more, steps, inner = 1, 1, shift, first.dims
    elif not continues or (others, rest) != (steps, inner):
        return None
    dims = [(size + more, *steps), *inner]
    # Torch has no negative strides. A view that overlaps itself can't be written by one copy.
    if first.tensor != second.tensor or shift[0] < 0 or _overlaps(dims):
        return None
    return _run(first.tensor, dims, first.offset, first.wire_offset)


def _overlaps(dims: Sequence[Sequence[int]]) -> bool:
    """Return whether a view may contain an element twice, except along dimensions of stride 0.

    A dimension of stride 0 repeats a slice for several peers; `unpack` sums over it.
    """
    reach = 0
    for size, stride, _ in sorted(dims, key=operator.itemgetter(1)):
        if stride == 0 or size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def blocks_of(x: Tensor, side: Side, peer: int) -> list[Tensor]:
    """Return views of the blocks of ``x`` that belong to a peer; check mode uses this."""
    return [x[tuple(slice(*part) for part in block)] for block in side.parts[peer]]
