"""The steps of forward under autograd's eyes, which makes the backward of them.

See Note [Two ways to differentiate] in `runner`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from ...exchange.exchange import Half, run_halves
from ...schedule import Exchanged, Op, Part, Program, Schedule, Step
from .execution import Attend, Call, attend_group, with_kv
from .runner import FORWARD, Runner
from .slices import join


class Gathering(Runner):
    """Gathers steps that follow one another and performs them together, as one node of autograd:
    fewer nodes cost the host less. `gather` is their handler.
    """

    def __init__(self, call: Call, schedule: Schedule | None = None):
        super().__init__(call, schedule)
        self._gathered: list[Step] = []

    @abstractmethod
    def joins(self, gathered: list[Step], step: Step) -> bool:
        """Whether a step is performed together with those that were gathered."""

    @abstractmethod
    def perform(self, steps: list[Step]) -> None:
        """Perform steps as one node."""

    def gather(self, step: Step) -> None:
        self._gathered.append(step)

    def walk(self, program: Program) -> None:
        super().walk(program)
        self._perform()

    def reach(self, step: Step) -> None:
        if self._gathered and not self.joins(self._gathered, step):
            self._perform()

    def _perform(self) -> None:
        steps, self._gathered = self._gathered, []
        if steps:
            self.perform(steps)


class Recorded(Gathering):
    """Performs the steps of forward under autograd's eyes. See Note [Two ways to differentiate].

    What travels between two attentions, o of one group and q, k, v of a later one, is one node.

    Attributes:
        tokens: Of exchanges that are under way.
        values: q, k, v and o of head groups: made, then received.
        outputs: o of each group, local, where nothing else takes it.
    """

    handlers = FORWARD

    def __init__(
        self,
        call: Call,
        attend: Attend,
        project: Callable[[str, int], Tensor] | None = None,
        arrive: Callable[[str, Tensor], Tensor] | None = None,
    ):
        """
        Args:
            call: The call.
            attend: A group and its q, k, v -> o, [s, b, h_g/P, d] each.
            project: Kind and group -> q, k or v of the group, [s/P, b, h_g, d]. None where a node
                does it, and gives the tokens.
            arrive: What is done with q, k or v on arrival, [s, b, h_g/P, d]: RoPE where the caller
                wants it after the exchange. None for nothing.
        """
        super().__init__(call)
        self._project, self._attend, self._arrive = project, attend, arrive
        self.tokens: dict[Exchanged, Tensor] = {}
        self.values: dict[Part, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self._attended: dict[int, tuple[Tensor, ...]] = {}  # o, and q, k, v that it is made of

    def joins(self, gathered: list[Step], step: Step) -> bool:
        # What is done on arrival is done under the exchanges that are still on their way.
        return self._arrive is None and step.on_wire and not step.is_local_end

    def project(self, step: Step) -> None:
        (part,) = step.parts
        assert self._project is not None
        self.values[part] = self._project(*part)

    def start(self, step: Step) -> None:
        if step.is_local_end:
            sent = [self.values.pop(part) for part in step.parts]
            self.tokens[step.exchange] = self.call.start(step, *sent)
        else:
            self.gather(step)

    def finish(self, step: Step) -> None:
        if step.is_local_end:
            token = self.tokens.pop(step.exchange)
            (part,) = step.parts
            self.values[part] = self.call.exchanges[step.exchange].finish(token)
        else:
            self.gather(step)

    def attend(self, step: Step) -> None:
        group, geometry = step.group, self.call.geometry
        q = self.values.pop(("q", group))
        k, v = (with_kv(geometry, kind, group, self.values) for kind in ("k", "v"))
        self._attended[group] = attend_group(self.call, self._attend, group, q, k, v), q, k, v

    def merge(self, step: Step) -> None:
        self.outputs[step.group] = self.values.pop(("o", step.group))

    def perform(self, steps: list[Step]) -> None:
        halves = []
        for step in steps:
            if step.op is Op.START:
                halves.append(self.call.starting(step, self._attended.pop(step.group)))
            else:
                token = self.tokens.pop(step.exchange)
                halves.append(Half(self.call.exchanges[step.exchange], (token,)))
        for step, made in zip(steps, run_halves(halves)):
            if step.op is Op.START:
                (self.tokens[step.exchange],) = made
            else:
                for part, x in zip(step.parts, made):
                    self.values[part] = x if self._arrive is None else self._arrive(part[0], x)


def join_heads(call: Call, outputs: dict[int, Tensor]) -> Tensor:
    """o of all heads, [.., .., h, d], from that of each group."""
    heads = [call.geometry.heads_of("q", group) for group in call.groups]
    return join([outputs[group] for group in call.groups], 2, heads)
