"""Attention layers: the drop-in for DeepSpeed's ``DistributedAttention`` and the block that reaches the projections."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable

import torch
from torch import Tensor, nn

from . import ops
from .config import SpOverlapConfig
from .exchange import Channel
from .layout import Geometry
from .linear import OutputParts, RowParts, WholeRows, call_through, can_take_apart
from .parts import Part, cut, join
from .schedule import Call, overlapped
from .transport import Transport

_geometry = lru_cache(maxsize=4096)(Geometry)


class _Layer:
    """What both kinds of attention layer share: the sp group, the configuration, and the agreement of the ranks."""

    def __init__(self, channel: Channel, config: SpOverlapConfig, where: str):
        self.channel, self.config, self.where = channel, config, where
        self.agreed = False

    def call(self, describe: Callable[[], tuple[Geometry, tuple]]) -> Call:
        """A call of this layer, of the geometry that ``describe`` gives.

        On the layer's first call (on every call with ``sp_overlap.check``) the ranks compare it first: a fault that one of
        them has, or a difference, is a ValueError on all of them before anything is exchanged.
        """
        first = not self.agreed
        if first or self.config.check:
            self.channel.agree(self.where, lambda: self._comparable(*describe()))
            self.agreed = True
        geometry, _ = describe()
        return Call(self.channel, geometry, self.where, checked=first and self.config.check)

    def _comparable(self, geometry: Geometry, types: tuple) -> str:
        ops.implementation(self.channel.kernels)  # refused here, on every rank, where this one lacks them
        lengths = geometry.seq_lens if len(set(geometry.seq_lens)) > 1 else geometry.seq_lens[0]
        return (
            f"local sequence {lengths}, batch {geometry.batch}, {geometry.heads} query and {geometry.kv_heads} KV heads, "
            f"{geometry.groups} head groups, {'batch' if geometry.batch_first else 'sequence'} first, {types}"
        )

    def geometry(self, x: Tensor, heads: int, kv_heads: int, batch_first: bool, lengths, extra: tuple) -> Geometry:
        """Geometry of a call with ``x`` [s/P, b, ...], one head group where attention gets ``extra`` arguments per head."""
        channel = self.channel
        batch, local_seq = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
        seq_lens = (local_seq,) * channel.size if lengths is None else tuple(int(length) for length in lengths)
        groups = self.config.groups_for(heads, channel.size)
        geometry = _geometry(channel.size, channel.rank, seq_lens, batch, heads, kv_heads, groups, batch_first)
        if groups > 1 and _per_head(geometry, extra):
            geometry = _geometry(channel.size, channel.rank, seq_lens, batch, heads, kv_heads, 1, batch_first)
        if seq_lens[channel.rank] != local_seq:
            raise ValueError(
                f"sequence_lengths: {seq_lens[channel.rank]} for sp rank {channel.rank}, whose local sequence has {local_seq} tokens"
            )
        return geometry


def _per_head(geometry: Geometry, extra: tuple) -> bool:
    """Whether some tensor may have one slice per head of a rank (a bias, slopes), which head groups would misuse.

    Asked for every rank's count of heads, so that all ranks answer alike; where it is wrong it costs some overlap.
    """
    counts = {stop - start for start, stop in map(geometry.query_range, range(geometry.sp_size))}
    return any(isinstance(x, Tensor) and not counts.isdisjoint(x.shape) for x in extra)


def _apart(o: Any, q: Tensor, where: str) -> Tensor:
    """Local attention's output with its heads in a dimension of their own, ``[.., .., h_g/P, d]``."""
    if not isinstance(o, Tensor):
        raise ValueError(f"{where}: local attention must return one tensor, got {type(o).__name__}")
    heads = q.shape[2]
    if o.dim() == 3 and o.shape[-1] % heads == 0:
        o = o.unflatten(-1, (heads, -1))
    if o.dim() != 4 or o.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{where}: local attention of query {list(q.shape)} must return that shape (another head dim is fine), or the "
            f"same with heads and head dim flattened, got {list(o.shape)}"
        )
    return o


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotated rotary embedding (https://arxiv.org/abs/2104.09864); dims of ``x`` past those of ``cos`` pass through."""
    dims = cos.shape[-1]
    rotary, rest = x[..., :dims], x[..., dims:]
    low, high = rotary.chunk(2, dim=-1)
    rotary = rotary * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((rotary, rest), dim=-1) if rest.shape[-1] else rotary


class ProjectedAttention:
    """Ulysses attention of q, k, v that were projected already; holds no module and no parameter.

    What is overlapped: the exchanges with one another and with attention (head groups), and the exchanges of dq, dk and
    dv with the backward of the caller's projections.
    """

    def __init__(self, channel: Channel, config: SpOverlapConfig, where: str):
        self.layer = _Layer(channel, config, where)

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
        arrive: Callable[[str, Tensor], Tensor] = lambda kind, x: x,
        sequence_lengths: list[int] | None = None,
    ) -> Tensor:
        """Attend over the global sequence.

        query        [s/P, b, h, d], or [b, s/P, h, d] if ``batch_first``
        key, value   the same with h_kv heads
        args, kwargs more arguments for ``local_attention``, which is called once per head group
        arrive       what to do with q, k, v after their exchange (RoPE)
        returns      as ``query`` with the head dim of the attention's output; 3-D if ``local_attention`` returns 3-D
        """
        layer, kwargs = self.layer, kwargs or {}
        extra = (*args, *kwargs.values())
        call = layer.call(lambda: self._describe(query, key, value, batch_first, num_kv_heads, sequence_lengths, extra))
        geometry = call.geometry
        given = {"q": query, "k": key, "v": value}
        flat: list[bool] = []

        def inputs(program):
            parts = {}
            for kind, x in given.items():
                groups = [group for k, group in call.parts if k == kind]
                pieces = cut(x, 2, [geometry.heads_of(kind, group) for group in groups])
                parts.update(((kind, group), piece) for group, piece in zip(groups, pieces))
            return program(lambda kind, group: parts[kind, group])

        def attend(q, k, v):
            o = local_attention(q, k, v, *args, **kwargs)
            flat.append(isinstance(o, Tensor) and o.dim() == 3)
            return _apart(o, q, layer.where)

        def output(tokens, program):
            outputs: list[Tensor] = []
            program(tokens, lambda group, o: outputs.append(o))
            o = join(outputs, 2, [geometry.heads_of("q", group) for group in call.groups])
            return o.flatten(2) if flat[0] else o

        return overlapped(call, inputs, attend, output, arrive)

    def _describe(self, query, key, value, batch_first, num_kv_heads, lengths, extra):
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        if not query.dim() == key.dim() == value.dim() == 4:
            raise ValueError(f"query, key and value must be 4-D, [s/P, b, h, d] or [b, s/P, h, d], got {shapes}")
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}; give all three one dtype")
        if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]:
            raise ValueError(f"query, key and value don't belong together: {shapes}")
        heads, kv_heads = query.shape[2], key.shape[2]
        if num_kv_heads not in (None, kv_heads):
            raise ValueError(f"num_kv_heads is {num_kv_heads}, but key has {kv_heads} heads before the exchange ({shapes})")
        geometry = self.layer.geometry(query, heads, kv_heads, batch_first, lengths, extra)
        grads = [torch.is_grad_enabled() and x.requires_grad for x in (query, key, value)]
        return geometry, (str(query.dtype), query.shape[3], value.shape[3], "gradients of q, k, v", grads)


