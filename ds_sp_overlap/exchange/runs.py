"""Finds few strided views that hold all parts of tensors, for tensors whose parts are no tiles.

Where ranks share query heads, every r-th peer is sent some of q, and all of k and v. One copy for
each part would be hundreds of launches for an exchange. Pure arithmetic, as `layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .layout import Patches, Sides


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
    strides: tuple[int, ...]
    offset: int
    wire_strides: tuple[int, ...]
    wire_offset: int


@lru_cache(maxsize=4096)
def runs_of(sides: Sides, strides: tuple[tuple[int, ...], ...]) -> list[Run]:
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


def _blocks_in_wire(sides: Sides, strides: tuple[tuple[int, ...], ...]) -> list[Run]:
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

    Those repeat a slice for several peers, which `joined.split` sums.
    """
    reach = 0
    for stride, size in sorted(zip(strides, shape)):
        if stride == 0 or size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
