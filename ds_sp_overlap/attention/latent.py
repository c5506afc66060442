"""Latent attention: k and v of all heads are made of one latent a token, and of one rotated key
that all heads share.

Where latent and key are fewer numbers than the heads that a rank would receive (`latents_pay`),
they travel in the heads' place, as one KV head that every rank needs:

    travels as    q    k         v              o
    what          q    latent    rotated key    o

They travel once, with the first head group. On arrival each group expands the latent over the whole
sequence with the rows of the projection that are its heads' on this rank. So the gradient of the
projection is zero on a rank for the heads of others, and the sum over the sp group, which is made
of every gradient, is the whole one. That of the latent is summed over the ranks by its exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..exchange.geometry import Geometry
from .drop_in import ProjectedAttention
from .heads import bind_arguments
from .layer import LayerRuntime
from .runtime.linear import call_through, can_split
from .runtime.slices import cut


def latents_pay(sp_size: int, heads: int, latent: int, rotated: int, per_head: int) -> bool:
    """Whether a rank receives fewer numbers a token as a latent and a rotated key than as k and v
    of its heads.

    per_head   numbers of k and v of a head
    """
    return 1 < sp_size <= heads and sp_size * (latent + rotated) < heads * per_head


def can_expand_rows(projection: nn.Module) -> bool:
    """Whether some rows of the projection of a latent may be computed, and nobody sees."""
    return can_split(projection) and projection.bias is None


class LatentAttention:
    """Ulysses attention of q, a latent and a rotated key; holds no module and no parameter.

    projection   gives the linear layer from the latent to k and v of all heads, which
                 `can_expand_rows` affirms
    nope_dim     of k of a head, what is made of the latent; d - d_rot
    """

    def __init__(self, layer: LayerRuntime, projection: Callable[[], nn.Module], nope_dim: int):
        self.layer, self.projection, self.nope_dim = layer, projection, nope_dim
        self._of_heads = ProjectedAttention(layer)

    @torch.compiler.disable
    def __call__(
        self,
        local_attention: Callable[..., Tensor],
        query: Tensor,
        latent: Tensor,
        rotated: Tensor,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        *,
        batch_first: bool,
        sequence_lengths: list[int] | None,
        baseline: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    ) -> Tensor:
        """Attend over the global sequence.

        query     [s/P, b, h, d], or [b, s/P, h, d] if ``batch_first``
        latent    the same with one head, and the dim of the projection's input
        rotated   the same with one head, d_rot
        returns   as ``query`` with the head dim of v

        k and v of all heads in place of latent and rotated key are attended to as
        `ProjectedAttention` does, whose arguments the others are.
        """
        if latent.shape[2] == query.shape[2]:
            return self._of_heads(
                local_attention, query, latent, rotated, args, kwargs,
                batch_first=batch_first, sequence_lengths=sequence_lengths, baseline=baseline,
            )  # fmt: skip
        projection: Any = self.projection()

        def attend(query: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
            inputs, weight = (query, latent, rotated), projection.weight
            run, call = self.layer.begin(
                lambda: self._describe(
                    *inputs,
                    weight,
                    batch_first,
                    sequence_lengths,
                    (*args, *(kwargs or {}).values()),
                ),
                inputs,
                None,
                False,
            )
            assert call is not None  # nothing else attends to latents
            per_head = weight.shape[0] // query.shape[2]
            own = [call.geometry.query_range(call.geometry.sp_rank, group) for group in call.groups]
            rows = cut(
                weight, 0, [((start * per_head, stop * per_head),) for start, stop in own]
            )  # guard: rows of its heads
            local = bind_arguments(local_attention, call.geometry, args, kwargs or {})

            def of_group(group: int, q: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
                return local(group, q, *self._expanded(latent, rotated, rows[group], per_head))

            q, k, v = run.inputs
            return run.end(self._of_heads.overlapped(call, q, k, v, of_group))

        return call_through(
            [projection], attend, query, latent, rotated
        )  # guard: its weight is whole

    def _expanded(
        self, latent: Tensor, rotated: Tensor, rows: Tensor, per_head: int
    ) -> tuple[Tensor, Tensor]:
        """k and v [.., .., h_g/P, ..] of the whole sequence."""
        kv = F.linear(latent.squeeze(2), rows).unflatten(-1, (-1, per_head))
        k, v = kv.split([self.nope_dim, per_head - self.nope_dim], -1)
        return torch.cat([k, rotated.expand(*k.shape[:-1], -1)], -1), v

    def _describe(
        self,
        query: Tensor,
        latent: Tensor,
        rotated: Tensor,
        weight: Tensor,
        batch_first: bool,
        lengths: list[int] | None,
        extra: tuple,
    ) -> tuple[Geometry, Callable[[], tuple]]:
        shapes = f"query {list(query.shape)}, latent {list(latent.shape)}, rotated key {list(rotated.shape)}"
        if (
            not query.shape[:2] == latent.shape[:2] == rotated.shape[:2]
            or not latent.shape[2] == rotated.shape[2] == 1
        ):
            raise ValueError(
                f"query, latent and rotated key don't belong together: {shapes}; give the latter one head each"
            )
        if not query.dtype == latent.dtype == rotated.dtype:
            raise ValueError(
                f"query is {query.dtype}, latent {latent.dtype}, rotated key {rotated.dtype}; give all one dtype"
            )
        geometry = self.layer.geometry(query, query.shape[2], 1, batch_first, lengths, extra)

        def types() -> tuple:
            grads = [
                torch.is_grad_enabled() and x.requires_grad
                for x in (query, latent, rotated, weight)
            ]
            dims = [x.shape[3] for x in (query, latent, rotated)]
            return (
                str(query.dtype),
                *dims,
                "gradients of q, latent, rotated key and projection",
                grads,
            )

        return geometry, types
