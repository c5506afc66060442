"""Makes the calls of an attention layer, of whatever kind, once the ranks have agreed on them.

Note [Agreement of the ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that exchange different things hang, or train on wrong numbers. So the ranks compare what they
are about to do before anything is exchanged, and a fault of one rank becomes the same ValueError on
all ranks. The comparison costs a collective that the host waits for, so it is made for the first
call of a layer only, or for the first call of a kind (`agree_on_o`); later calls use its outcome.
Whatever decides about such a comparison is therefore the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor

from ..autotune.policy import Policy
from ..autotune.trial import Candidate
from ..config import SpOverlapConfig
from ..exchange.copy_engines import CopyEngine
from ..exchange.geometry import Geometry
from ..exchange.sp_group import SPGroup
from ..exchange.streams import refuse_captured
from ..profiling.steps import in_checkpoint
from ..profiling.timed import TimedCall
from ..profiling.timeline import Timeline
from ..relayout import ops
from ..schedule import Schedule, by_head_groups, check
from ..warn import inform, warn_once
from .runtime.execution import Call

# Makes a schedule of what travels with each head group, and of whether the output projection's
# wgrads come last.
MakeSchedule = Callable[[tuple[str, ...], bool], Schedule]
# Gives the geometry of a call, or refuses its arguments.
FindGeometry = Callable[[], Geometry]
# Gives whatever else must be the same on all ranks: dtypes, head dims, which gradients are needed.
FindTypes = Callable[[], tuple]


@lru_cache(maxsize=256)
def _checked(make_schedule: MakeSchedule, kinds: tuple[str, ...], wgrad_last: bool) -> Schedule:
    """Make a schedule; raise ValueError if a layer can't run by it.

    ``kinds`` are what travels with each head group, as in `Geometry.kinds`.
    """
    return check(make_schedule(kinds, wgrad_last), kinds)


# The policies of layers of one's own, which choose together over one group with one config. They
# outlive the layers, which ranks free at different times: later layers join them on all ranks.
_policies: dict[tuple, Policy] = {}
# What was logged for such layers.
_told: set[str] = set()


def _policy_of(config: SpOverlapConfig, sp_group: SPGroup) -> Policy | None:
    """Return the policy of a layer that `enable` does not know; None where nothing is chosen."""
    key = sp_group.group, config.model_dump_json()
    policy = _policies.get(key) or Policy.of(config, sp_group)
    if policy is not None:
        _policies[key] = policy
    return policy


class LayerRuntime:
    """Makes the `Call`s of one layer; all kinds of attention layer share it.

    Args:
        sp_group: The sp group.
        config: The ``sp_overlap`` section.
        where: Name of the layer, for errors and logs.
        policy: Shared with the other layers of the model; None for a policy of its own.
        schedule: Makes the schedule.

    Attributes:
        agreed: Whether the ranks have agreed on a call, see Note [Agreement of the ranks].
        windowed: Whether the layer could have a window when it was made, which decides G where the
            section gives the window alone.
    """

    # Whether the first call logs what the layer got. `enable` reports its own layers itself.
    tells = False

    def __init__(
        self,
        sp_group: SPGroup,
        config: SpOverlapConfig,
        where: str,
        policy: Policy | None = None,
        schedule: MakeSchedule = by_head_groups,
    ):
        self.sp_group, self.config, self.where, self.schedule = sp_group, config, where, schedule
        self.policy = policy or _policy_of(config, sp_group)
        # The place among the layers of the policy, which try different candidates in one step.
        self.index = self.policy.join() if self.policy else 0
        Timeline.of(config, sp_group)
        self.agreed = self.windowed = False
        # The name by which the ranks compare calls; it counts the layers that were called.
        self._name_of_calls = where
        # For each number of query and KV heads, r and the default G: what the attention supports is
        # looked up once.
        self.shares_and_groups: dict[tuple[int, int], tuple[int, int]] = {}
        # For each kind of call, whether the backward of attention reads o on any rank.
        self._reads_o: dict[tuple, bool] = {}
        # What of the section no CUDA graph can hold, in words.
        no_graph = {
            "sp_overlap.timeline": config.timeline is not None,
            "sp_overlap.kv_once_per_node": config.kv_once_per_node,
            'sp_overlap.transport "copy_engine"': isinstance(sp_group.transport, CopyEngine),
        }
        self._no_graph = ", ".join(key for key, is_given in no_graph.items() if is_given)

    def __deepcopy__(self, memo: dict) -> LayerRuntime:
        # A process group can't be copied, so the copy exchanges over the same one. Its place in the
        # policy is its own.
        copy = LayerRuntime(self.sp_group, self.config, self.where, self.policy, self.schedule)
        copy.windowed = self.windowed
        return copy

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self.where}: an attention layer over a process group can't be pickled; "
            "save its state_dict()"
        )

    def begin(
        self,
        geometry_of_call: FindGeometry,
        types: FindTypes,
        inputs: tuple[Tensor, ...],
        has_baseline: bool = False,
    ) -> tuple[TimedCall, Call | None]:
        """Begin a call, with the number of head groups that the policy chooses.

        Collective as `call` and `Calls.count` are.

        Args:
            geometry_of_call: Gives the geometry.
            types: Gives what else is compared; asked where the ranks compare their calls.
            inputs: The tensors that the layer works on.
            has_baseline: Whether a baseline computes the same without overlap.

        Returns:
            The clock of the call, whose ``inputs`` the layer must use, and whose ``end`` it must
            call with its output; and the call, or None where the baseline is to run.

        Raises:
            RuntimeError: while a CUDA graph is captured that can't hold the call; and as
                `Calls.count` does.
            ValueError: as `call` does.
        """
        if self._no_graph:
            self.refuse_graph(self._no_graph)
        self.sp_group.refuse_destroyed(self.where)
        call = self.call(geometry_of_call, types)
        # Only here: one rank's input may be no tensor, of which all learn in the first call.
        side = self.sp_group.sides.get(inputs[0].device)
        if side is not None and side.blocks:
            self.refuse_graph("exchanges by gloo")
        self.sp_group.calls.count(self.sp_group, self._name_of_calls, inputs[0].device)
        # The baseline is stock attention, which needs a query head for each rank.
        has_baseline = has_baseline and call.geometry.heads >= call.geometry.sp_size
        least = 1
        if self.windowed and self.config.window is not None:
            # Stock, and fewer groups of which a window holds as many, hold more than the default.
            has_baseline, least = False, call.geometry.groups
        policy, geometry, run = self.policy, call.geometry, TimedCall(inputs)
        # G; or "off" for the baseline.
        candidate: Candidate = geometry.groups
        if policy is not None:
            trial = policy.trial(geometry, inputs[0], has_baseline, least)
            if trial is not None:
                candidate = trial.candidate(self.index)
                tokens = geometry.batch * sum(geometry.seq_lens)
                policy.follow(run, trial, candidate, tokens=tokens)
        if isinstance(candidate, str):
            return run, None
        if candidate != geometry.groups:
            call = self._call_of(geometry.in_groups(candidate), call.checked)
        call.window = self.config.window_of(candidate)
        call.begin(inputs[0])
        return run, call

    def refuse_graph(self, what: str) -> None:
        """Raise RuntimeError, on this rank, while a CUDA graph is captured; none can hold ``what``."""
        refuse_captured(self.where, f"{what} can't work; capture without")

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

        Called after the forward of attention of a layer that recomputes q, k and v. Collective for
        the first call of a kind.

        Args:
            kind: The kind of the call, which is the same on every rank: the dtype, and whether
                autocast is on. Calls of one kind need one comparison of the ranks.
            reads_o: Whether the backward of attention reads o on this rank.
            foreign: A tensor that attention learns without being called with it, in words; empty
                for none.

        Returns:
            Whether the backward of attention reads o on any rank, in the first call of this kind.

        Raises:
            ValueError: if ``foreign`` isn't empty; on all ranks alike in the first call of a kind,
                later on this rank alone.
        """
        # In later calls, only ``foreign`` counts: `_reads_o` has the answer.
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

    def call(self, geometry_of_call: FindGeometry, types: FindTypes) -> Call:
        """Make a call; the arguments are those of `begin`.

        Collective on the layer's first call, and with ``sp_overlap.check`` on every call. See
        Note [Agreement of the ranks].

        Raises:
            ValueError: if an argument raises on any rank, or if the ranks differ; on all ranks
                alike where this is collective. Otherwise what an argument raises, on this rank.
        """
        is_first = not self.agreed
        if is_first or self.config.check:
            self.sp_group.agree(self.where, lambda: self._comparable(geometry_of_call(), types))
            self.sp_group.prepare()
            if self.config.kv_once_per_node:
                self.sp_group.find_nodes()
            if is_first:
                calls, self.agreed = self.sp_group.calls, True
                calls.layers += 1
                self._name_of_calls = f"{self.where} (layer {calls.layers})"
        # Once more, since the geometry depends on nodes that may have been found just now.
        geometry = geometry_of_call()
        if is_first and self.tells:
            self._tell(geometry)
        return self._call_of(geometry, is_first and self.config.check)

    def _tell(self, geometry: Geometry) -> None:
        """Log the start-up line of layers of one shape, once in a process."""
        got = f"G = {geometry.groups}"
        if self.policy is not None:
            got = f"G by timing in the first {self.policy.warmup_steps} steps"
        if not self.config.enabled:
            got = "off (enabled is false in its config)"
        heads = f"{geometry.heads} query and {geometry.kv_heads} KV heads"
        what = f"{heads} over {geometry.sp_size} ranks: {got}"
        if what not in _told:
            _told.add(what)
            inform(f"sp_overlap: {self.where}, and layers of one's own like it: {what}")

    def _call_of(self, geometry: Geometry, checked: bool) -> Call:
        """Make a call with this geometry and the schedule for it; ``checked`` as for `Call`."""
        schedule = _checked(self.schedule, geometry.kinds, self.config.wgrad)
        return Call(self.sp_group, geometry, schedule, self.where, checked=checked)

    def refuse(self, error: Exception) -> None:
        """Raise ``error``; on every rank, if this is the layer's first call.

        For arguments that are refused before `begin`. The other ranks, which call `begin`, then
        raise too instead of waiting.
        """

        def raising() -> NoReturn:
            raise error

        self.call(raising, raising)

    def _comparable(self, geometry: Geometry, types: FindTypes) -> str:
        """Return what must be the same on all ranks, in words.

        Args:
            geometry: Of the call.
            types: As for `begin`; it may raise ValueError.

        Raises:
            ValueError: if this rank can't run the layer; `SPGroup.agree` raises it on all ranks.
        """
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
        lengths = geometry.seq_lens if len(set(geometry.seq_lens)) > 1 else geometry.seq_lens[0]
        return (  # guard: same layer, same call
            f"sp_overlap {self.config.model_dump(exclude_defaults=True)}, "
            f"local sequence {lengths}, batch {geometry.batch}, "
            f"{geometry.heads} query and {geometry.kv_heads} KV heads, "
            f"{geometry.groups} head groups, {geometry.shares} shares {geometry.query_chunks}, "
            f"{'batch' if geometry.batch_first else 'sequence'} first, {types()}, "
            f"{'in an' if in_checkpoint() else 'in no'} activation checkpoint, "
            f"{self.where}, call {sp_group.calls.number + 1} over the sp group"
        )
