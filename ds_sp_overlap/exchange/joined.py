"""Several tensors in one transfer: each peer is sent its part of every one of them, token by token side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .geometry import Side


def join(tensors: Sequence[Tensor], sides: Sequence[Side], wire: Tensor) -> None:
    """Write the parts of ``tensors``, each [.., .., h, d], into the flat ``wire``, which may have a wider dtype."""
    if (place := _of_equal_parts(sides, wire)) is not None:  # one kernel
        torch.cat([x.reshape(side.tiled) for x, side in zip(tensors, sides)], 3, out=place)
        return
    for part, place in _places(tensors, sides, wire):
        place.copy_(part)


def split(wire: Tensor, sides: Sequence[Side], tensors: Sequence[Tensor]) -> None:
    """The inverse of `join`; slices that several parts hold are summed, in fp32 for half precision."""
    if (place := _of_equal_parts(sides, wire)) is not None:
        pieces = place.split([side.tiled[3] for side in sides], 3)
        for x, side, piece in zip(tensors, sides, pieces):
            x.view(side.tiled).copy_(piece)
        return
    if all(side.tiles for side in sides):
        for part, place in _places(tensors, sides, wire):
            part.copy_(place)
        return
    totals = [torch.zeros_like(x, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype) for x in tensors]
    for part, place in _places(totals, sides, wire):
        part.add_(place)
    for x, total in zip(tensors, totals):
        x.copy_(total)


def _of_equal_parts(sides: Sequence[Side], wire: Tensor) -> Tensor | None:
    """The wire in the order of the tensors' memory, with `Side.tiled` of all of them side by side; None if parts are not equal."""
    if any(not side.tiled for side in sides):
        return None
    shape, dim = sides[0].tiled, sides[0].dim
    peers, *others = shape[dim], *shape[:dim], *shape[dim + 1 : 3], sum(side.tiled[3] for side in sides)
    return wire.view(peers, *others).movedim(0, dim)


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
