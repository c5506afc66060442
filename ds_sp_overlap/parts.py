"""Parts of a tensor along one dimension, taken and put together again, differentiably.

A part is a list of ranges. Parts may overlap (KV heads that two ranks need): their gradients are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layout import Range

Part = tuple[Range, ...]

def cut_ranges(parameter: Tensor, dim: int, ranges: Part) -> Tensor:
    """The slices of ``parameter`` along ``dim``, one after another; a view if there is one."""
    pieces = [parameter.narrow(dim, start, stop - start) for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def put_ranges(whole: Tensor, dim: int, ranges: Part, piece: Tensor, add: bool) -> None:
    """Write (or add) ``piece`` back to the slices of ``whole`` that `cut_ranges` took it from."""
    at = 0
    for start, stop in ranges:
        target, source = whole.narrow(dim, start, stop - start), piece.narrow(dim, at, stop - start)
        target.add_(source) if add else target.copy_(source)
        at += stop - start


def _disjoint_cover(parts: list[Part], size: int) -> bool:
    ranges = sorted(r for part in parts for r in part)
    return [r[0] for r in ranges] + [size] == [0] + [r[1] for r in ranges]


def _join(shape, dim: int, parts: list[Part], pieces) -> Tensor | None:
    """A tensor with each piece in its place; summed where parts overlap, zero where there is none."""
    given = [(part, piece) for part, piece in zip(parts, pieces) if piece is not None]
    if not given:
        return None
    once = _disjoint_cover([part for part, _ in given], shape[dim])
    whole = given[0][1].new_empty(shape) if once else given[0][1].new_zeros(shape)
    for part, piece in given:
        put_ranges(whole, dim, part, piece, add=not once)
    return whole


class _Cut(torch.autograd.Function):
    """Cut a tensor into parts; the gradient is put together in one pass instead of one padded sum a part."""

    @staticmethod
    def forward(ctx, x, dim, parts):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dim, ctx.parts = x.shape, dim, parts
        return tuple(cut_ranges(x, dim, part).contiguous() for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _join(ctx.shape, ctx.dim, ctx.parts, grads), None, None


class _Join(torch.autograd.Function):
    """The inverse of `_Cut`."""

    @staticmethod
    def forward(ctx, shape, dim, parts, *pieces):
        ctx.dim, ctx.parts = dim, parts
        return _join(shape, dim, parts, pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, None, *(cut_ranges(grad, ctx.dim, part).contiguous() for part in ctx.parts)


class _GradientParts(torch.autograd.Function):
    """Stand-ins for parts of a parameter, whose gradients are put together into the parameter's.

    parameter  [n, ...]
    part g     [n_g, ...]   no memory of its own; only its gradient counts
    backward   d parameter = the gradients of the parts, in their places (summed where parts overlap)
    """

    @staticmethod
    def forward(ctx, parameter, parts):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.parts = parameter.shape, parts
        rows = [sum(stop - start for start, stop in part) for part in parts]
        return tuple(parameter.new_empty(()).expand(n, *parameter.shape[1:]) for n in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _join(ctx.shape, 0, ctx.parts, grads), None


def cut(x: Tensor, dim: int, parts: list[Part]) -> tuple[Tensor, ...]:
    """The parts of ``x`` along ``dim``, each a list of ranges; differentiable, parts may overlap."""
    return (x,) if parts == [((0, x.shape[dim]),)] else _Cut.apply(x, dim, parts)


def join(pieces: list[Tensor], dim: int, parts: list[Part]) -> Tensor:
    """The tensor that `cut` takes into ``pieces``, for parts that tile it; differentiable."""
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return _Join.apply(shape, dim, parts, *pieces)


def gradient_parts(parameter: Tensor | None, parts: list[Part]) -> tuple[Tensor | None, ...]:
    """What the parts of a parameter hand their gradients to; the parameter itself if there is one part."""
    if parameter is None:
        return (None,) * len(parts)
    return (parameter,) if parts == [((0, parameter.shape[0]),)] else _GradientParts.apply(parameter, parts)
