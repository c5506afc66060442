"""Lays the parts of a tensor end to end before a transfer, and back after it.

    pack                 cut a tensor along one dimension and lay the parts, each contiguous, end to
                         end
    unpack               the inverse; slices that several parts hold are summed, in fp32 for half
                         precision
    rotate_pack          rotary embedding of heads [tokens..., h, d], then pack: q and k
    unpack_rotate_back   the transpose of rotate_pack: unpack, sum, rotate back: dq and dk

All operators write into tensors of the caller, so that the caller decides which stream allocates.

The functions here are PyTorch's own copies and serve every device. They are the reference for the
compiled operators of csrc/, which `kernels` loads as ``torch.ops.ds_sp_overlap``, and which refuse
arguments that don't fit. Their CPU kernels only show that the index maps of the CUDA kernels are
right; PyTorch's copies are faster. Arguments of an exchange come from one `Layout`, so they fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..rotary import rotate, rotate_back
from . import kernels


def _parts(
    tensor: Tensor, wire: Tensor, dim: int, starts: list[int], stops: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Pair each part of ``tensor`` with its segment of ``wire``, shaped alike."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in zip(starts, stops)]
    segments = wire.split([part.numel() for part in parts])
    return [(part, segment.view(part.shape)) for part, segment in zip(parts, segments)]


@functools.lru_cache(maxsize=4096)
def _tiled(
    shape: Sequence[int],
    strides: Sequence[int],
    dim: int,
    starts: Sequence[int],
    stops: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Return shape, strides and repeats of a view with a dimension for the tiles in front.

    None if the parts are no tiles. Tiles have equal sizes and cover ``dim`` in order. Each tile is
    the part of ``repeats`` successive peers, more than one where these need the same KV heads.

    Args:
        shape: Shape of the tensor.
        strides: Strides of the tensor.
        dim: The dimension of the parts.
        starts: Start of each part.
        stops: Stop of each part.
    """
    size = stops[0] - starts[0]
    tiles = shape[dim] // size if size > 0 else len(starts)
    repeats, rest = divmod(len(starts), max(tiles, 1))
    if repeats == 0:
        return None
    in_order = True
    for index, part in enumerate(zip(starts, stops)):
        first = index // repeats * size
        in_order = in_order and part == (first, first + size)
    if tiles * size == shape[dim] and rest == 0 and in_order:  # guard: tiles lie in order
        view_shape = (tiles, *shape[:dim], size, *shape[dim + 1 :])
        return view_shape, (size * strides[dim], *strides), repeats
    return None


def _equal_tiles(
    tensor: Tensor, dim: int, starts: Sequence[int], stops: Sequence[int]
) -> tuple[Tensor, int] | None:
    """Return the view of `_tiled` of ``tensor``, and ``repeats``; None if parts are no tiles."""
    tiled = _tiled(tensor.shape, tensor.stride(), dim, tuple(starts), tuple(stops))
    if tiled is None:
        return None
    shape, strides, repeats = tiled
    return tensor.as_strided(shape, strides), repeats


