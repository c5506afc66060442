"""What every attention layer shares: the sp group, the configuration, the agreement of the ranks,
the form of o.
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
from ..exchange.geometry import Geometry
from ..exchange.sp_group import SPGroup
from ..profiling.timed import TimedCall
from ..profiling.timeline import Timeline
from ..relayout import ops
from ..schedule import Block, Schedule, Windowed, by_head_groups, check
from ..warn import warn_once
from .heads import Local, PerHead, difference_of_ranks, fault
from .runtime.execution import Call

_geometry = lru_cache(maxsize=4096)(Geometry)
_regrouped = lru_cache(maxsize=4096)(lambda geometry, groups: replace(geometry, groups=groups))


@lru_cache(maxsize=256)
def _checked(
    schedule: Callable[[tuple[str, ...], bool], Schedule], kinds: tuple[str, ...], wgrad_last: bool
) -> Schedule:
    """What ``schedule`` makes. Raises ValueError where a layer can't run by it."""
    made = schedule(kinds, wgrad_last)
    if isinstance(made, Block):
        raise ValueError(
            "schedule= makes a Block, of which the MLP is a part that a layer by itself doesn't have; return a Schedule or a "
            'Windowed, or leave out schedule= and set sp_overlap.scope to "block"'
        )
    return check(made, kinds)


