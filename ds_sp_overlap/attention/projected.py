"""Attends to q, k and v that the caller has projected."""

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
    """Ulysses attention of q, k and v that the caller has projected.

    The exchanges overlap with one another and with attention (head groups). dq, dk and dv have all
    arrived when the backward of the caller's projections begins: autograd runs first what was made
    last, and the exchanges were made behind the projections. Holds no module and no parameter.

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
        """Translate the arguments of DeepSpeed's class; its indices are used nowhere else.

        Args:
            query: [s/P, b, h, d] or [b, s/P, h, d].
            batch_dim_idx: 0 or 1.
            rotary_pos_emb: (cos, sin), each [s, 1, 1, d_rot]; None without RoPE.
            sequence_lengths: Local sequence length of every rank; None if all are the same.

        Returns:
            ``tokens`` and ``arrive`` of a call.

        Raises:
            ValueError: for arguments that can't work; on all ranks alike in the layer's first call.
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
            value: As ``key``; its head dim may be another one.
            args: More arguments for ``local_attention``.
            kwargs: More keyword arguments for ``local_attention``.
            tokens: How the tokens lie.
            num_kv_heads: h_kv, to be compared with that of ``key``; None for no comparison.
            arrive: Transforms q, k or v after its exchange (RoPE).
            baseline: Computes the same of q, k and v without overlap, as a candidate of the policy;
                None for no such candidate.

        Returns:
            o in the layout of ``query``, with the head dim of the local attention's output; 3-D if
            ``local_attention`` returns 3-D.

        Raises:
            ValueError: for tensors that don't fit; on all ranks alike in the layer's first call.
        """
        kwargs = kwargs or {}

        def geometry() -> Geometry:
            _check(query, key, value, num_kv_heads)
            heads, extra = (query.shape[2], key.shape[2]), (*args, *kwargs.values())
            return geometry_of(self.layer, query, heads, tokens, extra, attend=local_attention)

        inputs = query, key, value
        types = partial(types_of, inputs, inputs, "gradients of q, k, v")
        run, call = self.layer.begin(geometry, types, inputs, has_baseline=baseline is not None)
        # The policy has chosen the baseline.
        if call is None:
            assert baseline is not None
            return run.end(baseline(*run.inputs))
        local = bind_arguments(local_attention, call, args, kwargs)
        return run.end(self.overlapped(call, run.inputs, local, arrive))

    def overlapped(
        self, call: Call, inputs: Sequence[Tensor], local: Attend, arrive: Arrive | None = None
    ) -> Tensor:
        """Walk the forward of the schedule of ``call``; autograd derives its backward.

        Args:
            call: The call.
            inputs: What travels as q, k and v, each with its own number of heads and head dim.
            local: A head group and its q, k, v -> o, with o 4-D, or 3-D with its heads flattened.
            arrive: As in a call of the object.

        Returns:
            As a call of the object.
        """
        self.layer.warn_if_window_is_ignored()
        walk = Walk(call, local, arrive=arrive)
        for kind, x in zip("qkv", inputs):
            walk.values |= cut_heads(call, kind, x)
        walk.run("inputs", "attention", "output")
        o = join_heads(call, walk.values)
        # Exchanges want o 4-D; the caller gets it as his attention makes it.
        return o.flatten(2) if call.is_flat else o


def _rotated(
    cos: Tensor, sin: Tensor, batch_first: bool, kind: str, x: Tensor, queries: tuple[Range, ...]
) -> Tensor:
    """Rotate q or k on arrival; q holds the global sequence, or these ranges of it."""
    if kind == "v":
        return x
    if kind == "q" and queries:  # guard: rotated by its own positions
        # The rows of the tables that belong to these queries, one range after another.
        cos = torch.cat([cos[start:stop] for start, stop in queries])
        sin = torch.cat([sin[start:stop] for start, stop in queries])
    # The tables have the sequence first, as DeepSpeed's class wants them.
    if batch_first:
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
    return rotate(x, cos, sin)


def types_of(inputs: Sequence[Tensor], learned: Sequence[Tensor], words: str) -> tuple:
    """Return dtype and head dims of ``inputs``, and which of ``learned`` need a gradient.

    ``words`` describe the latter to a user whose ranks differ.
    """
    grads = [torch.is_grad_enabled() and x.requires_grad for x in learned]
    return str(inputs[0].dtype), *[x.shape[3] for x in inputs], words, grads


def _check(query: Tensor, key: Tensor, value: Tensor, num_kv_heads: int | None) -> None:
    """Check that q, k and v belong together; raise ValueError if not.

    The arguments are those of a call.
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
