"""Parts of a tensor along one dimension, taken and put together again, differentiably.

A part is a list of ranges. Parts may overlap (KV heads that two ranks need): their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..exchange.layout import Range

Ranges = tuple[Range, ...]  # of a part


@lru_cache(maxsize=4096)
def _strided(shape: Sequence[int], strides: Sequence[int], dim: int, ranges: Ranges) -> tuple | None:
    """Shape, strides and offset of `_slices`."""
    (first, stop), (second, _), *_ = ranges
    size, step, stride = stop - first, second - first, strides[dim]
    if any(r != (first + i * step, first + i * step + size) for i, r in enumerate(ranges)):
        return None
    wide = (*shape[:dim], len(ranges), size, *shape[dim + 1 :])
    return wide, (*strides[:dim], step * stride, stride, *strides[dim + 1 :]), first * stride


def _slices(x: Tensor, dim: int, ranges: Ranges) -> Tensor | None:
    """Equal, evenly spaced slices of ``x`` as one view, ``[.., count, slice, ..]`` in place of ``dim``; None if they are not."""
    if (view := _strided(x.shape, x.stride(), dim, ranges)) is None:
        return None
    shape, strides, offset = view
    return x.as_strided(shape, strides, x.storage_offset() + offset)


def cut_ranges(parameter: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The slices of ``parameter`` along ``dim``, one after another; a view if there is one."""
    if len(ranges) == 1:
        if ranges[0] == (0, parameter.shape[dim]):
            return parameter
        return parameter.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    slices = _slices(parameter, dim, ranges)  # one copy instead of one a slice
    if slices is not None:
        return slices.flatten(dim, dim + 1)
    return torch.cat([parameter.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def put_ranges(whole: Tensor, dim: int, ranges: Ranges, piece: Tensor, add: bool) -> None:
    """Write (or add) ``piece`` back to the slices of ``whole`` that `cut_ranges` took it from."""
    slices = _slices(whole, dim, ranges) if len(ranges) > 1 and not add else None
    if slices is not None:
        slices.copy_(piece.unflatten(dim, (len(ranges), -1)))
        return
    at = 0
    for start, stop in ranges:
        target, source = whole.narrow(dim, start, stop - start), piece.narrow(dim, at, stop - start)
        target.add_(source) if add else target.copy_(source)
        at += stop - start


@lru_cache(maxsize=4096)
def _disjoint_cover(parts: tuple[Ranges, ...], size: int) -> bool:
    ranges = sorted(r for part in parts for r in part)
    return [r[0] for r in ranges] + [size] == [0] + [r[1] for r in ranges]


def join_pieces(shape: Sequence[int], dim: int, pieces: list[tuple[Ranges, Tensor]]) -> Tensor | None:
    """A tensor with each piece in its place; summed where their parts overlap, zero where there is none; None for no piece."""
    if not pieces:
        return None
    if len(pieces) == 1 and pieces[0][0] == ((0, shape[dim]),):
        return pieces[0][1]
    once = _disjoint_cover(tuple(part for part, _ in pieces), shape[dim])
    like = pieces[0][1]
    whole = like.new_empty(shape) if once else like.new_zeros(shape)  # guard: zero without a gradient
    for part, piece in pieces:
        put_ranges(whole, dim, part, piece, add=not once)  # guard: shared rows are summed
    return whole


class _Cut(torch.autograd.Function):
    """Cut a tensor into parts; the gradient is put together in one pass instead of one padded sum a part."""

    @staticmethod
    def forward(ctx, x, dim, parts):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dim, ctx.parts = x.shape, dim, parts
        # Copies, never views of x, which only a part of few tokens could be: norms and RoPE may work in place.
        return tuple(cut_ranges(x, dim, part).clone(memory_format=torch.contiguous_format) for part in parts)

    @staticmethod
    def backward(ctx, *grads):
        given = [(part, grad) for part, grad in zip(ctx.parts, grads) if grad is not None]
        return join_pieces(ctx.shape, ctx.dim, given), None, None


class _Join(torch.autograd.Function):
    """The inverse of `_Cut`."""

    @staticmethod
    def forward(ctx, shape, dim, parts, *pieces):
        ctx.dim, ctx.parts = dim, parts
        return join_pieces(shape, dim, list(zip(parts, pieces)))

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, *(cut_ranges(grad, ctx.dim, part).contiguous() for part in ctx.parts)


def cut(x: Tensor, dim: int, parts: list[Ranges]) -> tuple[Tensor, ...]:
    """The parts of ``x`` along ``dim``, each a list of ranges; differentiable, parts may overlap."""
    return (x,) if parts == [((0, x.shape[dim]),)] else _Cut.apply(x, dim, parts)


def join(pieces: list[Tensor], dim: int, parts: list[Ranges]) -> Tensor:
    """The tensor that `cut` takes into ``pieces``, for parts that tile it; differentiable."""
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return _Join.apply(shape, dim, parts, *pieces)


def batched(parameter: Tensor, dim: int, part: Ranges, count: int) -> Tensor:
    """``count`` equal, evenly spaced slices of ``parameter`` along ``dim`` as one view, ``[count, .., slice]``, ``dim`` last."""
    first, last = part[0][0], part[-1][1]
    size = sum(stop - start for start, stop in part) // count
    step = part[1][0] - first if len(part) > 1 else size
    return parameter.narrow(dim, first, last - first).unfold(dim, size, step).movedim(dim, 0)
