"""Which G, or none: tried in the first steps of training on the ranks themselves, and never asked again.

Candidates are "off", the layer's own forward, where there is one that computes the same thing, and G = 1, 2, 4 as far as
the heads go. They take turns of one optimizer step each; within a step the layers of a model run different ones, so that
whatever else happens to the machine happens to all of them. With C = 4 candidates, warmup_steps = 16 and no loser yet:

    step     | 0       | 1   2   3   4     | 5   6   7   8   9  10  11  12  13  14  15  16 | 17 ...
    layer 0  | default | off G=1 G=2 G=4   | off G=1 G=2 G=4 off ...                       | the fastest
    layer 1  | default | G=1 G=2 G=4 off   | G=1 G=2 G=4 off G=1 ...                       | the fastest
             |         | untimed: warms up | timed; after each round the hopeless go       |

A candidate never changes between a forward and its backward, as long as no optimizer of the process steps between them: checkpointing would compute another graph than it saved,
and gradient accumulation keeps several in flight. Nothing is tried before the first optimizer step, so that a program
without one runs with the default.

Timed are forward, and backward from the arrival of the output's gradient to that of the inputs', in calls that record
a graph. What the slowest rank measured counts, since the others wait for it.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel
from .clock import Steps, clock_of, watched
from .config import SpOverlapConfig

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
        self.step = policy.steps.now()
        self.turn = self.round = self.turns = 0  # place in the round; rounds and turns that are over
        self.started, self.chosen = False, None
        self.marks: dict[Candidate, tuple[list, list]] = {candidate: ([], []) for candidate in candidates}
        self.slowest_ms: dict[Candidate, float] = {}  # what was found of each, in the last round that it took part in

    def candidate(self, index: int) -> Candidate:
        """What layer ``index`` runs in this step. Collective when a round is over; every rank asks at the same places."""
        if self.chosen is None and (step := self.policy.steps.now()) != self.step:
            self.step = step
            self._next_turn()
        if self.chosen is not None:
            return self.chosen
        return self.left[(self.turn + index) % len(self.left)] if self.started else self.default

    @property
    def timed(self) -> bool:
        """Whether calls are to be timed now."""
        return self.chosen is None and self.round > 0

    def _next_turn(self) -> None:
        if not self.started:
            self.started = True
            return
        self.turn, self.turns = self.turn + 1, self.turns + 1
        if self.turn < len(self.left):
            return
        if self.timed:
            self._drop_the_hopeless()
        self.turn, self.round = 0, self.round + 1
        if len(self.left) == 1 or self.turns + len(self.left) > self.policy.warmup_steps:
            self._decide()

    def _milliseconds(self, candidate: Candidate) -> float:
        """Median of a layer on this rank; a forward that is computed again counts as often as it was."""
        clock = self.policy.clock
        forwards, backwards = ([clock.between_ms(*pair) for pair in marks] for marks in self.marks[candidate])
        if not forwards or not backwards:
            return float("inf")
        return median(forwards) * len(forwards) / len(backwards) + median(backwards)

    def _drop_the_hopeless(self) -> None:
        """Collective."""
        every = self.policy.channel.gather([self._milliseconds(candidate) for candidate in self.left])
        self.slowest_ms.update((candidate, max(times)) for candidate, times in zip(self.left, zip(*every)))
        limit = HOPELESS * min(self.slowest_ms[candidate] for candidate in self.left)
        self.left = [candidate for candidate in self.left if self.slowest_ms[candidate] <= limit]

    def _decide(self) -> None:
        best = min(self.left, key=lambda candidate: self.slowest_ms.get(candidate, float("inf")))
        found = self.slowest_ms.get(best, float("inf")) < float("inf")
        self.chosen, self.marks = best if found else self.default, {}
        if self.policy.channel.rank == 0:
            self.policy.say(str(self))

    def __str__(self) -> str:
        if not any(time < float("inf") for time in self.slowest_ms.values()):
            return f"sp_overlap: {self.what}: no call was timed, G = {self.chosen}"
        names = {candidate: candidate if candidate == OFF else f"G = {candidate}" for candidate in self.slowest_ms}
        times = ", ".join(f"{names[candidate]} {ms:.2f} ms" for candidate, ms in self.slowest_ms.items())
        kept = "off, stock is fastest here" if self.chosen == OFF else names[self.chosen]
        return f"sp_overlap: {self.what}: {times} a layer, forward and backward on the slowest rank; kept: {kept}"


class Policy:
    """Chooses for the layers of one model.

    channel        the sp group, whose ranks choose together
    warmup_steps   optimizer steps in which a shape may run something else than what is kept
    say            what is done with the line about each choice, on sp rank 0

    Shapes are told apart by heads, sizes, dtype and candidates, lengths by powers of two, so that lengths that vary are not
    timed for ever.
    """

    def __init__(self, channel: Channel, warmup_steps: int, say: Callable[[str], Any] = lambda line: print(line, flush=True)):
        self.channel, self.warmup_steps, self.say = channel, warmup_steps, say
        self.contests: dict[tuple, Contest] = {}
        self.steps = Steps()
        self.clock: Any = None
        self._layers = 0

    @classmethod
    def of(cls, config: SpOverlapConfig, channel: Channel) -> Policy | None:
        """The policy that a config asks for; None where nothing is to be chosen, and beside data parallelism.

        Candidates deliver the gradients of a layer in different orders. ZeRO reduces them over all data-parallel replicas in
        the order in which they come (and gathers weights in the order of their use), so that replicas must run the same
        candidate; sp groups that choose each for itself would sum gradients of different parameters without a word.
        """
        timed = config.head_groups == "auto" and config.policy.warmup_steps > 0 and channel.size > 1
        alone = not dist.is_initialized() or dist.get_world_size() == channel.size
        return cls(channel, config.policy.warmup_steps) if timed and alone else None

    def join(self) -> int:
        """A number for one more layer."""
        self._layers += 1
        return self._layers - 1

    def contest(self, geometry, x: Tensor, off: bool) -> Contest | None:
        """The contest for a call with ``x``; None where there is one candidate only."""
        # G = 1 where two groups were possible: the call has arguments per head
        candidates = candidates_for(geometry.max_groups if geometry.groups > 1 else 1, off)
        if len(candidates) == 1:
            return None
        bucket = sum(geometry.seq_lens).bit_length()
        key = (geometry.heads, geometry.kv_heads, geometry.batch, bucket, x.shape[2:], x.dtype, candidates)
        if key not in self.contests:
            self.clock = self.clock or clock_of(x.device)
            what = (
                f"{geometry.heads} query and {geometry.kv_heads} KV heads, batch {geometry.batch}, about "
                f"{sum(geometry.seq_lens)} tokens over {geometry.sp_size} ranks, {str(x.dtype).removeprefix('torch.')}"
            )
            self.contests[key] = Contest(self, what, candidates, geometry.groups)
        return self.contests[key]

    def run(self, contest: Contest, candidate: Candidate, body: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """``body(*inputs)``, timed where that is due."""
        if not (contest.timed and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            return body(*inputs)
        forwards, backwards = contest.marks[candidate]
        return watched(self.clock, body, inputs, lambda *marks: forwards.append(marks), lambda *marks: backwards.append(marks))

    def close(self) -> None:
        """Count steps no further; what was chosen stays chosen."""
        self.steps.close()
