"""``python -m ds_sp_overlap plan``: what overlap would be worth, before anything is run.

A layer is the list of what its program does, in order: compute for some time, start an exchange, wait for one. `run` plays
such a list on two rows, as `schedule.py` draws them: one that computes and one that carries a single exchange at a time.

    compute | Wq0 Wk0 Wv0 | ..waits.. | attention 0 | ...
    wire    |     q0  k0  v0                        o0

What the model leaves out: relayout copies, kernel launches, the smaller matrix products of more head groups, and what an
exchange takes from the compute units while it is under way. Each makes the real step longer, or more groups less attractive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .layout import Geometry

GROUPS = (1, 2, 4)  # head groups that are tried
CLOSE = 0.01  # fewer groups are preferred over a step that is shorter by less: each has a cost that the model leaves out
WORTH = 0.02  # a step that would be shorter by less than this is not worth the bother


@dataclass(frozen=True)
class Step:
    """One thing that a program does.

    kind   "compute" on the compute row; "start" an exchange, to be carried when the wire is free; "wait" until it has arrived
    name   of the exchange, for "start" and "wait"
    ms     duration; of the transfer, for "start"
    held   bytes of send and receive buffers, from "start" to "wait"
    """

    kind: Literal["compute", "start", "wait"]
    name: str
    ms: float = 0.0
    held: int = 0


@dataclass(frozen=True)
class Result:
    """step_ms until the last row is done; compute_ms and wire_ms of work; most bytes of buffers in flight at once."""

    step_ms: float
    compute_ms: float
    wire_ms: float
    buffer_bytes: int

    @property
    def exposed(self) -> float:
        """Share of the step in which nothing is computed."""
        return 1 - self.compute_ms / self.step_ms if self.step_ms else 0.0


def run(program: list[Step]) -> Result:
    """Play a program: the compute row does one step after another, the wire carries exchanges in the order of their starts."""
    now = wire_free = compute = wire = 0.0
    arrives: dict[str, float] = {}
    held: dict[str, int] = {}
    most = 0
    for step in program:
        if step.kind == "compute":
            now += step.ms
            compute += step.ms
        elif step.kind == "start":
            wire_free = arrives[step.name] = max(now, wire_free) + step.ms
            wire += step.ms
            held[step.name] = step.held
            most = max(most, sum(held.values()))
        else:
            now = max(now, arrives.pop(step.name))
            del held[step.name]
    assert not arrives, f"started and never waited for: {list(arrives)}"
    return Result(now, compute, wire, most)


@dataclass(frozen=True)
class Layer:
    """Shape of a transformer layer. Raises ValueError where no sp group of this size can hold it.

    width           model dim m
    heads, kv_heads, head_dim
    seq             global sequence, tokens; divides by the sp size
    sp_size         P
    batch
    element_bytes   of what is exchanged
    intermediate    width of a gated MLP that shares the layer's time and hides nothing; 0: the attention layer alone
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    sp_size: int
    batch: int = 1
    element_bytes: int = 2
    intermediate: int = 0

    def __post_init__(self):
        if self.seq % self.sp_size:
            raise ValueError(f"{self.seq} tokens do not divide by sp size {self.sp_size}; take a multiple of it")
        self.geometry(1)

    def geometry(self, groups: int) -> Geometry:
        lengths = (self.seq // self.sp_size,) * self.sp_size
        return Geometry(self.sp_size, 0, lengths, self.batch, self.heads, self.kv_heads, groups)


@dataclass(frozen=True)
class Rates:
    """What the machine does.

    matmul, attention   FLOP/s of projections and of causal attention (the masked half is not counted)
    wire                bytes/s that a rank sends to the others in an all-to-all, while it receives as many
    latency_ms          of an exchange of nothing
    """

    matmul: float
    attention: float
    wire: float
    latency_ms: float = 0.02


class Costs:
    """Milliseconds of everything a layer does on rank 0, the rank with the most heads, in G head groups."""

    def __init__(self, layer: Layer, rates: Rates, groups: int):
        self.layer, self.rates, self.geometry = layer, rates, layer.geometry(groups)
        self.groups = range(groups)

    def projection(self, kind: str, group: int) -> float:
        """One matrix product with the part of a weight: forward, dgrad, or wgrad."""
        layer = self.layer
        heads = sum(stop - start for start, stop in self.geometry.heads_of("q" if kind == "o" else kind, group))
        tokens = layer.seq // layer.sp_size * layer.batch
        return 1e3 * 2 * tokens * layer.width * heads * layer.head_dim / self.rates.matmul

    def attention(self, group: int) -> float:
        """Forward; the backward makes five products of the forward's two."""
        layer = self.layer
        start, stop = self.geometry.query_range(0, group)
        return 1e3 * 2 * layer.seq**2 * layer.batch * (stop - start) * layer.head_dim / self.rates.attention

    def mlp(self) -> float:
        """Forward; the backward takes twice as long."""
        layer = self.layer
        tokens = layer.seq // layer.sp_size * layer.batch
        return 1e3 * 2 * tokens * layer.width * 3 * layer.intermediate / self.rates.matmul

    def start(self, name: str, group: int) -> Step:
        """``name``: q, k, v, o, dq, dk, dv or do."""
        layout = self.geometry.exchange(name[-1], group, self.layer.head_dim)
        layout = layout.inverse if name[0] == "d" else layout
        sent, got = (
            (sum(sizes), sum(sizes[1:])) for sizes in (layout.source.split_sizes, layout.target.split_sizes)
        )
        size = self.layer.element_bytes
        ms = self.rates.latency_ms + 1e3 * size * max(sent[1], got[1]) / self.rates.wire
        return Step("start", f"{name}{group}", ms, size * (sent[0] + got[0]))


def _wait(name: str, group: int) -> Step:
    return Step("wait", f"{name}{group}")


def _compute(name: str, ms: float) -> Step:
    return Step("compute", name, ms)


def eight(costs: Costs) -> list[Step]:
    """The program that `schedule.overlapped` draws."""
    c, groups = costs, costs.groups
    kinds = {group: c.geometry.kinds_of(group) for group in groups}
    steps: list[Step] = []
    for group in groups:
        for kind in kinds[group]:
            steps += [_compute(f"W{kind}{group}", c.projection(kind, group)), c.start(kind, group)]
    for group in groups:
        steps += [_wait(kind, group) for kind in kinds[group]]
        steps += [_compute(f"attention {group}", c.attention(group)), c.start("o", group)]
    for group in groups:
        steps += [_wait("o", group), _compute(f"Wo{group}", c.projection("o", group))]
    steps += [_compute("MLP", 3 * c.mlp())]
    for group in reversed(groups):
        steps += [_compute(f"Wo{group} dgrad", c.projection("o", group)), c.start("do", group)]
    steps += [_compute(f"Wo{group} wgrad", c.projection("o", group)) for group in groups]
    for group in reversed(groups):
        steps += [_wait("do", group), _compute(f"attention {group}'", 2.5 * c.attention(group))]
        steps += [c.start("d" + kind, group) for kind in reversed(kinds[group])]
    for group in reversed(groups):
        for kind in reversed(kinds[group]):
            steps += [_wait("d" + kind, group), _compute(f"W{kind}{group}'", 2 * c.projection(kind, group))]
    return steps


def five(costs: Costs) -> list[Step]:
    """What DeepSpeed's PR 5691 with Megatron-DeepSpeed's PR 415 overlaps: v, o and dv stay exposed."""
    c = costs
    W = {kind: c.projection(kind, 0) for kind in "qkvo"}
    return [
        _compute("Wq", W["q"]), c.start("q", 0),
        _compute("Wk", W["k"]), c.start("k", 0),
        _compute("Wv", W["v"]), _wait("q", 0), _wait("k", 0),
        c.start("v", 0), _wait("v", 0), _compute("attention", c.attention(0)),
        c.start("o", 0), _wait("o", 0), _compute("Wo", W["o"]), _compute("MLP", 3 * c.mlp()),
        _compute("Wo dgrad", W["o"]), c.start("do", 0), _compute("Wo wgrad", W["o"]), _wait("do", 0),
        _compute("attention'", 2.5 * c.attention(0)), c.start("dv", 0), _wait("dv", 0),
        c.start("dk", 0), c.start("dq", 0), _compute("Wv'", 2 * W["v"]),
        _wait("dk", 0), _compute("Wk'", 2 * W["k"]), _wait("dq", 0), _compute("Wq'", 2 * W["q"]),
    ]  # fmt: skip


def none(costs: Costs) -> list[Step]:
    """DeepSpeed's class as it stands: every exchange is waited for where it is started."""
    steps: list[Step] = []
    for step in five(costs):
        if step.kind != "wait":
            steps.append(step)
        if step.kind == "start":
            steps.append(Step("wait", step.name))
    return steps


@dataclass(frozen=True)
class Plan:
    """What `plan` found: the programs' results by name, and the fewest head groups that come close to the shortest step."""

    results: dict[str, Result]
    best: int
    max_groups: int

    @property
    def gain(self) -> float:
        """Share of the step without overlap that the best program saves."""
        return 1 - self.results[f"eight of eight, G = {self.best}"].step_ms / self.results["none"].step_ms

    @property
    def advice(self) -> str:
        base = self.results["none"]
        few = "; a rank has one query head, so v, o and dv have only each other to hide behind" if self.max_groups == 1 else ""
        if self.gain < WORTH:
            why = (
                f"the exchanges are {base.exposed:.1%} of the layer's time without any overlap"
                if base.exposed < 2 * WORTH
                else f"the layer computes for {base.compute_ms / base.wire_ms:.1%} of what its exchanges take"
                if base.compute_ms < WORTH * base.wire_ms
                else "what could hide them is too short"
            )
            return f"don't bother: it would save {self.gain:.1%} of the layer's time; {why}{few}"
        return f"worth it: G = {self.best} saves {self.gain:.1%} of the layer's time{few}"


def plan(layer: Layer, rates: Rates) -> Plan:
    """Play every program and choose the head groups."""
    possible = [groups for groups in GROUPS if groups <= layer.geometry(1).max_groups]
    one = Costs(layer, rates, 1)
    results = {"none": run(none(one)), "five of eight": run(five(one))}
    results |= {f"eight of eight, G = {groups}": run(eight(Costs(layer, rates, groups))) for groups in possible}
    steps = {groups: results[f"eight of eight, G = {groups}"].step_ms for groups in possible}
    best = next(groups for groups in possible if steps[groups] <= (1 + CLOSE) * min(steps.values()))
    return Plan(results, best, layer.geometry(1).max_groups)
