"""Computes a time that no order of a program's steps can beat."""

from __future__ import annotations

from collections.abc import Callable

from ...schedule import Needs, Op, Step


def limit(needs: Needs, ms: Callable[[Step], float]) -> float:
    """Return a time that no order of these steps can beat.

    The compute row performs one step at a time, and the wire one transfer at a time. Take any set
    of steps of one row. None of them begins before the longest path to the first of them is over.
    Together they take the sum of their durations. After the last of them follows the longest path
    from there to the end. The limit is the largest such sum over all sets of both rows.

    Args:
        needs: Each step, with the steps that it comes after.
        ms: Duration of a step on the compute row; of the transfer, for a start. A finish takes no
            time.
    """
    behind: Needs = {step: [] for step in needs}
    for step, before in needs.items():
        for each in before:
            behind[each].append(step)
    took = {step: 0.0 if step.op is Op.FINISH else ms(step) for step in needs}
    # For each step the longest path in front of it, and behind it.
    head, tail = _longest(needs, took), _longest(behind, took)
    longest = 0.0
    for on_wire in (False, True):
        row = []
        for step in needs:
            if step.op is not Op.FINISH and (step.op is Op.START) is on_wire:
                row.append(step)
        # The largest sums have all steps of a row with at least some path in front of them, and at
        # least some path behind them.
        for first in {head[step] for step in row}:
            together = 0.0
            later = [step for step in row if head[step] >= first]
            for step in sorted(later, key=lambda step: -tail[step]):
                together += took[step]
                longest = max(longest, first + together + tail[step])
    return longest


def _longest(edges: Needs, took: dict[Step, float]) -> dict[Step, float]:
    """Return for each step the longest path along ``edges``, without the step itself."""
    found: dict[Step, float] = {}

    def way(step: Step) -> float:
        """Return the path of one step; each is computed once."""
        if step not in found:
            found[step] = max((way(each) + took[each] for each in edges[step]), default=0.0)
        return found[step]

    for step in edges:
        way(step)
    return found
