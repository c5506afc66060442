"""A whole self-attention layer, whose projections work under the exchanges."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor, nn

from . import ops
from .channel import Channel
from .config import SpOverlapConfig
from .heads import Local
from .layer import Layer, apart
from .linear import PLAIN, Forwards, RowParts, WholeRows, autocast, batched_pays, call_through, can_take_apart
from .nodes import Rows, finish_output, start_inputs
from .parts import Part, join
from .policy import Policy
from .rotary import Rotary
from .schedule import Call, overlapped
from .transport import Transport


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
    rope                     ``rope(x, position_embeddings)`` for x [b, s/P, h_g, d], applied before the exchange; best a
                             `Rotary`, which needs no memory order
    sequence_process_group   the sp group; None where the world is one rank
    batch_first              hidden states are [b, s/P, m] (True) or [s/P, b, m]
    config                   an ``sp_overlap`` section
    name                     for errors and logs
    policy                   shared with other layers, for "head_groups": "auto"; one of its own if None
    plain                    forwards of linear layers that may be taken apart, see `linear.can_take_apart`
    heads_alike              ``local_attention`` treats all heads alike; else that is tried out on the first call

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
        policy: Policy | None = None,
        plain: Forwards = PLAIN,
        heads_alike: bool = False,
    ):
        self.heads, self.kv_heads, self.head_dim = num_heads, num_kv_heads or num_heads, head_dim
        self.local_attention, self.rope, self.batch_first, self.plain = local_attention, rope, batch_first, plain
        parsed = SpOverlapConfig.parse(config or {})
        channel = Channel(sequence_process_group, transport or parsed.transport, kernels=parsed.kernels)
        self.layer = Layer(channel, parsed, name, policy, heads_alike)
        self.use(o_proj, q_proj, k_proj, v_proj, qkv_proj, q_norm, k_norm)
        sizes = {
            "q_proj.out_features": (q_proj, self.heads),
            "k_proj.out_features": (k_proj, self.kv_heads),
            "v_proj.out_features": (v_proj, self.kv_heads),
            "qkv_proj.out_features": (qkv_proj, self.heads + 2 * self.kv_heads),
            "o_proj.in_features": (o_proj, self.heads),
        }
        for what, (module, heads) in sizes.items():
            expected = heads * head_dim
            found = getattr(module, what.split(".")[1]) if type(module) is nn.Linear else expected
            if found != expected:
                raise ValueError(
                    f"{name}: {what} is {found}, but {self.heads} query and {self.kv_heads} KV heads of {head_dim} make it {expected}"
                )

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
        self._modules = list(dict.fromkeys([*(module for module, _ in self._projections.values()), o_proj]))

    def taken_apart(self) -> list[nn.Module]:
        """The projections that are computed part by part, as of now."""
        if not self.layer.config.projections:
            return []
        return [module for module in self._modules if can_take_apart(module, self.plain)]

    @torch.compiler.disable
    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        sequence_lengths: list[int] | None = None,
        instead: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the global sequence.

        hidden_states        [b, s/P, m], or [s/P, b, m] if not ``batch_first``
        position_embeddings  for ``rope``, of this rank's positions; a `Rotary` needs them
        sequence_lengths     local length of every rank, where they are not all the same
        instead              gives the same for ``hidden_states`` without overlap, for the policy; None where nothing does
        returns              as ``hidden_states``, in what ``o_proj`` returns: some linear layers return a bias beside it

        The remaining arguments go to ``local_attention``, once per head group.
        """
        extra = (*args, *kwargs.values())
        return self.layer.run(
            lambda: self._describe(hidden_states, position_embeddings, sequence_lengths, extra),
            lambda call, x: self._overlapped(call, x, position_embeddings, args, kwargs),
            (hidden_states,),
            lambda: Local(self.local_attention, args, kwargs, self.head_dim, self.head_dim, autocast(hidden_states)[0].dtype),
            instead,
        )

    def _overlapped(self, call: Call, hidden_states: Tensor, position_embeddings: Any, args: tuple, kwargs: dict) -> Tensor:
        opened = self.taken_apart()
        if isinstance(self.rope, Rotary) and ops.implementation(self.layer.channel.kernels).folds:
            call.turn = self.rope.of_tokens(position_embeddings, self.head_dim)
        call.by_rank = self._by_rank(call, hidden_states, opened)

        def inputs(program):
            inner = [module for module in opened if module is not self.o_proj]
            rows, tables = self._rows(call), self._tables(call, position_embeddings)

            def body(x):
                if tables is not None and {part.module for part in rows.values()}.issubset(inner):
                    return start_inputs(call, x, rows, self.head_dim, tables, program)
                return tuple(program(self._projector(call, x, rows, inner, position_embeddings)))

            return call_through(inner, body, hidden_states)

        def attend(q, k, v):
            return apart(self.local_attention(q, k, v, *args, **kwargs), q, self.layer.where)

        def output(tokens, program):
            if self.o_proj in opened:
                defer = self.layer.config.wgrad
                return call_through(
                    [self.o_proj], lambda *tokens: finish_output(call, self.o_proj, defer, tokens, program), *tokens
                )
            outputs: list[Tensor] = []
            program(tokens, lambda group, o: outputs.append(o))
            o = join(outputs, 2, [call.geometry.heads_of("q", group) for group in call.groups])
            return self.o_proj(o.flatten(2))

        return overlapped(call, inputs, attend, output)

    def _rows(self, call: Call) -> dict[tuple[str, int], Rows]:
        """Where each part of q, k and v comes from."""
        rows = {}
        for kind, group in call.parts:
            module, first = self._projections[kind]
            ranks = call.geometry.sp_size if kind in call.by_rank else 0
            rows[kind, group] = Rows(module, call.geometry.elements_of(kind, group, first, self.head_dim), ranks)
        return rows

    def _tables(self, call: Call, position_embeddings: Any) -> tuple[Tensor, ...] | None:
        """What q and k are rotated by between projection and exchange, empty for nothing; None where more is done to them."""
        if any(norm is not None for norm in self._norms.values()) or not (self.rope is None or isinstance(self.rope, Rotary)):
            return None
        tables = None if self.rope is None or call.turn is not None else self.rope.turn(position_embeddings, self.head_dim)
        return () if tables is None else None if any(table.requires_grad for table in tables) else tables

    def _projector(self, call: Call, x: Tensor, rows: dict, opened: list[nn.Module], position_embeddings: Any):
        """``project(kind, group)`` of `overlapped`: projection, norm and RoPE of one group's heads."""
        parts: dict[nn.Module, list[Part]] = {}
        place = {}
        for what, part in rows.items():
            place[what] = len(parts.setdefault(part.module, []))
            parts[part.module].append(part.rows)
        sources = {m: (RowParts if m in opened else WholeRows)(x, m, parts) for m, parts in parts.items()}

        def project(kind: str, group: int) -> Tensor:
            module, _, ranks = rows[kind, group]
            heads = sources[module].part(place[kind, group], ranks).unflatten(-1, (-1, self.head_dim))
            return shape(kind, heads.movedim(2, 0)).movedim(0, 2) if ranks else shape(kind, heads)  # in the order of memory

        def shape(kind: str, heads: Tensor) -> Tensor:
            if kind == "v":
                return heads
            if self._norms[kind] is not None:
                heads = self._norms[kind](heads)
            return heads if self.rope is None or call.turn is not None else self.rope(heads, position_embeddings)

        return project

    def _by_rank(self, call: Call, x: Tensor, opened: list[nn.Module]) -> frozenset[str]:
        """Those of q, k, v and o whose send buffers are written by the GEMM that makes them, so that nothing is packed."""
        geometry = call.geometry
        if not batched_pays(x, geometry.heads // geometry.sp_size * self.head_dim):  # no part has more rows a rank
            return frozenset()
        modules = {**{kind: module for kind, (module, _) in self._projections.items()}, "o": self.o_proj}
        stranger = self.rope is not None and not isinstance(self.rope, Rotary)  # expects four dimensions
        packed = stranger or call.turn is not None

        def pays(kind: str) -> bool:
            sent = "q" if kind == "o" else kind
            start, stop = geometry.sent_range(sent, geometry.sp_rank, 0)
            rows = (stop - start) * self.head_dim
            return modules[kind] in opened and geometry.divides(sent) and batched_pays(x, rows, dgrad=kind == "o")

        return frozenset(kind for kind in "qkvo" if not (packed and kind in "qk") and pays(kind))

    def _describe(self, hidden: Tensor, position_embeddings: Any, lengths, extra: tuple):
        if hidden.dim() != 3:
            raise ValueError(f"hidden_states must be 3-D, [b, s/P, m] or [s/P, b, m], got {list(hidden.shape)}")
        geometry = self.layer.geometry(hidden, self.heads, self.kv_heads, self.batch_first, lengths, extra)

        def types():
            if isinstance(self.rope, Rotary):
                self.rope.turn(position_embeddings, self.head_dim)  # refused on every rank
            grads = [torch.is_grad_enabled() and (hidden.requires_grad or trained) for trained in self._trained()]
            return str(hidden.dtype), self.head_dim, "gradients of q, k, v", grads

        return geometry, types

    def _trained(self) -> list[bool]:
        modules = (self._projections[kind][0] for kind in "qkv")
        return [any(p.requires_grad for p in module.parameters()) for module in modules]
