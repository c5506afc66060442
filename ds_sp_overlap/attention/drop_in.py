"""Attends to q, k and v that the caller has projected: in place of ``DistributedAttention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry
from ..exchange.layout import Range
from ..exchange.shares import QueryChunks
from ..exchange.sp_group import SPGroup
from ..exchange.transport import Transport
from ..rotary import check_tables, rotate
from .call_geometry import geometry_of
from .heads import Local, bind_arguments
from .layer import LayerRuntime
from .runtime.execution import Attend, Call
from .runtime.recorded import Arrive, Recorded, join_heads
from .runtime.slices import cut


class ProjectedAttention:
    """Ulysses attention of q, k and v that the caller has projected.

    The exchanges overlap with one another and with attention (head groups). The exchanges of dq, dk
    and dv overlap with the backward of the caller's projections. Holds no module and no parameter.

    Args:
        layer: The runtime of the layer.
    """

    def __init__(self, layer: LayerRuntime):
        self.layer = layer

    def translate(
        self, query: Tensor, batch_dim_idx: Any, rotary_pos_emb: tuple[Tensor, Tensor] | None
    ) -> tuple[bool, Arrive | None]:
        """Translate the arguments of DeepSpeed's class; its indices are used nowhere else.

        Args:
            query: [s/P, b, h, d] or [b, s/P, h, d].
            batch_dim_idx: 0 or 1.
            rotary_pos_emb: (cos, sin), each [s, 1, 1, d_rot]; None without RoPE.

        Returns:
            ``batch_first`` and ``arrive`` of a call.

        Raises:
            ValueError: for arguments that can't work.
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
        batch_first = batch_dim_idx == 0
        if rotary_pos_emb is None:
            return batch_first, None
        try:
            check_tables(rotary_pos_emb, query.shape[-1], partial=True)
        except ValueError as error:
            self.layer.refuse(error)
        tables = rotary_pos_emb

        def arrive(kind: str, x: Tensor, queries: tuple[Range, ...]) -> Tensor:
            if kind == "v":
                return x
            cos, sin = tables
            if kind == "q" and queries:  # guard: rotated by its own positions
                cos, sin = (torch.cat([table[a:b] for a, b in queries]) for table in tables)
            if batch_first:
                cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
            return rotate(x, cos, sin)

        return batch_first, arrive

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
        batch_first: bool,
        num_kv_heads: int | None = None,
        arrive: Arrive | None = None,
        sequence_lengths: list[int] | None = None,
        query_chunks: QueryChunks | None = None,
        baseline: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attend over the global sequence.

        Collective.

        Args:
            local_attention: q, k, v, *args, **kwargs -> o, over the global sequence with this
                rank's heads; called once per head group.
            query: [b, s/P, h, d] if ``batch_first``, else [s/P, b, h, d].
            key: As ``query``, with h_kv heads.
            value: As ``key``; its head dim may be another one.
            args: More arguments for ``local_attention``.
            kwargs: More keyword arguments for ``local_attention``.
            batch_first: Whether the batch comes before the sequence.
            num_kv_heads: h_kv, to be compared with that of ``key``; None for no comparison.
            arrive: Transforms q, k or v after its exchange (RoPE).
            sequence_lengths: Local sequence length of every rank; None if all are the same.
            query_chunks: Where ranks share query heads, the tokens that each share attends with;
                None for two chunks each (`Geometry`).
            baseline: Computes the same of q, k and v without overlap, as a candidate of the policy;
                None for no such candidate.

        Returns:
            o in the layout of ``query``, with the head dim of the local attention's output; 3-D if
            ``local_attention`` returns 3-D.

        Raises:
            ValueError: for tensors that don't fit; on all ranks alike in the layer's first call.
        """
        kwargs = kwargs or {}
        extra = (*args, *kwargs.values())

        def local_of_call() -> Local:
            q_dim, v_dim = query.shape[3], value.shape[3]
            return Local(local_attention, args, kwargs, q_dim, v_dim, query.dtype)

        run, call = self.layer.begin(
            lambda: self._describe(
                query,
                key,
                value,
                batch_first,
                num_kv_heads,
                lengths=sequence_lengths,
                extra=extra,
                attend=local_attention,
                query_chunks=query_chunks,
            ),
            (query, key, value),
            local_of_call,
            has_baseline=baseline is not None,
        )
        q, k, v = run.inputs
        if call is None:
            assert baseline is not None
            return run.end(baseline(q, k, v))
        local = bind_arguments(local_attention, call, args, kwargs)
        return run.end(self.overlapped(call, q, k, v, local, arrive))

    def overlapped(
        self,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        local: Attend,
        arrive: Arrive | None = None,
    ) -> Tensor:
        """Walk the schedule of ``call``.

        Args:
            call: The call.
            query: As in a call of the object.
            key: As ``query``, with a number of heads and a head dim of its own.
            value: As ``key``, with a head dim of its own.
            local: A head group and its q, k, v -> o.
            arrive: As in a call of the object.

        Returns:
            As a call of the object.
        """
        layer, geometry = self.layer, call.geometry
        layer.warn_if_window_is_ignored()
        is_flat: list[bool] = []
        pieces: dict[tuple[str, int], Tensor] = {}
        for kind, x in (("q", query), ("k", key), ("v", value)):
            parts = [part for part in call.schedule.parts if part[0] == kind]
            pieces.update(zip(parts, cut(x, 2, [geometry.heads_of(*part) for part in parts])))

        def attend(group: int, *heads: Any) -> Any:
            o = local(group, *heads)
            is_flat.append(isinstance(o, Tensor) and o.dim() == 3)
            return o

        runner = Recorded(call, attend, lambda *part: pieces.pop(part), arrive)
        runner.walk(call.schedule.forward)
        o = join_heads(call, runner.outputs)
        return o.flatten(2) if is_flat[0] else o

    def _describe(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_first: bool,
        num_kv_heads: int | None,
        lengths: list[int] | None,
        extra: tuple,
        attend: Callable[..., Any] | str,
        query_chunks: QueryChunks | None,
    ) -> tuple[Geometry, Callable[[], tuple]]:
        def shapes() -> str:
            return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"

        if not query.dim() == key.dim() == value.dim() == 4:
            raise ValueError(
                "query, key and value must be 4-D, [s/P, b, h, d] or [b, s/P, h, d], "
                f"got {shapes()}"
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
                f"query, key and value don't belong together: {shapes()}; give them one batch and "
                "sequence, query and key one head dim, key and value one number of heads"
            )
        heads, kv_heads = query.shape[2], key.shape[2]
        if num_kv_heads not in (None, kv_heads):
            raise ValueError(
                f"num_kv_heads is {num_kv_heads}, but key has {kv_heads} heads before the exchange "
                f"({shapes()}); pass num_kv_heads={kv_heads}, or leave it out"
            )
        geometry = geometry_of(
            self.layer,
            query,
            heads,
            kv_heads,
            batch_first,
            lengths=lengths,
            extra=extra,
            attend=attend,
            query_chunks=query_chunks,
        )

        def types() -> tuple:
            grads = [torch.is_grad_enabled() and x.requires_grad for x in (query, key, value)]
            return str(query.dtype), query.shape[3], value.shape[3], "gradients of q, k, v", grads

        return geometry, types


class DistributedAttention(nn.Module):
    """Drop-in for ``deepspeed.sequence.layer.DistributedAttention``, with overlap.

    Takes any numbers of heads. Where there are fewer query heads than ranks, ranks share them
    (Note [Shares] in `shares`), which the local attention must allow. A layer that was made
    without ``config`` follows the ``sp_overlap`` section, once `enable` has seen it.

    Args:
        local_attention: Attention over the global sequence with this rank's heads. Where ranks
            share query heads, it is called once for each range of this rank's queries, with
            ``queries=(a, b)``: q then holds the tokens a to b of the sequence, k and v all tokens,
            and token t of q attends to no key behind t if attention is causal.
        sequence_process_group: The sp group; None for all ranks, as to DeepSpeed's class.
        scatter_idx: DeepSpeed's; 2, the dimension of the heads.
        gather_idx: DeepSpeed's; 0 or 1, the dimension of the sequence.
        sp_stream: Carries the transfers; None for our own stream, which all layers share.
        num_kv_heads: KV heads before the exchange; None to read them from the key.
        config: An ``sp_overlap`` section.
        transport: The mover of bytes; None for that of ``config``.
        name: Name of the layer, for errors and logs.
        heads_alike: Whether the local attention is known to treat all heads alike on all ranks;
            otherwise the first call probes it. With head groups a rank attends with other heads
            than without; the slices of a `PerHead` follow the heads.

    Raises:
        ValueError: for arguments that can't work.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        config: SpOverlapConfig | dict | None = None,
        transport: Transport | None = None,
        name: str = "attention",
        heads_alike: bool = False,
    ):
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"{name}: scatter_idx must be 2 (heads) and gather_idx 0 or 1 (sequence), got "
                f"{scatter_idx} and {gather_idx}; the exchange back to local sequences is part of "
                "this module"
            )
        self.local_attn, self.num_kv_heads = local_attention, num_kv_heads
        self.scatter_idx, self.gather_idx, self.sp_stream = scatter_idx, gather_idx, sp_stream
        self.heads_alike = heads_alike
        # Whether the layer runs as it was made, whatever the section of the model says.
        self.has_own_config = config is not None or transport is not None
        parsed = SpOverlapConfig.parse(config or {})
        group = sequence_process_group or dist.group.WORLD
        sp_group = SPGroup(group, transport or parsed.transport, sp_stream, **parsed.of_sp_group)
        layer = LayerRuntime(sp_group, parsed, name, heads_alike=heads_alike)
        self._attend = ProjectedAttention(layer)

    @property
    def spg(self) -> Any:
        """The sp group."""
        return self._attend.layer.sp_group.group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        sequence_lengths: list[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the global sequence.

        Collective.

        Args:
            query: [b, s/P, h, d] for ``batch_dim_idx`` 0, [s/P, b, h, d] for 1.
            key: As ``query``, with h_kv heads.
            value: As ``key``.
            batch_dim_idx: The dimension of the batch.
            rotary_pos_emb: (cos, sin), each [s, 1, 1, d_rot], d_rot <= d; applied to q and k after
                their exchange. None without RoPE.
            *args: More arguments for the local attention, which is called once per head group. A
                tensor has the same shape on every rank, except for a dimension of heads.
            sequence_lengths: Local sequence length of every rank; None if all are the same.
            **kwargs: More keyword arguments for the local attention.

        Returns:
            As ``query``; 3-D if the local attention returns 3-D.

        Raises:
            ValueError: for arguments that can't work; on all ranks alike in the first call.
        """
        batch_first, arrive = self._attend.translate(query, batch_dim_idx, rotary_pos_emb)
        return self._attend(
            self.local_attn,
            query,
            key,
            value,
            args=args,
            kwargs=kwargs,
            batch_first=batch_first,
            num_kv_heads=self.num_kv_heads,
            arrive=arrive,
            sequence_lengths=sequence_lengths,
        )