class DistributedAttention(nn.Module):
    """Drop-in for ``deepspeed.sequence.layer.DistributedAttention``, overlapped and right in every case it is not.

    local_attention          attention over the whole sequence with this rank's heads
    sequence_process_group   the sp group
    scatter_idx, gather_idx  DeepSpeed's; head scatter (2) and sequence gather (0 or 1) only
    sp_stream                a stream to carry the exchanges; one is made if None
    num_kv_heads             KV heads before the exchange; read from the key if None
    config                   an ``sp_overlap`` section

    Any head counts with at least one query head a rank. Raises ValueError for arguments that can't work.
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
    ):
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"{name}: scatter_idx must be 2 (heads) and gather_idx 0 or 1 (sequence), got {scatter_idx} and {gather_idx}; "
                "the exchange back to local sequences is part of this module"
            )
        self.local_attn, self.spg, self.num_kv_heads = local_attention, sequence_process_group, num_kv_heads
        self.scatter_idx, self.gather_idx, self.sp_stream = scatter_idx, gather_idx, sp_stream
        parsed = SpOverlapConfig.parse(config or {})
        channel = Channel(sequence_process_group, transport, sp_stream, parsed.kernels)
        self._attend = ProjectedAttention(channel, parsed, name)

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
        rotary_pos_emb    (cos, sin), each [s, 1, 1, d_rot]; applied to q and k after the exchange
        sequence_lengths  local length of every rank, where they are not all the same
        returns           as ``query``; 3-D if the local attention returns 3-D

        The remaining arguments go to ``local_attention`` (once per head group); tensors among them have the same shape on
        every rank, but for a dimension of heads.
        """
        return drop_in_forward(
            self._attend, self.local_attn, self.num_kv_heads, query, key, value, batch_dim_idx, rotary_pos_emb, *args,
            sequence_lengths=sequence_lengths, **kwargs
        )  # fmt: skip


