"""Packs several tensors into one transfer, or one tensor whose parts are several blocks.

Each peer is sent its parts of all tensors side by side, token by token; or one after another, where
it is not sent the same tokens of each (`Layout.apart`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..relayout import ops
from .layout import Patches, Place, Side, Sides


def join(tensors: Sequence[Tensor], sides: Sides, new_empty: Callable[..., Tensor]) -> Tensor:
    """Pack ``tensors``, each [.., .., h, d], into a new buffer.

    Args:
        tensors: What is sent.
        sides: The parts of each tensor.
        new_empty: Makes the buffer, of one dtype for all tensors.

    Returns:
        The flat buffer that travels.
    """
    wire = new_empty(sides.elements)
    places = sides.places()
    if places and not sides.is_repeated:
        # One kernel packs all parts.
        tiles = [_tile(x, side) for x, side in zip(tensors, sides.each)]
        whole = wire.as_strided(*places[0])
        if len(tiles) > 1:
            whole, *tiles = ops.widened(whole, *tiles)
            torch.cat(tiles, 3, out=whole)
        else:
            ops.copy(whole, tiles[0])
    elif places:
        for x, side, view in zip(tensors, sides.each, places[1:]):
            ops.copy(_by_piece(wire, side, view), _tile(x, side).unsqueeze(side.dim + 1))
    else:
        for part, place in _views(tensors, sides, wire):
            ops.copy(place, part)
    return wire


def split(wire: Tensor, sides: Sides, tensors: Sequence[Tensor]) -> None:
    """Unpack ``wire`` into ``tensors``, the inverse of `join`.

    Slices that several parts hold are summed, in fp32 for half precision. Slices that no part holds
    keep their values.
    """
    places = sides.places()
    if places:
        for x, side, view in zip(tensors, sides.each, places[1:]):
            if side.is_repeated:
                parts = _by_piece(wire, side, view)
                total = parts.sum(side.dim + 1, dtype=_exact(x.dtype))
                _tile(x, side).copy_(total)  # guard: repeated parts are summed
            else:
                ops.copy(_tile(x, side), wire.as_strided(*view))
        return
    if all(side.tiles or not side.covers for side in sides.each):  # guard: joined tiles need no sum
        for part, place in _views(tensors, sides, wire):
            ops.copy(part, place)
        return
    totals = [torch.zeros_like(x, dtype=_exact(x.dtype)) for x in tensors]
    for part, place in _views(totals, sides, wire):
        # Peers that have the same slice are dimensions along which the part does not move.
        same = [dim for dim, step in enumerate(part.stride()) if step == 0]
        if same:
            place = place.sum(same, dtype=part.dtype)
            for dim in reversed(same):
                part = part.select(dim, 0)
        part.add_(place)  # guard: joined replicas are summed
    for x, total in zip(tensors, totals):
        x.copy_(total)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def split_copies(wire: Tensor, sides: Sides) -> tuple[Tensor, ...]:
    """Unpack ``wire`` into new tensors, one copy each, for sides that are `Sides.copied`.

    A copy that makes its own memory costs the host less than ``new_empty`` and ``copy_``.
    """
    outs = []
    for (place, has_final_shape), shape in zip(sides.copied, sides.shapes):
        outs.append(_copy(wire.as_strided(*place), shape, has_final_shape))
    return tuple(outs)


def _copy(x: Tensor, shape: Sequence[int], has_final_shape: bool) -> Tensor:
    """Copy ``x`` into a contiguous tensor of ``shape``."""
    copy = x if has_final_shape else x.reshape(shape)
    if copy.data_ptr() == x.data_ptr():  # guard: a copy, no view
        return copy.clone(memory_format=torch.contiguous_format)
    return copy


def _tile(x: Tensor, side: Side) -> Tensor:
    """Return the parts of ``x`` in the shape of `Side.tiled`; a view if ``x`` is contiguous.

    A part that several peers share is there once.
    """
    if side.tiles:
        return x.reshape(*side.tiled)
    # Each piece holds all tokens of a peer, of which the part is one chunk; or heads that several
    # peers need.
    assert side.spaced is not None
    pieces, _, piece, (start, stop) = side.spaced
    parts = x.unflatten(side.dim, (pieces, piece)).narrow(side.dim + 1, start, stop - start)
    return parts.flatten(3)


def _by_piece(wire: Tensor, side: Side, view: Place) -> Tensor:
    """Return the place of a tensor in the wire, with a dimension for the peers of each piece."""
    assert side.spaced is not None
    pieces, repeats, *_ = side.spaced
    return wire.as_strided(*view).unflatten(side.dim, (pieces, repeats))


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


def _views(
    tensors: Sequence[Tensor], sides: Sides, wire: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views that hold all parts of ``tensors``, each with its place in the wire."""
    for run in runs_of(sides, tuple(x.stride() for x in tensors)):
        x = tensors[run.tensor]
        part = x.as_strided(run.shape, run.strides, x.storage_offset() + run.offset)
        yield part, wire.as_strided(run.shape, run.wire_strides, run.wire_offset)


