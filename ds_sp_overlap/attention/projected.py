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
from .arguments import bind_arguments
from .call_geometry import Tokens, geometry_of
from .layer import LayerRuntime
from .runtime.execution import Attend, Call
from .runtime.parts import cut_heads, join_heads
from .runtime.walk import Arrive, Walk


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

    def translate(
        self,
        query: Tensor,
        batch_dim_idx: Any,
        rotary_pos_emb: tuple[Tensor, Tensor] | None,
        sequence_lengths: list[int] | None,
    ) -> tuple[Tokens, Arrive | None]:
        """Translate the arguments of DeepSpeed's class; only this method reads DeepSpeed's indices.

        Args:
            query: [s/P, b, h, d] or [b, s/P, h, d].
            batch_dim_idx: 0 or 1.
            rotary_pos_emb: (cos, sin), each [s, 1, 1, d_rot]; None without RoPE.
            sequence_lengths: Local sequence length of every rank; None if all are the same.

        Returns:
            The arguments ``tokens`` and ``arrive`` of `__call__`.

        Raises:
            ValueError: for another ``batch_dim_idx``, or tables of a wrong shape. In the layer's
                first call, all ranks raise.
        """
        if isinstance(batch_dim_idx, (bool, Tensor)) or batch_dim_idx not in (0, 1):
            got = repr(batch_dim_idx)
            if isinstance(batch_dim_idx, Tensor):
                got = f"a tensor of shape {list(batch_dim_idx.shape)}"
            self.layer.refuse(
                ValueError(
                    f"batch_dim_idx must be 0 (batch first) or 1 (sequence first), got {got}"
                )
            )
        tokens = Tokens(batch_dim_idx == 0, sequence_lengths)
        if rotary_pos_emb is None:
            return tokens, None
        try:
            check_tables(rotary_pos_emb, query.shape[-1], partial=True)
        except ValueError as error:
            self.layer.refuse(error)
        return tokens, partial(_rotated, *rotary_pos_emb, tokens.batch_first)

    @torch._disable_dynamo
    def __call__(
        self,
        local_attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        *,
        tokens: Tokens,
        num_kv_heads: int | None = None,
        arrive: Arrive | None = None,
        baseline: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attend over the global sequence.

        Collective.

        Args:
            local_attention: q, k, v, *args, **kwargs -> o, over the global sequence with this
                rank's heads; called once per head group.
            query: [b, s/P, h, d] if ``tokens.batch_first``, else [s/P, b, h, d].
            key: As ``query``, with h_kv heads.
            value: As ``key``; its head dim may differ.
            args: More arguments for ``local_attention``.
            kwargs: More keyword arguments for ``local_attention``.
            tokens: The layout of the tokens.
            num_kv_heads: The h_kv that ``key`` must have; None for no check.
            arrive: Transforms q, k or v after its exchange (RoPE); None for no change.
            baseline: Computes o from q, k and v without overlap; the policy may choose to run the
                baseline. None for no baseline.

        Returns:
            o in the layout of ``query``, with the head dim of the local attention's output; 3-D if
            ``local_attention`` returns 3-D.

        Raises:
            ValueError: for tensors that don't fit. In the layer's first call, all ranks raise.
        """
        kwargs = kwargs or {}

        def geometry() -> Geometry:
            _check(query, key, value, num_kv_heads)
            heads, extra = (query.shape[2], key.shape[2]), (*args, *kwargs.values())
            return geometry_of(self.layer, query, heads, tokens, extra, attend=local_attention)

        inputs = query, key, value
        types = partial(types_of, inputs, inputs, "gradients of q, k, v")
        bind = partial(bind_arguments, local_attention, args, kwargs)
        body = partial(self.overlapped, bind, arrive)
        return self.layer.run(geometry, types, inputs, body, baseline)

    def overlapped(
        self, bind: Callable[[Call], Attend], arrive: Arrive | None, call: Call, *inputs: Tensor
    ) -> Tensor:
        """Run the forward in the order of the schedule; autograd runs the mirrored backward.

        Args:
            bind: Takes the call; returns the local attention. Its o may be 3-D, with heads and head
                dim flattened.
            arrive: Transforms q, k or v after its exchange (RoPE); None for no change.
            call: The call.
            *inputs: The tensors that travel as q, k and v, each with its own number of heads and
                head dim.

        Returns:
            o in the layout of the first input; 3-D if the local attention returns 3-D.
        """
        self.layer.warn_if_window_is_ignored()
        walk = Walk(call, bind(call), arrive=arrive)
        for kind, x in zip("qkv", inputs):
            walk.values |= cut_heads(call, kind, x)
        walk.run()
        o = join_heads(call, walk.values)
        # Exchanges need o 4-D; the caller gets o in the form that the local attention returns.
        return o.flatten(2) if call.is_flat else o


def _rotated(
    cos: Tensor, sin: Tensor, batch_first: bool, kind: str, x: Tensor, queries: tuple[Range, ...]
) -> Tensor:
    """Rotate q or k on arrival; return v unchanged.

    q holds the ranges ``queries`` of the sequence, or the whole sequence if ``queries`` is empty.
    """
    if kind == "v":
        return x
    if kind == "q" and queries:  # guard: rotated by its own positions
        # Take the rows of the tables that belong to these queries, one range after another.
        cos = torch.cat([cos[start:stop] for start, stop in queries])
        sin = torch.cat([sin[start:stop] for start, stop in queries])
    # The tables have the sequence first, as in DeepSpeed's class.
    if batch_first:
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
    return rotate(x, cos, sin)


def types_of(inputs: Sequence[Tensor], learned: Sequence[Tensor], words: str) -> tuple:
    """Return dtype and head dims of ``inputs``, and which of ``learned`` need a gradient.

    ``words`` describes ``learned`` in the error that ranks raise if they differ.
    """
    grads = [torch.is_grad_enabled() and x.requires_grad for x in learned]
    return str(inputs[0].dtype), *[x.shape[3] for x in inputs], words, grads


def _check(query: Tensor, key: Tensor, value: Tensor, num_kv_heads: int | None) -> None:
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
        or query.shape[3] != key.shape[3]
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
