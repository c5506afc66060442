"""Simulate a layer's schedule by the durations of its steps: for CPUs and slow links, where host time hardly matters.

The duration of a transfer is proportional to its bytes, that of a product or attention to its work. Left out are relayouts,
launches, the lower rate of small products, and compute units that an exchange takes. For GPUs, `ds_sp_overlap plan` simulates the
launches.
"""

from typing import NamedTuple

from ds_sp_overlap.schedule import O, Op, Program, Schedule, Simulation, Step, simulate
from ds_sp_overlap.tools.planner.costs import LayerShape

# The MLP of a transformer layer, between forward and backward.
MLP = Step(Op.MERGE, (), False, 0)


def program(text: str, grad: bool = False) -> Program:
    """Read a program of one head group: ``project q, start q``; with ``grad``, ``start q`` sends dq."""
    steps = [each.split() for each in text.split(", ")]
    return tuple(Step(Op(op), (of,), grad, 0) for op, of in steps)


# DeepSpeed's class, between projections that are called whole.
BASELINE = Schedule(
    program(
        "project q, project k, project v, start q, finish q, start k, finish k, start v, finish v, "
        "attend o, start o, finish o, merge o"
    ),
    program(
        "wgrad o, dgrad o, start o, finish o, attend o, start v, finish v, start k, finish k, "
        "start q, finish q, dgrad v, wgrad v, dgrad k, wgrad k, dgrad q, wgrad q",
        grad=True,
    ),
)

# The overlap of DeepSpeed's PR 5691 with Megatron-DeepSpeed's PR 415: v, o and dv stay exposed.
UPSTREAM = Schedule(
    program(
        "project q, start q, project k, start k, project v, finish q, finish k, start v, finish v, "
        "attend o, start o, finish o, merge o"
    ),
    program(
        "dgrad o, start o, wgrad o, finish o, attend o, start v, finish v, start k, start q, "
        "dgrad v, wgrad v, finish k, dgrad k, wgrad k, finish q, dgrad q, wgrad q",
        grad=True,
    ),
)


class Rates(NamedTuple):
    """The rates of a machine.

    matmul       FLOP/s of matrix products
    attention    FLOP/s of causal attention; the masked half does not count as work
    wire         bytes/s that a rank sends to the others in an all-to-all, while it receives as many
    latency_ms   ms of an empty exchange
    """

    matmul: float
    attention: float
    wire: float
    latency_ms: float


class Costs:
    """Computes the durations of a layer's steps in G head groups, on rank 0, the rank with the most heads."""

    def __init__(self, layer: LayerShape, rates: Rates, groups: int):
        self.layer, self.rates, self.geometry = layer, rates, layer.geometry(groups)

    def ms(self, step: Step) -> float:
        """Return the duration of a step, in ms.

        A start takes as long as its transfer, a product or attention as long as its work.
        """
        layer, tokens = self.layer, self.layer.seq // self.layer.sp_size * self.layer.batch
        if step.op is Op.START:
            # The part of rank 0 itself, at index 0, is not sent.
            kinds = (*step.beside, *step.tensors)
            layout = self.geometry.exchange(kinds, step.group, (layer.head_dim,) * len(kinds))
            layout = layout.inverse if step.grad else layout
            sent, received = sum(layout.sources.sizes[1:]), sum(layout.targets.sizes[1:])
            moved_bytes = layer.element_bytes * max(sent, received)
            return self.rates.latency_ms + 1e3 * moved_bytes / self.rates.wire
        if step == MLP:
            # Three matrices, of width times intermediate each. Backward takes twice as long as
            # forward: three times forward in all.
            return 1e3 * 2 * tokens * layer.width * 3 * layer.intermediate * 3 / self.rates.matmul
        if step.op is Op.ATTEND:
            start, stop = self.geometry.query_range(0, step.group)
            queries = sum(stop - start for start, stop in self.geometry.own_queries)
            pairs = layer.seq * queries * layer.batch
            # Two products of 2 FLOP for each pair; half of the pairs are masked: 2 * 2 / 2.
            products = 1e3 * 2 * pairs * (stop - start) * layer.head_dim
            forward = products / self.rates.attention
            # The backward makes five products, the forward two.
            return forward * (2.5 if step.grad else 1)
        # A projection, its dgrad or its wgrad.
        (kind,) = step.tensors
        ranges = self.geometry.heads_of("q" if step.tensors == O else kind, step.group)
        heads = sum(stop - start for start, stop in ranges)
        return 1e3 * 2 * tokens * layer.width * heads * layer.head_dim / self.rates.matmul

    def simulate(self, schedule: Schedule) -> Simulation:
        """Simulate a whole transformer layer: forward, the MLP and backward."""
        return simulate(schedule, (*schedule.forward, MLP, *schedule.backward), self.ms)
