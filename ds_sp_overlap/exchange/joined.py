"""Several tensors in one transfer: each peer is sent its part of every one of them, token by token side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .layout import Side, Sides


def join(tensors: Sequence[Tensor], sides: Sides, new_empty: Callable[..., Tensor]) -> Tensor:
    """The parts of ``tensors``, each [.., .., h, d], in the flat buffer that travels; ``new_empty`` makes it, of a dtype for all."""
    wire = new_empty(sides.elements)
    if places := sides.places():  # one kernel
        place, tiles = wire.as_strided(*places[0]), [_tile(x, side) for x, side in zip(tensors, sides.each)]
        torch.cat(tiles, 3, out=place) if len(tiles) > 1 else place.copy_(tiles[0])
        return wire
    for part, place in _places(tensors, sides, wire):
        place.copy_(part)
    return wire


def split(wire: Tensor, sides: Sides, tensors: Sequence[Tensor]) -> None:
    """The inverse of `join`; slices that several parts hold are summed, in fp32 for half precision. What no part holds stays."""
    if places := sides.places():
        for x, side, tile in zip(tensors, sides.each, places[1:]):
            _tile(x, side).copy_(wire.as_strided(*tile))
        return
    if all(side.tiles or not side.covers for side in sides.each):  # guard: joined tiles need no sum
        for part, place in _places(tensors, sides, wire):
            part.copy_(place)
        return
    totals = [torch.zeros_like(x, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype) for x in tensors]
    for part, place in _places(totals, sides, wire):
        part.add_(place)  # guard: joined replicas are summed
    for x, total in zip(tensors, totals):
        x.copy_(total)


def split_copies(wire: Tensor, sides: Sides) -> tuple[Tensor, ...]:
    """`split` into new tensors, for sides that are `copied`. A copy that makes its memory costs the host less than ``new_empty`` and
    ``copy_``."""
    return tuple([_copy(wire.as_strided(*place), shape, whole) for (place, whole), shape in zip(sides.copied, sides.shapes)])


def _copy(x: Tensor, shape: Sequence[int], whole: bool) -> Tensor:
    copy = x if whole else x.reshape(shape)
    return copy.clone(memory_format=torch.contiguous_format) if copy.data_ptr() == x.data_ptr() else copy  # guard: a copy, no view


def _tile(x: Tensor, side: Side) -> Tensor:
    """The parts of ``x`` in the shape of `Side.tiled`; a view, if ``x`` lies in one piece."""
    if side.tiles:
        return x.reshape(*side.tiled)
    assert side.spaced is not None
    piece, (start, stop) = side.spaced
    return x.unflatten(side.dim, (len(side.parts), piece)).narrow(side.dim + 1, start, stop - start).flatten(3)  # no other chunk


def _places(tensors: Sequence[Tensor], sides: Sides, wire: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part with its place in the wire, of its shape."""
    at = 0
    for ranges in zip(*(side.parts for side in sides.each)):  # of one peer
        parts = [x.narrow(side.dim, start, stop - start) for x, side, (start, stop) in zip(tensors, sides.each, ranges)]
        size = sum(part.numel() for part in parts)
        widths = [part.shape[2] * part.shape[3] for part in parts]
        together = wire.narrow(0, at, size).view(*parts[0].shape[:2], sum(widths))
        yield from ((part, place.unflatten(2, part.shape[2:])) for part, place in zip(parts, together.split(widths, 2)))
        at += size
