"""Copies tensors to the wire and back, by few pairs of views that are found once.

For each end of an exchange, and the strides of its tensors, `copies_of` finds pairs of strided
views, one of a tensor and one of the wire. One copy moves each pair, whatever the number of ranks.
So a plan of an exchange is a value: `pack` and `unpack` carry it out, and decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..relayout.ops import sum_dtype
from .layout import Patches, Side, Sides

Strides = tuple[int, ...]


class Run(NamedTuple):
    """Parts of a tensor, and their places in the wire, as two strided views of one shape.

    Attributes:
        tensor: Index of the tensor.
        shape: Shape of both views.
        strides: Strides in the tensor; 0 where several peers have the same slice.
        offset: Offset in the tensor, in elements.
        wire_strides: Strides in the wire.
        wire_offset: Offset in the wire.
    """

    tensor: int
    shape: tuple[int, ...]
    strides: Strides
    offset: int
    wire_strides: Strides
    wire_offset: int

    @property
    def repeats(self) -> list[int]:
        """The dimensions over peers that have the same slice."""
        return [dim for dim, step in enumerate(self.strides) if step == 0]

    @property
    def elements(self) -> int:
        """Elements of the tensor that the view holds, each counted once."""
        return math.prod(size for size, step in zip(self.shape, self.strides) if step)

    @property
    def grain(self) -> int:
        """The most elements that can be one: ends and starts of all rows are multiples of it."""
        if not self.strides[-1] == self.wire_strides[-1] == 1:
            return 1
        steps = *self.strides[:-1], *self.wire_strides[:-1]
        return math.gcd(self.shape[-1], self.offset, self.wire_offset, *steps)


@dataclass(frozen=True)
class Copies:
    """The copies between tensors and the wire.

    Attributes:
        runs: The pairs of views.
        grains: `Run.grain` of each.
        flat: If the one tensor lies in memory as it travels: the offset of its first element; else
            None.
        disjoint: Whether the parts of each tensor cover the tensor without overlap, so that each
            part is copied. Otherwise parts are added to zeros.
    """

    runs: tuple[Run, ...]
    grains: tuple[int, ...]
    flat: int | None
    disjoint: bool


@lru_cache(maxsize=4096)
def copies_of(sides: Sides, strides: tuple[Strides, ...] | None = None) -> Copies:
    """Find the copies between tensors with these strides and the wire.

    Args:
        sides: The parts of each tensor.
        strides: The strides of each tensor; None for those of contiguous tensors.
    """
    if strides is None:
        strides = tuple(contiguous(shape) for shape in sides.shapes)
    runs = runs_of(sides, strides)
    sizes = [math.prod(shape) for shape in sides.shapes]
    held = [0] * len(sizes)
    for run in runs:
        held[run.tensor] += run.elements
    disjoint = held == sizes  # guard: disjoint parts need no sum
    flat = None
    if len(runs) == 1 and sides.elements == sizes[0]:
        (run,) = runs
        # A dimension of one element has no stride.
        steps = zip(run.shape, run.strides, run.wire_strides)
        if all(
            size == 1 or step == wire for size, step, wire in steps
        ):  # guard: lies as it travels
            flat = run.offset
    return Copies(tuple(runs), tuple([run.grain for run in runs]), flat, disjoint)


def contiguous(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def pack(tensors: Sequence[Tensor], copies: Copies, wire: Tensor) -> None:
    """Copy the parts of ``tensors`` to their places in the flat ``wire``."""
    for run, grain in zip(copies.runs, copies.grains):
        part, place = _views(run, grain, tensors[run.tensor], wire)
        place.copy_(part)


def unpack(wire: Tensor, copies: Copies, tensors: Sequence[Tensor]) -> None:
    """Copy what is in the flat ``wire`` to ``tensors``, the inverse of `pack`.

    Slices that several parts hold are summed, in fp32 for half precision. Slices that no part holds
    become zero.
    """
    totals = tensors
    if not copies.disjoint:
        totals = [  # guard: halves are summed in fp32
            torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in tensors
        ]
    for run, grain in zip(copies.runs, copies.grains):
        x, repeats = totals[run.tensor], run.repeats
        # Sums have no wide elements.
        part, place = _views(run, grain if copies.disjoint and not repeats else 1, x, wire)
        if repeats:
            place = place.sum(repeats, dtype=sum_dtype(x.dtype))  # guard: repeats are summed
            for dim in reversed(repeats):
                part = part.select(dim, 0)
        if copies.disjoint:
            part.copy_(place)
        else:
            part.add_(place)  # guard: overlaps are summed
    if not copies.disjoint:
        for x, total in zip(tensors, totals):
            x.copy_(total)


def _views(run: Run, grain: int, x: Tensor, wire: Tensor) -> tuple[Tensor, Tensor]:
    """Return the view of a tensor and that of the wire; 16 bytes an element where that pays."""
    _, shape, strides, offset, wire_strides, wire_offset = run
    # ``as_strided`` counts from the storage, which other tensors may share.
    part = x.as_strided(shape, strides, x.storage_offset() + offset)
    place = wire.as_strided(shape, wire_strides, wire.storage_offset() + wire_offset)
    if prefers_16_bytes(x) and x.dtype == wire.dtype and grain * x.element_size() % 16 == 0:
        if not (x.data_ptr() % 16 or wire.data_ptr() % 16):
            part, place = part.view(torch.complex128), place.view(torch.complex128)
    return part, place


def prefers_16_bytes(x: Tensor) -> bool:
    """Return whether PyTorch's copies of 16 bytes an element are faster on the device of ``x``."""
    # On a GPU its permuting copy of 2-byte elements reaches half of the bandwidth.
    return x.is_cuda


