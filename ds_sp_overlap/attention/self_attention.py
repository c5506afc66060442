"""Runs a whole self-attention layer, whose projections hide the exchanges.

Note [Called whole]
~~~~~~~~~~~~~~~~~~~
A projection is computed part by part, one head group at a time, only if this has no visible side
effect. Otherwise the module is called whole. The output projection is called whole if it is not a
plain linear layer (LoRA, quantised, hooked). The projections of q, k and v are all called whole in
each of these cases:

- One of them is not a plain linear layer.
- A norm is not known to be a function of its input and its parameters alone.
- RoPE is not a `Rotary`, or its tables need a gradient.

Exchanges overlap in either case. Every call checks the modules again, since hooks and adapters come
and go.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..autotune.policy import Policy
from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry
from ..exchange.shares import QueryChunks
from ..exchange.sp_group import SPGroup
from ..exchange.transport import Transport
from ..schedule import by_head_groups, schedule_of
from .arguments import LocalAttention
from .call_geometry import Tokens, geometry_of
from .declared import config_for
from .input_modules import InputModules
from .layer import LayerRuntime, MakeSchedule
from .memory.checkpoint_cache import current_pass
from .runtime.execution import Call
from .runtime.linear import PLAIN, PURE, Plain, Pure, can_split, products_of, returned_by
from .runtime.nodes import End
from .runtime.parts import join_heads
from .runtime.slices import batched_is_slow
from .runtime.walk import Walk


class SelfAttention:
    """Runs a whole self-attention layer under sequence parallelism; its projections hide exchanges.

    See Note [Called whole] for exceptions. This object is no module and has no parameters; it
    calls the modules that it is given. Keep this object beside your modules, or call it in the
    forward of a module.

    Args:
        local_attention: q, k, v -> o over the global sequence, [b, s, h/P, d] each if
            ``batch_first``, else [s, b, h/P, d]. Where ranks share query heads, each call also gets
            ``queries=``, as described for `DistributedAttention`.
        o_proj: The output projection, [h d] -> [m].
        num_heads: ``h``.
        head_dim: ``d``.
        num_kv_heads: ``h_kv``; None for ``h``.
        q_proj: The projection of q; give either q_proj, k_proj and v_proj, or qkv_proj.
        k_proj: The projection of k.
        v_proj: The projection of v.
        qkv_proj: A fused projection of q, k and v. Its rows are in the order
            [all q | all k | all v], unless ``first_rows`` is given.
        first_rows: For each of "q", "k" and "v", the first row of each head in its projection; None
            if the heads lie one after another.
        q_norm: Per-head norm of q, applied over d; None for no norm.
        k_norm: Per-head norm of k, applied over d; None for no norm.
        norm_last: Whether the norms come after ``rope``.
        rope: ``rope(x, position_embeddings)`` rotates x [b, s/P, h_g, d], before the exchange; None
            without RoPE. For other functions than a `Rotary`, q, k and v are projected whole.
        sequence_process_group: The sp group; None only in a world of one rank.
        batch_first: Whether hidden states are [b, s/P, m]; otherwise they are [s/P, b, m].
        config: An ``sp_overlap`` section.
        transport: The mover of bytes, ready for use (`Named.prepare` is not called); None for the
            transport that ``config`` names.
        name: Name of the layer, for errors and logs.
        policy: The policy that the model's layers share for "head_groups": "auto"; None for the
            policy that layers with this group and config share.
        plain: Forwards of linear layers that may be split, see `linear.can_split`.
        pure: Forwards of norms that backward may recompute, see `linear.can_recompute`.
        heads_alike: Whether the local attention treats all heads alike on all ranks; values for
            each head in a `PerHead` don't matter. If neither this argument nor
            `attention_function` declares that heads are alike, the layer runs in one head group.
        schedule: Makes a `Schedule`, as `schedule.by_head_groups` does; must be the same function
            on every rank. "window" and "checkpointing" in ``config`` need the default.

    Raises:
        ValueError: for modules or numbers of heads that don't fit together, or a wrong ``config``.
    """

    # Whether to run without a window, since some rank's modules allow none. Integrations set this.
    falls_back = False

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
        schedule: MakeSchedule = by_head_groups,
    ):
        self.heads, self.kv_heads, self.head_dim = num_heads, num_kv_heads or num_heads, head_dim
        self.local_attention, self.batch_first = local_attention, batch_first
        self.plain = plain
        parsed = SpOverlapConfig.parse(config or {}).of_own_layer()
        self.may_window = parsed.window_of(1) is not None
        # A window has a schedule of its own, which would silently replace the caller's.
        if schedule is not by_head_groups and self.may_window:
            raise ValueError(
                f"{name}: schedule= beside sp_overlap.window or checkpointing: such a layer "
                "makes q, k and v again in backward, in an order of its own "
                "(schedule.by_window); leave out one of the two"
            )
        self.inputs = InputModules(
            name,
            self.heads,
            self.kv_heads,
            head_dim,
            first_rows=first_rows,
            norm_last=norm_last,
            rope=rope,
            plain=plain,
            pure=pure,
        )
        sp_group = SPGroup(
            sequence_process_group, transport or parsed.transport, **parsed.of_sp_group
        )
        own = config_for(local_attention, parsed, heads_alike)
        self.layer = LayerRuntime(sp_group, own, name, policy, schedule)
        # `enable` passes a parsed config, and logs G itself.
        self.layer.tells = not isinstance(config, SpOverlapConfig)
        projections = dict(q_proj=q_proj, k_proj=k_proj, v_proj=v_proj, qkv_proj=qkv_proj)
        self.use(o_proj, **projections, q_norm=q_norm, k_norm=k_norm)
        self.layer.windowed = self.can_window()
        # A wrong number of heads would cut the projections at wrong rows. Only `nn.Linear` is known
        # to have its sizes as attributes.
        sizes = {
            "q_proj.out_features": (q_proj, self.heads),
            "k_proj.out_features": (k_proj, self.kv_heads),
            "v_proj.out_features": (v_proj, self.kv_heads),
            "qkv_proj.out_features": (qkv_proj, self.heads + 2 * self.kv_heads),
            "o_proj.in_features": (o_proj, self.heads),
        }
        for size, (module, heads) in sizes.items():
            expected = actual = heads * head_dim
            if type(module) is nn.Linear and (first_rows is None or module is o_proj):
                actual = getattr(module, size.split(".")[1])
            if actual != expected:
                raise ValueError(
                    f"{name}: {size} is {actual}, but {self.heads} query and {self.kv_heads} KV "
                    f"heads of {head_dim} make it {expected}; mend the layer, or num_heads=, "
                    "num_kv_heads= and head_dim="
                )

    def use(self, o_proj: Any, **inputs: Any) -> None:
        """Set the modules for the calls that follow.

        Integrations call this before each call of the layer, since adapters may replace modules at
        any time.

        Args:
            o_proj: The output projection.
            **inputs: The projections and norms of q, k and v, see `InputModules.use`.
        """
        self.o_proj = o_proj
        self.inputs.use(**inputs)

    def split_projections(self) -> list[nn.Module]:
        """Return the projections that are computed part by part, see Note [Called whole].

        The list holds all projections of q, k and v or none of them.
        """
        inputs, output = self._split_ends()
        split = list(self.inputs.projections) if inputs else []
        return split + [self.o_proj] if output else split

    def _split_ends(self) -> tuple[bool, bool]:
        """Return whether q, k and v are projected part by part, and whether o is."""
        if not self.layer.config.projections:
            return False, False
        return self.inputs.can_split(), can_split(self.o_proj, self.plain)

    def can_window(self) -> bool:
        """Return whether the layer, with its current modules, can run with a window."""
        # All projections must be split, since the backward of a window recomputes q, k and v.
        return not self.falls_back and all(self._split_ends())

    # Not `torch.compiler.disable`, which would import torch._dynamo here and take a second.
    @torch._disable_dynamo
    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        sequence_lengths: list[int] | None = None,
        query_chunks: QueryChunks | None = None,
        baseline: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the global sequence.

        Collective.

        Args:
            hidden_states: [b, s/P, m] if ``batch_first``, else [s/P, b, m].
            *args: More arguments for ``local_attention``, which is called once per head group.
            position_embeddings: The second argument of ``rope``, for this rank's positions.
            sequence_lengths: Local sequence length of every rank; None if all are the same.
            query_chunks: Where ranks share query heads (`Geometry`): for each share, the ranges of
                tokens whose queries belong to the share; None for two chunks of the sequence per
                share.
            baseline: Computes the layer's output from ``hidden_states`` without overlap; the policy
                may choose to run the baseline. None for no baseline.
            **kwargs: More keyword arguments for ``local_attention``.

        Returns:
            The output of ``o_proj``, in the layout of ``hidden_states``; or (output, bias) if
            ``o_proj`` returns such a pair.

        Raises:
            ValueError: for arguments that don't fit. In the layer's first call, all ranks raise.
        """
        tokens = Tokens(self.batch_first, sequence_lengths, query_chunks)
        local = LocalAttention(self.local_attention, args, kwargs)
        return self.layer.run(
            partial(self._geometry, hidden_states, tokens, local),
            partial(self._types, hidden_states, position_embeddings),
            (hidden_states,),
            partial(self._overlapped, position_embeddings, local),
            baseline,
        )

    def _overlapped(
        self, position_embeddings: Any, local: LocalAttention, call: Call, hidden_states: Tensor
    ) -> Tensor:
        """Run the layer in the order of its schedule.

        With a window, the layer is one node of autograd (`_windowed`). Otherwise, one node projects
        q, k and v part by part, or their projections are called whole. Likewise, a node runs the
        output projection, or the output projection is called whole.
        """
        tables = self.inputs.tables(position_embeddings)
        splits_inputs, splits_output = self._split_ends()
        # If a table needs a gradient, ``tables`` is None: call projections whole, so that autograd
        # sees the rotation.
        splits_inputs = splits_inputs and tables is not None
        attend = local.bind(call.geometry)
        ends = {}
        project = None
        window = self.layer.config.window_of(call.geometry.groups)
        if window is not None and splits_inputs and splits_output and not self.falls_back:
            call.schedule = schedule_of(call.geometry, window, self.layer.config.wgrad)
            call.local, call.attend, call.agree = local, attend, self.layer.agree_on_o
            ends[""] = self._windowed(call, tables or ())
        else:
            self.layer.warn_if_window_is_ignored()
            of_kernels = self.inputs.tables_of_kernels(call, hidden_states, position_embeddings)
            call.rope_tables = of_kernels
            call.by_rank = self._by_rank(call, hidden_states, splits_inputs, splits_output)
            if splits_inputs:
                ends["inputs"] = self._inputs(call, tables or ())
            else:
                project = self.inputs.whole(call, hidden_states, position_embeddings)
            if splits_output:
                ends["output"] = self._output()
        walk = Walk(call, attend, project, ends=ends)
        walk.values["x"] = hidden_states
        walk.run()
        if splits_output:
            return returned_by(self.o_proj, self.plain, walk.values["y"])
        return self.o_proj(join_heads(call, walk.values).flatten(2))

    def _inputs(self, call: Call, tables: tuple[Tensor, ...]) -> End:
        """Return the projections of q, k and v as an `End`; ``tables`` rotate q and k."""
        projections = call.projections = self.inputs.of_call(call)
        names = projections.cuts.names(len(tables))
        return End(
            projections.modules, names, lambda: [*projections.parameters(), *tables, call.empty]
        )

    def _output(self) -> End:
        """Return the output projection as an `End`."""
        tensors = partial(products_of, [self.o_proj], self.plain)
        return End([self.o_proj], ("token", ("weight", "o"), ("bias", "o")), tensors)

    def _windowed(self, call: Call, tables: tuple[Tensor, ...]) -> End:
        """Set up a call that runs with a window; return all projections as one `End`.

        In such a call no packing kernel rotates, and no GEMM writes in the send buffer's order: a
        tensor may travel alone in forward, and together with others when backward recomputes it.
        """
        config = self.layer.config
        # A window reads the states of random generators on the host, which no CUDA graph records.
        self.layer.refuse_graph("sp_overlap.window and checkpointing")
        if config.saves_attention:
            call.checkpoint = current_pass(self.layer.where, config.keeps_where_possible)
        call.offloads = config.checkpointing == "offload"
        # Local attention does not read the parameters of projections and norms.
        inputs, output, local = self._inputs(call, tables), self._output(), call.local
        modules = inputs.modules + output.modules
        around = [module for module in modules if isinstance(module, nn.Module)]
        local.begin(call.geometry.seq_dim, self.layer.where, around)
        learned = tuple([("learned", index) for index in range(len(local.learned))])
        names = inputs.names + output.names[1:] + learned
        return End(modules, names, lambda: inputs.tensors() + output.tensors() + local.learned)

    def project_locally(self, x: Tensor, position_embeddings: Any) -> list[Tensor]:
        """Project hidden states to q, k and v without any exchange.

        Integrations compare the result with q, k and v of the model's own forward. Not collective.

        Args:
            x: Hidden states of this rank.
            position_embeddings: The second argument of ``rope``.

        Returns:
            q, k and v of this rank's own tokens, with all heads, [b, s/P, h, d] or
            [s/P, b, h, d].
        """
        batch, seq = x.shape[:2] if self.batch_first else (x.shape[1], x.shape[0])
        # A geometry of one rank, so that nothing is exchanged.
        geometry = Geometry(1, 0, (seq,), batch, self.heads, self.kv_heads, 1, self.batch_first)
        schedule = by_head_groups(geometry.kinds, True)
        call = Call(SPGroup(None), geometry, schedule, where=self.layer.where, x=x)
        project = self.inputs.whole(call, x, position_embeddings)
        return [project(kind, 0) for kind in "qkv"]

    def _by_rank(
        self, call: Call, x: Tensor, splits_inputs: bool, splits_output: bool
    ) -> frozenset[str]:
        """Return the kinds (q, k, v, o) that a batched GEMM writes in the send buffer's order.

        No kernel needs to pack such tensors (`slices.by_rank`). For o, the GEMM computes do. A
        batched GEMM is used where a group's slices of the weight lie apart, since it need not copy
        the slices. See `_split_ends` for ``splits_inputs`` and ``splits_output``.
        """
        sliced = call.geometry.in_slices
        # With ``first_rows``, a single strided view may not be able to hold the rows of a group.
        if not sliced or self.inputs.first_rows is not None or batched_is_slow(x):
            return frozenset()
        by_rank = sliced if splits_inputs else frozenset()
        if call.rope_tables is not None:
            # The kernel that packs q and k also rotates them.
            by_rank -= {"q", "k"}
        return by_rank | {"o"} if "q" in sliced and splits_output else by_rank

    def _geometry(self, hidden: Tensor, tokens: Tokens, local: LocalAttention) -> Geometry:
        """Return the geometry of a call, or raise ValueError for arguments that don't fit.

        Args:
            hidden: Hidden states, [b, s/P, m] or [s/P, b, m].
            tokens: The tokens of the call.
            local: The local attention.
        """
        if hidden.dim() != 3:
            raise ValueError(
                f"hidden_states must be 3-D, [b, s/P, m] or [s/P, b, m], got {list(hidden.shape)}"
            )
        heads, attend = (self.heads, self.kv_heads), local.attention
        return geometry_of(self.layer, hidden, heads, tokens, attend=attend, extra=local.extra)

    def _types(self, hidden: Tensor, position_embeddings: Any) -> tuple:
        """Return further values that must be equal on all ranks.

        Raises:
            ValueError: if ``position_embeddings`` don't fit ``rope``.
        """
        self.inputs.tables(position_embeddings)
        grads = [
            torch.is_grad_enabled() and (hidden.requires_grad or trained)
            for trained in self.inputs.learns()
        ]
        # With a window, backward makes other exchanges, and a hook could prevent the window on one
        # rank alone. So the ranks compare.
        windowed = "projections in parts for a window", self.may_window and self.can_window()
        return str(hidden.dtype), self.head_dim, ("gradients of q, k, v", grads), windowed
