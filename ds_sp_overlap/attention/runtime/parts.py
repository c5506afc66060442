"""Cuts tensors into parts along one dimension, and joins parts to tensors, differentiably.

For heads, q, k and v of a fused projection (`input_modules`), and weights of latents (`latent`) and
of mixers by heads (`mixer_heads`). Tests compare the gradients of these layers
(tests/ranks/test_gradients.py and others).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...exchange.exchange import Node
from ...schedule import Part
from .execution import Call
from .pieces import Pieces, copied
from .slices import Ranges, cut_ranges


def _joined(
    shape: Sequence[int], dim: int, parts: Sequence[Ranges], pieces: Sequence[Tensor | None]
) -> Tensor | None:
    """Join those pieces that are not None; return None if all are."""
    present = [(part, piece) for part, piece in zip(parts, pieces) if piece is not None]
    # Empty pieces are left out. Where one piece is the whole, it is returned itself, and writing an
    # empty one into it would count as a change.
    present = [(part, piece) for part, piece in present if piece.shape[dim]] or present[:1]
    joined = Pieces(shape, dim, tuple([part for part, _ in present]))
    for part, piece in present:
        joined.put(part, copied, piece)
    return joined.whole()


class _Parts(Node):
    """Cut a tensor into parts, or join parts to a tensor; each is the gradient of the other.

    The gradient is made in one pass; PyTorch's slicing would add a padded tensor for each part.
    """

    @staticmethod
    def forward(ctx, is_cut, shape, dim, parts, *tensors):
        """Cut the one tensor given into parts if ``is_cut``; else join them to one of ``shape``."""
        # In the backward of a cut, a part without a gradient is None and left out. In that of a
        # join, the whole without a gradient comes as zeros.
        ctx.set_materialize_grads(not is_cut)
        ctx.given = is_cut, shape, dim, parts
        if not is_cut:
            return _joined(shape, dim, parts, tensors)
        pieces = []
        for part in parts:
            piece = cut_ranges(tensors[0], dim, part)
            # A copy, no view: a norm, or RoPE, may change its part in place.
            if piece is tensors[0] or piece._is_view():
                piece = piece.clone(memory_format=torch.contiguous_format)
            pieces.append(piece)
        return tuple(pieces)

    @staticmethod
    def backward(ctx, *gradients):
        is_cut, shape, dim, parts = ctx.given
        if is_cut:
            return None, None, None, None, _joined(shape, dim, parts, gradients)
        pieces = (cut_ranges(gradients[0], dim, part).contiguous() for part in parts)
        return None, None, None, None, *pieces


def cut(x: Tensor, dim: int, parts: list[Ranges]) -> tuple[Tensor, ...]:
    """Cut ``x`` into parts along ``dim``, differentiably; parts may overlap.

    Returns:
        A copy of each part; ``x`` itself for one part that is all of it.
    """
    if parts == [((0, x.shape[dim]),)]:
        return (x,)
    return _Parts.apply(True, x.shape, dim, parts, x)


def join(pieces: list[Tensor], dim: int, parts: list[Ranges]) -> Tensor:
    """Join pieces along ``dim``, differentiably: the inverse of `cut`.

    Args:
        pieces: The pieces.
        dim: The dimension of the parts.
        parts: The part of each piece; they tile the dimension.

    Returns:
        The tensor; a single piece itself.
    """
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return _Parts.apply(False, shape, dim, parts, *pieces)


def cut_heads(call: Call, kind: str, x: Tensor) -> dict[Part, Tensor]:
    """Cut local q, k or v [.., .., heads, d] into the heads that travel with each group.

    Returns:
        For each part of that kind, its heads; a group whose k and v came with an earlier group has
        no part.
    """
    parts = [part for part in call.schedule.parts if part[0] == kind]
    return dict(zip(parts, cut(x, 2, [call.geometry.heads_of(*part) for part in parts])))


def join_heads(call: Call, values: dict[Part, Tensor]) -> Tensor:
    """Join local o of each group to local o of all heads in their order, [.., .., h, d]."""
    heads = [call.geometry.heads_of("q", group) for group in call.groups]
    return join([values["o", group] for group in call.groups], 2, heads)
