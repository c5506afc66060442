"""``python -m ds_sp_overlap plan``: what overlap would be worth, before anything is run.

The schedules that layers run by, and those of DeepSpeed's class, are played with the costs of a layer (`schedule.play`).

What the model leaves out: relayout copies, kernel launches, the smaller matrix products of more head groups, and what an
exchange takes from the compute units while it is under way. Each makes the real step longer, or more groups less attractive.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..autotune.costs import WINDOWS, Costs, LayerShape, Rates, schedule_of
from ..exchange.layout import Layout, chunk_of
from ..schedule import MLP, Bar, Played, Program, Schedule, Step, by_chunks, by_head_groups, needs_of, periods, play
from .limit import limit

GROUPS = (1, 2, 4)  # head groups that are tried
CHUNKS = (2, 4, 8)  # chunks of tokens that are shown
CLOSE = 0.01  # fewer groups are preferred over a step that is shorter by less: each has a cost that the model leaves out
WORTH = 0.02  # a step that would be shorter by less than this is not worth the bother


def limit_of(costs: Costs) -> float:
    """What no order of a layer's steps stays below where nothing runs under its MLP: `limit` of forward and of backward."""
    kinds = costs.geometry.kinds
    return costs.ms(MLP) + sum(limit(needs, costs.ms) for needs in needs_of(kinds, by_head_groups(kinds).starts))


class BlockCosts(Costs):
    """Of every step of a layer in a chain, in C chunks of tokens and G head groups."""

    def __init__(self, layer: LayerShape, rates: Rates, groups: int, chunks: int):
        super().__init__(layer, rates, groups)
        self.chunks = chunks
        self.block = by_chunks(self.geometry.kinds, chunks)

    def ms(self, step: Step) -> float:
        if step.act in ("start", "attend"):
            return super().ms(step)
        layer, length = self.layer, self.layer.seq // self.layer.sp_size
        start, stop = (0, length) if step.act == "wgrad" else chunk_of(length, step.chunk, self.chunks)
        width = {"o": layer.heads * layer.head_dim, "qkv": (layer.heads + 2 * layer.kv_heads) * layer.head_dim}.get(
            step.of, 3 * layer.intermediate
        )
        return 1e3 * 2 * (stop - start) * layer.batch * layer.width * width / self.rates.matmul

    def _exchange(self, step: Step) -> Layout:
        kinds = step.of.removeprefix("d")
        dims = (self.layer.head_dim,) * len(kinds)
        layout = self.geometry.of_chunk(kinds, step.group, dims, step.chunk, self.chunks)
        return layout.inverse if step.of[0] == "d" else layout

    def in_a_chain(self) -> Played:
        """What one layer more adds to a chain: the times of its rows, without their bars."""
        four, three = (self.played(self.block.chain(layers)) for layers in (4, 3))
        compute, wire = (Bar("layer", by, 0.0, more - less) for by, more, less in (
            (self.block.forward[0], four.compute_ms, three.compute_ms), (None, four.wire_ms, three.wire_ms)
        ))  # fmt: skip
        return Played([compute], [wire], four.step_ms - three.step_ms, [])

    def played(self, schedule: Schedule, is_stock: bool = False) -> Played:
        """Without the bytes that it holds."""
        return play(schedule, (*schedule.forward, *schedule.backward), self.ms)

    def limit(self) -> float:
        """What no order of such a layer's steps stays below, see `limit`."""
        played = self.in_a_chain()
        ways = sum(limit(needs, self.ms) for needs in periods(self.geometry.kinds, self.chunks))
        return max(ways, played.compute_ms, played.wire_ms)


def _program(text: str) -> Program:
    """``project q`` and so on, one head group."""
    return tuple(Step(act, of, 0) for act, of in map(str.split, text.split(", ")))


# What DeepSpeed's PR 5691 with Megatron-DeepSpeed's PR 415 overlaps: v, o and dv stay exposed.
FIVE = Schedule(
    _program(
        "project q, start q, project k, start k, project v, finish q, finish k, start v, finish v, attend o, start o, finish o, merge o"
    ),
    _program(
        "dgrad o, start do, wgrad o, finish do, attend do, start dv, finish dv, start dk, start dq, dgrad v, wgrad v, "
        "finish dk, dgrad k, wgrad k, finish dq, dgrad q, wgrad q"
    ),
)