def runs_of(sides: Sides, strides: tuple[Strides, ...]) -> list[Run]:
    """Return a few views that hold all parts of tensors with these strides.

    Args:
        sides: The parts of each tensor.
        strides: The strides of each tensor.
    """
    # Tensor by tensor: only views of one tensor merge.
    runs = sorted(_blocks_in_wire(sides, strides), key=lambda block: block.tensor)
    # Views that were merged may be evenly spaced among themselves: they merge in turn.
    while len(merged := _merged(runs)) < len(runs):
        runs = merged
    return runs


def _blocks_in_wire(sides: Sides, strides: tuple[Strides, ...]) -> list[Run]:
    """Return a view for each block of each part, in the order of the wire."""
    blocks: list[Run] = []
    # Offsets in the wire: of the peer; from there, of the tensor (``before``); and from there, of
    # the block (``done``).
    place = 0
    for peer, size in enumerate(sides.sizes):
        # Elements between two tokens in the wire, if parts of several tensors alternate.
        of_all = sum(math.prod(side.part_shape(peer)[2:]) for side in sides.each)
        before = 0
        for tensor, side in enumerate(sides.each):
            shape = side.part_shape(peer)
            own = math.prod(shape[2:])
            width = own if sides.apart else of_all
            # Strides in the wire: from token to token a ``width``; inside of a token as packed.
            steps = [shape[1] * width, width]
            steps += [math.prod(shape[dim + 1 :]) for dim in range(2, len(shape))]
            done = 0
            for block in side.blocks(peer):
                cut, offset = list(shape), 0
                for dim, start, stop in block:
                    cut[dim] = stop - start
                    offset += start * strides[tensor][dim]
                wire_offset = place + before + done
                if math.prod(cut):
                    views = strides[tensor], offset, tuple(steps), wire_offset
                    blocks.append(Run(tensor, tuple(cut), *views))
                # Only `Patches` have several blocks in a part, one behind the other.
                if isinstance(side, Patches):
                    done += cut[side.seq_dim] * steps[side.seq_dim]
            before += side.split_sizes[peer] if sides.apart else own
        place += size
    return blocks


def _merged(runs: list[Run]) -> list[Run]:
    """Merge successive views of one shape that are evenly spaced in the tensor and in the wire."""
    merged: list[Run] = []
    at = 0
    while at < len(runs):
        first, end, step = runs[at], at + 1, (0, 0)
        while end < len(runs):
            before, after = runs[end - 1], runs[end]
            alike = after[:3] == first[:3] and after.wire_strides == first.wire_strides
            shift = after.offset - before.offset, after.wire_offset - before.wire_offset
            # The first two views set the distance. Torch has no negative strides.
            if not alike or shift[0] < 0 or end > at + 1 and shift != step:
                break
            # A view that overlaps itself can't be written by one copy.
            if _overlaps((end + 1 - at, *first.shape), (shift[0], *first.strides)):
                break
            end, step = end + 1, shift
        if end > at + 1:
            shape, strides = (end - at, *first.shape), (step[0], *first.strides)
            wire_strides = step[1], *first.wire_strides
            first = Run(first.tensor, shape, strides, first.offset, wire_strides, first.wire_offset)
        merged.append(first)
        at = end
    return merged


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a view may hold an element twice; dimensions of stride 0 don't count.

    Those repeat a slice for several peers, which `unpack` sums.
    """
    reach = 0
    for stride, size in sorted(zip(strides, shape)):
        if stride == 0 or size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def blocks_of(x: Tensor, side: Side, peer: int) -> list[Tensor]:
    """Return the blocks of ``x`` that are the part of a peer, as views; for check mode."""
    blocks = []
    for block in side.blocks(peer):
        part = x
        for dim, start, stop in block:
            part = part.narrow(dim, start, stop - start)
        blocks.append(part)
    return blocks
