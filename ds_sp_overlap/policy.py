"""Which G, or none: tried in the first steps of training on the ranks themselves, and never asked again.

Candidates are "off", the layer's own forward, where there is one that computes the same thing, and G = 1, 2, 4 as far as
the heads go. They take turns of one optimizer step each; within a step the layers of a model run different ones, so that
whatever else happens to the machine happens to all of them. With C = 4 candidates, warmup_steps = 16 and no loser yet:

    step     | 0       | 1   2   3   4     | 5   6   7   8   9  10  11  12  13  14  15  16 | 17 ...
    layer 0  | default | off G=1 G=2 G=4   | off G=1 G=2 G=4 off ...                       | the fastest
    layer 1  | default | G=1 G=2 G=4 off   | G=1 G=2 G=4 off G=1 ...                       | the fastest
             |         | untimed: warms up | timed; after each round the hopeless go       |

A candidate never changes between a forward and its backward, as long as no optimizer of the process steps between them:
checkpointing would compute another graph than it saved, and gradient accumulation keeps several in flight. Nothing is
tried before the first optimizer step, so that a program without one runs with the default.

Timed are forward, and backward from the arrival of the output's gradient to that of the inputs', in calls that record
a graph, per token. What the slowest rank measured counts, since the others wait for it.

Ranks that reduce gradients together run the same candidate for the same layer in the same step and keep the same: ZeRO
gathers weights and reduces gradients in the order in which they come, so that replicas whose orders differed would sum
gradients of different parameters without a word. (Every G delivers them in one order, which a test holds; nothing else hangs
on it.) Hence what is tried follows from the count of steps and from what all ranks have told one another, not from the batch
of one of them:

    layer calls                   run what was agreed, note what was met and how long it took
    optimizer steps               replicas tell one another (`Policy._tell`); all are there, whatever they evaluate in between
    first layer call after that   contests that some rank has met begin, turn, lose the hopeless, end (`Policy._look`); the
                                  ranks of one sp group, which are all here, tell one another now
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel
from .clock import Steps, clock_of, watched
from .config import SpOverlapConfig
from .layout import Geometry

OFF = "off"
Candidate = int | str  # G, or OFF
HOPELESS = 1.5  # times the fastest's time, after which a candidate is not tried again


def candidates_for(max_groups: int, off: bool) -> tuple[Candidate, ...]:
    """What can be tried with up to ``max_groups`` head groups."""
    return (*((OFF,) if off else ()), *(groups for groups in (1, 2, 4) if groups <= max_groups))


class Contest:
    """The candidates for layers of one shape, their times, and finally the chosen one.

    what         the shape, in words
    candidates   at least two
    default      the G of calls before the first turn, and the choice if nothing was ever timed
    """

    def __init__(self, policy: Policy, what: str, candidates: tuple[Candidate, ...], default: int):
        self.policy, self.what, self.left, self.default = policy, what, list(candidates), default
        self.turn = self.round = self.turns = 0  # place in the round; rounds and turns that are over
        self.started, self.chosen = False, None
        self.met = -1  # the last step in which this rank did
        self.marks: dict[Candidate, tuple[list, list]] = {candidate: ([], []) for candidate in candidates}
        self.slowest_ms: dict[Candidate, float] = {}  # what was found of each, in the last round that it took part in

    def candidate(self, index: int) -> Candidate:
        """What layer ``index`` runs in this step."""
        if self.chosen is not None:
            return self.chosen
        return self.left[(self.turn + index) % len(self.left)] if self.started else self.default

    @property
    def timed(self) -> bool:
        """Whether calls are to be timed now."""
        return self.chosen is None and self.round > 0

    def milliseconds(self) -> list[float]:
        """Of a layer on this rank, for each candidate that is left; inf for one that was not timed.

        Medians of the times per token, for as many tokens as calls here have on average: no candidate gains by short batches
        on its turns, and the rank with the long ones is the slow one. A forward computed again counts as often as it was.
        """
        clock = self.policy.clock
        tokens = [mark[2] for forwards, _ in self.marks.values() for mark in forwards]

        def per_token(marks: list) -> float:
            return median(clock.between_ms(begin, end) / max(1, count) for begin, end, count in marks)

        def of(forwards: list, backwards: list) -> float:
            if not forwards or not backwards:
                return float("inf")
            return mean(tokens) * (per_token(forwards) * len(forwards) / len(backwards) + per_token(backwards))

        return [of(*self.marks[candidate]) for candidate in self.left]

    def next_turn(self, every: list[list[float]]) -> None:
        """Go on by a step; ``every`` has the `milliseconds` of each rank that knows the contest."""
        if not self.started:
            self.started = True
            return
        self.turn, self.turns = self.turn + 1, self.turns + 1
        if self.turn < len(self.left):
            return
        self._drop_the_hopeless(every)
        self.turn, self.round = 0, self.round + 1
        if len(self.left) == 1 or self.turns + len(self.left) > self.policy.warmup_steps:
            self._decide()

    def _drop_the_hopeless(self, every: list[list[float]]) -> None:
        """A rank that has not timed all that are left compares nothing."""
        every = [times for times in every if max(times) < float("inf")]
        if not every:
            return
        self.slowest_ms.update((candidate, max(times)) for candidate, times in zip(self.left, zip(*every)))
        limit = HOPELESS * min(self.slowest_ms[candidate] for candidate in self.left)
        self.left = [candidate for candidate in self.left if self.slowest_ms[candidate] <= limit]

    def _decide(self) -> None:
        best = min(self.left, key=lambda candidate: self.slowest_ms.get(candidate, float("inf")))
        self.chosen, self.marks = best if best in self.slowest_ms else self.default, {}
        if self.policy.channel.rank == 0:
            self.policy.say(str(self))

    def __str__(self) -> str:
        if not self.slowest_ms:
            return f"sp_overlap: {self.what}: no call was timed, G = {self.chosen}"
        names = {candidate: candidate if candidate == OFF else f"G = {candidate}" for candidate in self.slowest_ms}
        times = ", ".join(f"{names[candidate]} {ms:.2f} ms" for candidate, ms in self.slowest_ms.items())
        kept = "off, stock is fastest here" if self.chosen == OFF else names[self.chosen]
        return f"sp_overlap: {self.what}: {times} a layer, forward and backward on the slowest rank; kept: {kept}"


class Policy:
    """Chooses for the layers of one model.

    channel        the ranks that choose together: the sp group, or with ``replicas`` all that reduce gradients together
    warmup_steps   optimizer steps in which a shape may run something else than what is kept
    replicas       whether they are several sp groups, each with batches of its own
    say            what is done with the line about each choice, on the first of these ranks

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
        say: Callable[[str], Any] = lambda line: print(line, flush=True),
    ):
        self.channel, self.warmup_steps, self.replicas, self.say = channel, warmup_steps, replicas, say
        self.contests: dict[tuple, Contest] = {}
        self.steps = Steps(self._tell) if replicas else Steps()
        self.over = False  # beside replicas: nothing is asked any more
        self.clock: Any = None
        self._layers, self._step = 0, 0
        self._trained = -1  # the last step with a call that recorded a graph
        self._told: list[dict[tuple, tuple[str, list[float]]]] = []  # by every rank, when the optimizer last stepped

    @classmethod
    def of(cls, config: SpOverlapConfig, channel: Channel, gradient_group: Any = None) -> Policy | None:
        """The policy that a config asks for; None where nothing is to be chosen, or ranks of the world choose apart.

        gradient_group   the ranks that reduce gradients together, as far as it is known
        """
        if not (config.head_groups == "auto" and config.policy.warmup_steps > 0 and channel.size > 1):
            return None
        replicas = dist.get_world_size() > channel.size
        together = Channel(gradient_group) if replicas else channel
        return cls(together, config.policy.warmup_steps, replicas) if together.size == dist.get_world_size() else None

    def join(self) -> int:
        """A number for one more layer."""
        self._layers += 1
        return self._layers - 1

    def contest(self, geometry: Geometry, x: Tensor, off: bool) -> Contest | None:
        """The contest for a call with ``x``; None where there is one candidate only, or none to be tried any more."""
        self._look()
        if torch.is_grad_enabled():
            self._trained = self._step
        # G = 1 where two groups were possible: the call has arguments per head
        candidates = candidates_for(geometry.max_groups if geometry.groups > 1 else 1, off and not self.replicas)
        if len(candidates) == 1:
            return None
        batch = () if self.replicas else (geometry.batch, sum(geometry.seq_lens).bit_length())
        key = (geometry.heads, geometry.kv_heads, x.shape[2:], x.dtype, *batch, candidates, geometry.groups)
        if key not in self.contests:
            if self.over:
                return None
            what = f"{geometry.heads} query and {geometry.kv_heads} KV heads"
            what += "" if self.replicas else f", batch {geometry.batch}, about {sum(geometry.seq_lens)} tokens"
            what += f" over {geometry.sp_size} ranks, {str(x.dtype).removeprefix('torch.')}"
            self.contests[key] = Contest(self, what, candidates, geometry.groups)
        self.clock = self.clock or clock_of(x.device)
        self.contests[key].met = self._step
        return self.contests[key]

    def _tell(self) -> None:
        """Tell all ranks what was met and measured. Collective: every rank calls layers and then steps its optimizers.

        Not for a step of another model's optimizer: this one may be dead, and not be collected on every rank yet.
        """
        mine = {
            key: (contest.what, contest.milliseconds())
            for key, contest in self.contests.items()
            if contest.chosen is None and (self.replicas or contest.met == self._step)
        }
        if self._trained == self._step if self.replicas else mine:  # an sp group meets the same
            self._told = self.channel.gather(mine)

    def _look(self) -> None:
        """Act on what was told, at the first call after it."""
        if (step := self.steps.now()) == self._step:
            return
        if not self.replicas:  # whose ranks are all here, whatever optimizers one of them has of its own
            self._tell()
        self._step, told, self._told = step, self._told, []
        asked = {key: what for report in told for key, (what, _) in report.items()}
        for key, what in asked.items():
            contest = self.contests.setdefault(key, Contest(self, what, *key[-2:]))
            contest.next_turn([report[key][1] for report in told if key in report])
        if self.replicas and told and step > self.warmup_steps and all(self.contests[key].chosen is not None for key in asked):
            self.over = True
            self.close()

    def run(
        self, contest: Contest, candidate: Candidate, tokens: int, body: Callable[..., Tensor], inputs: tuple[Tensor, ...]
    ) -> Tensor:
        """``body(*inputs)`` for so many tokens, timed where that is due."""
        if not (contest.timed and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            return body(*inputs)
        forwards, backwards = contest.marks[candidate]
        return watched(
            self.clock,
            body,
            inputs,
            lambda *marks: forwards.append((*marks, tokens)),
            lambda *marks: backwards.append((*marks, tokens)),
        )

    def close(self) -> None:
        """Count steps no further; what was chosen stays chosen."""
        self.steps.close()
