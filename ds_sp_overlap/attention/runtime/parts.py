"""Cuts tensors into parts along one dimension, and joins parts to tensors.

`Pieces` joins the pieces of a gradient, each as soon as it is computed, inside of nodes of
autograd. `cut` and `join` are differentiable. They cut and join heads, fused projections
(`input_modules`), and the weights of latents (`latent`) and of mixers by heads (`mixer_heads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...exchange.exchange import Node
from ...exchange.layout import HEADS
from ...schedule import Part
from .execution import Call
from .slices import Parts, Ranges, cut_ranges, mm_to_slices, put_ranges, tile


class Pieces:
    """Joins pieces along ``dim`` to one tensor; a part is the place of a piece.

    Where parts overlap, the tensor is the sum of their pieces; where there is no part, zero. Call
    `put` once for each piece, then `whole`.

    Args:
        shape: The shape of the tensor.
        dim: The dimension of the parts.
        parts: The parts of all pieces to come.
        late: Whether to allocate the tensor only in `whole`, when the caller has freed memory.
    """

    def __init__(self, shape: Sequence[int], dim: int, parts: Parts, late: bool = False):
        self.shape, self.dim, self.late = shape, dim, late
        self._once = tile(parts, shape[dim])
        self._whole: Tensor | None = None
        self._waiting: list[tuple[Ranges, Tensor]] = []

    def put(self, part: Ranges, compute: Callable[..., Tensor], *operands: Any) -> None:
        """Compute a piece, and put it in its place.

        Args:
            part: The part.
            compute: Computes the piece from ``operands``. Takes ``out=``, a tensor to write to:
                where parts don't overlap, this avoids a copy.
            operands: The operands. The first has the dtype and the device of the joined tensor.
        """
        if self.late:
            self._waiting.append((part, compute(*operands)))
            return
        if self._whole is None:
            # If one piece is the whole tensor, no copy is needed.
            if self._once and part == ((0, self.shape[self.dim]),):
                self._whole = compute(*operands)
                return
            make = (  # guard: zero without a gradient
                operands[0].new_empty if self._once else operands[0].new_zeros
            )
            self._whole = make(*self.shape)
        add = not self._once  # guard: shared rows are summed
        if len(part) == 1 and not add:
            # Write to the range directly. (The range may be empty, after a piece that is the whole
            # tensor.)
            ((start, stop),) = part
            compute(*operands, out=self._whole.narrow(self.dim, start, stop - start))
        elif compute is torch.mm:
            a, b = operands
            # `mm_to_slices` writes columns. For rows, write columns of the transpose: (a b)^T =
            # b^T a^T.
            if self.dim == 0:
                mm_to_slices(b.t(), a.t(), self._whole.t(), part, add=add)
            else:
                mm_to_slices(a, b, self._whole, part, add=add)
        else:
            put_ranges(self._whole, self.dim, part, compute(*operands), add=add)

    def whole(self) -> Tensor | None:
        """Return the joined tensor; None if there was no piece. If ``late``, join only now."""
        self.late = False
        # Pop the pieces one by one, to free each as soon as it is in place.
        while self._waiting:
            part, piece = self._waiting.pop()
            self.put(part, copied, piece)
        return self._whole


def copied(piece: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy ``piece`` to ``out``, if given: the ``compute`` of `Pieces.put` for existing pieces."""
    return piece if out is None else out.copy_(piece)


def _joined(
    shape: Sequence[int], parts: Sequence[Ranges], pieces: Sequence[Tensor | None]
) -> Tensor | None:
    """Join the pieces that are not None along `HEADS`; return None if all are None."""
    present = [(part, piece) for part, piece in zip(parts, pieces) if piece is not None]
    # Leave empty pieces out. A piece that is the whole tensor is returned without a copy, and
    # writing an empty piece to that tensor would increase its version counter.
    present = [(part, piece) for part, piece in present if piece.shape[HEADS]] or present[:1]
    joined = Pieces(shape, HEADS, tuple([part for part, _ in present]))
    for part, piece in present:
        joined.put(part, copied, piece)
    return joined.whole()


class _Parts(Node):
    """Cuts a tensor into parts along `HEADS`, or joins parts; the backward of one is the other.

    The backward of a cut writes the gradient in one pass. For PyTorch's slicing, autograd would pad
    the gradient of each part to the whole shape, and sum these tensors.
    """

    @staticmethod
    def forward(ctx, is_cut, shape, parts, *tensors):
        """Cut ``tensors[0]`` into parts if ``is_cut``; else join ``tensors`` to ``shape``."""
        # The backward of a cut leaves out parts whose gradient is None. The backward of a join
        # needs a gradient: zeros if there is none.
        ctx.set_materialize_grads(not is_cut)
        ctx.given = is_cut, shape, parts
        if not is_cut:
            return _joined(shape, parts, tensors)
        pieces = []
        for part in parts:
            piece = cut_ranges(tensors[0], HEADS, part)
            # Copy the part, since a norm or RoPE may change it in place.
            if piece is tensors[0] or piece._is_view():
                piece = piece.clone(memory_format=torch.contiguous_format)
            pieces.append(piece)
        return tuple(pieces)

    @staticmethod
    def backward(ctx, *gradients):
        is_cut, shape, parts = ctx.given
        if is_cut:
            return None, None, None, _joined(shape, parts, gradients)
        pieces = (cut_ranges(gradients[0], HEADS, part).contiguous() for part in parts)
        return None, None, None, *pieces


def cut(x: Tensor, parts: list[Ranges]) -> tuple[Tensor, ...]:
    """Cut ``x`` into parts of dimension `HEADS`, differentiably; parts may overlap.

    Returns:
        A copy of each part; ``x`` itself if the only part is all of ``x``.
    """
    if parts == [((0, x.shape[HEADS]),)]:
        return (x,)
    return _Parts.apply(True, x.shape, parts, x)


def cut_heads(call: Call, kind: str, x: Tensor) -> dict[Part, Tensor]:
    """Cut local q, k or v [.., .., heads, d] into the heads that travel with each group.

    Returns:
        The heads of each part of ``kind``. There is no part of k and v for a group that sends q
        alone.
    """
    parts = [part for part in call.schedule.parts if part[0] == kind]
    return dict(zip(parts, cut(x, [call.geometry.heads_of(*part) for part in parts])))


def join_heads(call: Call, values: dict[Part, Tensor]) -> Tensor:
    """Join local o of the head groups to one tensor of all heads in order, [.., .., h, d]."""
    pieces = [values["o", group] for group in call.groups]
    if len(pieces) == 1:
        return pieces[0]
    shape, heads = list(pieces[0].shape), [call.geometry.heads_of("q", g) for g in call.groups]
    shape[HEADS] = call.geometry.heads
    return _Parts.apply(False, shape, heads, *pieces)
