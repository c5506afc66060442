"""Parts of a tensor along one dimension, taken and put together again, differentiably.

A part is a list of ranges. Parts may overlap (KV heads that two ranks need): their gradients are
summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...exchange.exchange import Node
from ...exchange.layout import Range

Ranges = tuple[Range, ...]  # of a part


class Parts(tuple[Ranges, ...]):
    """Several parts. Hashed as the object that it is, since every call asks for it; `parts_of`
    makes each once.
    """

    __hash__ = object.__hash__


@lru_cache(maxsize=4096)
def parts_of(*parts: Ranges) -> Parts:
    return Parts(parts)


@lru_cache(maxsize=4096)
def _strided(
    shape: Sequence[int], strides: Sequence[int], dim: int, ranges: Ranges
) -> tuple | None:
    """Shape, strides and offset of `_slices`."""
    (first, stop), (second, _), *_ = ranges
    size, step, stride = stop - first, second - first, strides[dim]
    if any(r != (first + i * step, first + i * step + size) for i, r in enumerate(ranges)):
        return None
    wide = (*shape[:dim], len(ranges), size, *shape[dim + 1 :])
    return wide, (*strides[:dim], step * stride, stride, *strides[dim + 1 :]), first * stride


def _slices(x: Tensor, dim: int, ranges: Ranges) -> Tensor | None:
    """Equal, evenly spaced slices of ``x`` as one view, ``[.., count, slice, ..]`` in place of
    ``dim``; None if they are not.
    """
    if (view := _strided(x.shape, x.stride(), dim, ranges)) is None:
        return None
    shape, strides, offset = view
    return x.as_strided(shape, strides, x.storage_offset() + offset)


def cut_ranges(parameter: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The slices of ``parameter`` along ``dim``, one after another; a view if there is one."""
    if len(ranges) == 1:
        ((start, stop),) = ranges
        if stop - start == parameter.shape[dim]:
            return parameter
        return parameter[
            (slice(None),) * dim + (slice(start, stop),)
        ]  # costs the host less than `narrow`
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


def cutter(parameter: Tensor, dim: int, parts: tuple[Ranges, ...]) -> Callable[[Ranges], Tensor]:
    """`cut_ranges` of each of ``parts``; where each is one range and they tile ``dim``, views that
    are all made at once.
    """
    if (tiles := _tiles(parts, parameter.shape[dim])) is None:
        return partial(cut_ranges, parameter, dim)
    order, sizes = tiles
    return dict(
        zip(order, parameter.split_with_sizes(sizes, dim) if len(sizes) > 1 else (parameter,))
    ).__getitem__


@lru_cache(maxsize=4096)
def _tiles(parts: tuple[Ranges, ...], size: int) -> tuple[list[Ranges], list[int]] | None:
    """The parts in order, with their sizes."""
    order = sorted(parts)
    ok = all(len(part) == 1 for part in order) and _disjoint_cover(parts, size)
    return (order, [stop - start for ((start, stop),) in order]) if ok else None


@lru_cache(maxsize=4096)
def _disjoint_cover(parts: tuple[Ranges, ...], size: int) -> bool:
    ranges = sorted(r for part in parts for r in part)
    return [r[0] for r in ranges] + [size] == [0] + [r[1] for r in ranges]


