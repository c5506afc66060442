"""``python -m ds_sp_overlap plan``: what overlap would be worth, before anything is run.

The schedules that layers run by, and those of DeepSpeed's class, are played with the costs of a layer (`schedule.play`).

What the model leaves out: relayout copies, kernel launches, the smaller matrix products of more head groups, and what an
exchange takes from the compute units while it is under way. Each makes the real step longer, or more groups less attractive.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..exchange.geometry import Geometry
from ..schedule import MLP, Played, Program, Schedule, Step, by_head_groups, play

GROUPS = (1, 2, 4)  # head groups that are tried
CLOSE = 0.01  # fewer groups are preferred over a step that is shorter by less: each has a cost that the model leaves out
WORTH = 0.02  # a step that would be shorter by less than this is not worth the bother


@dataclass(frozen=True)
class LayerShape:
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

    def __post_init__(self) -> None:
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
    """Of every step of a layer on rank 0, the rank with the most heads, in G head groups."""

    def __init__(self, layer: LayerShape, rates: Rates, groups: int):
        self.layer, self.rates, self.geometry = layer, rates, layer.geometry(groups)

    def ms(self, step: Step) -> float:
        """Duration on the compute row; of the transfer, for a start."""
        layer = self.layer
        tokens = layer.seq // layer.sp_size * layer.batch
        if step.act == "start":
            sent, got = (sum(sizes[1:]) for sizes in self._sizes(step))
            return self.rates.latency_ms + 1e3 * layer.element_bytes * max(sent, got) / self.rates.wire
        if step == MLP:  # forward, and a backward that takes twice as long
            return 1e3 * 2 * tokens * layer.width * 3 * layer.intermediate * 3 / self.rates.matmul
        if step.act == "attend":  # the backward makes five products of the forward's two
            start, stop = self.geometry.query_range(0, step.group)
            forward = 1e3 * 2 * layer.seq**2 * layer.batch * (stop - start) * layer.head_dim / self.rates.attention
            return forward * (2.5 if step.of == "do" else 1)
        heads = sum(stop - start for start, stop in self.geometry.heads_of("q" if step.of == "o" else step.of, step.group))
        return 1e3 * 2 * tokens * layer.width * heads * layer.head_dim / self.rates.matmul

    def held(self, step: Step) -> int:
        """Bytes of send and receive buffers of an exchange."""
        return self.layer.element_bytes * sum(map(sum, self._sizes(step)))

    def _sizes(self, step: Step) -> tuple[list[int], list[int]]:
        """Elements to and from each rank."""
        kinds = step.of.removeprefix("d")
        layout = self.geometry.together(kinds, step.group, (self.layer.head_dim,) * len(kinds))
        layout = layout.inverse if step.of[0] == "d" else layout
        return layout.send_sizes, layout.recv_sizes

    def played(self, schedule: Schedule) -> Played:
        """A whole transformer layer: forward, the MLP, and backward."""
        return play(schedule, (*schedule.forward, MLP, *schedule.backward), self.ms, self.held)


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


NONE = Schedule(_waiting(FIVE.forward), _waiting(FIVE.backward))  # DeepSpeed's class as it stands


@dataclass(frozen=True)
class Plan:
    """What `plan` found: the schedules as they were played, by name, and the fewest head groups that come close to the shortest step."""

    results: dict[str, Played]
    best: int
    max_groups: int

    @property
    def gain(self) -> float:
        """Share of the step without overlap that the best schedule saves."""
        return 1 - self.results[f"eight of eight, G = {self.best}"].step_ms / self.results["none"].step_ms

    @property
    def advice(self) -> str:
        base = self.results["none"]
        few = "; a rank has one query head, so nothing hides v, o and dv" if self.max_groups == 1 else ""
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


def plan(layer: LayerShape, rates: Rates) -> Plan:
    """Play every schedule and choose the head groups."""
    possible = [groups for groups in GROUPS if groups <= layer.geometry(1).max_groups]
    one = Costs(layer, rates, 1)
    results = {"none": one.played(NONE), "five of eight": one.played(FIVE)}
    for groups in possible:
        costs = Costs(layer, rates, groups)
        results[f"eight of eight, G = {groups}"] = costs.played(by_head_groups(costs.geometry.kinds))
    steps = {groups: results[f"eight of eight, G = {groups}"].step_ms for groups in possible}
    best = next(groups for groups in possible if steps[groups] <= (1 + CLOSE) * min(steps.values()))
    return Plan(results, best, layer.geometry(1).max_groups)