class LayerRuntime:
    """What both kinds of attention layer share: the sp group, the configuration, and the agreement
    of the ranks.

    policy        shared with the other layers of the model; one of its own if None
    heads_alike   the local attention is known to treat all heads alike, and not tried out
    schedule      what travels with each head group, whether wgrads of the output projection come
                  last -> what happens when
    """

    def __init__(
        self,
        sp_group: SPGroup,
        config: SpOverlapConfig,
        where: str,
        policy: Policy | None = None,
        heads_alike: bool = False,
        schedule: Callable[[tuple[str, ...], bool], Schedule] = by_head_groups,
    ):
        self.sp_group, self.config, self.where, self.heads_alike, self.schedule = (
            sp_group,
            config,
            where,
            heads_alike,
            schedule,
        )
        self.policy = policy or Policy.of(config, sp_group)
        self.index = self.policy.join() if self.policy else 0
        sp_group.timeline = sp_group.timeline or Timeline.of(config, sp_group)
        self.agreed, self.called = False, where
        self._divides: dict[
            tuple, bool
        ] = {}  # whether attention may be cut into head groups, by kind of call
        self._reads_o: dict[
            tuple, bool
        ] = {}  # whether the backward of attention that is not run again reads o, by kind of call

    def __deepcopy__(self, memo: dict) -> LayerRuntime:
        """Of the copy of a module: it exchanges over the same group."""
        return LayerRuntime(
            self.sp_group, self.config, self.where, self.policy, self.heads_alike, self.schedule
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self.where}: an attention layer over a process group can't be pickled; save its state_dict()"
        )

    def begin(
        self,
        describe: Callable[[], tuple[Geometry, Callable[[], tuple]]],
        inputs: tuple[Tensor, ...],
        local: Callable[[], Local] | None,
        has_baseline: bool,
        head_dim: int = 0,
    ) -> tuple[TimedCall, Call | None]:
        """Begin a `call` of this layer, with the head groups that the policy chooses; None where
        the baseline is to run.

        local          the local attention of the call; None where it is known to treat all heads
                       alike
        has_baseline   whether there is something that gives the same without overlap
        head_dim       d of a layer that can run by a window; 0 of others
        """
        call, timeline, device = (
            self.counted(describe, inputs, local),
            self.sp_group.timeline,
            inputs[0].device,
        )
        run = TimedCall(inputs)
        if timeline is not None and timeline.recording():
            run.timed(timeline.layer(self.where, device))
        policy, geometry = self.policy, call.geometry
        off = has_baseline and not (policy and policy.replicas)
        tried = (
            self._tried(geometry, inputs[0], head_dim, off)
            if self.config.memory == "auto"
            else None
        )
        trial = None if policy is None else policy.trial(geometry, inputs[0], has_baseline, tried)
        candidate = tried.default if tried is not None else geometry.groups
        if policy is not None and trial is not None:
            candidate = trial.candidate(self.index)
            policy.follow(run, trial, candidate, geometry.batch * sum(geometry.seq_lens))
        if isinstance(candidate, str):
            return run, None
        groups, window = candidate if isinstance(candidate, tuple) else (candidate, None)
        call = (
            call
            if groups == geometry.groups
            else self._made(_regrouped(geometry, groups), call.checked)
        )
        call.window = window or self.config.window_of(groups)
        return run, call

    def _tried(self, geometry: Geometry, x: Tensor, head_dim: int, off: bool) -> Candidates:
        """What is tried where memory counts, and what is taken until then or else; alike on all
        ranks that choose together.
        """
        config, policy, size = self.config, self.policy, geometry.sp_size
        fixed = geometry.groups if config.head_groups != "auto" or geometry.groups == 1 else None
        if not head_dim:  # what holds less is not known, but more groups hold less
            ways = candidates_for(geometry.max_groups if fixed is None else 1, off)
            return Candidates(ways[::-1] if fixed is None else (fixed,), geometry.groups)
        # Lengths that vary are one shape to the policy; those of replicas differ, and are all long.
        local = (
            2**20
            if policy and policy.replicas
            else 1 << (sum(geometry.seq_lens) // size).bit_length()
        )
        batch = 1 if policy and policy.replicas else geometry.batch
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        sizes = (
            x.shape[-1],
            geometry.heads,
            geometry.kv_heads,
            head_dim,
            local * size,
            size,
            batch,
            dtype.itemsize,
        )
        return candidates_of(
            LayerShape(*sizes),
            fixed,
            config.window,
            config.checkpointing != "recompute",
            off,
            config.policy.warmup_steps // 2,
        )

    def counted(
        self,
        describe: Callable[[], tuple[Geometry, Callable[[], tuple]]],
        inputs: tuple[Tensor, ...],
        local: Callable[[], Local] | None,
    ) -> Call:
        """A `call` of this layer, counted, in one head group where its local attention needs all
        heads at once.
        """
        call = self.call(describe)
        if (
            call.geometry.groups > 1
            and local
            and not self.heads_alike
            and not self._may_divide(call, inputs, local)
        ):  # guard: heads alike
            call = self._made(_regrouped(call.geometry, 1), call.checked)
        self.sp_group.calls.count(self.sp_group, self.called, inputs[0].device)
        if self.sp_group.timeline is not None:
            self.sp_group.timeline.look()
        return call

    def _may_divide(
        self, call: Call, inputs: tuple[Tensor, ...], local: Callable[[], Local]
    ) -> bool:
        """Whether the local attention may be called group by group; tried out for the first call of
        a kind, on all ranks.
        """
        device, kind = inputs[0].device, kind_of(call, inputs)
        if kind not in self._divides:
            attention = local()
            mine = fault(call, attention, device, partial(with_head_dim, where=self.where))
            found, norms = zip(*self.sp_group.gather(mine, self.where))
            seen = "; ".join(
                f"sp rank {rank}: {what}" for rank, what in enumerate(found) if what
            )  # guard: what any rank found
            seen = seen or difference_of_ranks(norms, attention.dtype)  # guard: alike on all ranks
            self._divides[kind] = not seen
            if seen:
                warn_once(
                    f"sp_overlap: {attention.name}, called with some of a rank's heads at a time, is not what it is over all of "
                    f"them, and runs in one head group ({seen}). If it treats all heads alike, say so with heads_alike=True"
                )
        return self._divides[kind]

    def holds_all(self) -> None:
        """Say of a layer that can't make q, k and v again in backward what that means, if it was
        asked to.
        """
        if self.config.window_of(1) is not None:
            warn_once(
                "sp_overlap: window and checkpointing need projections that are computed part by part; a layer whose projections can't be "
                "(adapters, hooks, RoPE that learns, DistributedAttention between the caller's own) holds all head groups until backward"
            )

    def reads_o(self, kind: tuple, mine: bool, learns: str) -> bool:
        """Whether o must travel again in backward: on one rank of the first call of a kind, then on
        all of them.

        kind     as `kind_of` tells
        learns   what attention learns and nobody was told of; refused on all ranks
        """
        found = (
            self.sp_group.gather((mine, learns), self.where)
            if kind not in self._reads_o
            else [(False, learns)]
        )
        if seen := next((what for _, what in found if what), ""):  # guard: no gradient is lost
            raise ValueError(
                f"{self.where}: local attention learns {seen}, which it is not called with; with sp_overlap.window or checkpointing give "
                "it as an argument (PerHead for one slice a head), or as a module with parameters"
            )
        return self._reads_o.setdefault(kind, any(reads for reads, _ in found))

    def call(self, describe: Callable[[], tuple[Geometry, Callable[[], tuple]]]) -> Call:
        """A call of this layer, of the geometry that ``describe`` gives.

        On the layer's first call (on every call with ``sp_overlap.check``) the ranks compare it
        first: a fault that one of them has, or a difference, is a ValueError on all of them before
        anything is exchanged.
        """
        first = not self.agreed
        if first or self.config.check:
            self.sp_group.agree(self.where, lambda: self._comparable(*describe()))
            self.sp_group.prepare()
            if first:
                self.sp_group.calls.layers += 1
                self.agreed, self.called = (
                    True,
                    f"{self.where} (layer {self.sp_group.calls.layers})",
                )
        geometry, _ = describe()
        return self._made(geometry, first and self.config.check)

    def _made(self, geometry: Geometry, checked: bool) -> Call:
        schedule = _checked(self.schedule, geometry.kinds, self.config.wgrad)
        if isinstance(schedule, Windowed) and schedule.last_use != geometry.last_use:
            raise ValueError(
                f"schedule= makes a Windowed whose KV heads are used last by the groups {schedule.last_use}, but here they are by "
                f"{geometry.last_use}; give by_window those of the layer's heads"
            )
        return Call(self.sp_group, geometry, schedule, self.where, checked)

    def refuse(self, error: Exception) -> None:
        """Raise ``error``, on the layer's first call on every rank."""

        def describe() -> NoReturn:
            raise error

        self.call(describe)

    def _comparable(self, geometry: Geometry, types: Callable[[], tuple]) -> str:
        world = (
            dist.get_world_size() if self.sp_group.group is None and dist.is_initialized() else 1
        )
        if world > 1:  # guard: ranks need a group
            raise ValueError(
                f"no sp group in a world of {world} ranks; pass sequence_process_group= once torch.distributed is initialised "
                "(torch.distributed.group.WORLD for all of them, a group of this rank alone for no sequence parallelism)"
            )
        ops.check_usable(self.sp_group.kernels)  # refused here, on every rank, where this one can't
        if self.sp_group.timeline is not None:
            self.sp_group.timeline.check()
        lengths = geometry.seq_lens if len(set(geometry.seq_lens)) > 1 else geometry.seq_lens[0]
        return (
            f"sp_overlap {self.config.model_dump(exclude_defaults=True)}, local sequence {lengths}, batch {geometry.batch}, "
            f"{geometry.heads} query and {geometry.kv_heads} KV heads, "
            f"{geometry.groups} head groups, {'batch' if geometry.batch_first else 'sequence'} first, {types()}, "
            f"{self.where}, call {self.sp_group.calls.number + 1} over the sp group"  # guard: same layer, same call
        )

    def geometry(
        self,
        x: Tensor,
        heads: int,
        kv_heads: int,
        batch_first: bool,
        lengths: list[int] | None,
        extra: tuple,
    ) -> Geometry:
        """Geometry of a call with ``x`` [s/P, b, ...], one head group where attention gets
        ``extra`` arguments per head.
        """
        sp_group = self.sp_group
        batch, local_seq = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
        seq_lens = (
            (local_seq,) * sp_group.size
            if lengths is None
            else tuple(int(length) for length in lengths)
        )
        groups = self.config.groups_for(heads, sp_group.size)
        for x in extra:
            if isinstance(x, PerHead):
                x.check(heads)
        geometry = _geometry(
            sp_group.size, sp_group.rank, seq_lens, batch, heads, kv_heads, groups, batch_first
        )
        if (
            groups > 1
            and extra
            and _per_head(geometry, extra if self.heads_alike else tree_leaves(extra))
        ):
            geometry = _geometry(
                sp_group.size, sp_group.rank, seq_lens, batch, heads, kv_heads, 1, batch_first
            )
        if seq_lens[sp_group.rank] != local_seq:
            raise ValueError(
                f"sequence_lengths: {seq_lens[sp_group.rank]} for sp rank {sp_group.rank}, whose local sequence has {local_seq} tokens; "
                "give every rank's own"
            )
        return geometry


def _per_head(geometry: Geometry, extra: Iterable) -> bool:
    """Whether some tensor may have one slice per head of a rank (a bias, slopes), which head groups
    would misuse.

    Asked for every rank's count of heads, so that all ranks answer alike; where it is wrong it
    costs some overlap.
    """
    counts = {geometry.heads // geometry.sp_size, -(-geometry.heads // geometry.sp_size)}
    return any(isinstance(x, Tensor) and not counts.isdisjoint(x.shape) for x in extra)


def with_head_dim(o: Any, q: Tensor, where: str) -> Tensor:
    """Local attention's output with its heads in a dimension of their own, ``[.., .., h_g/P, d]``."""
    if not isinstance(o, Tensor):
        raise ValueError(f"{where}: local attention must return one tensor, got {type(o).__name__}")
    if o.shape == q.shape:
        return o
    heads = q.shape[2]
    if o.dim() == 3 and o.shape[-1] % heads == 0:
        o = o.unflatten(-1, (heads, -1))
    if o.dim() != 4 or o.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{where}: local attention of query {list(q.shape)} must return that shape (another head dim is fine), or the "
            f"same with heads and head dim flattened, got {list(o.shape)}"
        )
    return o


def kind_of(call: Call, inputs: tuple[Tensor, ...]) -> tuple:
    """What tells kinds of calls apart, the same on every rank."""
    geometry, first = call.geometry, inputs[0]
    sizes = geometry.heads, geometry.kv_heads, first.shape[-1], inputs[-1].shape[-1]
    return *sizes, first.dtype, torch.is_autocast_enabled(first.device.type)
