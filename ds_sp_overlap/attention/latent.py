"""Exchanges the latent of latent attention instead of the heads that are expanded from it.

In latent attention, k and v of all heads are made from one latent per token, and from one rotated
key that all heads share. If latent and rotated key have fewer elements per token than the heads for
one rank (`latents_pay`), they travel in place of the heads, as one KV head that every rank needs:

    travels as    q    k         v              o
    tensor        q    latent    rotated key    o

Latent and rotated key travel once, with the first head group. Each group expands the latent of the
global sequence to the group's heads on this rank, with the projection's rows for these heads.

Note [Gradients of parts]
~~~~~~~~~~~~~~~~~~~~~~~~~
A rank expands the latent for its own heads only. So on this rank, the gradient of the projection is
zero in the rows of all other heads. The gradients of all parameters are summed over the sp group,
and this sum is the whole gradient of the projection. The exchange of the latent's gradient sums it
over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..exchange.geometry import Geometry
from .arguments import bind_arguments
from .call_geometry import Tokens, geometry_of
from .layer import LayerRuntime
from .projected import ProjectedAttention, types_of
from .runtime.execution import Attend, Call
from .runtime.linear import call_through, can_split
from .runtime.parts import cut
from .runtime.slices import Ranges


def latents_pay(sp_size: int, heads: int, latent: int, rotated: int, per_head: int) -> bool:
    """Return whether a rank receives fewer elements per token if the latent travels.

    Args:
        sp_size: ``P``.
        heads: Query heads, ``h``.
        latent: Dim of the latent.
        rotated: Dim of the rotated key.
        per_head: Elements per token of k and v of one head, d + d_v.
    """
    return 1 < sp_size <= heads and sp_size * (latent + rotated) < heads * per_head


def can_expand_rows(projection: nn.Module) -> bool:
    """Return whether the projection of a latent can be computed for some rows of its weight alone.

    True for a plain linear layer without bias, see `linear.can_split`.
    """
    return can_split(projection) and projection.bias is None


class LatentAttention(ProjectedAttention):
    """Runs Ulysses attention of q, a latent and a rotated key; holds no module and no parameter.

    Args:
        layer: The runtime of the layer.
        projection: Returns the linear layer that expands the latent to k and v of all heads;
            `can_expand_rows` must be true for the layer.
        nope_dim: d - d_rot, the size of the part of k that is expanded from the latent.
    """

    def __init__(self, layer: LayerRuntime, projection: Callable[[], nn.Module], nope_dim: int):
        super().__init__(layer)
        self.projection, self.nope_dim = projection, nope_dim

    @torch._disable_dynamo
    def __call__(
        self,
        local_attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        **how: Any,
    ) -> Tensor:
        """Attend over the global sequence.

        Collective. Instead of latent and rotated key, the caller may pass k and v of all heads, for
        instance where an adapter changes the expansion; k and v are then exchanged as they are.

        Args:
            local_attention: q, k, v, *args, **kwargs -> o; called once per head group.
            query: [b, s/P, h, d] if ``tokens.batch_first``, else [s/P, b, h, d].
            key: The latent: as ``query``, with one head and the dim of the projection's input.
            value: The rotated key: as ``query``, with one head of d_rot.
            args: More arguments for ``local_attention``.
            kwargs: More keyword arguments for ``local_attention``.
            **how: ``tokens``; and for k and v of all heads, the other keyword arguments of
                `ProjectedAttention`.

        Returns:
            o in the layout of ``query``, with the head dim of v.

        Raises:
            ValueError: for tensors that don't fit. In the layer's first call, all ranks raise.
        """
        if key.shape[2] == query.shape[2]:
            whole = ProjectedAttention.__call__
            return whole(self, local_attention, query, key, value, args, kwargs, **how)
        body = partial(self._of_latents, local_attention, args, kwargs or {}, how["tokens"])
        tensors = query, key, value
        # Run inside of the projection's own call, so that ZeRO-3 has gathered the weight.
        return call_through([self.projection()], body, *tensors)  # guard: its weight is whole

    def _of_latents(
        self,
        local_attention: Callable[..., Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        tokens: Tokens,
        *tensors: Tensor,
    ) -> Tensor:
        """Run attention inside of the call of the projection, after the projection's pre-hooks."""
        weight: Any = self.projection().weight
        geometry = partial(self._one_head, tensors, tokens, (*args, *kwargs.values()))
        learned = "gradients of q, latent, rotated key and projection"
        types = partial(types_of, tensors, (*tensors, weight), learned)
        # The weight has this many rows for each head: d - d_rot of k, then d_v of v.
        per_head = weight.shape[0] // tensors[0].shape[2]

        def bind(call: Call) -> Attend:
            own = [call.geometry.query_range(call.geometry.sp_rank, group) for group in call.groups]
            parts: list[Ranges] = [((start * per_head, stop * per_head),) for start, stop in own]
            rows = cut(weight, 0, parts)  # guard: rows of its heads
            attend = bind_arguments(local_attention, args, kwargs, call)
            return partial(self._expand, attend, rows, per_head)

        return self.layer.run(geometry, types, tensors, partial(self.overlapped, bind, None))

    def _one_head(self, tensors: Sequence[Tensor], tokens: Tokens, extra: tuple) -> Geometry:
        """Return the geometry of a call; the latent counts as one KV head."""
        _check(*tensors)
        query, why = tensors[0], "latent attention needs all queries at once"
        return geometry_of(self.layer, query, (query.shape[2], 1), tokens, extra, attend=why)

    def _expand(
        self,
        attend: Attend,
        rows: Sequence[Tensor],
        per_head: int,
        group: int,
        q: Tensor,
        latent: Tensor,
        rotated: Tensor,
    ) -> Tensor:
        """Expand the latent to k and v of the group's heads on this rank, and attend.

        See Note [Gradients of parts].
        """
        kv = F.linear(latent.squeeze(2), rows[group]).unflatten(-1, (-1, per_head))
        k, v = kv.split([self.nope_dim, per_head - self.nope_dim], -1)
        k = torch.cat([k, rotated.expand(*k.shape[:-1], -1)], -1)
        return attend(group, q, k, v)


def _check(query: Tensor, latent: Tensor, rotated: Tensor) -> None:
    """Raise ValueError unless q, latent and rotated key have matching shapes and one dtype."""
    one_head = latent.shape[2] == rotated.shape[2] == 1
    if not (query.shape[:2] == latent.shape[:2] == rotated.shape[:2] and one_head):
        raise ValueError(
            f"query, latent and rotated key don't belong together: query {list(query.shape)}, "
            f"latent {list(latent.shape)}, rotated key {list(rotated.shape)}; give the latter "
            "one head each"
        )
    if not query.dtype == latent.dtype == rotated.dtype:
        raise ValueError(
            f"query is {query.dtype}, latent {latent.dtype}, rotated key {rotated.dtype}; "
            "give all one dtype"
        )