def drop_in_forward(
    attend: ProjectedAttention,
    local_attention: Callable[..., Tensor],
    num_kv_heads: int | None,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch_dim_idx: int,
    rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
    *args: Any,
    sequence_lengths: list[int] | None = None,
    **kwargs: Any,
) -> Tensor:
    """``DistributedAttention.forward`` for a module of this class or of DeepSpeed's; its indices end here."""
    if isinstance(batch_dim_idx, (bool, Tensor)) or batch_dim_idx not in (0, 1):
        got = f"a tensor of shape {list(batch_dim_idx.shape)}" if isinstance(batch_dim_idx, Tensor) else repr(batch_dim_idx)

        def refuse():
            raise ValueError(f"batch_dim_idx must be 0 (batch first) or 1 (sequence first), got {got}")

        attend.layer.call(refuse)
    batch_first = batch_dim_idx == 0

    def arrive(kind, x):
        if kind == "v" or rotary_pos_emb is None:
            return x
        cos, sin = (table.transpose(0, 1) if batch_first else table for table in rotary_pos_emb)
        return rotate(x, cos, sin)

    return attend(
        local_attention, query, key, value, args, kwargs,
        batch_first=batch_first, num_kv_heads=num_kv_heads, arrive=arrive, sequence_lengths=sequence_lengths,
    )  # fmt: skip


