"""Several tensors in one transfer: each peer is sent its part of every one of them, token by token side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..relayout.ops import tiling
from .layout import Side


def join(tensors: Sequence[Tensor], sides: Sequence[Side], wire: Tensor) -> None:
    """Write the parts of ``tensors``, each [.., .., h, d], into the flat ``wire``, which may have a wider dtype."""
    if tiles := _tiles(tuple(sides)):  # one kernel
        torch.cat([x.reshape(shape) for x, shape in zip(tensors, tiles)], 3, out=_tiled_wire(wire, sides, tiles))
        return
    for part, place in _places(tensors, sides, wire):
        place.copy_(part)


def split(wire: Tensor, sides: Sequence[Side], tensors: Sequence[Tensor]) -> None:
    """The inverse of `join`; slices that several parts hold are summed, in fp32 for half precision."""
    if tiles := _tiles(tuple(sides)):
        pieces = _tiled_wire(wire, sides, tiles).split([shape[3] for shape in tiles], 3)
        for x, shape, piece in zip(tensors, tiles, pieces):
            x.view(shape).copy_(piece)
        return
    if all(side.tiles for side in sides):  # guard: joined tiles need no sum
        for part, place in _places(tensors, sides, wire):
            part.copy_(place)
        return
    totals = [torch.zeros_like(x, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype) for x in tensors]
    for part, place in _places(totals, sides, wire):
        part.add_(place)  # guard: joined replicas are summed
    for x, total in zip(tensors, totals):
        x.copy_(total)


@lru_cache(maxsize=4096)
def _tiles(sides: tuple[Side, ...]) -> list[tuple[int, ...]]:
    """Shape of each tensor with a dimension for the peers in front of the one that is cut, and h and d in one; none if its parts
    don't tile it equally."""
    found = [tiling(side.shape, side.dim, *side.edges) for side in sides]
    shapes = [tiled[0] for tiled in found if tiled is not None and tiled[1] == 1]  # guard: a tile for each peer
    return [(*shape[:3], shape[3] * shape[4]) for shape in shapes] if len(shapes) == len(sides) else []


def _tiled_wire(wire: Tensor, sides: Sequence[Side], tiles: list[tuple[int, ...]]) -> Tensor:
    """The wire in the order of the tensors' memory, with the tiles of all of them side by side."""
    dim, shape = sides[0].dim, [*tiles[0][:3], sum(shape[3] for shape in tiles)]
    return wire.view(shape.pop(dim), *shape).movedim(0, dim)


def _places(tensors: Sequence[Tensor], sides: Sequence[Side], wire: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part with its place in the wire, of its shape."""
    at = 0
    for ranges in zip(*(side.parts for side in sides)):  # of one peer
        parts = [x.narrow(side.dim, start, stop - start) for x, side, (start, stop) in zip(tensors, sides, ranges)]
        size = sum(part.numel() for part in parts)
        widths = [part.shape[2] * part.shape[3] for part in parts]
        together = wire.narrow(0, at, size).view(*parts[0].shape[:2], sum(widths))
        yield from ((part, place.unflatten(2, part.shape[2:])) for part, place in zip(parts, together.split(widths, 2)))
        at += size
