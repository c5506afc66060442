"""Chooses the number of head groups by timing candidates in the first steps of training.

The candidates are: "off", the layer's own forward, if this forward computes the same output; and
G = 1, 2, 4 head groups, if there are enough heads. A layer runs one candidate for a whole optimizer
step. Within a step, the layers of a model run different candidates, so that disturbances of the
machine affect all candidates alike. With 4 candidates, none pruned, and warmup_steps = 16:

    step    | 0       | 1   2   3   4    | 5   6   7   8   9  10  11  12  13 .. 16 | 17 ...
    layer 0 | default | off G=1 G=2 G=4  | off G=1 G=2 G=4 off ...                 | the fastest
    layer 1 | default | G=1 G=2 G=4 off  | G=1 G=2 G=4 off G=1 ...                 | the fastest
            |         | untimed: warm-up | timed; each round prunes the slow       |

Calls that record a graph are timed: the forward, and the backward from the arrival of the output's
gradient to its end. Times are per token. The time on the slowest rank counts, since the other ranks
wait for the slowest rank.

Note [One candidate in forward and backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A layer's candidate never changes between a forward and its backward, as long as no optimizer of the
process steps between them. Otherwise the recompute in a checkpoint would differ from its forward.
(With gradient accumulation, several forwards wait for their backward at a time.) Trying begins
after the first optimizer step, for shapes that had a backward. So a program that doesn't train runs
the default.

Note [What ranks have in common]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks of an sp group launch the same exchanges only if they run the same candidate. But one rank may
have an optimizer of its own, make a step that the other ranks don't make, or free a model earlier.
So no collective may depend on such events. Only calls of layers and their backwards are the same on
all ranks of an sp group:

    backward of a layer           is noted (`Policy._back`); without one, ranks compare nothing
    optimizer step                is noted (`Policy.note_step`), without waiting
    first layer call after a      the ranks of the sp group compare whether every rank's optimizer
    backward                      has stepped (`Policy._look`). If so, the step is over, and each
                                  trial whose layers ran advances by one step

Note [Replicas]
~~~~~~~~~~~~~~~
With data parallelism the sp groups are replicas, each with its own batches. Ranks that reduce
gradients together must run the same candidate for the same layer in the same step, and choose the
same candidate: ZeRO reduces gradients in the order of their arrival, so replicas with different
orders would silently sum gradients of different parameters. (A test checks that every G delivers
gradients in the same order.) Replicas have no layer calls in common, since one replica may evaluate
alone. So each rank posts its measurements when its optimizer steps (`Board`), without waiting for
other ranks. The next layer call waits for the measurements of all ranks.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry
from ..exchange.sp_group import SPGroup
from ..exchange.streams import refuse_captured
from ..profiling.clocks import clock_of
from ..profiling.steps import in_backward, listen, listeners
from ..profiling.timed import TimedCall
from ..warn import by_rank, inform, say
from .trial import Candidate, Report, Shape, Trial, candidates_for, merged

# The seconds after which replicas stop waiting for ranks whose optimizers have not stepped.
WAIT_S = 60


class Board:
    """Collects the reports of all ranks of the world in a store, see Note [Replicas].

    The last rank to post its report for a step merges all reports. If a rank waits longer than
    `WAIT_S` for the merged report, it gives up for all ranks: it sets, instead of the merged
    report, the list of ranks that were late. The first of these two entries for a step is final.
    """

    # Counts policies; equal on every rank, since replicas make their policies in the same order.
    made = itertools.count()

    def __init__(self) -> None:
        # Typed as Any, since torch's stub of the store does not allow bytes.
        self.store: Any = dist.PrefixStore(
            f"sp_overlap policy {next(self.made)}", _get_default_store()
        )

    def tell(self, step: int, report: Report) -> None:
        """Post this rank's report for a step; merge all reports if this report is the last one.

        Called once in each optimizer step while candidates are timed.
        """
        keys = self._keys(step)
        self.store.set(keys[dist.get_rank()], pickle.dumps(report))
        if self.store.add(f"{step} told by", 1) == len(keys):
            reports = [pickle.loads(entry) for entry in self.store.multi_get(keys)]
            # Set the entry only if there is none yet: a rank may have given up in `told`.
            self.store.compare_set(str(step), "", pickle.dumps(merged(reports)))

    def told(self, step: int) -> dict | list[int]:
        """Wait for the merged report of a step, see `merged`.

        Returns:
            The merged report; or, if a rank gave up, the ranks that had not posted a report.
        """
        end = time.monotonic() + WAIT_S
        while not self.store.check([str(step)]):
            time.sleep(0.01)
            if time.monotonic() > end:
                keys = enumerate(self._keys(step))
                missing = [rank for rank, key in keys if not self.store.check([key])]
                self.store.compare_set(str(step), "", pickle.dumps(missing))
        return pickle.loads(self.store.get(str(step)))

    @staticmethod
    def _keys(step: int) -> list[str]:
        return [f"{step} of rank {rank}" for rank in range(dist.get_world_size())]


class Policy:
    """Chooses candidates for the layers of one model.

    Layers of the same `Shape` share a `Trial`. A call of a layer gets its trial from `trial`, runs
    the candidate that the trial returns, and passes its `TimedCall` to `follow`, for the times.

    Args:
        sp_group: The sp group, whose ranks choose together.
        warmup_steps: The limit on optimizer steps in which the layers of a shape try candidates.
        replicas: Whether there are several sp groups, each with its own batches; then all ranks of
            the world choose together.
    """

    # The functions that log the line about each choice, and the warning of `_give_up`.
    inform, warn = staticmethod(inform), staticmethod(say)

    def __init__(self, sp_group: SPGroup, warmup_steps: int, replicas: bool = False):
        self.sp_group, self.warmup_steps, self.replicas = sp_group, warmup_steps, replicas
        self.trials: dict[Shape, Trial] = {}
        self.board = Board() if replicas else None
        # Whether trying has ended for all shapes.
        self.over = False
        # The clock; the first call of `trial` makes it for the device of the layer.
        self.clock: Any = None
        self.step = self._layers = 0
        # Whether a layer had a backward in this step.
        self._back_since = False
        # Whether the next call compares the ranks: a backward came after the last comparison.
        self._due = False
        # Whether an optimizer has stepped in this step.
        self._stepped = False
        listen(self)

    @classmethod
    def of(
        cls, config: SpOverlapConfig, sp_group: SPGroup, gradient_group: Any = None
    ) -> Policy | None:
        """Make the policy that a config asks for.

        Args:
            config: The ``sp_overlap`` section.
            sp_group: The sp group.
            gradient_group: The ranks that reduce gradients together; None if unknown.

        Returns:
            The policy. None if the config leaves no choice; or if there are replicas, but not all
            ranks are known to reduce gradients together, so that replicas can't choose together.
        """
        if not config.times_groups or sp_group.size == 1:
            return None
        world = dist.get_world_size()
        replicas = world > sp_group.size
        if replicas and (gradient_group is None or dist.get_world_size(gradient_group) < world):
            return None
        return cls(sp_group, config.policy.warmup_steps, replicas)

    def join(self) -> int:
        """Count one more layer; return its index, for `Trial.candidate`."""
        self._layers += 1
        return self._layers - 1

    def trial(self, geometry: Geometry, x: Tensor, off: bool, least: int = 1) -> Trial | None:
        """Return the trial for a call.

        Collective in the first call after a backward (`_look`).

        Args:
            geometry: Geometry of the call; its number of head groups is the default G.
            x: The first input of the layer. Its dtype, and its dims after batch and sequence, are
                part of the shape that identifies the trial.
            off: Whether the layer's own forward is a candidate.
            least: The smallest G that is a candidate.

        Returns:
            The trial; None if the call is to run its default: if trying ended before this shape had
            a trial, or if the shape has a single candidate and no replicas wait for this rank.
        """
        self._look()
        # A default G of 1: the call allows no more groups, for instance with arguments per head.
        most = geometry.max_groups if geometry.groups > 1 else 1
        # Replicas get no "off": some batches don't allow "off", and replicas differ in batches.
        candidates = candidates_for(most, off and not self.replicas, least)  # guard: no stock
        # With replicas, return a trial even if there is no choice: its calls must be followed,
        # since the other ranks wait for this rank's steps.
        if len(candidates) == 1 and (self.over or not self.replicas):
            return None
        shape = _shape(geometry, x.shape[2:], x.dtype, candidates, self.replicas)
        if shape not in self.trials:
            # After trying has ended, make no trial: the other replicas may not have this shape.
            if self.over:
                return None
            self.trials[shape] = Trial(shape, self.warmup_steps)
        self.clock = self.clock or clock_of(x.device)
        return self.trials[shape]

    def _back(self, trial: Trial, _: Tensor) -> None:
        """Note that the backward of a call has begun, see Note [What ranks have in common].

        This is a hook on the call's output. ``trial`` is the trial of the call.
        """
        trial.met = self.step
        self._back_since = self._due = True

    def note_step(self) -> None:
        """Note that an optimizer of this process has stepped.

        Only the first optimizer step after a layer's backward has an effect. This method then marks
        this rank as stepped, for the comparison in `_look`, and posts the rank's report (`Board`).
        """
        if self._back_since and not self._stepped:
            self._stepped = True
            if self.board is not None:
                self.board.tell(self.step, self._report())

    def _report(self) -> Report:
        """Return this rank's times of the trials that are not over.

        Without replicas, the report has only trials whose shape had a backward in this step.
        """
        report = {}
        for shape, trial in self.trials.items():
            if trial.chosen is None and (self.replicas or trial.met == self.step):
                report[shape] = trial.milliseconds(self.clock)
        return report

    def _look(self) -> None:
        """Advance to the next step if the optimizer of every rank of the sp group has stepped.

        `trial` calls this method, and so does each call of a layer. Collective in the first call
        after a backward; further calls do nothing.

        Raises:
            RuntimeError: on all ranks of the sp group, if their trials differ.
        """
        # In the recompute of a checkpoint, a layer must run the candidate of its forward. See
        # Note [One candidate in forward and backward].
        if not self._due or self.over or in_backward():  # guard: stays for its backward
            return
        own_report = self._report() if self._stepped and self.board is None else {}
        stepped, reports = zip(*self.sp_group.gather((self._stepped, own_report)))
        if not all(stepped):
            # Without gradients, this is an evaluation between the backward and the optimizer's
            # step. The next call compares again.
            self._due = not torch.is_grad_enabled()
            return
        if any(report.keys() != reports[0].keys() for report in reports):
            tried = by_rank([shape.what for shape in report] or "nothing" for report in reports)
            raise RuntimeError(
                'sp_overlap.head_groups "auto": the ranks of the sp group would try different '
                f"things ({tried}); give a number"
            )
        # The merged report; or, if the replicas gave up, the ranks that were late.
        outcome: dict | list[int] = merged(reports)
        if self.board is not None:  # guard: replicas choose together
            outcome = self.board.told(self.step)
        self.step += 1
        self._back_since = self._due = self._stepped = False
        if isinstance(outcome, list):
            return self._give_up(outcome)
        for shape, slowest in outcome.items():
            trial = self.trials.setdefault(shape, Trial(shape, self.warmup_steps))
            trial.next_step(slowest)
            if trial.chosen is not None:
                self.inform(str(trial))
        all_chosen = all(self.trials[shape].chosen is not None for shape in outcome)
        if self.replicas and self.step > self.warmup_steps and all_chosen:
            self.close()

    def _give_up(self, missing: list[int]) -> None:
        """Stop trying, since no optimizer of the world's ranks ``missing`` has stepped."""
        self.close()
        self.warn(
            f'sp_overlap.head_groups "auto": {WAIT_S} s after the others no optimizer of ranks '
            f"{missing} has stepped; nothing is tried any more, and what is not chosen yet is the "
            "default. Step optimizers on all ranks alike, or give a number"
        )

    def follow(self, run: TimedCall, trial: Trial, candidate: Candidate, tokens: int) -> None:
        """Make the call's backward run `_back`, and time the call if the trial needs times.

        Args:
            run: The call.
            trial: The trial of the call.
            candidate: The candidate that the call runs.
            tokens: The tokens of the call: batch times the global sequence.
        """
        if self.over or trial.chosen is not None and not self.replicas:
            return
        refuse_captured(
            'sp_overlap.head_groups "auto"',
            "G can't be chosen; train until the log tells what was kept, or give a number",
        )
        if trial.timed and torch.is_grad_enabled():  # guard: also for frozen inputs
            run.time(self.clock, trial.marks[candidate], tokens)
        run.arrives = functools.partial(self._back, trial)

    def close(self) -> None:
        """End trying: trials that have not chosen choose their default."""
        self.over = True
        for trial in self.trials.values():
            trial.chosen = trial.chosen or trial.shape.default
        listeners.discard(self)


@functools.lru_cache(maxsize=4096)
def _shape(
    geometry: Geometry,
    sizes: torch.Size,
    dtype: torch.dtype,
    candidates: tuple[Candidate, ...],
    replicas: bool,
) -> Shape:
    """Return the shape of a call; its default candidate is the G of ``geometry``."""
    what = f"{geometry.heads} query and {geometry.kv_heads} KV heads"
    if geometry.shares > 1:
        what += f", r = {geometry.shares}"
    if not replicas:  # guard: their lengths differ
        # Round the length to a power of two, so that varying lengths share a trial.
        tokens = 2 ** (sum(geometry.seq_lens).bit_length() - 1)
        what += f", batch {geometry.batch}, about {tokens} tokens"
    what += f" over {geometry.sp_size} ranks, {str(dtype).removeprefix('torch.')}"
    return Shape(what, sizes, candidates, geometry.groups)
