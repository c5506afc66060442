"""A whole self-attention layer, whose projections work under the exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..autotune.policy import Policy
from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry
from ..exchange.sp_group import SPGroup
from ..exchange.transport import Transport
from ..relayout import ops
from ..rotary import Rotary
from ..schedule import Block, O, Part, Schedule, Windowed, by_head_groups, schedule_of
from .heads import Local, PerHead, bind_arguments, modules_of
from .layer import LayerRuntime, kind_of, with_head_dim
from .memory.checkpoint_cache import current_pass
from .runtime.execution import Attend, Call
from .runtime.linear import (
    PLAIN,
    PURE,
    Plain,
    Pure,
    autocast,
    batched_pays,
    call_through,
    can_compute_again,
    can_split,
)
from .runtime.nodes import finish_projected, start_projected
from .runtime.projections import Projections, Rows
from .runtime.recorded import Recorded, join_heads
from .runtime.runner import LocalAttention
from .runtime.slices import Parts, cut, parts_of
from .runtime.window import windowed


class SelfAttention:
    """A whole self-attention layer under sequence parallelism, its projections working under the
    exchanges.

    It owns nothing: it is no module and has no parameters, it drives those it is given. Keep it
    beside your modules, or in the forward of one of them.

    local_attention          q, k, v -> o over the whole sequence, [b, s, h/P, d] each ([s, b, h/P,
                             d] if not ``batch_first``)
    o_proj                   output projection, [h d_v] -> [m]
    num_heads, head_dim      h, d
    num_kv_heads             h_kv; h if None
    q_proj, k_proj, v_proj   separate projections, or
    qkv_proj                 a fused one, its rows in the order [all q | all k | all v], or as ``first_rows`` says
    first_rows               first row of each head of q, k and v in its projection, where they are
                             not one after another
    q_norm, k_norm           per-head norm of q and k, applied over d
    norm_last                apply the norm behind ``rope`` instead of before it
    rope                     ``rope(x, position_embeddings)`` for x [b, s/P, h_g, d], applied before
                             the exchange; best a `Rotary`: beside any other the projections are
                             called whole
    sequence_process_group   the sp group; None where the world is one rank
    batch_first              hidden states are [b, s/P, m] (True) or [s/P, b, m]
    config                   an ``sp_overlap`` section
    name                     for errors and logs
    policy                   shared with other layers, for "head_groups": "auto"; one of its own if
                             None
    plain                    forwards of linear layers that may be split, see `linear.can_split`
    pure                     forwards of norms that may be computed again in backward, see
                             `linear.can_compute_again`
    heads_alike              the local attention treats all heads alike on all ranks; else that is
                             tried out on the first call. With head groups a rank attends with other
                             heads than without (`PerHead` follows them)
    schedule                 what happens when, made for what travels with each head group
                             (`schedule.by_head_groups`): a `Schedule`, or a `Windowed` whose
                             backward makes q, k and v again

    Projections that can't be split are called whole; their exchanges are overlapped all the same.
    The output projection can't if it is not a plain linear layer (LoRA, quantised, hooked by
    somebody). Those of q, k and v can't if one of them is not, if a norm is not known to be a
    function of its input and parameters alone, or if RoPE is no `Rotary` or learns its tables.
    """

    # Runs the layer by itself in the order of a `Block`; of `chain`, which the package sets.
    run_in_chunks: Callable[..., Tensor]

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
        first_rows: dict[str, tuple[int, ...]] | None = None,
        q_norm: Callable[[Tensor], Tensor] | None = None,
        k_norm: Callable[[Tensor], Tensor] | None = None,
        norm_last: bool = False,
        rope: Callable[[Tensor, Any], Tensor] | None = None,
        sequence_process_group: Any = None,
        batch_first: bool = True,
        config: SpOverlapConfig | dict | None = None,
        transport: Transport | None = None,
        name: str = "attention",
        policy: Policy | None = None,
        plain: Plain = PLAIN,
        pure: Pure = PURE,
        heads_alike: bool = False,
        schedule: Callable[[tuple[str, ...], bool], Schedule] = by_head_groups,
    ):
        self.heads, self.kv_heads, self.head_dim = num_heads, num_kv_heads or num_heads, head_dim
        self.local_attention, self.rope, self.batch_first = local_attention, rope, batch_first
        self.plain, self.pure, self.first_rows, self.norm_last = plain, pure, first_rows, norm_last
        parsed = SpOverlapConfig.parse(config or {})
        if schedule is not by_head_groups and parsed.window_of(1) is not None:
            raise ValueError(
                f"{name}: schedule= beside sp_overlap.window or checkpointing: such a layer makes q, k and v again in backward, in an "
                "order of its own (schedule.by_window); leave out one of the two"
            )
        sp_group = SPGroup(
            sequence_process_group, transport or parsed.transport, kernels=parsed.kernels
        )
        self.layer = LayerRuntime(sp_group, parsed, name, policy, heads_alike, schedule)
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
            known = type(module) is nn.Linear and (first_rows is None or module is o_proj)
            found = getattr(module, what.split(".")[1]) if known else expected
            if found != expected:
                raise ValueError(
                    f"{name}: {what} is {found}, but {self.heads} query and {self.kv_heads} KV heads of {head_dim} make it {expected}; "
                    "mend the layer, or num_heads=, num_kv_heads= and head_dim="
                )

    def use(
        self, o_proj, q_proj=None, k_proj=None, v_proj=None, qkv_proj=None, q_norm=None, k_norm=None
    ) -> None:
        """Drive these modules from now on: adapters come and go after the block was made."""
        separate, name = (q_proj, k_proj, v_proj), self.layer.where
        if (qkv_proj is None) == (None in separate) or (
            qkv_proj is not None and separate != (None, None, None)
        ):
            given = {"q_proj": q_proj, "k_proj": k_proj, "v_proj": v_proj, "qkv_proj": qkv_proj}
            got = ", ".join(key for key, module in given.items() if module is not None) or "none"
            raise ValueError(
                f"{name}: give q_proj, k_proj and v_proj, or qkv_proj alone, got {got}"
            )
        if qkv_proj is None:
            self._inputs = list(dict.fromkeys(separate))
            self._projections: dict[str, tuple[int, int | tuple[int, ...]]]
            self._projections = {
                kind: (self._inputs.index(module), 0) for kind, module in zip("qkv", separate)
            }
        else:
            self._inputs = [qkv_proj]
            heads = 0, self.heads, self.heads + self.kv_heads
            self._projections = {
                kind: (0, first * self.head_dim) for kind, first in zip("qkv", heads)
            }
        if self.first_rows is not None:
            self._projections = {
                kind: (module, self.first_rows[kind])
                for kind, (module, _) in self._projections.items()
            }
        self._norms, self.o_proj = {"q": q_norm, "k": k_norm}, o_proj
        self._known: tuple[tuple, Any] | None = None  # what `_rows` returned, and for what

    def split_projections(self) -> list[nn.Module]:
        """The projections that are computed part by part, as of now."""
        if not self.layer.config.projections:
            return []
        norms = [norm for norm in self._norms.values() if norm is not None]
        able = [module for module in (*self._inputs, self.o_proj) if can_split(module, self.plain)]
        plain = all(module in able for module in self._inputs) and (
            self.rope is None or isinstance(self.rope, Rotary)
        )
        plain = plain and all(can_compute_again(norm, self.pure) for norm in norms)
        return able if plain else [module for module in able if module not in self._inputs]

    def window_of(self, groups: int, split: list[nn.Module]) -> int | None:
        """How many of the head groups are held at a time by a call that computes ``split`` part by
        part; None where all of them are.
        """
        return (
            self.layer.config.window_of(groups)
            if self._inputs[0] in split and self.o_proj in split
            else None
        )

    def keeps_over_checkpoints(self) -> bool:
        """Whether attention is kept over a checkpoint, as of now."""
        return (
            self.layer.config.checkpointing != "recompute"
            and self.window_of(1, self.split_projections()) is not None
        )

    @torch.compiler.disable
    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        sequence_lengths: list[int] | None = None,
        baseline: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the global sequence.

        hidden_states        [b, s/P, m], or [s/P, b, m] if not ``batch_first``
        position_embeddings  for ``rope``, of this rank's positions; a `Rotary` needs them
        sequence_lengths     local length of every rank, where they are not all the same
        baseline             gives the same for ``hidden_states`` without overlap, for the policy;
                             None where nothing does
        returns              as ``hidden_states``, in what ``o_proj`` returns: some linear layers
                             return a bias beside it

        The remaining arguments go to ``local_attention``, once per head group.
        """
        extra = (*args, *kwargs.values())
        run, call = self.layer.begin(
            lambda: self.describe(hidden_states, position_embeddings, sequence_lengths, extra),
            (hidden_states,),
            lambda: Local(
                self.local_attention,
                args,
                kwargs,
                self.head_dim,
                self.head_dim,
                autocast(hidden_states)[0].dtype,
            ),
            baseline is not None,
            self.head_dim if self.layer.config.memory == "auto" and self._can_window() else 0,
        )
        (x,) = run.inputs
        if call is None:
            assert baseline is not None
            return run.end(baseline(x))
        return run.end(self._overlapped(call, x, position_embeddings, args, kwargs))

    def _overlapped(
        self, call: Call, hidden_states: Tensor, position_embeddings: Any, args: tuple, kwargs: dict
    ) -> Tensor:
        if isinstance(call.schedule, Block):
            return self.run_in_chunks(call, hidden_states, position_embeddings, args, kwargs)
        split = self.split_projections()
        rope = self._folded()
        call.rope_tables = (
            None if rope is None else rope.of_tokens(position_embeddings, self.head_dim)
        )
        tables = self._tables(position_embeddings)
        if tables is None:  # they learn
            split = [module for module in split if module is self.o_proj]
        call.by_rank = self._by_rank(call, hidden_states, split)

        local = bind_arguments(self.local_attention, call.geometry, args, kwargs)

        def attend(group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return with_head_dim(local(group, q, k, v), q, self.layer.where)

        can_recompute = self._inputs[0] in split and self.o_proj in split
        by_hand = isinstance(call.schedule, Windowed)
        if by_hand and not can_recompute:
            raise ValueError(
                f"{self.layer.where}: schedule= makes a Windowed, whose backward makes q, k and v again, for which projections must be "
                "computed part by part; these can't be (adapters, hooks, RoPE that learns): return a Schedule"
            )
        if not by_hand and can_recompute and call.window is not None:
            call.run_by(schedule_of(call.geometry, call.window, self.layer.config.wgrad))
            by_hand = True
        if by_hand:
            # A part may travel alone in one program and joined in the other: neither written as it
            # travels nor rotated on the way.
            call.by_rank, call.rope_tables = frozenset(), None
        else:
            self.layer.warn_if_window_is_ignored()
        if self._inputs[0] in split:
            assert tables is not None
            norms = {kind: norm for kind, norm in self._norms.items() if norm is not None}
            recorded = torch.is_grad_enabled()
            made = Projections(
                self._inputs,
                *self._rows(call),
                norms,
                self.rope,
                tables,
                self.norm_last,
                call.folded,
                self.head_dim,
                self.plain,
                recorded,
            )
            if by_hand:
                leaves = self.plain[type(self.o_proj).forward](self.o_proj)
                watched = self.watched(call, hidden_states, attend, args, kwargs)
                checkpointing = self.layer.config.checkpointing
                checkpoint = (
                    None if checkpointing == "recompute" else current_pass(self.layer.where)
                )
                layer = partial(
                    windowed,
                    call,
                    made,
                    watched,
                    checkpoint,
                    checkpointing == "offload",
                    self.o_proj,
                    leaves,
                )
                return call_through([*made.called, self.o_proj], layer, hidden_states)
            started = call_through(made.called, partial(start_projected, call, made), hidden_states)
            runner = Recorded(call, attend)
            runner.tokens.update(zip([step.exchange for step in call.schedule.starts], started))
        else:
            rotary = self.rope
            rotate = None if rotary is None else lambda heads: rotary(heads, position_embeddings)
            runner = Recorded(call, attend, self.whole(call, hidden_states, rotate))
            runner.walk(call.schedule.inputs)
        runner.walk(call.schedule.attention)
        if self.o_proj in split:
            of_groups = [runner.tokens[O, group, 0] for group in call.groups]
            leaves = self.plain[type(self.o_proj).forward](self.o_proj)
            return call_through(
                [self.o_proj], partial(finish_projected, call, self.o_proj, leaves), *of_groups
            )
        runner.walk(call.schedule.output)
        return self.o_proj(join_heads(call, runner.outputs).flatten(2))

    def _can_window(self) -> bool:
        split = self.split_projections()
        return self._inputs[0] in split and self.o_proj in split

    def watched(
        self, call: Call, x: Tensor, attend: Attend, args: tuple, kwargs: dict
    ) -> LocalAttention:
        """The local attention of a call, and the tensors that it reads beside q, k and v."""
        leaves = (
            leaf.tensor if isinstance(leaf, PerHead) else leaf
            for leaf in tree_leaves((args, kwargs))
        )
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = {
            id(p)
            for module in (*self._inputs, self.o_proj, *self._norms.values())
            if module
            for p in module.parameters()
        }
        inside = [
            p
            for module in modules_of(self.local_attention)
            for p in module.parameters()
            if id(p) not in own
        ]
        learned = {id(x): x for x in (*given, *inside) if x.requires_grad}
        return LocalAttention(
            attend,
            given,
            list(learned.values()),
            partial(self.layer.agree_on_o, kind_of(call, (x,))),
        )

    def _folded(self) -> Rotary | None:
        """The rotation of q and k, if it is done in the kernels that pack them."""
        rope = self.rope
        return (
            rope
            if isinstance(rope, Rotary)
            and not (self.norm_last and any(self._norms.values()))
            and ops.implementation(self.layer.sp_group.kernels).folds
            else None
        )

    def _tables(self, position_embeddings: Any) -> tuple[Tensor, ...] | None:
        """What q and k are rotated by behind the projections, empty for nothing; None where it
        learns.
        """
        tables = (
            self.rope.of(position_embeddings, self.head_dim)
            if isinstance(self.rope, Rotary)
            else ()
        )
        return (
            ()
            if tables is None
            else None
            if any(table.requires_grad for table in tables)
            else tables
        )

    def _rows(self, call: Call) -> tuple[dict[Part, Rows], list[Parts]]:
        """Where each part of q, k and v comes from; and what each projection is cut into."""
        of, known = (call.geometry, call.schedule, call.by_rank), self._known
        if known is not None and known[0] == of:  # as in the call before, mostly
            return known[1]
        rows = {}
        for kind, group in call.schedule.parts:
            module, first = self._projections[kind]
            ranks = (
                call.geometry.sp_size
                if kind in call.by_rank and (kind, group) in call.schedule.alone
                else 0
            )
            rows[kind, group] = Rows(
                module, call.geometry.elements_of(kind, group, first, self.head_dim), ranks
            )
        parts = [
            parts_of(*(part.rows for part in rows.values() if part.module == at))
            for at in range(len(self._inputs))
        ]
        self._known = of, (rows, parts)
        return rows, parts

    def whole(
        self,
        call: Call,
        x: Tensor,
        rotate: Callable[[Tensor], Tensor] | None,
        called: Callable[[Any], Any] = lambda module: module,
    ) -> Callable[[str, int], Tensor]:
        """``project`` of `Recorded`: each projection is called when its first part is asked
        for, and cut.

        called   what is called in place of a projection or a norm
        """
        rows, parts = self._rows(call)
        made: dict[Part, Tensor] = {}

        def project(kind: str, group: int) -> Tensor:
            module = rows[kind, group].module
            if (kind, group) not in made:
                y = called(self._inputs[module])(x)
                of_module = [part for part, of in rows.items() if of.module == module]
                made.update(
                    zip(of_module, cut(y[0] if isinstance(y, tuple) else y, 2, list(parts[module])))
                )
            heads = made.pop((kind, group)).unflatten(-1, (-1, self.head_dim))
            if kind == "v":
                return heads
            norm = None if self._norms[kind] is None else called(self._norms[kind])
            heads = heads if norm is None or self.norm_last else norm(heads)
            heads = heads if rotate is None or (kind, group) in call.folded else rotate(heads)
            return norm(heads) if norm is not None and self.norm_last else heads

        return project

    def plainly(self, x: Tensor, position_embeddings: Any) -> list[Tensor]:
        """Make q, k and v of this rank's own tokens, all heads of each, and exchange nothing: for a
        comparison with somebody else's.
        """
        batch, seq = x.shape[:2] if self.batch_first else (x.shape[1], x.shape[0])
        geometry = Geometry(1, 0, (seq,), batch, self.heads, self.kv_heads, 1, self.batch_first)
        call = Call(SPGroup(None), geometry, by_head_groups(geometry.kinds, True), self.layer.where)
        rotary = self.rope
        rotate = None if rotary is None else lambda heads: rotary(heads, position_embeddings)
        project = self.whole(call, x, rotate)
        self._known = None
        return [project(kind, 0) for kind in "qkv"]

    def _by_rank(self, call: Call, x: Tensor, split: list[nn.Module]) -> frozenset[str]:
        """Those of q, k, v and o whose send buffers are written by the GEMM that makes them, so
        that nothing is packed.
        """
        geometry = call.geometry
        if not batched_pays(
            x, geometry.heads // geometry.sp_size * self.head_dim
        ):  # no part has more rows a rank
            return frozenset()
        modules = {
            **{kind: self._inputs[module] for kind, (module, _) in self._projections.items()},
            "o": self.o_proj,
        }
        in_order = self.first_rows is None

        def pays(kind: str) -> bool:
            sent = "q" if kind == "o" else kind
            start, stop = geometry.sent_range(sent, geometry.sp_rank, 0)
            rows = (stop - start) * self.head_dim
            return (
                modules[kind] in split
                and in_order
                and geometry.divides(sent)
                and batched_pays(x, rows, dgrad=kind == "o")
            )

        return frozenset(
            kind
            for kind in "qkvo"
            if not (call.rope_tables is not None and kind in "qk") and pays(kind)
        )

    @property
    def inputs(self) -> list[Any]:
        """Projections of q, k and v, and their norms."""
        return [*self._inputs, *(norm for norm in self._norms.values() if norm is not None)]

    def describe(
        self, hidden: Tensor, position_embeddings: Any, lengths: list[int] | None, extra: tuple
    ) -> tuple[Geometry, Callable[[], tuple]]:
        if hidden.dim() != 3:
            raise ValueError(
                f"hidden_states must be 3-D, [b, s/P, m] or [s/P, b, m], got {list(hidden.shape)}"
            )
        geometry = self.layer.geometry(
            hidden, self.heads, self.kv_heads, self.batch_first, lengths, extra
        )

        def types() -> tuple:
            if isinstance(self.rope, Rotary):
                self.rope.of(position_embeddings, self.head_dim)  # refused on every rank
            grads = [
                torch.is_grad_enabled() and (hidden.requires_grad or trained)
                for trained in self._trained()
            ]
            return str(hidden.dtype), self.head_dim, "gradients of q, k, v", grads

        return geometry, types

    def _trained(self) -> list[bool]:
        of_kind = (
            (self._inputs[module], self._norms.get(kind))
            for kind, (module, _) in self._projections.items()
        )
        return [
            any(
                p.requires_grad for m in modules if isinstance(m, nn.Module) for p in m.parameters()
            )
            for modules in of_kind
        ]
