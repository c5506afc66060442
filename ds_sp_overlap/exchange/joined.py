"""Several tensors in one transfer: each peer is sent its part of every one of them, token by token side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .layout import Side, Sides


def join(tensors: Sequence[Tensor], sides: Sides, wire: Tensor) -> None:
    """Write the parts of ``tensors``, each [.., .., h, d], into the flat ``wire``, which may have a wider dtype."""
    if sides.tiles():  # one kernel
        torch.cat([_tile(x, side) for x, side in zip(tensors, sides.each)], 3, out=wire.as_strided(*sides.tiled_wire))
        return
    for part, place in _places(tensors, sides, wire):
        place.copy_(part)


def split(wire: Tensor, sides: Sides, tensors: Sequence[Tensor]) -> None:
    """The inverse of `join`; slices that several parts hold are summed, in fp32 for half precision. What no part holds stays."""
    if tiles := sides.tiles():
        pieces = wire.as_strided(*sides.tiled_wire).split_with_sizes([shape[3] for shape in tiles], 3)
        for x, side, piece in zip(tensors, sides.each, pieces):
            _tile(x, side).copy_(piece)
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
