"""What no order of a program's steps can beat."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Step

Needs = dict[Step, list[Step]]


def limit(needs: Needs, ms: Callable[[Step], float]) -> float:
    """A time that no order of these steps stays below, one at a time on the compute row and one at a time on the wire.

    Of any steps of one row together: they can't begin before the first of them may (the longest way to it), take as long as they
    take, and after the last of them there is the longest way from it to the end. The largest such sum, over both rows.

    needs   each step, with the steps that it comes after
    ms      of a step on the compute row; of the transfer, for a start; finishes take none
    """
    behind: Needs = {step: [] for step in needs}
    for step, before in needs.items():
        for each in before:
            behind[each].append(step)
    took = {step: 0.0 if step.act == "finish" else ms(step) for step in needs}
    head, tail = _longest(needs, took), _longest(behind, took)
    longest = 0.0
    for on_wire in (False, True):
        row = [step for step in needs if (step.act == "start") is on_wire and step.act != "finish"]
        for first in {head[step] for step in row}:
            together = 0.0
            for step in sorted((step for step in row if head[step] >= first), key=lambda step: -tail[step]):
                together += took[step]
                longest = max(longest, first + together + tail[step])
    return longest


def _longest(edges: Needs, took: dict[Step, float]) -> dict[Step, float]:
    """Of each step the longest way along ``edges``, itself not counted."""
    found: dict[Step, float] = {}

    def way(step: Step) -> float:
        if step not in found:
            found[step] = max((way(each) + took[each] for each in edges[step]), default=0.0)
        return found[step]

    for step in edges:
        way(step)
    return found
