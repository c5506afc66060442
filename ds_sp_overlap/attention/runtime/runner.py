"""The loop over steps; and the steps of forward by hand, inside a node of autograd that has a
backward of its own (`backward`).

Note [Two ways to differentiate]
    A layer runs by a schedule in one of two ways, for which its modules and its schedule decide
    when a call begins.

    Autograd, in the mirror's order (`Recorded`). Exchanges and local attention are nodes of
    autograd, which runs them backward in the reverse order of their creation: this is the backward
    program, to which `schedule.check` holds a schedule. Where projections are computed part by
    part, each end of the layer is one node (`nodes`), and walks its own section of both programs.

    By hand (`window`). The whole layer is one node. Forward keeps no q, k, v; backward walks the
    backward program from its first step to its last, makes and sends q, k, v again, and asks
    autograd for nothing but the backward of local attention, one head group at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...exchange.exchange import new_token
from ...profiling.ranges import NOTHING, is_profiled, named
from ...schedule import Exchanged, Op, Part, Program, Schedule, Step
from ..memory.recompute import Attended, attend_once
from .execution import Attend, Call, attend_group, with_kv
from .linear import matrix
from .output import OutputProjection
from .projections import InputGradients

FORWARD = {
    Op.PROJECT: "project",
    Op.START: "start",
    Op.FINISH: "finish",
    Op.ATTEND: "attend",
    Op.MERGE: "merge",
}


class Runner:
    """Performs the steps of programs, each by the handler of its op.

    Attributes:
        call: The call of a layer that the steps belong to.
        schedule: The schedule that names them, for profilers.
    """

    def __init__(self, call: Call, schedule: Schedule | None = None):
        self.call, self.schedule = call, schedule or call.schedule

    # The method that performs the steps of an op. Bound methods in an attribute of the object would
    # be a reference circle, which keeps tensors alive.
    handlers: ClassVar[dict[Op, str]] = {}
    _functions: ClassVar[dict[Op, Callable[[Any, Step], None]]]

    def __init_subclass__(cls) -> None:
        cls._functions = {op: getattr(cls, name) for op, name in cls.handlers.items()}

    def walk(self, program: Program) -> None:
        """Perform a program; nowhere else is there a loop over steps that does anything."""
        functions, reach, profiled = self._functions, self.reach, is_profiled()
        for step in program:
            if reach is not None:
                reach(step)
            if profiled:
                with self.range(step):
                    functions[step.op](self, step)
            else:  # a context manager costs the host as much as the rest of this loop
                functions[step.op](self, step)

    # Called before each step.
    reach: Callable[[Step], None] | None = None

    def range(self, step: Step) -> Any:
        """A range of a profiler, named as in the drawing; an exchange makes its own ranges."""
        return NOTHING if step.on_wire else named(self.call.where, self.schedule.label(step))


class LocalAttention(NamedTuple):
    """
    attend    a group and its q, k, v -> o
    given     tensors that it is called with beside them
    learned   those of them, and of its parameters, that have a gradient
    agree     whether o must travel in backward, on any rank, of what is needed on this one
    """

    attend: Attend
    given: list[Tensor]
    learned: list[Tensor]
    agree: Callable[[bool, str], bool]


class ForwardRunner(Runner):
    """Performs the steps of forward.

    Attributes:
        values: q, k, v and o of head groups: made, then received.
        tokens: Of the exchanges that were started, in their order.
        outputs: Local o of each group as it was projected, [tokens, k_g].
        attended: Of each group, what the backward of its attention needs; ``saved`` are the tensors
            of it.
        y: The sum of the output projection so far.
    """

    y: Tensor | None = None
    handlers = FORWARD

    def __init__(self, call: Call):
        super().__init__(call)
        self.values: dict[Part, Tensor] = {}
        self.tokens: dict[Exchanged, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.attended: dict[int, Attended] = {}
        self.saved: dict[int, list[Tensor]] = {}

    def take_inputs(
        self,
        inputs: InputGradients,
        x: Tensor,
        parameters: Sequence[Tensor | None],
        tables: tuple[Tensor, ...],
        of_norms: Sequence[Tensor] | None = None,
        normed: dict[Part, Tensor] | None = None,
    ) -> None:
        """For PROJECT.

        Args:
            inputs: The projections.
            x: [.., m].
            parameters: Weight and bias of each linear layer.
            tables: By which q and k are rotated.
            of_norms: What the norms learn, in backward.
            normed: Takes the inputs of the norms; None where nobody needs them.
        """
        self.inputs, self.tables, self.of_norms, self.normed = inputs, tables, of_norms, normed
        self.linear = inputs.made.projecting(matrix(x), x.shape[:2], parameters)

    def take_attention(self, local: LocalAttention, is_recorded: bool) -> None:
        """For ATTEND; ``is_recorded`` where its backward will be asked for."""
        self.local, self.is_recorded = local, is_recorded

    def take_output(self, output: OutputProjection, weight: Tensor, bias: Tensor | None) -> None:
        """For MERGE."""
        self.merging = output.merging(weight, bias)

    def project(self, step: Step) -> None:
        (part,) = step.parts
        made, heads = self.inputs.made, self.linear(part)
        if self.normed is not None and part[0] in made.norms and self.inputs.is_needed(part):
            self.normed[part] = heads
        self.values[part] = made.shape(part, heads, self.tables, self.of_norms)

    def start(self, step: Step) -> None:
        sent = [self.values.pop(part) for part in step.parts]
        self.call.exchanging(step, sent).start_forward(sent)
        self.tokens[step.exchange] = new_token(sent[0])

    def finish(self, step: Step) -> None:
        exchange = self.call.exchanges[step.exchange]
        self.values.update(zip(step.parts, exchange.finish_forward()))

    def attend(self, step: Step) -> None:
        group, geometry = step.group, self.call.geometry
        self.values["o", group] = self._attended(group)
        for sent in range(group + 1):
            if geometry.last_use[sent] == group:  # guard: let go when no group needs them
                self.values.pop(("k", sent), None), self.values.pop(("v", sent), None)

    def merge(self, step: Step) -> None:
        o = self.values.pop(("o", step.group))
        self.y, self.outputs[step.group] = self.merging(self.y, step.group, o)

    def _attended(self, group: int) -> Tensor:
        call, attend = self.call, self.local.attend
        q = self.values.pop(("q", group))
        k, v = (with_kv(call.geometry, kind, group, self.values) for kind in ("k", "v"))
        if not self.is_recorded:
            return attend_group(call, attend, group, q, k, v)
        o, self.attended[group], self.saved[group] = attend_once(
            lambda *heads: attend_group(call, attend, group, *heads),
            (q, k, v),
            self.wanted(group),
            self.local.given,
            self.local.learned,
        )
        return o

    def wanted(self, group: int) -> list[bool]:
        """Of which of q, k and v of a group there will be a gradient."""
        sent = [sent for sent, *_ in self.call.geometry.kv_pieces(group)]
        of_kv = [any(self.inputs.is_needed((kind, at)) for at in sent) for kind in ("k", "v")]
        return [self.inputs.is_needed(("q", group)), *of_kv]