def _waiting(program: Program) -> Program:
    """Every exchange is waited for where it is started."""
    steps: list[Step] = []
    for step in program:
        if step.act != "finish":
            steps.append(step)
        if step.act == "start":
            steps.append(step._replace(act="finish"))
    return tuple(steps)


# DeepSpeed's class as it stands, between projections that are called whole.
NONE = Schedule(
    _waiting(_program("project q, project k, project v, start q, start k, start v, attend o, start o, merge o")),
    _waiting(
        _program(
            "wgrad o, dgrad o, start do, attend do, start dv, start dk, start dq, dgrad v, wgrad v, dgrad k, wgrad k, dgrad q, wgrad q"
        )
    ),
)


@dataclass(frozen=True)
class Plan:
    """What `plan` found: the schedules as they were played, by name, and the fewest head groups that come close to the shortest step.

    limits   of each, what no order of its steps stays below (`limit`): layers by themselves with nothing under the MLP
    """

    results: dict[str, Played]
    best: int
    max_groups: int
    limits: dict[str, float]

    @property
    def gain(self) -> float:
        """Share of the step without overlap that the best schedule saves."""
        return 1 - self.results[f"eight of eight, G = {self.best}"].step_ms / self.results["none"].step_ms

    @property
    def advice(self) -> str:
        base = self.results["none"]
        name, block = min(((name, r) for name, r in self.results.items() if "block" in name), key=lambda row: row[1].step_ms, default=("", base))  # fmt: skip
        saved, beside = 1 - block.step_ms / base.step_ms, ""
        if saved > self.gain + WORTH:
            beside = f"; a {name}, saves {saved:.1%}, its exchanges under the MLP as well"
        few = "; a rank has one query head, so nothing hides v, o and dv" if self.max_groups == 1 else ""
        if self.gain < WORTH and beside:
            return f"worth it in a block alone{beside}; a layer by itself would save {self.gain:.1%}{few}"
        if self.gain < WORTH:
            why = (
                f"the exchanges are {base.exposed:.1%} of the layer's time without any overlap"
                if base.exposed < 2 * WORTH
                else f"the layer computes for {base.compute_ms / base.wire_ms:.1%} of what its exchanges take"
                if base.compute_ms < WORTH * base.wire_ms
                else "what could hide them is too short"
            )
            return f"don't bother: it would save {self.gain:.1%} of the layer's time; {why}{few}"
        return f"worth it: G = {self.best} saves {self.gain:.1%} of the layer's time{few}{beside}"

    @property
    def smallest(self) -> str:
        """Of those that take no longer than the shortest step, but for `CLOSE`, the one that holds least."""
        shortest = min(of.step_ms for of in self.results.values() if of.peak)
        close = {name: of.peak for name, of in self.results.items() if of.peak and of.step_ms <= (1 + CLOSE) * shortest}
        return min(close, key=close.__getitem__)


def plan(layer: LayerShape, rates: Rates) -> Plan:
    """Play every schedule and choose the head groups."""
    possible = [groups for groups in GROUPS if groups <= layer.geometry(1).max_groups]
    one = Costs(layer, rates, 1)
    results = {"none": one.played(NONE, is_stock=True), "five of eight": one.played(FIVE)}
    limits = dict.fromkeys(results, limit_of(one))
    for groups in possible:
        costs = Costs(layer, rates, groups)
        name = f"eight of eight, G = {groups}"
        results[name], limits[name] = costs.played(schedule_of(costs.geometry)), limit_of(costs)
    for groups, window in WINDOWS:
        if groups <= layer.geometry(1).max_groups:
            costs = Costs(layer, rates, groups)
            name = f"window, G = {groups}, W = {window}"
            results[name], limits[name] = costs.played(schedule_of(costs.geometry, window)), limit_of(costs)
    steps = {groups: results[f"eight of eight, G = {groups}"].step_ms for groups in possible}
    best = next(groups for groups in possible if steps[groups] <= (1 + CLOSE) * min(steps.values()))
    for chunks, groups in itertools.product(CHUNKS, possible if layer.intermediate else ()):
        of_block = BlockCosts(layer, rates, groups, chunks)
        name = f"block, C = {chunks}, G = {groups}"
        results[name], limits[name] = of_block.in_a_chain(), of_block.limit()
    return Plan(results, best, layer.geometry(1).max_groups, limits)
