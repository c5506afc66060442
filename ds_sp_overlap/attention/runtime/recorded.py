"""What each step of forward does where autograd records it and derives its backward.

See Note [Two ways to differentiate] in `runner`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from ...exchange.exchange import Half, run_halves
from ...exchange.layout import Range
from ...schedule import Exchanged, Op, Part, Program, Step
from .execution import Attend, Call, attend_group
from .parts import cut, join
from .runner import Runner

# Changes q, k or v on arrival, given the kind, the tensor, and the ranges of tokens that q holds:
# none, where q holds the whole sequence.
Arrive = Callable[[str, Tensor, tuple[Range, ...]], Tensor]


class Gathering(Runner):
    """Gathers consecutive steps and performs them together, as one node of autograd.

    Fewer nodes cost the host less time. A subclass gathers a step by passing it to `gather`. It
    calls `flush` before a step that must come behind those that were gathered.
    """

    def __init__(self, call: Call):
        super().__init__(call)
        self._gathered: list[Step] = []

    @abstractmethod
    def joins(self, gathered: list[Step], step: Step) -> bool:
        """Return whether a step is performed together with the steps gathered so far."""

    @abstractmethod
    def perform(self, steps: list[Step]) -> None:
        """Perform the steps as one node."""

    def gather(self, step: Step) -> None:
        """Perform the step later, with those that were gathered if it joins them."""
        if self._gathered and not self.joins(self._gathered, step):
            self.flush()
        self._gathered.append(step)

    def walk(self, program: Program) -> None:
        super().walk(program)
        self.flush()

    def flush(self) -> None:
        """Perform the steps that were gathered."""
        if self._gathered:
            steps, self._gathered = self._gathered, []
            self.perform(steps)


class Recorded(Gathering):
    """Performs the steps of forward with operations that autograd records.

    The exchanges between two attentions, o of one group and q, k, v of a later one, become one
    node. See Note [Two ways to differentiate].

    Args:
        call: The call.
        attend: Computes o of a group from its number and its q, k, v, all [s, b, h_g/P, d].
        project: Computes q, k or v of a group, [s/P, b, h_g, d], from the kind and the group. None
            if the inputs are a node of their own, whose tokens the caller puts in ``tokens``.
        arrive: RoPE, if the caller wants RoPE after the exchange. None for no change.

    Attributes:
        tokens: For each exchange that is in flight, an empty tensor that stands for it.
        outputs: Local o of each group, unless the output is a node of its own.
    """

    def __init__(
        self,
        call: Call,
        attend: Attend,
        project: Callable[[str, int], Tensor] | None = None,
        arrive: Arrive | None = None,
    ):
        super().__init__(call)
        self._project, self._attend, self._arrive = project, attend, arrive
        self.tokens: dict[Exchanged, Tensor] = {}
        # For each group whose o is not sent yet: o, and the q, k, v that o was computed from, as
        # `Half` takes them.
        self._attended: dict[int, tuple[Tensor, ...]] = {}

    def joins(self, gathered: list[Step], step: Step) -> bool:
        # With work on arrival, each step is a node of its own, so that the work hides the exchanges
        # that are still in flight.
        return self._arrive is None

    def project(self, step: Step) -> None:
        self.flush()
        (part,) = step.parts
        assert self._project is not None
        self.values[part] = self._project(*part)

    def start(self, step: Step) -> None:
        """Start q, k or v now; leave a start of o to `perform`."""
        if step.is_local_end:
            self.flush()
            tensors = [self.values.pop(part) for part in step.parts]
            self.tokens[step.exchange] = self.call.new_exchange(step, tensors).start(*tensors)
        else:
            self.gather(step)

    def finish(self, step: Step) -> None:
        """Finish o now; leave a finish of q, k or v to `perform`."""
        if step.is_local_end:
            self.flush()
            exchange = self.call.exchanges[step.exchange]
            self.values["o", step.group] = exchange.finish(self.tokens.pop(step.exchange))
        else:
            self.gather(step)

    def attend(self, step: Step) -> None:
        # What was gathered brings the q, k and v of this group.
        self.flush()
        group, heads = step.group, self.heads(step.group)
        self._attended[group] = attend_group(self.call, self._attend, group, *heads), *heads

    def merge(self, step: Step) -> None:
        self.outputs[step.group] = self.values.pop(("o", step.group))

    def perform(self, steps: list[Step]) -> None:
        """Run starts of o and finishes of q, k, v as one node; apply ``arrive`` to the latter."""
        halves = []
        for step in steps:
            if step.op is Op.START:
                attended = self._attended.pop(step.group)
                halves.append(Half(self.call.new_exchange(step, attended), attended, starts=True))
            else:
                token = self.tokens.pop(step.exchange)
                halves.append(Half(self.call.exchanges[step.exchange], (token,)))
        arrive, geometry = self._arrive, self.call.geometry
        queries = geometry.own_queries if geometry.shares > 1 else ()
        for step, results in zip(steps, run_halves(halves)):
            if step.op is Op.START:
                (self.tokens[step.exchange],) = results
            else:
                for part, x in zip(step.parts, results):
                    self.values[part] = x if arrive is None else arrive(part[0], x, queries)


def cut_heads(call: Call, kind: str, x: Tensor) -> dict[Part, Tensor]:
    """Cut local q, k or v [.., .., heads, d] into the heads that travel with each group.

    Returns:
        For each part of that kind, its heads; a group whose k and v came with an earlier group has
        no part.
    """
    parts = [part for part in call.schedule.parts if part[0] == kind]
    return dict(zip(parts, cut(x, 2, [call.geometry.heads_of(*part) for part in parts])))


def join_heads(call: Call, outputs: dict[int, Tensor]) -> Tensor:
    """Join local o of each group to local o of all heads in their order, [.., .., h, d]."""
    heads = [call.geometry.heads_of("q", group) for group in call.groups]
    return join([outputs[group] for group in call.groups], 2, heads)
