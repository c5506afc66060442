"""Which G, or none: tried in the first steps of training on the ranks themselves, and never asked again.

Candidates are "off", the layer's own forward, where there is one that computes the same thing, and G = 1, 2, 4 as far as
the heads go; where memory counts also some (G, W), see `choices`. Each is tried for an optimizer step at a time; within a step the layers of a model run different ones, so that
whatever else happens to the machine happens to all of them. With C = 4 candidates, warmup_steps = 16 and no loser yet:

    step     | 0       | 1   2   3   4     | 5   6   7   8   9  10  11  12  13  14  15  16 | 17 ...
    layer 0  | default | off G=1 G=2 G=4   | off G=1 G=2 G=4 off ...                       | the fastest
    layer 1  | default | G=1 G=2 G=4 off   | G=1 G=2 G=4 off G=1 ...                       | the fastest
             |         | untimed: warms up | timed; after each round the slow are pruned   |

A candidate never changes between a forward and its backward, as long as no optimizer of the process steps between them:
checkpointing would compute another graph than it saved, and gradient accumulation keeps several in flight. Nothing is
tried before the first optimizer step, nor for shapes without a backward: a program that doesn't train runs the default.

Timed are forward, and backward from the arrival of the output's gradient to its end, in calls that record a graph, per
token. What the slowest rank measured counts, since the others wait for that rank.

Ranks of an sp group launch the same exchanges only if they run the same candidate, whatever else one of them does: an
optimizer of its own, a step that the others don't make, a model that is garbage earlier than elsewhere. So nothing collective
hangs on these. Alike on all ranks of an sp group are calls of layers, and their backwards:

    backwards of layers           come back (`Policy._back`); only then there is something to ask
    optimizer steps               are noted; nobody waits
    first layer call after that   the sp group is asked whether every optimizer has stepped (`Policy._look`); if so the step is
                                  over: trials that were met begin, go on, are pruned, end

Beside data parallelism the sp groups are replicas, each with batches of its own. Ranks that reduce gradients together run the
same candidate for the same layer in the same step and keep the same: ZeRO gathers weights and reduces gradients in the order in
which they come, so that replicas whose orders differed would sum gradients of different parameters without a word. (Every G
delivers gradients in one order, which a test holds.) No layer call is common to the replicas: one of them may evaluate alone. So
each rank tells the others what it met and measured when its optimizer steps (`Board`), which waits for nobody, and the first layer
call after that acts on what all have told.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ..config import SpOverlapConfig
from ..exchange.channel import Channel
from ..exchange.geometry import Geometry
from ..profiling.clocks import clock_of
from ..profiling.steps import Listener, in_backward
from ..profiling.timed import Run, Timed, output_of
from ..say import say
from .choices import Tried
from .trial import BLOCK, LAYER, Candidate, Report, Trial, candidates_for, merged

WAIT_S = 60  # for replicas whose optimizers have not stepped, before nothing is tried any more


class Board:
    """Where replicas tell one another, in the store of the world: telling waits for nobody.

    The rank that tells last of a step puts together what all have told. A rank that waits for this longer than `WAIT_S` gives up
    for all. Whichever of the two is written first holds.
    """

    made = itertools.count()  # alike on every rank, since replicas make their policies in one order

    def __init__(self) -> None:
        # Its stub denies that it takes bytes.
        self.store: Any = dist.PrefixStore(f"sp_overlap policy {next(self.made)}", _get_default_store())

    def tell(self, step: int, report: Report) -> None:
        keys = self._keys(step)
        self.store.set(keys[dist.get_rank()], pickle.dumps(report))
        if self.store.add(f"{step} told by", 1) == len(keys):
            reports = [pickle.loads(told) for told in self.store.multi_get(keys)]
            self.store.compare_set(str(step), "", pickle.dumps(merged(reports)))

    def told(self, step: int) -> dict | list[int]:
        """What all have told, as of `merged`; or the ranks that hadn't when somebody gave up."""
        end = time.monotonic() + WAIT_S
        while not self.store.check([str(step)]):
            time.sleep(0.01)
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(self._keys(step)) if not self.store.check([key])]
                self.store.compare_set(str(step), "", pickle.dumps(missing))
        return pickle.loads(self.store.get(str(step)))

    @staticmethod
    def _keys(step: int) -> list[str]:
        return [f"{step} of rank {rank}" for rank in range(dist.get_world_size())]


