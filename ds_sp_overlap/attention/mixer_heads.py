"""Runs the part of a mixer that needs whole sequences of some heads.

The exchanges have the geometry and the schedule of attention: q has h heads; k and v may have fewer
heads, each for several heads of q. The `Mixer` decides which tensors travel as q, k and v. A gated
delta net, for instance, has the most heads on v, so its v travels as q:

    travels as    q          k    v    o      started and finished in the order of `schedule`
    delta rule    v, b, a    k    q    o
    Mamba 1       x          dt   B, C y      q by channels, k and v with one head for all

The gate of the output does not travel; it is projected while the other tensors travel. Parameters
are cut by heads: on each rank, their gradients are zero for the heads of other ranks, see
Note [Gradients of parts] in `latent`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..exchange.geometry import Geometry
from .mixer import Documents, Mixer, Projected, Sections
from .runtime.execution import Call
from .runtime.parts import cut_heads, join_heads
from .runtime.walk import Walk


def mix_by_heads(
    call: Call,
    mixer: Mixer,
    projected: Projected,
    documents: Documents | None,
    meanwhile: Callable[[], None],
) -> Tensor:
    """Exchange q, k and v, mix each head group, and exchange o back, in the order of the schedule.

    Args:
        call: The call.
        mixer: The mixer.
        projected: Returns all heads of "q", "k" or "v".
        documents: The documents of the global sequence; None if each row is one document.
        meanwhile: Called while the first exchanges are in flight.

    Returns:
        o [b, s/P, h, ..].
    """
    pieces = {}

    def project(kind: str, group: int) -> Tensor:
        # The first group projects all heads of the kind; later groups take their parts.
        if (kind, group) not in pieces:
            pieces.update(cut_heads(call, kind, projected(kind)))
        return pieces.pop((kind, group))

    learned = mixer.parameters()

    def attend(group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = [_of_heads(call.geometry, group, *sections) for sections in learned]

        def mix(*xs: Tensor) -> Tensor:
            return mixer.mix(*xs, *own)

        return in_documents(documents, mix, q, k, v)  # guard: an empty state

    walk = Walk(call, attend, project)
    walk.run("inputs")
    meanwhile()
    walk.run("attention", "output")
    return join_heads(call, walk.values)


def in_documents(documents: Documents | None, mix: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """Apply ``mix`` to each document of tensors [b, s, ..]; one document per row if None."""
    return mix(*xs) if documents is None else documents.attend(mix, *xs)


def _of_heads(
    geometry: Geometry, group: int, parameter: Tensor | None, sections: Sections
) -> Tensor | None:
    """Return the rows of a parameter for the heads of a group on this rank.

    Where `with_kv` repeats a KV head for several query heads, the KV head's rows are repeated too.
    """
    if parameter is None:
        return None
    rows, first = [], 0
    for kind, size in sections:
        if kind == "q":
            count, heads = geometry.heads, [geometry.query_range(geometry.sp_rank, group)]
        else:
            count, (start, stop) = geometry.kv_heads, geometry.kv_range(geometry.sp_rank, group)
            index = geometry.kv_expansion(group)
            heads = [(start, stop)]
            if index is not None:
                heads = [(start + offset, start + offset + 1) for offset in index]
        rows += [parameter[first + start * size : first + stop * size] for start, stop in heads]
        first += count * size  # guard: rows of their own
    return torch.cat(rows)
