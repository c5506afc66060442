"""Makes the calls of an attention layer, of whatever kind, once the ranks have agreed on them.

Note [Agreement of the ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that exchange different things hang, or train on wrong numbers. So the ranks compare what they
are about to do before anything is exchanged, and a fault of one rank becomes the same ValueError on
all ranks. The comparison costs a collective that waits, so that it is made for the first call of a
layer only, or for the first call of a kind (`kind_of`); later calls use its outcome. Whatever
decides about such a comparison is therefore the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..autotune.choices import Candidates, candidates_of
from ..autotune.costs import LayerShape
from ..autotune.policy import Policy
from ..autotune.trial import candidates_for
from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry, QueryChunks, shares_for
from ..exchange.sp_group import SPGroup
from ..profiling.timed import TimedCall
from ..profiling.timeline import Timeline
from ..relayout import ops
from ..schedule import Schedule, Windowed, by_head_groups, check
from ..warn import warn_once
from .heads import Local, PerHead, differing_rank, probe_heads, takes_queries
from .runtime.execution import Call

# Makes a schedule of what travels with each head group, and of whether the output projection's
# wgrads come last.
MakeSchedule = Callable[[tuple[str, ...], bool], Schedule]
# Gives the geometry of a call, and a function that gives whatever else must be the same on all
# ranks: dtypes, head dims, which gradients are needed.
Describe = Callable[[], tuple[Geometry, Callable[[], tuple]]]

_geometry = lru_cache(maxsize=4096)(Geometry)
_regrouped = lru_cache(maxsize=4096)(lambda geometry, groups: replace(geometry, groups=groups))


@lru_cache(maxsize=256)
def _checked(make_schedule: MakeSchedule, kinds: tuple[str, ...], wgrad_last: bool) -> Schedule:
    """Make a schedule; raise ValueError if a layer can't run by it."""
    return check(make_schedule(kinds, wgrad_last), kinds)


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph."""
    # torch without CUDA can't answer the second question.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class LayerRuntime:
    """Makes the `Call`s of one layer; all kinds of attention layer share it.

    Args:
        sp_group: The sp group.
        config: The ``sp_overlap`` section.
        where: Name of the layer, for errors and logs.
        policy: Shared with the other layers of the model; None for a policy of its own.
        heads_alike: Whether the local attention is known to treat all heads alike; otherwise the
            first call probes it.
        schedule: Makes the schedule.

    Attributes:
        agreed: Whether the ranks have agreed on a call, see Note [Agreement of the ranks].
    """

    def __init__(
        self,
        sp_group: SPGroup,
        config: SpOverlapConfig,
        where: str,
        policy: Policy | None = None,
        heads_alike: bool = False,
        schedule: MakeSchedule = by_head_groups,
    ):
        self.sp_group, self.config, self.where = sp_group, config, where
        self.heads_alike, self.schedule = heads_alike, schedule
        self.policy = policy or Policy.of(config, sp_group)
        self.index = self.policy.join() if self.policy else 0
        sp_group.timeline = sp_group.timeline or Timeline.of(config, sp_group)
        self.agreed = False
        # The name by which the ranks compare calls; it counts the layers that were called.
        self._name_of_calls = where
        # For each kind of call, whether attention may be called with some of a rank's heads.
        self._may_group: dict[tuple, bool] = {}
        # For each kind of call, whether the backward of attention reads o on any rank.
        self._reads_o: dict[tuple, bool] = {}

    def __deepcopy__(self, memo: dict) -> LayerRuntime:
        # A copied layer exchanges over the same group.
        return LayerRuntime(
            self.sp_group,
            self.config,
            self.where,
            policy=self.policy,
            heads_alike=self.heads_alike,
            schedule=self.schedule,
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self.where}: an attention layer over a process group can't be pickled; "
            "save its state_dict()"
        )

    def begin(
        self,
        describe: Describe,
        inputs: tuple[Tensor, ...],
        local: Callable[[], Local] | None,
        has_baseline: bool,
        head_dim: int = 0,
    ) -> tuple[TimedCall, Call | None]:
        """Begin a call, with the number of head groups that the policy chooses.

        Collective on the first call, see Note [Agreement of the ranks].

        Args:
            describe: Describes the call.
            inputs: The tensors that the layer works on.
            local: Gives the local attention of the call; None where the local attention is known to
                treat all heads alike.
            has_baseline: Whether a baseline computes the same without overlap.
            head_dim: ``d`` of a layer that can run by a window; 0 for other layers.

        Returns:
            The clock of the call, whose ``inputs`` the layer must use; and the call, or None where
            the baseline is to run.
        """
        call = self.counted_call(describe, inputs, local)
        # Stock attention needs a query head for each rank.
        has_baseline = has_baseline and call.geometry.heads >= call.geometry.sp_size
        timeline, device = self.sp_group.timeline, inputs[0].device
        run = TimedCall(inputs)
        if timeline is not None and timeline.recording():
            run.timed(timeline.layer(self.where, device))
        policy, geometry = self.policy, call.geometry
        candidates = None
        if self.config.memory == "auto":
            off = has_baseline and not (policy and policy.replicas)
            candidates = self._candidates(geometry, inputs[0], head_dim, off=off)
        candidate = geometry.groups if candidates is None else candidates.default
        trial = None
        if policy is not None:
            trial = policy.trial(geometry, inputs[0], has_baseline, tried=candidates)
        if policy is not None and trial is not None:
            candidate = trial.candidate(self.index)
            tokens = geometry.batch * sum(geometry.seq_lens)
            policy.follow(run, trial, candidate, tokens=tokens)
        if isinstance(candidate, str):
            return run, None
        groups, window = candidate if isinstance(candidate, tuple) else (candidate, None)
        if groups != geometry.groups:
            call = self._call_of(_regrouped(geometry, groups), call.checked)
        call.window = window or self.config.window_of(groups)
        return run, call

    def _candidates(self, geometry: Geometry, x: Tensor, head_dim: int, off: bool) -> Candidates:
        """Choose the candidates where memory counts.

        All ranks that choose together get the same candidates and the same default.
        """
        config, policy, size = self.config, self.policy, geometry.sp_size
        fixed = geometry.groups if config.head_groups != "auto" or geometry.groups == 1 else None
        if not head_dim:
            # The memory that such a layer needs is not known, but more groups need less.
            ways = candidates_for(geometry.max_groups if fixed is None else 1, off)
            return Candidates(ways[::-1] if fixed is None else (fixed,), geometry.groups)
        # Lengths that vary are one shape to the policy. The lengths of replicas differ, and count
        # as long ones.
        local_seq, batch = 1 << (sum(geometry.seq_lens) // size).bit_length(), geometry.batch
        if policy and policy.replicas:
            local_seq, batch = 2**20, 1
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        shape = LayerShape(
            width=x.shape[-1],
            heads=geometry.heads,
            kv_heads=geometry.kv_heads,
            head_dim=head_dim,
            seq=local_seq * size,
            sp_size=size,
            batch=batch,
            element_bytes=dtype.itemsize,
            shares=geometry.shares,
        )
        return candidates_of(
            shape,
            fixed,
            config.window,
            again=config.checkpointing != "recompute",
            off=off,
            most=config.policy.warmup_steps // 2,
        )

    def counted_call(
        self, describe: Describe, inputs: tuple[Tensor, ...], local: Callable[[], Local] | None
    ) -> Call:
        """Make a call and count it; the arguments are those of `begin`.

        Returns:
            The call; in one head group where the local attention needs all heads at once.
        """
        if is_capturing():  # guard: no graph of a call
            raise RuntimeError(
                f"{self.where}: called while a CUDA graph is captured, but a layer waits on the "
                "host (to compare calls over the ranks), which no graph can hold; capture what "
                "lies around the layer, or switch the overlap off (ds_sp_overlap.disable)"
            )
        call = self.call(describe)
        if local is not None and call.geometry.groups > 1 and not self.heads_alike:
            if not self._may_call_by_group(call, inputs, local):  # guard: heads alike
                call = self._call_of(_regrouped(call.geometry, 1), call.checked)
        self.sp_group.calls.count(self.sp_group, self._name_of_calls, inputs[0].device)
        if self.sp_group.timeline is not None:
            self.sp_group.timeline.look()
        return call

    def _may_call_by_group(
        self, call: Call, inputs: tuple[Tensor, ...], local: Callable[[], Local]
    ) -> bool:
        """Return whether the local attention may be called group by group.

        Probed on all ranks for the first call of a kind, see Note [Agreement of the ranks].
        """
        device, kind = inputs[0].device, kind_of(call, inputs)
        if kind not in self._may_group:
            attention = local()
            form = partial(with_head_dim, where=self.where)
            probed = probe_heads(call, attention, device, form=form)
            faults, norms = zip(*self.sp_group.gather(probed, self.where))
            fault = "; ".join(  # guard: what any rank found
                f"sp rank {rank}: {text}" for rank, text in enumerate(faults) if text
            )
            fault = fault or differing_rank(norms, attention.dtype)  # guard: alike on all ranks
            self._may_group[kind] = not fault
            if fault:
                warn_once(
                    f"sp_overlap: {attention.name}, called with some of a rank's heads at a time, "
                    f"is not what it is over all of them, and runs in one head group ({fault}). "
                    "If it treats all heads alike, say so with heads_alike=True"
                )
        return self._may_group[kind]

    def warn_if_window_is_ignored(self) -> None:
        """Warn once if the section asks for a window, in a layer that can't recompute q, k, v."""
        if self.config.window_of(1) is not None:
            warn_once(
                "sp_overlap: window and checkpointing need projections that are computed part by "
                "part; a layer whose projections can't be (adapters, hooks, RoPE that learns, "
                "DistributedAttention between the caller's own) holds all head groups until "
                "backward"
            )

    def agree_on_o(self, kind: tuple, reads_o: bool, foreign: str) -> bool:
        """Agree whether o travels again in backward.

        Collective for the first call of a kind.

        Args:
            kind: The kind of the call (`kind_of`).
            reads_o: Whether the backward of attention reads o on this rank.
            foreign: A tensor that attention learns without being called with it, in words; empty
                for none.

        Returns:
            Whether the backward of attention reads o on any rank, in the first call of this kind.

        Raises:
            ValueError: if ``foreign`` isn't empty; on all ranks alike in the first call of a kind.
        """
        answers = [(False, foreign)]
        if kind not in self._reads_o:
            answers = self.sp_group.gather((reads_o, foreign), self.where)
        learned = next((text for _, text in answers if text), "")
        if learned:  # guard: no gradient is lost
            raise ValueError(
                f"{self.where}: local attention learns {learned}, which it is not called with; "
                "with sp_overlap.window or checkpointing give it as an argument (PerHead for one "
                "slice a head), or as a module with parameters"
            )
        return self._reads_o.setdefault(kind, any(reads for reads, _ in answers))

    def call(self, describe: Describe) -> Call:
        """Make a call with the geometry that ``describe`` gives.

        Collective on the layer's first call, and with ``sp_overlap.check`` on every call. See
        Note [Agreement of the ranks].

        Raises:
            ValueError: on all ranks alike, if ``describe`` raises on one of them, or if the ranks
                differ.
        """
        is_first = not self.agreed
        if is_first or self.config.check:
            self.sp_group.agree(self.where, lambda: self._comparable(*describe()))
            self.sp_group.prepare()
            if self.config.kv_once_per_node:
                self.sp_group.find_nodes()
            if is_first:
                calls, self.agreed = self.sp_group.calls, True
                calls.layers += 1
                self._name_of_calls = f"{self.where} (layer {calls.layers})"
        geometry, _ = describe()
        return self._call_of(geometry, is_first and self.config.check)

    def _call_of(self, geometry: Geometry, checked: bool) -> Call:
        schedule = _checked(self.schedule, geometry.kinds, self.config.wgrad)
        if isinstance(schedule, Windowed) and schedule.last_use != geometry.last_use:
            raise ValueError(
                "schedule= makes a Windowed whose KV heads are used last by the groups "
                f"{schedule.last_use}, but here they are by {geometry.last_use}; give by_window "
                "those of the layer's heads"
            )
        return Call(self.sp_group, geometry, schedule, self.where, checked=checked)

    def refuse(self, error: Exception) -> None:
        """Raise ``error``; on every rank, if this is the layer's first call."""

        def describe() -> NoReturn:
            raise error

        self.call(describe)

    def _comparable(self, geometry: Geometry, types: Callable[[], tuple]) -> str:
        """Return what must be the same on all ranks, in words."""
        sp_group = self.sp_group
        world = dist.get_world_size() if sp_group.group is None and dist.is_initialized() else 1
        if world > 1:  # guard: ranks need a group
            raise ValueError(
                f"no sp group in a world of {world} ranks; pass sequence_process_group= once "
                "torch.distributed is initialised (torch.distributed.group.WORLD for all of them, "
                "a group of this rank alone for no sequence parallelism)"
            )
        # Here, so that all ranks refuse kernels that one rank can't use.
        ops.check_usable(sp_group.kernels)
        if sp_group.timeline is not None:
            sp_group.timeline.check()
        lengths = geometry.seq_lens if len(set(geometry.seq_lens)) > 1 else geometry.seq_lens[0]
        return (  # guard: same layer, same call
            f"sp_overlap {self.config.model_dump(exclude_defaults=True)}, "
            f"local sequence {lengths}, batch {geometry.batch}, "
            f"{geometry.heads} query and {geometry.kv_heads} KV heads, "
            f"{geometry.groups} head groups, {geometry.shares} shares {geometry.query_chunks}, "
            f"{'batch' if geometry.batch_first else 'sequence'} first, {types()}, "
            f"{self.where}, call {sp_group.calls.number + 1} over the sp group"
        )

    def geometry(
        self,
        x: Tensor,
        heads: int,
        kv_heads: int,
        batch_first: bool,
        lengths: list[int] | None,
        extra: tuple,
        attend: Callable[..., Any] | str,
        query_chunks: QueryChunks | None = None,
    ) -> Geometry:
        """Return the geometry of a call.

        Args:
            x: [b, s/P, ..] if ``batch_first``, else [s/P, b, ..].
            heads: ``h``.
            kv_heads: ``h_kv``.
            batch_first: Whether the batch comes before the sequence.
            lengths: Local sequence length of every rank, in tokens; None where all are that of
                ``x``.
            extra: Arguments of the local attention beside q, k and v. If one of them may have a
                slice for each head of a rank, there is one head group.
            attend: As for `shares_of`.
            query_chunks: As for `Geometry`; ignored where no ranks share query heads.

        Raises:
            ValueError: for a `PerHead` without a slice for each head, for ``lengths`` that don't
                fit, and as `Geometry` and `shares_of` do.
        """
        sp_group = self.sp_group
        batch, local_seq = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
        seq_lens: tuple[int, ...] = (local_seq,) * sp_group.size
        if lengths is not None:
            seq_lens = tuple(int(length) for length in lengths)
        shares = shares_of(self.config, sp_group.size, heads, kv_heads, attend)
        groups = self.config.groups_for(heads, max(1, sp_group.size // shares))
        for argument in extra:
            if isinstance(argument, PerHead):
                argument.check(heads)
        geometry = _geometry(
            sp_group.size,
            sp_group.rank,
            seq_lens,
            batch,
            heads,
            kv_heads,
            groups,
            batch_first,
            shares,
            query_chunks if shares > 1 else None,
            sp_group.nodes if self.config.kv_once_per_node else None,
        )
        if groups > 1 and extra:
            if _may_be_per_head(geometry, extra if self.heads_alike else tree_leaves(extra)):
                geometry = _regrouped(geometry, 1)
        if seq_lens[sp_group.rank] != local_seq:
            raise ValueError(
                f"sequence_lengths: {seq_lens[sp_group.rank]} for sp rank {sp_group.rank}, whose "
                f"local sequence has {local_seq} tokens; give every rank's own"
            )
        return geometry


def shares_of(
    config: SpOverlapConfig,
    sp_size: int,
    heads: int,
    kv_heads: int,
    attend: Callable[..., Any] | str,
) -> int:
    """Return how many ranks share query heads in a layer, r; see Note [Shares] in `geometry`.

    Args:
        config: The ``sp_overlap`` section.
        sp_size: ``P``.
        heads: ``h``.
        kv_heads: ``h_kv``.
        attend: The local attention; or the reason why it needs all queries at once.

    Raises:
        ValueError: if r is above 1, asked for or since there are more ranks than heads, and the
            layer can't attend with a share of the queries.
    """
    asked = config.shares
    shares = shares_for(sp_size, heads, kv_heads) if asked == "auto" else asked
    if shares == 1:
        return 1
    if isinstance(attend, str):
        lacks = attend
    elif config.transport == "copy_engine":
        lacks = 'sp_overlap.transport "copy_engine" moves equal parts only'
    elif not takes_queries(attend):
        name = getattr(attend, "__qualname__", type(attend).__name__)
        lacks = (
            f"{name} has no parameter queries=, a range (a, b) of the tokens that it is called with"
        )
    else:
        return shares
    if asked == "auto" and heads >= sp_size:
        return 1
    why = f"sp_overlap.shares is {asked}"
    if asked == "auto":
        why = f"{heads} query heads are fewer than {sp_size} ranks"
    raise ValueError(  # guard: no attention with a share of the queries unless it can
        f"{why}, so that {shares} ranks would share query heads; but {lacks}; use sp size {heads} "
        "or less" + ("" if asked == "auto" else ', or sp_overlap.shares "auto"')
    )


def _may_be_per_head(geometry: Geometry, extra: Iterable) -> bool:
    """Return whether some tensor may have a slice for each head of a rank (a bias, slopes).

    Head groups would misuse such a tensor. A dimension counts that is as long as some rank has
    heads, so that all ranks answer alike. A tensor that is suspected by mistake costs overlap only.
    """
    counts = {geometry.heads // geometry.parts, -(-geometry.heads // geometry.parts)}
    return any(isinstance(x, Tensor) and not counts.isdisjoint(x.shape) for x in extra)


def with_head_dim(o: Any, q: Tensor, where: str) -> Tensor:
    """Give the output of local attention a dimension for its heads.

    Args:
        o: The output for ``q``, with its heads in a dimension of their own or flattened into the
            last one.
        q: [.., .., h_g/P, d].
        where: Name of the layer, for errors.

    Returns:
        o as [.., .., h_g/P, d_v].

    Raises:
        ValueError: for anything else than such an output.
    """
    if not isinstance(o, Tensor):
        raise ValueError(f"{where}: local attention must return one tensor, got {type(o).__name__}")
    if o.shape == q.shape:
        return o
    heads = q.shape[2]
    if o.dim() == 3 and o.shape[-1] % heads == 0:
        o = o.unflatten(-1, (heads, -1))
    if o.dim() != 4 or o.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{where}: local attention of query {list(q.shape)} must return that shape (another "
            "head dim is fine), or the same with heads and head dim flattened, got "
            f"{list(o.shape)}"
        )
    return o


def kind_of(call: Call, inputs: tuple[Tensor, ...]) -> tuple:
    """Return the kind of a call: calls of one kind need one comparison of the ranks.

    The kind is the same on every rank.
    """
    geometry, first = call.geometry, inputs[0]
    sizes = geometry.heads, geometry.kv_heads, first.shape[-1], inputs[-1].shape[-1]
    return *sizes, first.dtype, torch.is_autocast_enabled(first.device.type)