class Policy:
    """Chooses for the layers of one model.

    channel        the sp group, whose ranks choose together
    warmup_steps   optimizer steps in which a shape may run something else than what is kept
    replicas       whether all ranks of the world choose together, several sp groups with batches of their own
    say            what is done with the line about each choice
    frugal         as of a `Trial`

    Shapes are told apart by heads, sizes, dtype and candidates; in one sp group also by batch and by length, in powers of two,
    so that lengths that vary are not timed for ever. Replicas' batches differ, so that nothing of them tells shapes apart
    there, and "off", which is possible with some batches only, is no candidate. A shape that some replica meets when all
    is chosen and ``warmup_steps`` are over has the default, since the others can't know.
    """

    def __init__(
        self,
        channel: Channel,
        warmup_steps: int,
        replicas: bool = False,
        say: Callable[[str], Any] = say,
        frugal: bool = False,
    ):
        self.channel, self.warmup_steps, self.replicas, self.say, self.frugal = channel, warmup_steps, replicas, say, frugal
        self.trials: dict[tuple, Trial] = {}
        self._first: dict[tuple, int] = {}  # step in which layers in a row were first called, with inputs of a kind
        self.board = Board() if replicas else None
        self.over = False  # nothing is tried any more
        self.clock: Any = None
        self.step = self._layers = 0
        self._back_since = self._due = self._stepped = False  # in this step: a backward; one since the last question; a step
        self._hook = Listener(self._note)

    @classmethod
    def of(cls, config: SpOverlapConfig, channel: Channel, gradient_group: Any = None) -> Policy | None:
        """The policy that a config asks for; None where nothing is to be chosen, or ranks of the world choose apart.

        gradient_group   the ranks that reduce gradients together, as far as it is known
        """
        asked = config.head_groups == "auto" or config.memory == "auto"
        if not (asked and config.policy.warmup_steps > 0 and channel.size > 1):
            return None
        world = dist.get_world_size()
        replicas = world > channel.size
        if replicas and (gradient_group is None or dist.get_world_size(gradient_group) < world):
            return None
        return cls(channel, config.policy.warmup_steps, replicas, frugal=config.memory == "auto")

    def join(self) -> int:
        """A number for one more layer."""
        self._layers += 1
        return self._layers - 1

    def trial(self, geometry: Geometry, x: Tensor, off: bool, tried: Tried | None = None) -> Trial | None:
        """The trial for a call with ``x``; None where there is one candidate only, or none to be tried any more.

        tried   what to try instead of every number of groups
        """
        self._look()
        # G = 1 where two groups were possible: the call has arguments per head
        candidates = candidates_for(geometry.max_groups if geometry.groups > 1 else 1, off and not self.replicas)  # guard: no stock
        candidates, default = (candidates, geometry.groups) if tried is None else tried
        if len(candidates) == 1 and (self.over or not self.replicas):
            return None
        batch = () if self.replicas else (geometry.batch, sum(geometry.seq_lens).bit_length())  # guard: their lengths differ
        key = (geometry.heads, geometry.kv_heads, x.shape[2:], x.dtype, *batch, candidates, default)
        if key not in self.trials:
            if self.over:
                return None
            what = f"{geometry.heads} query and {geometry.kv_heads} KV heads"
            what += "" if self.replicas else f", batch {geometry.batch}, about {sum(geometry.seq_lens)} tokens"
            what += f" over {geometry.sp_size} ranks, {str(x.dtype).removeprefix('torch.')}"
            self.trials[key] = self._trial(key, what)
        self.clock = self.clock or clock_of(x.device)
        return self.trials[key]

    def trial_of_block(self, where: str, x: Tensor, lengths: Sequence[int]) -> Trial | None:
        """The trial for layers in a row, the first called ``where`` and given ``x`` [b, s/P, m]; None before their G is chosen.

        Not beside replicas, which would have to begin it in the same step.
        """
        self._look()
        key = (where, x.shape[0], sum(lengths).bit_length(), x.dtype, (LAYER, BLOCK), LAYER)
        if key not in self.trials:
            first = self._first.setdefault(key, self.step)  # in which its layers begin to try G
            busy = any(trial.chosen is None and trial.met >= self.step - 1 for trial in self.trials.values())
            if self.replicas or self.over or busy or self.step == first:  # guard: one thing is timed at a time
                return None
            what = f"{where} and the layers behind it, batch {x.shape[0]}, about {sum(lengths)} tokens, {str(x.dtype)[6:]}"
            self.trials[key] = self._trial(key, what)
        self.clock = self.clock or clock_of(x.device)
        return self.trials[key]

    def _trial(self, key: tuple, what: str) -> Trial:
        *_, candidates, default = key
        return Trial(what, candidates, default, self.warmup_steps, self.frugal)

    def _back(self, trial: Trial) -> None:
        """A call's backward has begun; alike on all ranks of the sp group, which exchange in it."""
        trial.met, self._back_since, self._due = self.step, True, True

    def _note(self) -> None:
        """An optimizer of this process has stepped. Beside replicas they are told, the first time in a step."""
        if self._back_since and not self._stepped:
            self._stepped = True
            if self.board is not None:
                self.board.tell(self.step, self._report())

    def _report(self) -> Report:
        return {
            key: (trial.what, trial.milliseconds(self.clock))
            for key, trial in self.trials.items()
            if trial.chosen is None and (self.replicas or trial.met == self.step)
        }

    def _look(self) -> None:
        """Ask the sp group whether the step is over, and go on to the next one if it is.

        Never during backward: there a checkpointed layer is computed again and must find what its first computation found.
        """
        if not self._due or self.over or in_backward():  # guard: stays for its backward
            return
        mine = (self._stepped, self._report() if self._stepped and self.board is None else {})
        stepped, reports = zip(*self.channel.gather(mine))
        if not all(stepped):
            self._due = not torch.is_grad_enabled()  # an evaluation before the step is not the last call before it
            return
        if any(report.keys() != reports[0].keys() for report in reports):
            seen = "; ".join(f"sp rank {rank}: {[what for what, _ in report.values()]}" for rank, report in enumerate(reports))
            raise RuntimeError(
                f'sp_overlap.head_groups "auto": the ranks of the sp group would try different things ({seen}); give a number'
            )
        told = merged(reports) if self.board is None else self.board.told(self.step)  # guard: replicas choose together
        self.step += 1
        self._back_since = self._due = self._stepped = False
        if isinstance(told, list):
            return self._give_up(told)
        for key, (what, slowest) in told.items():
            trial = self.trials.setdefault(key, self._trial(key, what))
            trial.next_step(slowest)
            if trial.chosen is not None:
                self.say(str(trial))
        if self.replicas and self.step > self.warmup_steps and all(self.trials[key].chosen is not None for key in told):
            self.close()

    def _give_up(self, missing: list[int]) -> None:
        self.close()
        self.say(
            f'sp_overlap.head_groups "auto": {WAIT_S} s after the others no optimizer of ranks {missing} has stepped; nothing is tried '
            "any more, and what is not chosen yet is the default. Step optimizers on all ranks alike, or give a number"
        )

    def follow(self, run: Run, trial: Trial, candidate: Candidate, tokens: int) -> None:
        """Look on while ``candidate`` runs for so many tokens, with a clock where that is due."""
        if self.over or trial.chosen is not None and not self.replicas:
            return
        if trial.timed and torch.is_grad_enabled():  # guard: also for frozen inputs
            forwards, backwards = trial.marks[candidate]
            run.timed(
                Timed(
                    self.clock,
                    lambda *marks: forwards.append((*marks, tokens)),
                    lambda *marks: backwards.append((*marks, tokens)),
                )
            )
        run.at_end(lambda y: self._follow_back(trial, output_of(y)))

    def _follow_back(self, trial: Trial, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._back(trial))

    def close(self) -> None:
        """Try nothing any more; what was chosen stays chosen."""
        self.over = True
        for trial in self.trials.values():
            trial.chosen = trial.chosen or trial.default
        self._hook.remove()
