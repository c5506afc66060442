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
and this sum is the whole gradient of the projection. The latent's gradient is summed over the ranks
by its exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import LocalAttention, PerHead
from .call_geometry import Tokens
from .layer import LayerRuntime
from .projected import ProjectedAttention
from .runtime.linear import call_through, can_split


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
            `can_expand_rows` must be true for this linear layer.
        nope_dim: d - d_rot, the size of the part of k that is expanded from the latent.
    """

    def __init__(self, layer: LayerRuntime, projection: Callable[[], nn.Module], nope_dim: int):
        super().__init__(layer)
        self.projection, self.nope_dim = projection, nope_dim

    @torch._disable_dynamo
    def __call__(
        self, local: LocalAttention, query: Tensor, key: Tensor, value: Tensor, **how: Any
    ) -> Tensor:
        """Attend over the global sequence.

        Collective. Instead of latent and rotated key, the caller may pass k and v of all heads, for
        instance if an adapter (LoRA) changes the expansion. Such k and v are exchanged as they are.

        Args:
            local: The local attention; called once per head group.
            query: [b, s/P, h, d] if ``tokens.batch_first``, else [s/P, b, h, d].
            key: The latent: as ``query``, with one head and the dim of the projection's input.
            value: The rotated key: as ``query``, with one head of dim d_rot.
            **how: ``tokens``; and for k and v of all heads, the other keyword arguments of
                `ProjectedAttention`.

        Returns:
            o in the layout of ``query``, with the head dim of v.

        Raises:
            ValueError: for tensors that don't fit. In the layer's first call, all ranks raise.
        """
        tensors = query, key, value
        if key.shape[2] == query.shape[2]:
            return ProjectedAttention.__call__(self, local, *tensors, **how)
        body = partial(self._of_latents, local, how["tokens"])
        # Run inside of the projection's own call, so that ZeRO-3 has gathered the weight.
        return call_through([self.projection()], body, *tensors)  # guard: its weight is whole

    def _of_latents(self, local: LocalAttention, tokens: Tokens, *tensors: Tensor) -> Tensor:
        """Run attention inside of the call of the projection, after the projection's pre-hooks."""
        weight: Any = self.projection().weight
        # The weight has equally many rows for each head: d - d_rot of k, then d_v of v.
        rows = PerHead(weight.unflatten(0, (tensors[0].shape[2], -1)))
        attend = partial(_expand, local.attention, self.nope_dim)
        local = LocalAttention(attend, local.args, {**local.kwargs, "rows": rows})
        return super().__call__(local, *tensors, tokens=tokens, one_head_dim=False)


def _expand(
    attend: Callable[..., Tensor],
    nope_dim: int,
    q: Tensor,
    latent: Tensor,
    rotated: Tensor,
    *args: Any,
    rows: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Expand the latent to k and v of the group's heads on this rank, and attend.

    See Note [Gradients of parts]. ``rows`` are the projection's rows for these heads.
    """
    # Copy the rows: autograd saves them, and a view would keep the weight that ZeRO-3 has gathered.
    kv = F.linear(latent.squeeze(2), rows.flatten(0, 1).clone())
    k, v = kv.unflatten(-1, (q.shape[2], -1)).tensor_split([nope_dim], -1)
    k = torch.cat([k, rotated.expand(k.shape[:-1] + (-1,))], -1)
    return attend(q, k, v, *args, **kwargs)