def copy(to: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``to``, on a GPU 16 bytes at a time where memory is aligned."""
    if prefers_16_bytes(to):
        to, source = widened(to, source)
    to.copy_(source)


def widened(*tensors: Tensor) -> Sequence[Tensor]:
    """View tensors of one dtype in elements of 16 bytes, on a GPU where all memory is aligned.

    Elsewhere return the tensors as they are.
    """
    # PyTorch's permuting copy of 2-byte elements is slow.
    if not prefers_16_bytes(tensors[0]) or len({x.dtype for x in tensors}) > 1:
        return tensors
    wide = []
    for x in tensors:
        view = _in_16_bytes(x)
        if view is None:
            return tensors
        wide.append(view)
    return wide


def prefers_16_bytes(x: Tensor) -> bool:
    """Return whether copies of 16 bytes at a time are faster on the device of ``x``."""
    return x.is_cuda


def _in_16_bytes(x: Tensor) -> Tensor | None:
    """View ``x`` in elements of 16 bytes (complex128); None where its memory is not aligned."""
    elements = 16 // x.element_size()
    if x.shape[-1] % elements or x.stride(-1) != 1 or x.data_ptr() % 16:
        return None
    if any(stride % elements for stride in x.stride()[:-1]):
        return None
    return x.view(torch.complex128)


def pack(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Copy the parts of ``x`` along ``dim``, each contiguous, end to end into the flat ``out``.

    Args:
        x: Any shape.
        dim: The dimension of the parts, counted from the front.
        starts: Start of each part.
        stops: Stop of each part.
        out: Flat, with the elements of all parts.
    """
    tiled = _equal_tiles(x, dim, starts, stops)
    if tiled is not None:
        # One copy kernel instead of one per part.
        tiles, repeats = tiled
        if repeats == 1:
            copy(out.view(*tiles.shape), tiles)
        else:
            copy(out.view(tiles.shape[0], repeats, *tiles.shape[1:]), tiles.unsqueeze(1))
        return
    for part, segment in _parts(x, out, dim, starts, stops):
        segment.copy_(part)


def unpack(wire: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Copy the parts in the flat ``wire`` to their places in ``out``; the inverse of `pack`.

    Slices that several parts hold are summed, in fp32 for half precision.

    Args:
        wire: Flat, with the elements of all parts.
        dim: The dimension of the parts, counted from the front.
        starts: Start of each part.
        stops: Stop of each part.
        out: Any shape; the parts must cover it.
    """
    exact = sum_dtype(out.dtype)  # guard: halves are summed in fp32
    tiled = _equal_tiles(out, dim, starts, stops)
    if tiled is not None:
        tiles, repeats = tiled
        if repeats == 1:
            copy(tiles, wire.view(*tiles.shape))
        else:
            replicas = wire.view(tiles.shape[0], repeats, *tiles.shape[1:])
            tiles.copy_(replicas.sum(1, dtype=exact))  # guard: replicas are summed
        return
    if [0, *stops] == [*starts, out.shape[dim]]:  # guard: tiles need no sum
        for part, segment in _parts(out, wire, dim, starts, stops):
            part.copy_(segment)
        return
    # Parts overlap: they are added to zeros.
    total = torch.zeros_like(out, dtype=exact)
    for part, segment in _parts(total, wire, dim, starts, stops):
        part.add_(segment)  # guard: overlaps are summed
    out.copy_(total)


def rotate_pack(
    x: Tensor, cos: Tensor, sin: Tensor, starts: list[int], stops: list[int], out: Tensor
) -> None:
    """Rotate ``x``, and pack its heads.

    Args:
        x: [tokens..., h, d].
        cos: [tokens..., d_rot], or a shape that broadcasts to it; of the dtype of ``x``, or float32
            for half precision.
        sin: As ``cos``.
        starts: First head of each part.
        stops: The head behind each part.
        out: Flat.
    """
    # Rounded once, after the rotation.
    exact = _accumulator(x.dtype)
    rotated = rotate(x.to(exact), *_of_heads(cos, sin, exact)).to(x.dtype)
    pack(rotated, x.dim() - 2, starts, stops, out)


def unpack_rotate_back(
    wire: Tensor, cos: Tensor, sin: Tensor, starts: list[int], stops: list[int], out: Tensor
) -> None:
    """Unpack the gradient of rotated heads and rotate it back: the backward of `rotate_pack`.

    ``wire`` is the flat gradient, ``out`` [tokens..., h, d] receives that of ``x``.
    """
    # Rounded once, after the sum of replicas and the rotation.
    exact = _accumulator(out.dtype)
    total = torch.empty(out.shape, dtype=exact, device=out.device)
    unpack(wire.to(exact), out.dim() - 2, starts, stops, total)
    out.copy_(rotate_back(total, *_of_heads(cos, sin, exact)))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are summed: fp32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which heads are rotated: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_heads(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give the tables a dimension for the heads."""
    return cos.unsqueeze(-2).to(dtype), sin.unsqueeze(-2).to(dtype)


class Relayout(NamedTuple):
    """One implementation of the operators.

    Attributes:
        folds: Whether rotary embedding costs less in ``rotate_pack`` than in front of ``pack``.
    """

    pack: Callable
    unpack: Callable
    rotate_pack: Callable
    unpack_rotate_back: Callable
    folds: bool

    def copies(self, x: Tensor) -> bool:
        """Return whether pack and unpack of ``x`` are PyTorch's copies, any of which may do it.

        The caller may then take the copy that costs the host least.
        """
        # Not on a GPU, where `copy` is faster.
        return self.pack is pack and not x.is_cuda


_TORCH = Relayout(pack, unpack, rotate_pack, unpack_rotate_back, folds=False)


def implementation(which: str) -> Relayout:
    """Return the operators that ``sp_overlap.kernels`` names.

    The first call for "compiled" loads the library, or builds it, which may take minutes.

    Args:
        which: "torch", PyTorch's copies; "compiled"; or "auto", the fastest that are known to be
            right. "auto" is "torch" as long as no GPU has run the compiled kernels
            (benchmarks/gpu.sh).

    Raises:
        ValueError: for "compiled" without CUDA kernels, with the reason and the command that helps.
    """
    if which in ("auto", "torch"):
        return _TORCH
    library = kernels.demanded()
    if not library.cuda:
        raise ValueError(f'sp_overlap.kernels: "compiled", but {library.reason}; {kernels.REMEDY}')
    compiled = torch.ops.ds_sp_overlap
    return Relayout(
        compiled.pack,
        compiled.unpack,
        compiled.rotate_pack,
        compiled.unpack_rotate_back,
        folds=True,
    )


def check_usable(which: str) -> None:
    """Check that this process can use the operators that ``sp_overlap.kernels`` names.

    Called where the ranks agree, so that all of them raise what one raises.

    Raises:
        ValueError: for "compiled" without a CUDA device or without CUDA kernels.
    """
    if which == "compiled" and not torch.cuda.is_available():
        raise ValueError(
            f'sp_overlap.kernels: "compiled", but torch {torch.__version__} sees no CUDA device '
            'here; say "auto" or "torch"'
        )
    implementation(which)