class SelfAttention:
    """A whole self-attention layer under sequence parallelism, its projections working under the exchanges.

    It owns nothing: it is no module and has no parameters, it drives those it is given. Keep it beside your modules, or
    in the forward of one of them.

    local_attention          q, k, v -> o over the whole sequence, [b, s, h/P, d] each ([s, b, h/P, d] if not ``batch_first``)
    o_proj                   output projection, [h d_v] -> [m]
    num_heads, head_dim      h, d
    num_kv_heads             h_kv; h if None
    q_proj, k_proj, v_proj   separate projections, or
    qkv_proj                 a fused one, its rows in the order [all q | all k | all v]
    q_norm, k_norm           per-head norm of q and k, applied over d
    rope                     ``rope(x, position_embeddings)`` for x [b, s/P, h_g, d]; applied before the exchange
    sequence_process_group   the sp group; None for one rank
    batch_first              hidden states are [b, s/P, m] (True) or [s/P, b, m]
    config                   an ``sp_overlap`` section
    name                     for errors and logs

    A projection that can't be taken apart (LoRA, quantised, hooked by somebody) is called whole; its exchanges are
    overlapped all the same.
    """

    def __init__(
        self,
        *,
        local_attention: Callable[..., Tensor],
        o_proj: nn.Module,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        q_proj: nn.Module | None = None,
        k_proj: nn.Module | None = None,
        v_proj: nn.Module | None = None,
        qkv_proj: nn.Module | None = None,
        q_norm: Callable[[Tensor], Tensor] | None = None,
        k_norm: Callable[[Tensor], Tensor] | None = None,
        rope: Callable[[Tensor, Any], Tensor] | None = None,
        sequence_process_group: Any = None,
        batch_first: bool = True,
        config: SpOverlapConfig | dict | None = None,
        transport: Transport | None = None,
        name: str = "attention",
    ):
        self.heads, self.kv_heads, self.head_dim = num_heads, num_kv_heads or num_heads, head_dim
        self.local_attention, self.rope, self.batch_first = local_attention, rope, batch_first
        parsed = SpOverlapConfig.parse(config or {})
        self.layer = _Layer(Channel(sequence_process_group, transport, kernels=parsed.kernels), parsed, name)
        self.use(o_proj, q_proj, k_proj, v_proj, qkv_proj, q_norm, k_norm)

    def use(self, o_proj, q_proj=None, k_proj=None, v_proj=None, qkv_proj=None, q_norm=None, k_norm=None) -> None:
        """Drive these modules from now on: adapters come and go after the block was made."""
        separate, name = (q_proj, k_proj, v_proj), self.layer.where
        if (qkv_proj is None) == (None in separate) or (qkv_proj is not None and separate != (None, None, None)):
            raise ValueError(f"{name}: give q_proj, k_proj and v_proj, or qkv_proj alone")
        if qkv_proj is None:
            self._projections = {kind: (module, 0) for kind, module in zip("qkv", separate)}
        else:
            firsts = (0, self.heads, self.heads + self.kv_heads)
            self._projections = {kind: (qkv_proj, first) for kind, first in zip("qkv", firsts)}
        self._norms, self.o_proj = {"q": q_norm, "k": k_norm}, o_proj

    def taken_apart(self) -> list[nn.Module]:
        """The projections that are computed part by part, as of now."""
        if not self.layer.config.projections:
            return []
        modules = dict.fromkeys([*(module for module, _ in self._projections.values()), self.o_proj])
        return [module for module in modules if can_take_apart(module)]

    @torch.compiler.disable
    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        sequence_lengths: list[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the global sequence.

        hidden_states        [b, s/P, m], or [s/P, b, m] if not ``batch_first``
        position_embeddings  for ``rope``, of this rank's positions
        sequence_lengths     local length of every rank, where they are not all the same
        returns              as ``hidden_states``

        The remaining arguments go to ``local_attention``, once per head group.
        """
        extra = (*args, *kwargs.values())
        call = self.layer.call(lambda: self._describe(hidden_states, sequence_lengths, extra))
        apart = self.taken_apart()

        def inputs(program):
            opened = [module for module in apart if module is not self.o_proj]
            return call_through(
                opened, lambda x: tuple(program(self._projector(call, x, opened, position_embeddings))), hidden_states
            )

        def attend(q, k, v):
            return _apart(self.local_attention(q, k, v, *args, **kwargs), q, self.layer.where)

        def columns(group, head_dim):
            return tuple((start * head_dim, stop * head_dim) for start, stop in call.geometry.heads_of("q", group))

        def output(tokens, program):
            if self.o_proj not in apart:
                outputs: list[Tensor] = []
                program(tokens, lambda group, o: outputs.append(o))
                o = join(outputs, 2, [call.geometry.heads_of("q", group) for group in call.groups])
                return self.o_proj(o.flatten(2))

            def body(*tokens):
                total = OutputParts(self.o_proj, like=hidden_states, defer=self.layer.config.wgrad)
                program(tokens, lambda group, o: total.add(o.flatten(2), columns(group, o.shape[-1])))
                return total.sum

            return call_through([self.o_proj], body, *tokens)

        return overlapped(call, inputs, attend, output)

    def _projector(self, call: Call, x: Tensor, opened: list[nn.Module], position_embeddings: Any):
        """``project(kind, group)`` of `overlapped`: projection, norm and RoPE of one group's heads."""
        rows: dict[nn.Module, list[Part]] = {}
        place: dict[tuple[str, int], tuple[nn.Module, int]] = {}
        for kind, group in call.parts:
            module, first = self._projections[kind]
            part = rows.setdefault(module, [])
            place[kind, group] = module, len(part)
            part.append(
                tuple(
                    ((first + start) * self.head_dim, (first + stop) * self.head_dim)
                    for start, stop in call.geometry.heads_of(kind, group)
                )
            )
        sources = {m: (RowParts if m in opened else WholeRows)(x, m, parts) for m, parts in rows.items()}

        def project(kind: str, group: int) -> Tensor:
            module, index = place[kind, group]
            heads = sources[module].part(index).unflatten(-1, (-1, self.head_dim))
            if kind == "v":
                return heads
            if self._norms[kind] is not None:
                heads = self._norms[kind](heads)
            return heads if self.rope is None else self.rope(heads, position_embeddings)

        return project

    def _describe(self, hidden: Tensor, lengths, extra: tuple):
        if hidden.dim() != 3:
            raise ValueError(f"hidden_states must be 3-D, [b, s/P, m] or [s/P, b, m], got {list(hidden.shape)}")
        geometry = self.layer.geometry(hidden, self.heads, self.kv_heads, self.batch_first, lengths, extra)
        grads = [torch.is_grad_enabled() and (hidden.requires_grad or trained) for trained in self._trained()]
        return geometry, (str(hidden.dtype), self.head_dim, "gradients of q, k, v", grads)

    def _trained(self) -> list[bool]:
        modules = (self._projections[kind][0] for kind in "qkv")
        return [any(p.requires_grad for p in module.parameters()) for module in modules]
