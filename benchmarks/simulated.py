"""Simulate a layer's schedule with the durations of its steps: for CPUs and slow links, where a host's time counts for little.

A transfer takes as long as its bytes, a product or attention as long as its work. Left out: relayouts, launches, smaller products of more
head groups, and compute units that an exchange takes. For GPUs, `ds_sp_overlap plan` plays what is launched.
"""

from ds_sp_overlap.schedule import MLP, O, Op, Schedule, Simulation, Step, simulate
from ds_sp_overlap.tools.planner.costs import LayerShape, Rates, Sizes
from ds_sp_overlap.tools.planner.plan import program

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


class Costs(Sizes):
    """Memory and durations of a layer in G head groups on rank 0."""

    def __init__(self, layer: LayerShape, rates: Rates, groups: int):
        super().__init__(layer, groups)
        self.rates = rates

    def ms(self, step: Step) -> float:
        """Return the duration of a step, in ms.

        A start takes as long as its transfer, a product or attention as long as its work.
        """
        layer, tokens = self.layer, self._tokens
        if step.op is Op.START:
            # The part of rank 0 itself, at index 0, is not sent.
            layout = self._exchange(step)
            sent, received = sum(layout.sources.sizes[1:]), sum(layout.targets.sizes[1:])
            moved_bytes = layer.element_bytes * max(sent, received)
            return self.rates.latency_ms + 1e3 * moved_bytes / self.rates.wire
        if step == MLP:
            # Three matrices, of width times intermediate each. Backward takes twice as long as
            # forward: three times forward in all.
            return 1e3 * 2 * tokens * layer.width * 3 * layer.intermediate * 3 / self.rates.matmul
        if step.op is Op.ATTEND:
            start, stop = self.geometry.query_range(0, step.group)
            pairs = layer.seq * self._global_tokens("q") * layer.batch
            # Two products of 2 FLOP for each pair, of which half are masked: 2 * 2 / 2.
            products = 1e3 * 2 * pairs * (stop - start) * layer.head_dim
            forward = products / self.rates.attention
            # The backward makes five products, the forward two.
            return forward * (2.5 if step.grad else 1)
        # A projection, its dgrad or its wgrad.
        (kind,) = step.tensors
        heads = self._local_heads("q" if step.tensors == O else kind, step.group)
        return 1e3 * 2 * tokens * layer.width * heads * layer.head_dim / self.rates.matmul

    def simulate(self, schedule: Schedule, is_baseline: bool = False) -> Simulation:
        """Simulate a whole transformer layer: forward, the MLP and backward; see `memory_bytes`."""
        program = (*schedule.forward, MLP, *schedule.backward)
        return simulate(schedule, program, self.ms, self.memory_bytes(schedule, is_baseline))
