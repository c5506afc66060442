"""Runs the calls of all kinds of attention layers, after the ranks have compared these calls.

Note [Agreement of the ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that exchange different things hang, or train on wrong numbers. So the ranks compare their
calls before they exchange anything, and a fault of one rank becomes the same ValueError on all
ranks. The comparison costs a collective that the host waits for. So a layer compares in its
first call, and `agree_on_o` in the first call of each kind; later calls use the outcome. All ranks
must enter the collective together, so each condition for entering is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

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

# (kinds, wgrad_last) -> Schedule. The arguments are the kinds that travel with each head group
# (`Geometry.kinds`), and whether the wgrads of the output projection come last.
MakeSchedule = Callable[[tuple[str, ...], bool], Schedule]
# Returns the geometry of a call, or raises ValueError for its arguments.
FindGeometry = Callable[[], Geometry]
# Returns further values that must be equal on all ranks: dtypes, head dims, needed gradients.
FindTypes = Callable[[], tuple]


@lru_cache(maxsize=256)
def _checked(make_schedule: MakeSchedule, kinds: tuple[str, ...], wgrad_last: bool) -> Schedule:
    """Make a schedule and check it; raise ValueError if a layer can't run by it.

    The arguments after ``make_schedule`` are those of a `MakeSchedule`.
    """
    return check(make_schedule(kinds, wgrad_last), kinds)


# The policies of layers that the caller makes, without `enable`. Layers with the same group and
# the same config share a policy. The policies outlive the layers: ranks free layers at different
# times, and a later layer must join the same policy on all ranks.
_policies: dict[tuple, Policy] = {}
# The lines that were logged for layers that the caller makes.
_told: set[str] = set()


def _policy_of(config: SpOverlapConfig, sp_group: SPGroup) -> Policy | None:
    """Return the policy of a layer that the caller makes; None if the config leaves no choice."""
    key = sp_group.group, config.model_dump_json()
    policy = _policies.get(key) or Policy.of(config, sp_group)
    if policy is not None:
        _policies[key] = policy
    return policy


class LayerRuntime:
    """Runs the calls of one layer; all kinds of attention layer use this class.

    Args:
        sp_group: The sp group.
        config: The ``sp_overlap`` section.
        where: Name of the layer, for errors and logs.
        policy: The policy that the layers of the model share; None for the policy that layers with
            this group and config share.
        schedule: Makes the schedule of a call.

    Attributes:
        agreed: Whether the ranks have agreed on a call, see Note [Agreement of the ranks].
        windowed: Whether the layer could run with a window (`schedule.window`) when it was made. If
            the config sets a window but no number of head groups G, ``windowed`` decides G.
    """

    # Whether the first call logs G. For the layers that `enable` builds, `enable` logs G.
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
        # This layer's index among the layers of the policy. In one step, layers with different
        # indices may try different candidates.
        self.index = self.policy.join() if self.policy else 0
        Timeline.of(config, sp_group)
        self.agreed = self.windowed = False
        # The name by which the ranks compare calls. The first call adds a number to this name.
        self._name_of_calls = where
        # (h, h_kv) -> (the number of ranks that share query heads, default G). Cached, since the
        # first of the two depends on the signature of local attention, which is slow to read.
        self.shares_and_groups: dict[tuple[int, int], tuple[int, int]] = {}
        # For each kind of call, whether the backward of attention reads o on any rank.
        self._reads_o: dict[tuple, bool] = {}
        # The settings under which no CUDA graph can hold a call.
        no_graph = {
            "sp_overlap.timeline": config.timeline is not None,
            "sp_overlap.kv_once_per_node": config.kv_once_per_node,
            'sp_overlap.transport "copy_engine"': isinstance(sp_group.transport, CopyEngine),
        }
        self._no_graph = ", ".join(filter(no_graph.get, no_graph))

    def __deepcopy__(self, memo: dict) -> LayerRuntime:
        # A process group can't be copied, so the copy uses the same group. The copy joins the
        # policy as another layer.
        copy = LayerRuntime(self.sp_group, self.config, self.where, self.policy, self.schedule)
        copy.windowed = self.windowed
        return copy

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self.where}: an attention layer over a process group can't be pickled; "
            "save its state_dict()"
        )

    def run(
        self,
        geometry_of_call: FindGeometry,
        types: FindTypes,
        inputs: tuple[Tensor, ...],
        body: Callable[..., Any],
        baseline: Callable[..., Any] | None = None,
    ) -> Any:
        """Run a call, with the number of head groups that the policy chooses.

        Collective whenever `compare`, `Calls.count` or `Policy.trial` is collective.

        Args:
            geometry_of_call: Returns the geometry.
            types: Returns the other values that the ranks compare; called only when they compare.
            inputs: The input tensors of the layer.
            body: Takes the `Call` and ``inputs``; returns the output of the layer.
            baseline: Computes the layer's output from ``inputs`` without overlap; the policy may
                choose to run the baseline. None for no baseline.

        Returns:
            The output of the layer.

        Raises:
            RuntimeError: if a CUDA graph is being captured that can't hold the call; or if
                `Calls.count` finds that the ranks called different layers.
            ValueError: if the arguments don't fit or the ranks differ, see `compare`; or if the
                layer can't run by its schedule.
        """
        if self._no_graph:
            self.refuse_graph(self._no_graph)
        self.sp_group.refuse_destroyed(self.where)
        geometry, checked = self.compare(geometry_of_call, types)
        # Read the device only here, after `compare`, which raises on all ranks if an input of one
        # rank is no tensor.
        side = self.sp_group.sides.get(inputs[0].device)
        if side is not None and side.blocks:
            self.refuse_graph("exchanges by gloo")
        self.sp_group.calls.count(self.sp_group, self._name_of_calls, inputs[0].device)
        policy, run = self.policy, None
        # The baseline is stock attention, which needs a query head for each rank.
        has_baseline = baseline is not None and geometry.heads >= geometry.sp_size
        least = 1
        if self.windowed and self.config.window is not None:
            # The baseline would need more memory than the window. So would fewer groups, which are
            # larger: the window holds a fixed number of groups.
            has_baseline, least = False, geometry.groups
        # The number of head groups; or "off" for the baseline.
        candidate: Candidate = geometry.groups
        if policy is not None:
            trial = policy.trial(geometry, inputs[0], has_baseline, least)
            if trial is not None:
                candidate, run = trial.candidate(self.index), TimedCall(inputs)
                tokens = geometry.batch * sum(geometry.seq_lens)
                policy.follow(run, trial, candidate, tokens=tokens)
        if isinstance(candidate, str):
            assert baseline is not None and run is not None
            return run.end(baseline(*run.inputs))
        if candidate != geometry.groups:
            geometry = geometry.in_groups(candidate)
        schedule = _checked(self.schedule, geometry.kinds, self.config.wgrad)
        call = Call(
            self.sp_group, geometry, schedule, where=self.where, x=inputs[0], checked=checked
        )
        return body(call, *inputs) if run is None else run.end(body(call, *run.inputs))

    def refuse_graph(self, what: str) -> None:
        """Raise RuntimeError, on this rank, if a CUDA graph is being captured.

        ``what`` names the setting that does not work in a CUDA graph.
        """
        refuse_captured(self.where, f"{what} can't work; capture without")

    def warn_if_window_is_ignored(self) -> None:
        """Warn once if the config asks for a window; layers that run without a window call this."""
        if self.config.window_of(1) is not None:
            warn_once(
                "sp_overlap: window and checkpointing need projections that are computed part by "
                "part; a layer whose projections can't be (adapters, hooks, RoPE that learns, "
                "DistributedAttention between the caller's own) holds all head groups until "
                "backward"
            )

    def agree_on_o(self, kind: tuple, reads_o: bool, foreign: str) -> bool:
        """Let the ranks agree on whether o is exchanged again in backward.

        A layer that recomputes q, k and v calls this after the forward of its attention. Collective
        for the first call of a kind.

        Args:
            kind: The kind of the call, which is the same on every rank: the dtype, and whether
                autocast is on. The ranks compare once for each kind.
            reads_o: Whether the backward of attention reads o on this rank.
            foreign: A description of a tensor that needs a gradient through attention but is not an
                argument of the attention; empty for none.

        Returns:
            Whether the backward of attention reads o on any rank, in the first call of this kind.

        Raises:
            ValueError: if ``foreign`` isn't empty; on all ranks alike in the first call of a kind,
                later on this rank alone.
        """
        # In later calls `_reads_o` has the answer, and only this rank's ``foreign`` is checked.
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

    def compare(self, geometry_of_call: FindGeometry, types: FindTypes) -> tuple[Geometry, bool]:
        """Compare the ranks if needed; the arguments are those of `run`.

        Collective in the layer's first call, and with ``sp_overlap.check`` in every call. See
        Note [Agreement of the ranks].

        Returns:
            The geometry of the call, and whether to check all its exchanges.

        Raises:
            ValueError: in a collective call, on all ranks: if ``geometry_of_call`` or ``types``
                raises on some rank, or if the ranks differ. In other calls, on this rank: if
                ``geometry_of_call`` raises.
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
        # Compute the geometry again: it depends on the nodes that `find_nodes` may just have set.
        geometry = geometry_of_call()
        if is_first and self.tells:
            self._tell(geometry)
        return geometry, is_first and self.config.check

    def _tell(self, geometry: Geometry) -> None:
        """Log heads and head groups of the layer, once in a process for layers of one shape."""
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

    def refuse(self, error: Exception) -> None:
        """Raise ``error``, on every rank if this is the layer's first call.

        A layer that refuses its arguments calls this method instead of `run`. The other ranks,
        which call `run`, then raise too instead of waiting for this rank.
        """

        def raising() -> NoReturn:
            raise error

        self.compare(raising, raising)

    def _comparable(self, geometry: Geometry, types: FindTypes) -> str:
        """Return a text that must be the same on all ranks.

        Args:
            geometry: The geometry of the call.
            types: Returns the other values that the ranks compare; may raise ValueError.

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
        # Check here, so that all ranks raise if one rank can't use the kernels.
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