@lru_cache(maxsize=4096)
def runs_of(sides: Sides, strides: tuple[tuple[int, ...], ...]) -> list[Run]:
    """Return few views that hold all parts of tensors with these strides.

    Parts of one shape that are evenly spaced, in the tensor and in the wire, are one view; such
    views in turn, as where every r-th peer is sent some of q.
    """
    blocks = _blocks_in_wire(sides, strides)
    runs: list[Run] = []
    for tensor in range(len(strides)):
        of_tensor = [block for block in blocks if block.tensor == tensor]
        while len(merged := _merged(of_tensor)) < len(of_tensor):
            of_tensor = merged
        runs += of_tensor
    return runs


def _blocks_in_wire(sides: Sides, strides: tuple[tuple[int, ...], ...]) -> list[Run]:
    """Return a view for each block of each part, in the order of the wire."""
    blocks: list[Run] = []
    place = 0
    for peer, size in enumerate(sides.sizes):
        # Elements between two tokens in the wire, if parts of several tensors alternate.
        of_all = sum(math.prod(_shape(side, peer)[2:]) for side in sides.each)
        before = 0
        for tensor, side in enumerate(sides.each):
            shape = _shape(side, peer)
            own = math.prod(shape[2:])
            width = of_all if sides.by_token else own
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
                if isinstance(side, Patches):
                    done += cut[side.seq_dim] * steps[side.seq_dim]
            before += own if sides.by_token else side.split_sizes[peer]
        place += size
    return blocks


def _shape(side: Side, peer: int) -> list[int]:
    """Return the shape of a peer's part."""
    shape = list(side.shape)
    start, stop = side.parts[peer]
    shape[side.dim] = stop - start
    if isinstance(side, Patches):
        shape[side.seq_dim] = sum(stop - start for start, stop in side.tokens[peer])
    return shape


def _merged(runs: list[Run]) -> list[Run]:
    """Merge successive views of one shape that are evenly spaced."""
    merged: list[Run] = []
    at = 0
    while at < len(runs):
        first, end, step = runs[at], at + 1, (0, 0)
        while end < len(runs):
            before, after = runs[end - 1], runs[end]
            alike = after[:3] == first[:3] and after.wire_strides == first.wire_strides
            shift = after.offset - before.offset, after.wire_offset - before.wire_offset
            if not alike or shift[0] < 0 or end > at + 1 and shift != step:
                break
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
    """Return whether a view may hold an element twice, but for dimensions of stride 0."""
    reach = 0
    for stride, size in sorted(zip(strides, shape)):
        if stride == 0 or size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def blocks_of(x: Tensor, side: Side, peer: int) -> list[Tensor]:
    """Return the blocks of ``x`` that are the part of a peer."""
    blocks = []
    for block in side.blocks(peer):
        part = x
        for dim, start, stop in block:
            part = part.narrow(dim, start, stop - start)
        blocks.append(part)
    return blocks
