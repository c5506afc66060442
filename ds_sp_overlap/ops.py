"""Pack and unpack: the relayout on either side of a transfer, as PyTorch operators.

    pack     cut a tensor along one dimension and lay the parts, each contiguous, end to end
    unpack   the inverse; slices that several parts hold are summed, in fp32 for half precision

Both write into a tensor that the caller owns, so that the caller decides on which stream's memory it lies. The
implementations here are PyTorch's own copies and serve every device; they are the reference for compiled ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("ds_sp_overlap", "DEF")
_library.define("pack(Tensor x, int dim, int[] starts, int[] stops, Tensor(a!) out) -> ()")
_library.define("unpack(Tensor wire, int dim, int[] starts, int[] stops, Tensor(a!) out) -> ()")


def _parts(tensor: Tensor, wire: Tensor, dim: int, starts: list[int], stops: list[int]):
    """Pair each part of ``tensor`` with its segment of ``wire``, shaped alike."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in zip(starts, stops)]
    sizes = [part.numel() for part in parts]
    if wire.dim() != 1 or wire.numel() != sum(sizes):
        raise ValueError(
            f"ds_sp_overlap.pack/unpack: parts {list(zip(starts, stops))} along dim {dim} of {list(tensor.shape)} hold "
            f"{sum(sizes)} elements, the wire buffer has shape {list(wire.shape)}"
        )
    return [(part, segment.view(part.shape)) for part, segment in zip(parts, wire.split(sizes))]


def _equal_tiles(tensor: Tensor, dim: int, starts: list[int], stops: list[int]) -> Tensor | None:
    """View of ``tensor`` with the parts in front, if they are equal and cover the dimension in order."""
    count, size = len(starts), stops[0] - starts[0]
    if count * size != tensor.shape[dim] or any(part != (i * size, i * size + size) for i, part in enumerate(zip(starts, stops))):
        return None
    return tensor.unflatten(dim, (count, size)).movedim(dim, 0)


def _pack(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    if (tiles := _equal_tiles(x, dim, starts, stops)) is not None:  # one copy kernel instead of one a part
        out.view(tiles.shape).copy_(tiles)
        return
    for part, segment in _parts(x, out, dim, starts, stops):
        segment.copy_(part)


def _unpack(wire: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    if (tiles := _equal_tiles(out, dim, starts, stops)) is not None:
        tiles.copy_(wire.view(tiles.shape))
        return
    half = out.dtype in (torch.float16, torch.bfloat16)
    total = torch.zeros_like(out, dtype=torch.float32 if half else out.dtype)
    for part, segment in _parts(total, wire, dim, starts, stops):
        part.add_(segment)
    out.copy_(total)


_library.impl("pack", _pack, "CompositeExplicitAutograd")
_library.impl("unpack", _unpack, "CompositeExplicitAutograd")
torch.library.register_fake("ds_sp_overlap::pack", lambda x, dim, starts, stops, out: None, lib=_library)
torch.library.register_fake("ds_sp_overlap::unpack", lambda wire, dim, starts, stops, out: None, lib=_library)

pack = torch.ops.ds_sp_overlap.pack
unpack = torch.ops.ds_sp_overlap.unpack
