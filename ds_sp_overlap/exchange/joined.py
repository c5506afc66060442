"""Packs several tensors into one transfer, or one tensor whose parts are several blocks.

Each peer is sent its parts of all tensors side by side, token by token; or one after another, where
it is not sent the same tokens of each (`Layout.apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..relayout import ops
from .layout import Side, Sides
from .runs import runs_of


def join(tensors: Sequence[Tensor], sides: Sides, new_empty: Callable[..., Tensor]) -> Tensor:
    """Pack ``tensors``, each [.., .., h, d], into a new buffer; `InFlight` calls it.

    Args:
        tensors: What is sent.
        sides: The parts of each tensor.
        new_empty: Makes the buffer from a number of elements, of one dtype for all tensors.

    Returns:
        The flat buffer that travels.
    """
    wire, places = new_empty(sides.elements), sides.places()
    if places and not sides.is_repeated:
        # One kernel packs all parts.
        tiles = [x.reshape(*side.tiled) for x, side in zip(tensors, sides.each)]
        whole = wire.as_strided(*places[0])
        if len(tiles) > 1:
            whole, *tiles = ops.widened(whole, *tiles)
            torch.cat(tiles, 3, out=whole)
        else:
            ops.copy(whole, tiles[0])
        return wire
    for part, place in _views(tensors, sides, wire):
        ops.copy(place, part)
    return wire


def split(wire: Tensor, sides: Sides, tensors: Sequence[Tensor]) -> None:
    """Unpack ``wire`` into ``tensors``, the inverse of `join`.

    Slices that several parts hold are summed, in fp32 for half precision. Slices that no part holds
    keep their values.
    """
    tiled = all(side.tiles or not side.covers for side in sides.each)
    # Whether no two views of a tensor overlap, so that each can be copied. Otherwise they are added
    # to zeros.
    disjoint = tiled or bool(sides.places())  # guard: joined tiles need no sum
    totals = tensors
    if not disjoint:
        totals = [torch.zeros_like(x, dtype=ops.sum_dtype(x.dtype)) for x in tensors]
    for part, place in _views(totals, sides, wire):
        # Dimensions over peers that hold the same slice: sum them before the slice is written.
        same = [dim for dim, step in enumerate(part.stride()) if step == 0]
        if same:
            place = place.sum(
                same, dtype=ops.sum_dtype(part.dtype)
            )  # guard: repeated parts are summed
            for dim in reversed(same):
                part = part.select(dim, 0)
        if disjoint:
            ops.copy(part, place)
        else:
            part.add_(place)  # guard: joined replicas are summed
    if not disjoint:
        for x, total in zip(tensors, totals):
            x.copy_(total)


def split_copies(wire: Tensor, sides: Sides) -> tuple[Tensor, ...]:
    """Unpack ``wire`` into new tensors, one copy each; `InFlight` calls it on a CPU.

    For sides whose `Sides.copied` is not empty. A copy that makes its own memory costs the host
    less than ``new_empty`` and ``copy_``.
    """
    outs = []
    for (place, has_final_shape), shape in zip(sides.copied, sides.shapes):
        x = wire.as_strided(*place)
        out = x if has_final_shape else x.reshape(shape)
        if out is x or out.data_ptr() == x.data_ptr():  # guard: a copy, no view
            out = out.clone(memory_format=torch.contiguous_format)
        outs.append(out)
    return tuple(outs)


def _views(
    tensors: Sequence[Tensor], sides: Sides, wire: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a view of a tensor and one of the wire, of one shape; a few such pairs hold all parts.

    A stride of 0 in the first is a dimension over peers that share one slice.
    """
    for run in runs_of(sides, tuple(x.stride() for x in tensors)):
        x = tensors[run.tensor]
        # ``as_strided`` counts from the storage, which other tensors may share.
        offset, wire_offset = x.storage_offset(), wire.storage_offset()
        part = x.as_strided(run.shape, run.strides, offset + run.offset)
        yield part, wire.as_strided(run.shape, run.wire_strides, wire_offset + run.wire_offset)


def blocks_of(x: Tensor, side: Side, peer: int) -> list[Tensor]:
    """Return the blocks of ``x`` that are the part of a peer, as views; for check mode."""
    blocks = []
    for block in side.blocks(peer):
        part = x
        for dim, start, stop in block:
            part = part.narrow(dim, start, stop - start)
        blocks.append(part)
    return blocks
