"""Attention of q, k, v that were projected already: the drop-in for DeepSpeed's
``DistributedAttention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry
from ..exchange.sp_group import SPGroup
from ..exchange.transport import Transport
from ..rotary import check_tables, rotate
from .heads import Local, calling
from .layer import LayerRuntime, with_head_dim
from .runtime.execution import Attend, Call
from .runtime.recorded import Recorded, join_heads
from .runtime.slices import cut


class ProjectedAttention:
    """Ulysses attention of q, k, v that were projected already; holds no module and no parameter.

    What is overlapped: the exchanges with one another and with attention (head groups), and the
    exchanges of dq, dk and dv with the backward of the caller's projections.
    """

    def __init__(self, layer: LayerRuntime):
        self.layer = layer

    def translated(
        self, query: Tensor, batch_dim_idx: Any, rotary_pos_emb: tuple[Tensor, Tensor] | None
    ) -> tuple[bool, Callable[[str, Tensor], Tensor] | None]:
        """``batch_first`` and ``arrive`` for arguments as DeepSpeed's class takes them, whose
        indices end here.
        """
        if isinstance(batch_dim_idx, (bool, Tensor)) or batch_dim_idx not in (0, 1):
            got = (
                f"a tensor of shape {list(batch_dim_idx.shape)}"
                if isinstance(batch_dim_idx, Tensor)
                else repr(batch_dim_idx)
            )
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

        def arrive(kind: str, x: Tensor) -> Tensor:
            if kind == "v":
                return x
            cos, sin = (table.transpose(0, 1) if batch_first else table for table in tables)
            return rotate(x, cos, sin)

        return batch_first, arrive

    @torch.compiler.disable
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
        arrive: Callable[[str, Tensor], Tensor] | None = None,
        sequence_lengths: list[int] | None = None,
        baseline: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attend over the global sequence.

        query        [s/P, b, h, d], or [b, s/P, h, d] if ``batch_first``
        key, value   the same with h_kv heads
        args, kwargs more arguments for ``local_attention``, which is called once per head group
        arrive       what to do with q, k, v after their exchange (RoPE)
        baseline     gives the same without overlap, for the policy; None where nothing does
        returns      as ``query`` with the head dim of the attention's output; 3-D if
                     ``local_attention`` returns 3-D
        """
        kwargs = kwargs or {}
        extra = (*args, *kwargs.values())

        run, call = self.layer.begin(
            lambda: self._describe(
                query, key, value, batch_first, num_kv_heads, sequence_lengths, extra
            ),
            (query, key, value),
            lambda: Local(
                local_attention, args, kwargs, query.shape[3], value.shape[3], query.dtype
            ),
            baseline is not None,
        )
        q, k, v = run.inputs
        if call is None:
            assert baseline is not None
            return run.end(baseline(q, k, v))
        return run.end(
            self.overlapped(
                call, q, k, v, calling(local_attention, call.geometry, args, kwargs), arrive
            )
        )

    def overlapped(
        self,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        local: Attend,
        arrive: Callable[[str, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Walk the schedule of ``call``; q, k, v and what is returned as in a call, k and v of head
        dims of their own.
        """
        layer, geometry = self.layer, call.geometry
        layer.holds_all()
        given = {"q": query, "k": key, "v": value}
        flat: list[bool] = []
        pieces: dict[tuple[str, int], Tensor] = {}
        for kind, x in given.items():
            parts = [part for part in call.schedule.parts if part[0] == kind]
            pieces.update(zip(parts, cut(x, 2, [geometry.heads_of(*part) for part in parts])))

        def attend(group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = local(group, q, k, v)
            flat.append(isinstance(o, Tensor) and o.dim() == 3)
            return with_head_dim(o, q, layer.where)

        runner = Recorded(call, attend, lambda *part: pieces.pop(part), arrive)
        runner.walk(call.schedule.forward)
        o = join_heads(call, runner.outputs)
        return o.flatten(2) if flat[0] else o

    def _describe(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_first: bool,
        num_kv_heads: int | None,
        lengths: list[int] | None,
        extra: tuple,
    ) -> tuple[Geometry, Callable[[], tuple]]:
        def shapes() -> str:
            return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"

        if not query.dim() == key.dim() == value.dim() == 4:
            raise ValueError(
                f"query, key and value must be 4-D, [s/P, b, h, d] or [b, s/P, h, d], got {shapes()}"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(
                f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; give all three one dtype"
            )
        if (
            query.shape[:2] != key.shape[:2]
            or key.shape[:3] != value.shape[:3]
            or query.shape[3] != key.shape[3]
        ):
            raise ValueError(
                f"query, key and value don't belong together: {shapes()}; give them one batch and sequence, query and key one head "
                "dim, key and value one number of heads"
            )
        heads, kv_heads = query.shape[2], key.shape[2]
        if num_kv_heads not in (None, kv_heads):
            raise ValueError(
                f"num_kv_heads is {num_kv_heads}, but key has {kv_heads} heads before the exchange ({shapes()}); pass num_kv_heads="
                f"{kv_heads}, or leave it out"
            )
        geometry = self.layer.geometry(query, heads, kv_heads, batch_first, lengths, extra)

        def types() -> tuple:
            grads = [torch.is_grad_enabled() and x.requires_grad for x in (query, key, value)]
            return str(query.dtype), query.shape[3], value.shape[3], "gradients of q, k, v", grads

        return geometry, types


class DistributedAttention(nn.Module):
    """Drop-in for ``deepspeed.sequence.layer.DistributedAttention``, overlapped and right in every
    case it is not.

    local_attention          attention over the whole sequence with this rank's heads
    sequence_process_group   the sp group; None for all ranks, as in DeepSpeed's
    scatter_idx, gather_idx  DeepSpeed's; head scatter (2) and sequence gather (0 or 1) only
    sp_stream                a stream to carry the transfers; ours, which all layers share, if None
    num_kv_heads             KV heads before the exchange; read from the key if None
    config                   an ``sp_overlap`` section
    heads_alike              the local attention treats all heads alike on all ranks; else that is
                             tried out on the first call. With head groups a rank attends with other
                             heads than without (`PerHead` follows them)

    Any head counts with at least one query head a rank. Raises ValueError for arguments that can't
    work.
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
                f"{name}: scatter_idx must be 2 (heads) and gather_idx 0 or 1 (sequence), got {scatter_idx} and {gather_idx}; "
                "the exchange back to local sequences is part of this module"
            )
        self.local_attn, self.num_kv_heads = local_attention, num_kv_heads
        self.scatter_idx, self.gather_idx, self.sp_stream = scatter_idx, gather_idx, sp_stream
        parsed = SpOverlapConfig.parse(config or {})
        sp_group = SPGroup(
            sequence_process_group or dist.group.WORLD,
            transport or parsed.transport,
            sp_stream,
            parsed.kernels,
        )
        self._attend = ProjectedAttention(
            LayerRuntime(sp_group, parsed, name, heads_alike=heads_alike)
        )

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

        query             [s/P, b, h, d] for ``batch_dim_idx`` 1, [b, s/P, h, d] for 0
        key, value        the same with h_kv heads
        rotary_pos_emb    (cos, sin), each [s, 1, 1, d_rot], d_rot <= d; applied to q and k after
                          the exchange
        sequence_lengths  local length of every rank, where they are not all the same
        returns           as ``query``; 3-D if the local attention returns 3-D

        The remaining arguments go to ``local_attention`` (once per head group); tensors among them
        have the same shape on every rank, but for a dimension of heads.
        """
        batch_first, arrive = self._attend.translated(query, batch_dim_idx, rotary_pos_emb)
        return self._attend(
            self.local_attn, query, key, value, args, kwargs,
            batch_first=batch_first, num_kv_heads=self.num_kv_heads, arrive=arrive, sequence_lengths=sequence_lengths,
        )  # fmt: skip
