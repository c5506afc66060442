"""Pack and unpack: the relayout on either side of a transfer.

    pack        cut a tensor along one dimension and lay the parts, each contiguous, end to end
    unpack      the inverse; slices that several parts hold are summed, in fp32 for half precision
    pack_qkv    q, k, v cut along their heads into three send buffers, with bias and rotary embedding on the way
    unpack_qkv  its backward: three received gradients, replicas summed and rotated back

All write into tensors that the caller owns, so that the caller decides on which stream's memory they lie. The functions
here are PyTorch's own copies and serve every device; they are the reference for the compiled operators of csrc/, which
`kernels` loads as ``torch.ops.ds_sp_overlap``. Those refuse what is refused here, in the same words. Their CPU kernels are there
to show that the index maps of the CUDA kernels are right; PyTorch's copies are faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .arguments import check_qkv, check_relayout, refuse


def _parts(tensor: Tensor, wire: Tensor, dim: int, starts: list[int], stops: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Pair each part of ``tensor`` with its segment of ``wire``, shaped alike."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in zip(starts, stops)]
    return [(part, segment.view(part.shape)) for part, segment in zip(parts, wire.split([p.numel() for p in parts]))]


@functools.lru_cache(maxsize=4096)
def _are_equal_tiles(extent: int, starts: Sequence[int], stops: Sequence[int]) -> bool:
    count, size = len(starts), stops[0] - starts[0]
    return count * size == extent and all(part == (i * size, i * size + size) for i, part in enumerate(zip(starts, stops)))


def _equal_tiles(tensor: Tensor, dim: int, starts: Sequence[int], stops: Sequence[int]) -> Tensor | None:
    """View of ``tensor`` with the parts in front, if they are equal and cover the dimension in order."""
    shape, count = tensor.shape, len(starts)
    if not _are_equal_tiles(shape[dim], tuple(starts), tuple(stops)):
        return None
    return tensor.view(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]).movedim(dim, 0)


def pack(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    _copy_out(x, check_relayout("pack", x, "x", out, "out", dim, starts, stops), starts, stops, out)


def _copy_out(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """pack, of arguments that are known to fit: those of an exchange come from one `Layout`."""
    if (tiles := _equal_tiles(x, dim, starts, stops)) is not None:  # one copy kernel instead of one a part
        out.view(tiles.shape).copy_(tiles)
        return
    for part, segment in _parts(x, out, dim, starts, stops):
        segment.copy_(part)


def unpack(wire: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    _copy_in(wire, check_relayout("unpack", out, "out", wire, "wire", dim, starts, stops), starts, stops, out)


def _copy_in(wire: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """unpack, of arguments that are known to fit."""
    if (tiles := _equal_tiles(out, dim, starts, stops)) is not None:
        tiles.copy_(wire.view(tiles.shape))
        return
    half = out.dtype in (torch.float16, torch.bfloat16)
    total = torch.zeros_like(out, dtype=torch.float32 if half else out.dtype)
    for part, segment in _parts(total, wire, dim, starts, stops):
        part.add_(segment)
    out.copy_(total)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotary embedding of the first dims of each head, or its transpose; the others pass through.

    half-rotated   pairs (i, i + rot/2)      y0 = x0 cos0 - x1 sin0      back   x0 = y0 cos0 + y1 sin1
    interleaved    pairs (2i, 2i + 1)        y1 = x1 cos1 + x0 sin1             x1 = y1 cos1 - y0 sin0
    """
    rot = cos.shape[-1]
    pair = (slice(0, rot, 2), slice(1, rot, 2)) if interleaved else (slice(0, rot // 2), slice(rot // 2, rot))
    y = x.clone()
    (x0, x1), (y0, y1) = ([t[..., part] for part in pair] for t in (x, y))
    (cos0, cos1), (sin0, sin1) = ([t.unsqueeze(-2).to(x.dtype)[..., part] for part in pair] for t in (cos, sin))
    y0.copy_(x0 * cos0 + x1 * sin1 if back else x0 * cos0 - x1 * sin0)
    y1.copy_(x1 * cos1 - x0 * sin0 if back else x1 * cos1 + x0 * sin1)
    return y


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def pack_qkv(x, bias, cos, sin, interleaved, rotated, starts, stops, out) -> None:
    check_qkv("pack_qkv", x, "x", out, "out", bias, cos, sin, rotated, starts, stops)
    ranks = len(starts) // len(x)
    for j, (tensor, wire) in enumerate(zip(x, out)):
        y = tensor
        if bias and bias[j] is not None:
            y = y.to(_accumulator(x[0].dtype)) + bias[j].view(y.shape[-2:])
        if cos is not None and j < rotated:
            y = _turn(y.to(_accumulator(x[0].dtype)), cos, sin, interleaved, back=False)
        mine = slice(j * ranks, (j + 1) * ranks)
        pack(y.to(tensor.dtype), tensor.dim() - 2, starts[mine], stops[mine], wire)


def unpack_qkv(wire, cos, sin, interleaved, rotated, starts, stops, out) -> None:
    check_qkv("unpack_qkv", out, "out", wire, "wire", [], cos, sin, rotated, starts, stops)
    ranks = len(starts) // len(out)
    for j, (received, tensor) in enumerate(zip(wire, out)):
        mine = slice(j * ranks, (j + 1) * ranks)
        if cos is None or j >= rotated:
            unpack(received, tensor.dim() - 2, starts[mine], stops[mine], tensor)
            continue
        total = torch.empty(tensor.shape, dtype=_accumulator(tensor.dtype), device=tensor.device)
        unpack(received.to(total.dtype), tensor.dim() - 2, starts[mine], stops[mine], total)
        tensor.copy_(_turn(total, cos, sin, interleaved, back=True))


class Relayout(NamedTuple):
    """One implementation of the operators."""

    pack: Callable
    unpack: Callable
    pack_qkv: Callable
    unpack_qkv: Callable
    folds: bool  # whether rotary embedding costs less in pack_qkv than in front of pack


_TORCH = Relayout(_copy_out, _copy_in, pack_qkv, unpack_qkv, folds=False)


def implementation(which: str) -> Relayout:
    """What ``sp_overlap.kernels`` asks for: "torch", the reference; "cuda", compiled; "auto", the best that is known to be right.

    "auto" is the reference as long as no GPU has run the compiled kernels (benchmarks/kernels_gpu.sh).

    Raises ValueError for "cuda" where there is no binary with CUDA kernels, with the reason and the command that mends it.
    """
    if which in ("auto", "torch"):
        return _TORCH
    if which != "cuda":
        refuse("implementation", f'kernels must be "auto", "cuda" or "torch", got {which!r}')
    library = kernels.demanded()
    if not library.cuda:
        raise ValueError(f'sp_overlap.kernels: "cuda", but {library.reason}; {kernels.REMEDY}')
    compiled = torch.ops.ds_sp_overlap
    return Relayout(compiled.pack, compiled.unpack, compiled.pack_qkv, compiled.unpack_qkv, folds=True)
