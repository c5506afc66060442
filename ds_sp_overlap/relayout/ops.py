"""Pack and unpack: the relayout on either side of a transfer.

    pack                 cut a tensor along one dimension and lay the parts, each contiguous, end to end
    unpack               the inverse; slices that several parts hold are summed, in fp32 for half precision
    rotate_pack          pack of heads [tokens..., h, d], after rotary embedding: q and k on their way out
    unpack_rotate_back   its transpose, for dq and dk: unpack, summed, and rotated back

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

from ..rotary import rotate, rotate_back
from . import kernels
from .arguments import check_relayout, check_rotated, refuse


def _parts(tensor: Tensor, wire: Tensor, dim: int, starts: list[int], stops: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Pair each part of ``tensor`` with its segment of ``wire``, shaped alike."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in zip(starts, stops)]
    return [(part, segment.view(part.shape)) for part, segment in zip(parts, wire.split([p.numel() for p in parts]))]


@functools.lru_cache(maxsize=4096)
def _tiled(
    shape: Sequence[int], strides: Sequence[int], dim: int, starts: Sequence[int], stops: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape and strides with the tiles in front, if the parts are equal tiles of ``dim`` that cover it in order, and how many parts
    in succession are each of them: more than one where several ranks in succession need the same KV heads."""
    parts, size = list(zip(starts, stops)), stops[0] - starts[0]
    tiles = shape[dim] // size if size > 0 else len(parts)
    repeats, rest = divmod(len(parts), max(tiles, 1))
    tiled = [(i // repeats * size, i // repeats * size + size) for i in range(len(parts))] if repeats else []
    if repeats and tiles * size == shape[dim] and rest == 0 and parts == tiled:  # guard: tiles lie in order
        return (tiles, *shape[:dim], size, *shape[dim + 1 :]), (size * strides[dim], *strides), repeats
    return None


def _equal_tiles(tensor: Tensor, dim: int, starts: Sequence[int], stops: Sequence[int]) -> tuple[Tensor, int] | None:
    """View of ``tensor`` with the tiles in front that its parts are, and how often each is repeated."""
    if (found := _tiled(tensor.shape, tensor.stride(), dim, tuple(starts), tuple(stops))) is None:
        return None
    shape, strides, repeats = found
    return tensor.as_strided(shape, strides), repeats


def _copy(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source)``; on a GPU 16 bytes at a time where that is possible: PyTorch's permuting copy of 2-byte elements is slow."""
    if to.is_cuda and (wide_to := _in_16_bytes(to)) is not None and (wide_source := _in_16_bytes(source)) is not None:
        to, source = wide_to, wide_source
    to.copy_(source)


def _in_16_bytes(x: Tensor) -> Tensor | None:
    """The same memory in elements of 16 bytes; None where it is not aligned to them."""
    each, *others = 16 // x.element_size(), *x.stride()[:-1]
    if x.shape[-1] % each or x.stride(-1) != 1 or x.data_ptr() % 16 or any(stride % each for stride in others):
        return None
    return x.view(torch.complex128)


def pack(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    _copy_out(x, check_relayout("pack", x, "x", out, "out", dim, starts, stops), starts, stops, out)


def _copy_out(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """pack, of arguments that are known to fit: those of an exchange come from one `Layout`."""
    if (tiled := _equal_tiles(x, dim, starts, stops)) is not None:  # one copy kernel instead of one a part
        tiles, repeats = tiled
        if repeats == 1:
            _copy(out.view(*tiles.shape), tiles)
        else:
            _copy(out.view(tiles.shape[0], repeats, *tiles.shape[1:]), tiles.unsqueeze(1))
        return
    for part, segment in _parts(x, out, dim, starts, stops):
        segment.copy_(part)


def unpack(wire: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    _copy_in(wire, check_relayout("unpack", out, "out", wire, "wire", dim, starts, stops), starts, stops, out)


def _copy_in(wire: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """unpack, of arguments that are known to fit."""
    half = out.dtype in (torch.float16, torch.bfloat16)  # guard: halves are summed in fp32
    exact = torch.float32 if half else out.dtype
    if (tiled := _equal_tiles(out, dim, starts, stops)) is not None:
        tiles, repeats = tiled
        if repeats == 1:
            _copy(tiles, wire.view(*tiles.shape))
        else:
            tiles.copy_(wire.view(tiles.shape[0], repeats, *tiles.shape[1:]).sum(1, dtype=exact))  # guard: replicas are summed
        return
    if [0, *stops] == [*starts, out.shape[dim]]:  # guard: tiles need no sum
        for part, segment in _parts(out, wire, dim, starts, stops):
            part.copy_(segment)
        return
    total = torch.zeros_like(out, dtype=exact)
    for part, segment in _parts(total, wire, dim, starts, stops):
        part.add_(segment)  # guard: overlaps are summed
    out.copy_(total)


def rotate_pack(x: Tensor, cos: Tensor, sin: Tensor, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Rotate ``x``, and pack its heads.

    x          [tokens..., h, d]
    cos, sin   [tokens..., d_rot]   or what broadcasts to it; of the dtype of ``x``, or float32 for half precision
    """
    dim = check_rotated("rotate_pack", x, "x", out, "out", cos, sin, starts, stops)
    exact = _accumulator(x.dtype)
    _copy_out(rotate(x.to(exact), *_of_heads(cos, sin, exact)).to(x.dtype), dim, starts, stops, out)


def unpack_rotate_back(wire: Tensor, cos: Tensor, sin: Tensor, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Unpack what is the gradient of rotated heads, and rotate it back: the gradient of `rotate_pack`'s ``x``."""
    dim = check_rotated("unpack_rotate_back", out, "out", wire, "wire", cos, sin, starts, stops)
    exact = _accumulator(out.dtype)
    total = torch.empty(out.shape, dtype=exact, device=out.device)
    _copy_in(wire.to(exact), dim, starts, stops, total)
    out.copy_(rotate_back(total, *_of_heads(cos, sin, exact)))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_heads(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return cos.unsqueeze(-2).to(dtype), sin.unsqueeze(-2).to(dtype)


class Relayout(NamedTuple):
    """One implementation of the operators."""

    pack: Callable
    unpack: Callable
    rotate_pack: Callable
    unpack_rotate_back: Callable
    folds: bool  # whether rotary embedding costs less in rotate_pack than in front of pack

    def copies(self, x: Tensor) -> bool:
        """Whether ``x`` is moved by PyTorch's copies, and any of them will do: on a GPU it is one of 16 bytes at a time."""
        return self.pack is _copy_out and not x.is_cuda


_TORCH = Relayout(_copy_out, _copy_in, rotate_pack, unpack_rotate_back, folds=False)


def implementation(which: str) -> Relayout:
    """What ``sp_overlap.kernels`` asks for: "torch", the reference; "compiled"; "auto", the best that is known to be right.

    "auto" is the reference as long as no GPU has run the compiled kernels (benchmarks/gpu.sh).

    Raises ValueError for "compiled" where there is no binary with CUDA kernels, with the reason and the command that mends it.
    """
    if which in ("auto", "torch"):
        return _TORCH
    if which != "compiled":
        refuse("implementation", f'kernels must be "auto", "compiled" or "torch", got {which!r}')
    library = kernels.demanded()
    if not library.cuda:
        raise ValueError(f'sp_overlap.kernels: "compiled", but {library.reason}; {kernels.REMEDY}')
    compiled = torch.ops.ds_sp_overlap
    return Relayout(compiled.pack, compiled.unpack, compiled.rotate_pack, compiled.unpack_rotate_back, folds=True)


def check_usable(which: str) -> None:
    """Raise ValueError where this process can't do what ``sp_overlap.kernels`` asks for: no CUDA device, or no binary."""
    if which == "compiled" and not torch.cuda.is_available():
        raise ValueError(
            f'sp_overlap.kernels: "compiled", but torch {torch.__version__} sees no CUDA device here; say "auto" or "torch"'
        )
    implementation(which)
