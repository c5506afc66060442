"""Lays the parts of a tensor end to end before a transfer, and back after it.

    pack                 cut a tensor along one dimension and lay the parts, each contiguous, end to
                         end
    unpack               the inverse; slices that several parts hold are summed, in fp32 for half
                         precision
    rotate_pack          rotary embedding of heads [tokens..., h, d], then pack: q and k
    unpack_rotate_back   the transpose of rotate_pack: unpack, sum, rotate back: dq and dk

All operators write into tensors of the caller, so that the caller decides which stream allocates.

The functions here are the reference for the compiled operators of csrc/, which `kernels` loads as
``torch.ops.ds_sp_overlap``, and which refuse arguments that don't fit. Their CPU kernels only show
that the index maps of the CUDA kernels are right. Arguments of an exchange come from one `Layout`,
so they fit. Where nobody asks for compiled kernels, `exchange.copies` packs and unpacks by
PyTorch's copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..rotary import rotate, rotate_back
from . import kernels


def pack(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Copy the parts of ``x`` along ``dim``, each contiguous, end to end into the flat ``out``.

    Args:
        x: Any shape.
        dim: The dimension of the parts, counted from the front.
        starts: Start of each part.
        stops: Stop of each part.
        out: Flat, with the elements of all parts.
    """
    out.copy_(torch.cat([part.flatten() for part in _parts(x, dim, starts, stops)]))


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
    total = torch.zeros_like(out, dtype=sum_dtype(out.dtype))
    parts = _parts(total, dim, starts, stops)
    for part, segment in zip(parts, wire.split([part.numel() for part in parts])):
        part.add_(segment.view(part.shape))
    out.copy_(total)


def _parts(x: Tensor, dim: int, starts: list[int], stops: list[int]) -> list[Tensor]:
    """Return the parts of ``x`` as views."""
    return [x.narrow(dim, start, stop - start) for start, stop in zip(starts, stops)]


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

    @property
    def copies(self) -> bool:
        """Return whether PyTorch's copies pack and unpack (`exchange.copies`)."""
        return self.pack is pack


_TORCH = Relayout(pack, unpack, rotate_pack, unpack_rotate_back, folds=False)


@functools.cache
def _compiled() -> Relayout:
    """Return the compiled operators of a library that is loaded, looked up once."""
    compiled = torch.ops.ds_sp_overlap
    return Relayout(
        compiled.pack.default,
        compiled.unpack.default,
        compiled.rotate_pack.default,
        compiled.unpack_rotate_back.default,
        folds=True,
    )


def implementation(which: str) -> Relayout:
    """Return the operators that ``sp_overlap.kernels`` names.

    Args:
        which: "torch", PyTorch's copies; "compiled", which `check_usable` found usable; or "auto",
            which is "torch" until the ranks have chosen (`SPGroup.prepare`).
    """
    return _compiled() if which == "compiled" else _TORCH


def lacks_compiled(build: bool) -> str:
    """Say why this process has no compiled operators for a GPU; empty if it has.

    Args:
        build: Whether to build a library where there is none, which takes a minute.
    """
    library = kernels.demanded() if build else kernels.library()
    if library.cuda:
        return ""
    return f"{library.reason}; {kernels.REMEDY}"


def check_usable(which: str) -> None:
    """Check that this process can use the operators that ``sp_overlap.kernels`` names.

    Called where the ranks agree, so that all of them raise what one raises. The first call for
    "compiled" loads the library, or builds it.

    Raises:
        ValueError: for "compiled" without a CUDA device or without CUDA kernels, with the reason
            and the command that helps.
    """
    if which != "compiled":
        return
    if not torch.cuda.is_available():
        raise ValueError(
            f'sp_overlap.kernels: "compiled", but torch {torch.__version__} sees no CUDA device '
            'here; say "auto" or "torch"'
        )
    lacks = lacks_compiled(build=True)
    if lacks:
        raise ValueError(f'sp_overlap.kernels: "compiled", but {lacks}')
