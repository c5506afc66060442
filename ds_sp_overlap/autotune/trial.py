"""Chooses a number of head groups, or "off", for layers of one shape, by times from `policy`."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from itertools import chain
from statistics import mean, median
from typing import Any, NamedTuple

import torch

OFF = "off"
# The numbers of head groups that trials time and the planner simulates. `config._LEAST_WARMUP`
# assumes at most four candidates: these and "off".
GROUPS = (1, 2, 4)
# The planner takes times as equal up to this relative difference, and then takes fewer groups.
CLOSE = 0.01
# A number of head groups G, or OFF.
Candidate = int | str
# A candidate whose time exceeds this multiple of the fastest time is not tried again.
PRUNED_ABOVE = 1.5


class Shape(NamedTuple):
    """Identifies the calls of layers that share a trial.

    Attributes:
        what: Heads, ranks and dtype in words; without replicas also batch and rounded tokens.
        sizes: The sizes of the layer's first input after batch and sequence.
        candidates: The candidates; a single candidate is chosen at once.
        default: The candidate that runs before the trial begins; chosen if no candidate was timed.
    """

    what: str
    sizes: torch.Size
    candidates: tuple[Candidate, ...]
    default: Candidate


# One rank's report: `Trial.milliseconds` of each trial.
Report = dict[Shape, list[float]]
# The result of `merged`.
MergedReport = dict[Shape, list[float] | None]


def _name(candidate: Candidate | None) -> str:
    return f"G = {candidate}" if isinstance(candidate, int) else candidate or "nothing yet"


def candidates_for(max_groups: int, off: bool, least: int = 1) -> tuple[Candidate, ...]:
    """Return the `GROUPS` from ``least`` to ``max_groups``, with OFF before them if ``off``."""
    possible = tuple(groups for groups in GROUPS if least <= groups <= max_groups)
    return (OFF, *possible) if off else possible


def merged(reports: Sequence[Report]) -> MergedReport:
    """Merge the reports of several ranks: for each candidate, take the time of the slowest rank.

    Leaves out ranks that have not timed all remaining candidates (`Trial.left`).

    Returns:
        For each trial, the time of each remaining candidate in ms; None if no rank is taken.
    """
    merged_reports = {}
    for shape in ChainMap(*reports):
        of_ranks = [report[shape] for report in reports if shape in report]
        # A rank reports inf for a candidate that it has not timed; leave this rank out.
        complete = [times for times in of_ranks if max(times) < float("inf")]
        slowest = [max(times) for times in zip(*complete)]  # guard: the slowest rank counts
        merged_reports[shape] = slowest or None
    return merged_reports


def _per_token(clock: Any, marks: list) -> float:
    """Return the median, over the calls (begin, end, tokens) in ``marks``, of ms per token."""
    return median(clock.between_ms(begin, end) / max(1, tokens) for begin, end, tokens in marks)


class Trial:
    """Holds the candidates for layers of one shape, their times, and finally the chosen candidate.

    Rounds begin with the second optimizer step. In a round, each layer runs each remaining
    candidate for one step. The first round is not timed. After each timed round, slow candidates
    are pruned.

    Args:
        shape: The shape.
        warmup_steps: The largest number of steps in all rounds.
    """

    def __init__(self, shape: Shape, warmup_steps: int):
        self.shape, self.warmup_steps, candidates = shape, warmup_steps, shape.candidates
        # The candidates that are not pruned yet.
        self.left = list(candidates)
        # The index of the step in the current round, and the number of finished rounds.
        self.place = self.round = 0
        # The number of finished steps in rounds; -1 in the first step, in which the default runs.
        self.steps = -1
        self.chosen = candidates[0] if len(candidates) == 1 else None
        # The last step in which a call on this rank had a backward.
        self.met = -1
        # Forwards and backwards of each candidate: (begin, end, tokens).
        self.marks: dict[Candidate, tuple[list, list]] = {each: ([], []) for each in candidates}
        # For each candidate, the slowest rank's time in the candidate's last timed round.
        self.slowest_ms: dict[Candidate, float] = {}

    def candidate(self, index: int) -> Candidate:
        """Return the candidate that layer ``index`` runs in this step."""
        if self.chosen is not None:
            return self.chosen
        if self.steps < 0:
            return self.shape.default
        return self.left[(self.place + index) % len(self.left)]

    @property
    def timed(self) -> bool:
        """Return whether calls are timed in this step."""
        return self.chosen is None and self.round > 0

    def milliseconds(self, clock: Any) -> list[float]:
        """Return, for each remaining candidate, a layer's time on this rank, forward and backward.

        The time is the median per token, times the mean number of tokens of all calls. So short
        batches in some steps favour no candidate, and a rank with long batches counts as slow.

        Returns:
            Times in ms; inf for a candidate that was not timed.
        """
        # ``forwards`` and ``backwards`` hold the calls of all candidates together.
        marks = [self.marks[candidate] for candidate in self.left]
        forwards, backwards = [list(chain(*of_each)) for of_each in zip(*marks)]
        times = []
        for own_forwards, own_backwards in marks:
            if not (own_forwards and own_backwards):
                times.append(float("inf"))
                continue
            # Recomputes and evaluations add forwards without a backward. Count forwards per
            # backward over all candidates, so that an evaluation disfavours no single candidate.
            calls, gradients = len(forwards), len(backwards)  # guard: evaluations favour none
            forward = _per_token(clock, own_forwards) * calls / gradients
            tokens = mean(tokens for *_, tokens in forwards)
            times.append(tokens * (forward + _per_token(clock, own_backwards)))
        return times

    def next_step(self, slowest: list[float] | None) -> None:
        """Advance by one optimizer step; at the end of a round, prune candidates or choose one.

        Args:
            slowest: For each remaining candidate, the slowest rank's time in ms, see `merged`; None
                if no rank has timed all of them.
        """
        self.steps += 1
        if self.steps == 0:
            return
        self.place += 1
        if self.place < len(self.left):
            return
        if slowest is not None:
            self.slowest_ms.update(zip(self.left, slowest))
            limit = PRUNED_ABOVE * min(slowest)
            self.left = [each for each in self.left if self.slowest_ms[each] <= limit]
        self.place, self.round = 0, self.round + 1
        if len(self.left) == 1 or self.steps + len(self.left) > self.warmup_steps:
            # Choose the fastest timed candidate; the default if no candidate was timed.
            timed = [each for each in self.left if each in self.slowest_ms]
            self.chosen = min(timed, key=self.slowest_ms.__getitem__, default=self.shape.default)
            self.marks = {}

    def __str__(self) -> str:
        choice = "off, stock is fastest here" if self.chosen == OFF else _name(self.chosen)
        if not self.slowest_ms:
            return f"sp_overlap: {self.shape.what}: no call was timed, {_name(self.chosen)}"
        times = ", ".join(f"{_name(each)} {ms:.2f} ms" for each, ms in self.slowest_ms.items())
        return (
            f"sp_overlap: {self.shape.what}: {times} a layer, forward and backward on the slowest rank; "
            f"kept: {choice}"
        )
