"""Runs attention of q, k and v that the caller has projected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..exchange.geometry import Geometry
from ..exchange.layout import Range
from ..rotary import check_tables, rotate
from .arguments import LocalAttention
from .call_geometry import Tokens, geometry_of
from .layer import LayerRuntime
from .runtime.execution import Call
from .runtime.parts import cut_heads, join_heads
from .runtime.walk import Arrive, Walk

# Computes o from q, k and v without overlap.
Baseline = Callable[[Tensor, Tensor, Tensor], Tensor]


class ProjectedAttention:
    """Runs Ulysses attention of q, k and v that the caller has projected.

    The exchanges overlap with one another and, by head groups, with attention. They don't overlap
    with the backward of the caller's projections: autograd first finishes the exchanges of dq, dk
    and dv, since forward recorded the exchanges after the projections. The object holds no module
    and no parameter.

    Args:
        layer: The runtime of the layer.
    """

    def __init__(self, layer: LayerRuntime):
        self.layer = layer

    def of_module(
        self,
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        batch_dim_idx: Any,
        rotary_pos_emb: tuple[Tensor, Tensor] | None,
        local: LocalAttention,
        sequence_lengths: list[int] | None,
        baseline: Baseline | None = None,
    ) -> Tensor:
        """Attend for a ``DistributedAttention``; only this method reads DeepSpeed's indices.

        Collective.

        Args:
            module: The ``DistributedAttention``, DeepSpeed's or ours.
            qkv: q, k and v, [s/P, b, h, d] or [b, s/P, h, d] each.
            batch_dim_idx: 0 or 1.
            rotary_pos_emb: (cos, sin), each [s, 1, 1, d_rot]; None without RoPE.
            local: The local attention.
            sequence_lengths: Local sequence length of every rank; None if all are the same.
            baseline: See `__call__`.

        Returns:
            The result of `__call__`.

        Raises:
            ValueError: for another ``batch_dim_idx``, tables of a wrong shape, or tensors that
                don't fit. In the layer's first call, all ranks raise.
        """
        arrive = None
        try:
            if isinstance(batch_dim_idx, (bool, Tensor)) or batch_dim_idx not in (0, 1):
                got = repr(batch_dim_idx)
                if isinstance(batch_dim_idx, Tensor):
                    got = f"a tensor of shape {list(batch_dim_idx.shape)}"
                raise ValueError(
                    f"batch_dim_idx must be 0 (batch first) or 1 (sequence first), got {got}"
                )
            if rotary_pos_emb is not None:
                check_tables(rotary_pos_emb, qkv[0].shape[-1], partial=True)
                arrive = partial(_rotated, rotary_pos_emb, batch_dim_idx == 0)
        except ValueError as error:
            self.layer.refuse(error)
        tokens, kv_heads = Tokens(batch_dim_idx == 0, sequence_lengths), module.num_kv_heads
        return self(
            local, *qkv, tokens=tokens, num_kv_heads=kv_heads, arrive=arrive, baseline=baseline
        )

    @torch._disable_dynamo
    def __call__(
        self,
        local: LocalAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        tokens: Tokens,
        num_kv_heads: int | None = None,
        one_head_dim: bool = True,
        arrive: Arrive | None = None,
        baseline: Baseline | None = None,
    ) -> Tensor:
        """Attend over the global sequence.

        Collective.

        Args:
            local: The local attention, over the global sequence with this rank's heads; called once
                per head group. Its o may be 3-D, with heads and head dim flattened.
            query: [b, s/P, h, d] if ``tokens.batch_first``, else [s/P, b, h, d].
            key: As ``query``, with h_kv heads.
            value: As ``key``; its head dim may differ.
            tokens: The layout of the tokens.
            num_kv_heads: The h_kv that ``key`` must have; None for no check.
            one_head_dim: Whether ``query`` and ``key`` must have one head dim.
            arrive: Transforms q, k or v after its exchange (RoPE); None for no change.
            baseline: Computes o from q, k and v without overlap; the policy may choose to run the
                baseline. None for no baseline.

        Returns:
            o in the layout of ``query``, with the head dim of the local attention's output; 3-D if
            the local attention returns 3-D.

        Raises:
            ValueError: for tensors that don't fit. In the layer's first call, all ranks raise.
        """
        inputs = query, key, value

        def geometry() -> Geometry:
            _check(query, key, value, num_kv_heads=num_kv_heads, one_head_dim=one_head_dim)
            heads, attend = (query.shape[2], key.shape[2]), local.attention
            return geometry_of(self.layer, query, heads, tokens, attend=attend, extra=local.extra)

        body = partial(self._overlapped, local, arrive)
        return self.layer.run(geometry, partial(_types, inputs, local), inputs, body, baseline)

    def _overlapped(
        self, local: LocalAttention, arrive: Arrive | None, call: Call, *inputs: Tensor
    ) -> Tensor:
        """Run the forward in the order of the schedule; autograd runs the mirrored backward."""
        self.layer.warn_if_window_is_ignored()
        walk = Walk(call, local.bind(call.geometry), arrive=arrive)
        for kind, x in zip("qkv", inputs):
            walk.values |= cut_heads(call, kind, x)
        walk.run()
        o = join_heads(call, walk.values)
        # Exchanges need o 4-D; the caller gets o in the form that the local attention returns.
        return o.flatten(2) if call.is_flat else o


def _rotated(
    tables: Sequence[Tensor], batch_first: bool, kind: str, x: Tensor, queries: Sequence[Range]
) -> Tensor:
    """Rotate q or k on arrival; return v unchanged.

    q holds the ranges ``queries`` of the sequence, or the whole sequence if ``queries`` is empty.
    """
    if kind == "v":
        return x
    if kind == "q" and queries:  # guard: rotated by its own positions
        # Take the rows of the tables that belong to these queries, one range after another.
        tables = [torch.cat([table[start:stop] for start, stop in queries]) for table in tables]
    # The tables have the sequence first, as in DeepSpeed's class.
    if batch_first:
        tables = [table.transpose(0, 1) for table in tables]
    return rotate(x, *tables)


def _types(inputs: Sequence[Tensor], local: LocalAttention) -> tuple:
    """Return dtype and head dims of ``inputs``, and whether q, k, v and o need a gradient."""
    learned = list(inputs) + local.arguments()
    grads = [torch.is_grad_enabled() and x.requires_grad for x in learned]
    head_dims = [x.shape[3] for x in inputs]
    return str(inputs[0].dtype), head_dims, "gradients of q, k, v, o", grads[:3], any(grads)


def _check(
    query: Tensor, key: Tensor, value: Tensor, num_kv_heads: int | None, one_head_dim: bool
) -> None:
    """Raise ValueError unless q, k and v have matching shapes and one dtype.

    The arguments are those of `ProjectedAttention.__call__`.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(
            "query, key and value must be 4-D, [s/P, b, h, d] or [b, s/P, h, d], got "
            f"{_shapes(query, key, value)}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; give all three one "
            "dtype"
        )
    if (
        query.shape[:2] != key.shape[:2]
        or key.shape[:3] != value.shape[:3]
        or one_head_dim
        and query.shape[3] != key.shape[3]
    ):
        raise ValueError(
            f"query, key and value don't belong together: {_shapes(query, key, value)}; give them "
            "one batch and sequence, query and key one head dim, key and value one number of heads"
        )
    kv_heads = key.shape[2]
    if num_kv_heads not in (None, kv_heads):
        raise ValueError(
            f"num_kv_heads is {num_kv_heads}, but key has {kv_heads} heads before the exchange "
            f"({_shapes(query, key, value)}); pass num_kv_heads={kv_heads}, or leave it out"
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Describe the shapes of q, k and v for an error."""
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
