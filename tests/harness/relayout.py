"""Computes the operators of csrc/ in PyTorch, as a reference for the compiled operators."""

import torch
from torch import Tensor

from ds_sp_overlap.relayout.ops import Relayout, sum_dtype
from ds_sp_overlap.rotary import rotate


def pack(x: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Copy parts of ``x`` along ``dim`` into the flat ``out``, one part after another.

    Args:
        x: Any shape.
        dim: The dimension of the parts, counted from the front.
        starts: Start of each part.
        stops: Stop of each part.
        out: Flat, with the elements of all parts.
    """
    out.copy_(torch.cat([part.flatten() for part in _parts(x, dim, starts, stops)]))


def unpack(wire: Tensor, dim: int, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Copy parts from the flat ``wire`` to their places in ``out``; the inverse of `pack`.

    Where parts overlap, their elements are summed, in fp32 for half precision.

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


def rotate_pack(x: Tensor, cos: Tensor, sin: Tensor, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Rotate ``x``, and pack ranges of its heads.

    Args:
        x: [tokens..., h, d].
        cos: [tokens..., d_rot], or a shape that broadcasts to it; of the dtype of ``x``, or float32
            for half precision.
        sin: Shape and dtype of ``cos``.
        starts: First head of each range.
        stops: The head after the last head of each range.
        out: Flat, with the elements of all ranges.
    """
    # Round only once, after the rotation.
    exact = _accumulator(x.dtype)
    rotated = rotate(x.to(exact), *_of_heads(cos, sin, exact)).to(x.dtype)
    pack(rotated, x.dim() - 2, starts, stops, out)


def unpack_rotate_back(wire: Tensor, cos: Tensor, sin: Tensor, starts: list[int], stops: list[int], out: Tensor) -> None:
    """Unpack the gradient of rotated heads, and rotate the gradient back: the backward of `rotate_pack`.

    ``wire`` is the flat gradient; ``out`` [tokens..., h, d] receives the gradient of ``x``.
    """
    # Round only once, after the sum over parts and the rotation.
    exact = _accumulator(out.dtype)
    total = torch.empty(out.shape, dtype=exact, device=out.device)
    unpack(wire.to(exact), out.dim() - 2, starts, stops, total)
    out.copy_(rotate(total, *_of_heads(cos, sin, exact), back=True))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which heads are rotated: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_heads(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tables with a dimension for heads, in ``dtype``."""
    return cos.unsqueeze(-2).to(dtype), sin.unsqueeze(-2).to(dtype)


REFERENCE = Relayout(pack, unpack, rotate_pack, unpack_rotate_back, folds=False)