class Pieces:
    """A tensor that is put together of pieces along ``dim``: summed where their parts overlap, zero
    where there is none.

    parts   of all pieces that will come, and ``some`` that they may stay away
    late    put them together at the end: where other memory is let go meanwhile
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim: int,
        parts: tuple[Ranges, ...],
        some: bool = False,
        late: bool = False,
    ):
        self.shape, self.dim, self.late = shape, dim, late
        self._whole: Tensor | None = None
        self._cut: Callable[[Ranges], Tensor] | None = None
        self._waiting: list[tuple[Ranges, Tensor]] = []
        self.once, self.parts = not some and _disjoint_cover(parts, shape[dim]), parts

    def put(self, part: Ranges, compute: Callable[..., Tensor], *operands: Any) -> None:
        """Put ``compute(*operands)``, like the first of them, in its place; computed there, if
        nothing else is put in that slice.
        """
        if self.late:
            self._waiting.append((part, compute(*operands)))
            return
        if self._whole is None:
            if self.once and part == ((0, self.shape[self.dim]),):
                self._whole = compute(*operands)
                return
            make = (
                operands[0].new_empty if self.once else operands[0].new_zeros
            )  # guard: zero without a gradient
            self._whole = make(*self.shape)
        if self.once and len(part) == 1:
            self._cut = self._cut or cutter(
                self._whole, self.dim, self.parts
            )  # behind a whole come parts of nothing
            compute(*operands, out=self._cut(part))
        else:
            put_ranges(
                self._whole, self.dim, part, compute(*operands), add=not self.once
            )  # guard: shared rows are summed

    def whole(self) -> Tensor | None:
        """The tensor; None if there was no piece."""
        self.late = False
        while self._waiting:
            part, piece = self._waiting.pop()
            self.put(part, _copied, piece)
        return self._whole


def _copied(piece: Tensor, out: Tensor | None = None) -> Tensor:
    return piece if out is None else out.copy_(piece)


def _joined(
    shape: Sequence[int], dim: int, parts: Sequence[Ranges], pieces: Sequence[Tensor | None]
) -> Tensor | None:
    """`Pieces` of those that are given; None for no piece."""
    given = [(part, piece) for part, piece in zip(parts, pieces) if piece is not None]
    joined = Pieces(shape, dim, tuple(part for part, _ in given))
    for part, piece in given:
        joined.put(part, _copied, piece)
    return joined.whole()


class _Slices(Node):
    """Cut a tensor into parts, or join parts to a tensor: each is the gradient of the other, made in
    one pass instead of one padded sum a part.
    """

    @staticmethod
    def forward(ctx, is_cut, shape, dim, parts, *tensors):
        ctx.set_materialize_grads(not is_cut)  # a whole is never None, a part may be
        ctx.given = is_cut, shape, dim, parts
        if not is_cut:
            return _joined(shape, dim, parts, tensors)
        # Copies, never views of x, which only a part of few tokens could be: norms and RoPE may
        # work in place.
        pieces = (cut_ranges(tensors[0], dim, part) for part in parts)
        return tuple(piece.clone(memory_format=torch.contiguous_format) for piece in pieces)

    @staticmethod
    def backward(ctx, *gradients):
        is_cut, shape, dim, parts = ctx.given
        if is_cut:
            return None, None, None, None, _joined(shape, dim, parts, gradients)
        pieces = (cut_ranges(gradients[0], dim, part).contiguous() for part in parts)
        return None, None, None, None, *pieces


def cut(x: Tensor, dim: int, parts: list[Ranges]) -> tuple[Tensor, ...]:
    """The parts of ``x`` along ``dim``, each a list of ranges; differentiable, parts may overlap."""
    if parts == [((0, x.shape[dim]),)]:
        return (x,)
    return _Slices.apply(True, x.shape, dim, parts, x)


def join(pieces: list[Tensor], dim: int, parts: list[Ranges]) -> Tensor:
    """The tensor that `cut` takes into ``pieces``, for parts that tile it; differentiable."""
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return _Slices.apply(False, shape, dim, parts, *pieces)


def batched(parameter: Tensor, dim: int, part: Ranges, count: int) -> Tensor:
    """``count`` equal, evenly spaced slices of ``parameter`` along ``dim`` as one view, ``[count,
    .., slice]``, ``dim`` last.
    """
    first, last = part[0][0], part[-1][1]
    size = sum(stop - start for start, stop in part) // count
    step = part[1][0] - first if len(part) > 1 else size
    return parameter.narrow(dim, first, last - first).unfold(dim, size, step).movedim(dim, 0)
