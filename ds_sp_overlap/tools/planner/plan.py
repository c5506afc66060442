"""Predicts what overlap would save, before anything is run: ``python -m ds_sp_overlap plan``.

The schedules that layers run by, and those of DeepSpeed's class, are simulated with the costs of a
layer (`schedule.simulate`).

The simulation leaves out relayout copies, kernel launches, the smaller matrix products of more head
groups, and the compute units that an exchange takes while it is under way. Each of these makes the
real step longer, or more groups less attractive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...autotune.trial import CLOSE, GROUPS
from ...schedule import (
    MLP,
    Op,
    Program,
    Schedule,
    Simulation,
    Step,
    by_head_groups,
    needs_of,
    schedule_of,
)
from .costs import WINDOWS, Costs, LayerShape, Rates
from .limit import limit

# A step that would be shorter by less than this share is not worth the bother.
WORTH = 0.02


def limit_of(costs: Costs) -> float:
    """Return the `limit` of forward and backward of a layer whose MLP hides nothing."""
    kinds = costs.geometry.kinds
    return costs.ms(MLP) + sum(
        limit(needs, costs.ms) for needs in needs_of(kinds, by_head_groups(kinds).starts)
    )


def _forward(text: str) -> Program:
    """Read a program of one head group from text: ``project q, start q``."""
    return tuple(Step(Op(op), (of,), False, 0) for op, of in map(str.split, text.split(", ")))


def _backward(text: str) -> Program:
    """Read a program of backward from text: ``start q`` sends dq."""
    return tuple(step._replace(grad=True) for step in _forward(text))


# The overlap of DeepSpeed's PR 5691 with Megatron-DeepSpeed's PR 415: v, o and dv stay exposed.
UPSTREAM = Schedule(
    _forward(
        "project q, start q, project k, start k, project v, finish q, finish k, start v, finish v, "
        "attend o, start o, finish o, merge o"
    ),
    _backward(
        "dgrad o, start o, wgrad o, finish o, attend o, start v, finish v, start k, start q, "
        "dgrad v, wgrad v, finish k, dgrad k, wgrad k, finish q, dgrad q, wgrad q"
    ),
)


def _waiting(program: Program) -> Program:
    """Return the program in which every exchange is waited for where it is started."""
    steps: list[Step] = []
    for step in program:
        if step.op is not Op.FINISH:
            steps.append(step)
        if step.op is Op.START:
            steps.append(step._replace(op=Op.FINISH))
    return tuple(steps)


# DeepSpeed's class as it stands, between projections that are called whole.
BASELINE = Schedule(
    _waiting(
        _forward(
            "project q, project k, project v, start q, start k, start v, attend o, start o, merge o"
        )
    ),
    _waiting(
        _backward(
            "wgrad o, dgrad o, start o, attend o, start v, start k, start q, "
            "dgrad v, wgrad v, dgrad k, wgrad k, dgrad q, wgrad q"
        )
    ),
)


@dataclass(frozen=True)
class Plan:
    """The outcome of `plan`.

    Attributes:
        results: The simulated schedules, by name.
        best: The fewest head groups that come close to the shortest step.
        max_groups: The most head groups of the layer.
        limits: For each schedule, the time that no order of its steps can beat (`limit`). Nothing
            runs under the MLP.
    """

    results: dict[str, Simulation]
    best: int
    max_groups: int
    limits: dict[str, float]

    @property
    def gain(self) -> float:
        """The share of the step without overlap that the best schedule saves."""
        best = self.results[f"eight of eight, G = {self.best}"]
        return 1 - best.step_ms / self.results["none"].step_ms

    @property
    def advice(self) -> str:
        """A line that says whether overlap is worth it."""
        base = self.results["none"]
        few = ""
        if self.max_groups == 1:
            few = "; a rank has one query head, so nothing hides v, o and dv"
        if self.gain < WORTH:
            why = "what could hide them is too short"
            if base.exposed < 2 * WORTH:
                why = (
                    f"the exchanges are {base.exposed:.1%} of the layer's time without any overlap"
                )
            elif base.compute_ms < WORTH * base.wire_ms:
                share = base.compute_ms / base.wire_ms
                why = f"the layer computes for {share:.1%} of what its exchanges take"
            return f"don't bother: it would save {self.gain:.1%} of the layer's time; {why}{few}"
        return f"worth it: G = {self.best} saves {self.gain:.1%} of the layer's time{few}"

    @property
    def smallest(self) -> str:
        """The schedule with the smallest peak, of those whose step is close to the shortest."""
        shortest = min(result.step_ms for result in self.results.values())
        peaks = {}
        for name, result in self.results.items():
            if result.step_ms <= (1 + CLOSE) * shortest:
                peaks[name] = result.peak
        return min(peaks, key=peaks.__getitem__)


def plan(layer: LayerShape, rates: Rates) -> Plan:
    """Simulate schedules and windows; choose the head groups among the former.

    Plain arithmetic: nothing is measured or exchanged.

    Args:
        layer: Shape of the layer.
        rates: Rates of one GPU.
    """
    possible = [groups for groups in GROUPS if groups <= layer.geometry(1).max_groups]
    # Stock has no shares. Where it can't run, the same shares without overlap stand in its place.
    stock = replace(layer, shares=1) if layer.heads >= layer.sp_size else layer
    one = Costs(stock, rates, 1)
    results = {
        "none": one.simulate(BASELINE, is_baseline=True),
        "five of eight": one.simulate(UPSTREAM),
    }
    limits = dict.fromkeys(results, limit_of(one))
    for groups in possible:
        costs = Costs(layer, rates, groups)
        name = f"eight of eight, G = {groups}"
        results[name], limits[name] = costs.simulate(schedule_of(costs.geometry)), limit_of(costs)
    for groups, window in WINDOWS:
        if groups <= layer.geometry(1).max_groups:
            costs = Costs(layer, rates, groups)
            name = f"window, G = {groups}, W = {window}"
            schedule = schedule_of(costs.geometry, window)
            results[name], limits[name] = costs.simulate(schedule), limit_of(costs)
    steps = {groups: results[f"eight of eight, G = {groups}"].step_ms for groups in possible}
    best = next(groups for groups in possible if steps[groups] <= (1 + CLOSE) * min(steps.values()))
    return Plan(results, best, layer.geometry(1).max_groups, limits)
