"""The candidates for layers of one shape, told apart by what they took. `policy` says when each is tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

OFF, LAYER, BLOCK = "off", "layers one by one", "block"
GROUPS = (1, 2, 4)  # head groups that are tried
CLOSE = 0.01  # of two candidates whose times differ by no more, the one that holds less is kept, where memory counts
Candidate = int | tuple[int, int] | str  # G, or G and W, or OFF of a layer; LAYER or BLOCK of layers in a row
PRUNED_ABOVE = 1.5  # times the fastest's time, after which a candidate is not tried again
Report = dict[tuple, tuple[str, list[float]]]  # trials by key, in words, and the `milliseconds` of a rank


def candidates_for(max_groups: int, off: bool) -> tuple[Candidate, ...]:
    """What can be tried with up to ``max_groups`` head groups."""
    return (*((OFF,) if off else ()), *(groups for groups in GROUPS if groups <= max_groups))


def merged(reports: Sequence[Report]) -> dict[tuple, tuple[str, list[float] | None]]:
    """For each trial what the slowest rank measured of each candidate that is left.

    A rank that has not timed all that are left compares nothing; None where every rank is such a one.
    """
    found: dict[tuple, tuple[str, list[float] | None]] = {}
    for key, (what, _) in itertools.chain.from_iterable(report.items() for report in reports):
        every = [report[key][1] for report in reports if key in report and max(report[key][1]) < float("inf")]
        found[key] = what, [max(times) for times in zip(*every)] or None  # guard: the slowest rank counts
    return found


class Trial:
    """The candidates for layers of one shape, their times, and finally the chosen one.

    what           the shape, in words
    candidates     chosen at once where there is only one
    default        of calls before the first step of trying, and the choice if nothing was ever timed
    warmup_steps   at most so many steps
    frugal         keep the first of the candidates that takes no longer than the fastest, but for `CLOSE`; else the fastest
    """

    def __init__(self, what: str, candidates: tuple[Candidate, ...], default: Candidate, warmup_steps: int, frugal: bool = False):
        self.what, self.left, self.default, self.warmup_steps = what, list(candidates), default, warmup_steps
        self.frugal = frugal
        self.place = self.round = self.steps = 0  # place in the round; rounds and steps that are over
        self.started = False
        self.chosen: Candidate | None = candidates[0] if len(candidates) == 1 else None
        self.met = -1  # the last step in which a call of this rank had its backward
        self.marks: dict[Candidate, tuple[list, list]] = {candidate: ([], []) for candidate in candidates}
        self.slowest_ms: dict[Candidate, float] = {}  # what was found of each, in the last round that it took part in

    def candidate(self, index: int) -> Candidate:
        """What layer ``index`` runs in this step."""
        if self.chosen is not None:
            return self.chosen
        return self.left[(self.place + index) % len(self.left)] if self.started else self.default

    @property
    def timed(self) -> bool:
        """Whether calls are to be timed now."""
        return self.chosen is None and self.round > 0

    def milliseconds(self, clock: Any) -> list[float]:
        """Of a layer on this rank, for each candidate that is left; inf for one that was not timed.

        Medians of the times per token, for as many tokens as calls here have on average: no candidate gains by short batches
        while it was tried, and the rank with the long ones is the slow one. A forward computed again, or without a backward, counts
        as often as there were such for all candidates together: none loses by what happened while it was tried.
        """
        marks = [self.marks[candidate] for candidate in self.left]
        forwards, backwards = ([mark for each in marks for mark in each[which]] for which in (0, 1))

        def per_token(marks: list) -> float:
            return median(clock.between_ms(begin, end) / max(1, count) for begin, end, count in marks)

        return [  # guard: evaluations favour none
            mean(mark[2] for mark in forwards) * (per_token(each[0]) * len(forwards) / len(backwards) + per_token(each[1]))
            if each[0] and each[1]
            else float("inf")
            for each in marks
        ]

    def next_step(self, slowest: list[float] | None) -> None:
        """Go on by a step; ``slowest`` has what is known of the candidates that are left, as of `merged`."""
        if not self.started:
            self.started = True
            return
        self.place, self.steps = self.place + 1, self.steps + 1
        if self.place < len(self.left):
            return
        self._prune(slowest)
        self.place, self.round = 0, self.round + 1
        if len(self.left) == 1 or self.steps + len(self.left) > self.warmup_steps:
            self.decide()

    def _prune(self, slowest: list[float] | None) -> None:
        if slowest is None:
            return
        self.slowest_ms.update(zip(self.left, slowest))
        limit = PRUNED_ABOVE * min(slowest)
        self.left = [candidate for candidate in self.left if self.slowest_ms[candidate] <= limit]

    def decide(self) -> None:
        """Choose by what is known now."""
        times = {candidate: self.slowest_ms.get(candidate, float("inf")) for candidate in self.left}
        least = (1 + CLOSE * self.frugal) * min(times.values())
        best = next(candidate for candidate in self.left if times[candidate] <= least)
        self.chosen, self.marks = best if best in self.slowest_ms else self.default, {}

    def __str__(self) -> str:
        def name(candidate: Candidate | None) -> str:
            if isinstance(candidate, tuple):
                return f"G = {candidate[0]}, W = {candidate[1]}"
            return f"G = {candidate}" if isinstance(candidate, int) else candidate or "nothing yet"

        if not self.slowest_ms:
            return f"sp_overlap: {self.what}: no call was timed, {name(self.chosen)}"
        times = ", ".join(f"{name(candidate)} {ms:.2f} ms" for candidate, ms in self.slowest_ms.items())
        kept = "off, stock is fastest here" if self.chosen == OFF else name(self.chosen)
        kept += f", which holds least of those within {CLOSE:.0%}" if self.frugal and self.chosen not in (None, OFF) else ""
        each = "" if LAYER in self.slowest_ms else " a layer"
        return f"sp_overlap: {self.what}: {times}{each}, forward and backward on the slowest rank; kept: {kept}"
