"""Predicts what overlap would save, before anything is run: ``python -m ds_sp_overlap plan``.

The schedules that layers run by, and those of DeepSpeed's class, are simulated with the costs of a
layer (`schedule.simulate`).

The simulation leaves out relayout copies, kernel launches, the smaller matrix products of more head
groups, and the compute units that an exchange takes while it is under way. Each of these makes the
real step longer, or more groups less attractive.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ...autotune.costs import WINDOWS, Costs, LayerShape, Rates
from ...autotune.trial import CLOSE, GROUPS
from ...exchange.layout import Layout, chunk_of
from ...schedule import (
    MLP,
    QKV,
    Bar,
    O,
    Op,
    Program,
    Recompute,
    Schedule,
    Simulation,
    Step,
    by_chunks,
    by_head_groups,
    needs_of,
    periods,
    schedule_of,
    simulate,
)
from .limit import limit

# Chunks of tokens that are shown.
CHUNKS = (2, 4, 8)
# A step that would be shorter by less than this share is not worth the bother.
WORTH = 0.02


def limit_of(costs: Costs) -> float:
    """Return the `limit` of forward and backward of a layer whose MLP hides nothing."""
    kinds = costs.geometry.kinds
    return costs.ms(MLP) + sum(
        limit(needs, costs.ms) for needs in needs_of(kinds, by_head_groups(kinds).starts)
    )


class BlockCosts(Costs):
    """Durations of the steps of a layer in a chain, in C chunks of tokens and G head groups.

    Args:
        layer: Shape of the layer.
        rates: Rates of one GPU.
        groups: G.
        chunks: C.
        recompute: What is computed again in backward.
    """

    def __init__(
        self,
        layer: LayerShape,
        rates: Rates,
        groups: int,
        chunks: int,
        recompute: Recompute = "none",
    ):
        super().__init__(layer, rates, groups)
        self.chunks = chunks
        self.block = by_chunks(self.geometry.kinds, chunks, recompute)

    def ms(self, step: Step) -> float:
        """Return the duration of a step on the compute row; of the transfer, for a start."""
        if step.op in (Op.START, Op.ATTEND):
            return super().ms(step)
        layer, length = self.layer, self.layer.seq // self.layer.sp_size
        # Weight gradients wait for all chunks, unless backward recomputes.
        of_all_chunks = step.op is Op.WGRAD and not self.block.recompute
        start, stop = (0, length) if of_all_chunks else chunk_of(length, step.chunk, self.chunks)
        width = {
            O: layer.heads * layer.head_dim,
            QKV: (layer.heads + 2 * layer.kv_heads) * layer.head_dim,
        }.get(step.tensors, 3 * layer.intermediate)
        return 1e3 * 2 * (stop - start) * layer.batch * layer.width * width / self.rates.matmul

    def _exchange(self, step: Step) -> Layout:
        """Return the layout of the exchange of one chunk."""
        # o beside do goes to attention, as q does.
        kinds = ("q", "q") if step.beside else step.tensors
        dims = (self.layer.head_dim,) * len(kinds)
        layout = self.geometry.exchange(kinds, step.group, dims, step.chunk, self.chunks)
        return layout.inverse if step.grad and not step.beside else layout

    def in_a_chain(self) -> Simulation:
        """Return the times that one more layer adds to a chain, one bar for each row."""
        # A first and a last layer have other steps than those between, which both chains have.
        four, three = (self.simulate(self.block.chain(layers)) for layers in (4, 3))
        # Only a bar with a step counts as computing.
        compute = Bar("layer", self.block.forward[0], 0.0, four.compute_ms - three.compute_ms)
        wire = Bar("layer", None, 0.0, four.wire_ms - three.wire_ms)
        return Simulation([compute], [wire], four.step_ms - three.step_ms, [])

    def simulate(self, schedule: Schedule, is_baseline: bool = False) -> Simulation:
        """Simulate forward and backward, without memory; ``is_baseline`` changes nothing here."""
        return simulate(schedule, (*schedule.forward, *schedule.backward), self.ms)

    def limit(self) -> float:
        """Return the `limit` of one layer in a chain."""
        played = self.in_a_chain()
        ways = sum(limit(needs, self.ms) for needs in periods(self.geometry.kinds, self.chunks))
        return max(ways, played.compute_ms, played.wire_ms)


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
        limits: For each schedule, the time that no order of its steps can beat (`limit`). For
            layers by themselves, nothing runs under the MLP.
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
        blocks = {name: result for name, result in self.results.items() if "block" in name}
        name = min(blocks, key=lambda name: blocks[name].step_ms, default="")
        block = blocks.get(name, base)
        saved, beside = 1 - block.step_ms / base.step_ms, ""
        if saved > self.gain + WORTH:
            beside = f"; a {name}, saves {saved:.1%}, its exchanges under the MLP as well"
        few = ""
        if self.max_groups == 1:
            few = "; a rank has one query head, so nothing hides v, o and dv"
        if self.gain < WORTH and beside:
            return (
                f"worth it in a block alone{beside}; "
                f"a layer by itself would save {self.gain:.1%}{few}"
            )
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
        return f"worth it: G = {self.best} saves {self.gain:.1%} of the layer's time{few}{beside}"

    @property
    def smallest(self) -> str:
        """The schedule with the smallest peak, of those whose step is close to the shortest."""
        # Blocks are simulated without memory, and have a peak of 0.
        layers = {name: result for name, result in self.results.items() if result.peak}
        shortest = min(result.step_ms for result in layers.values())
        peaks = {}
        for name, result in layers.items():
            if result.step_ms <= (1 + CLOSE) * shortest:
                peaks[name] = result.peak
        return min(peaks, key=peaks.__getitem__)


def plan(layer: LayerShape, rates: Rates) -> Plan:
    """Simulate schedules, windows and blocks; choose the head groups among the former.

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
    for chunks, groups in itertools.product(CHUNKS, possible if layer.intermediate else ()):
        of_block = BlockCosts(layer, rates, groups, chunks)
        name = f"block, C = {chunks}, G = {groups}"
        results[name], limits[name] = of_block.in_a_chain(), of_block.limit()
    return Plan(results, best, layer.geometry(1).max_groups, limits)
