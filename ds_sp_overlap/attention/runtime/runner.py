"""Walks programs step by step: the loop over steps, and what each step of forward does.

`ForwardRunner` performs the steps of forward without autograd, inside a node whose backward is
written by hand. `backward` has the steps of that backward. `recorded` has the steps of a forward
that autograd differentiates.

Note [Two ways to differentiate]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A layer is differentiated in one of two ways. Its modules and its schedule decide which one when a
call begins.

By autograd (`Recorded`). Exchanges and local attention are nodes of autograd. Autograd runs the
nodes backward in the reverse order of their creation. `schedule.check` requires this order of the
backward program's attention section. Where projections are computed part by part, each of the two
ends of the layer is one node (`nodes`), which walks its own section of both programs.

By hand (`window`). The whole layer is one node of autograd. Forward saves no q, k, v. Backward
walks the backward program (the wgrads of o alone, if nothing else needs a gradient): it recomputes
q, k and v and exchanges them once more. It asks autograd only for the backward of local attention,
one head group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ...profiling.ranges import NOTHING, is_profiled, named
from ...schedule import Op, Part, Program, Step
from ..memory.recompute import Attended, LocalAttention, attend_once
from .execution import Call, attend_group, attend_in_pieces, with_kv
from .input_gradients import InputGradients
from .output import OutputProjection
from .products import matrix
from .projections import ProjectionOperands


class Runner:
    """Performs the steps of programs, each with the method that has the name of its op.

    Attributes:
        call: The call of a layer that the steps belong to.
        values: q, k, v and o of head groups: the local tensors, then the received ones.
        outputs: For each head group that is merged, the local o.
    """

    def __init__(self, call: Call):
        self.call = call
        self.values: dict[Part, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    # For each op, the function that performs its steps. Bound methods in an attribute of the object
    # would be a reference cycle, which keeps tensors alive.
    _functions: ClassVar[dict[Op, Any]]

    def __init_subclass__(cls) -> None:
        cls._functions = {op: getattr(cls, op.value.lower(), None) for op in Op}

    def walk(self, program: Program) -> None:
        """Pass each step of a program to its method, in order.

        This is the one loop over programs. A runner may gather starts and finishes, to perform them
        together in one node. A call may walk its sections by several calls of this method.
        """
        functions, profiled = self._functions, is_profiled()
        for step in program:
            if profiled:
                with self.range(step):
                    functions[step.op](self, step)
            else:  # a context manager costs the host as much as the rest of this loop
                functions[step.op](self, step)

    def range(self, step: Step) -> Any:
        """Return a profiler range to enter, named as in the drawing."""
        # An exchange opens ranges of its own, for its parts.
        return NOTHING if step.on_wire else named(self.call.where, self.call.schedule.label(step))

    def heads(self, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q of a group, and the k and v that the group attends to, from ``values``."""
        # Only q is taken out: later groups may attend to the same k and v.
        q, geometry = self.values.pop(("q", group)), self.call.geometry
        k = with_kv(geometry, "k", group, self.values)
        return q, k, with_kv(geometry, "v", group, self.values)


class ForwardRunner(Runner):
    """Performs the steps of forward without autograd.

    Whoever makes one calls, before `walk`, those of `take_inputs`, `take_attention` and
    `take_output` whose steps the program has.

    Attributes:
        outputs: For each head group, the local o that the output projection read, [tokens, k_g].
        attended: For each head group, what the backward of its attention needs; filled only where
            there will be a backward.
        saved: For each head group, the tensors that belong to ``attended``.
        y: The sum of the output projection over the groups that are merged so far.
    """

    y: Tensor | None = None

    def take_inputs(self, inputs: InputGradients, operands: ProjectionOperands) -> None:
        """Take what the steps PROJECT need: the projections, and what they compute with."""
        self.inputs, self.operands = inputs, operands
        x, projections = operands.x, inputs.projections
        self.project_part = projections.projecting(matrix(x), x.shape[:2], operands.linear)

    def take_attention(self, local: LocalAttention, is_recorded: bool) -> None:
        """Take what the steps ATTEND need; ``is_recorded`` if attention will have a backward."""
        self.local, self.is_recorded = local, is_recorded
        self.attended: dict[int, Attended] = {}
        self.saved: dict[int, Sequence[Tensor]] = {}

    def take_output(self, output: OutputProjection, weight: Tensor, bias: Tensor | None) -> None:
        """Take what the steps MERGE need: the output projection, its weight [m, k] and bias [m]."""
        self.merge_group = output.merging(weight, bias)

    def project(self, step: Step) -> None:
        """Make a part of q, k or v, and note the input of its norm where backward reads it."""
        (part,) = step.parts
        projections, heads = self.inputs.projections, self.project_part(part)
        _, _, tables, norm_parameters, norm_inputs = self.operands
        if norm_inputs is not None and part[0] in projections.norms and self.inputs.is_needed(part):
            norm_inputs[part] = heads
        self.values[part] = projections.shape(part, heads, tables, norm_parameters)

    def start(self, step: Step) -> None:
        tensors = [self.values.pop(part) for part in step.parts]
        self.call.new_exchange(step, tensors).start_forward(tensors)

    def finish(self, step: Step) -> None:
        exchange = self.call.exchanges[step.exchange]
        self.values.update(zip(step.parts, exchange.finish_forward()))

    def attend(self, step: Step) -> None:
        """Attend with a group; then drop the k and v that no later group attends to."""
        call, group, local = self.call, step.group, self.local
        if self.is_recorded:
            self.values["o", group], self.attended[group], self.saved[group] = attend_once(
                partial(attend_in_pieces, call, local.attend, group),
                self.heads(group),
                self.qkv_need_grad(),
                local,
            )
        else:
            self.values["o", group] = attend_group(call, local.attend, group, *self.heads(group))
        # Of any rank: all ranks drop the same.
        for earlier, last in enumerate(call.geometry.last_use):
            if last == group:  # guard: let go when no group needs them
                self.values.pop(("k", earlier), None), self.values.pop(("v", earlier), None)

    def merge(self, step: Step) -> None:
        self.y, self.outputs[step.group] = self.merge_group(
            self.y, step.group, self.values.pop(("o", step.group))
        )

    def qkv_need_grad(self) -> list[bool]:
        """Return for each of q, k and v whether it needs a gradient, which is alike in all groups.

        All groups of a kind are rows of one projection; group 0 has all three kinds.
        """
        return [self.inputs.is_needed((kind, 0)) for kind in "qkv"]
