"""Steps, programs of them, and the schedule of a layer: programs of forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Op(Enum):
    """What a step does. START and FINISH are the two ends of an exchange, on the wire; all others
    compute. The value is the word for it in messages.
    """

    PROJECT = "project"
    ATTEND = "attend"
    MERGE = "merge"
    MLP = "MLP"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    START = "start"
    FINISH = "finish"

    __hash__ = object.__hash__  # each member is one object; enum's own hash costs the host more


Q, K, V, O = (("q",), ("k",), ("v",), ("o",))  # noqa: E741
QKV, OF_MLP = ("q", "k", "v"), ("MLP",)
Tensors = tuple[str, ...]
Part = tuple[str, int]  # q, k, v or o of a head group
Exchanged = tuple[Tensors, int, int]  # what an exchange and that of its gradient have in common


class _Fields(NamedTuple):
    op: Op
    tensors: Tensors
    grad: bool
    group: int
    chunk: int = 0
    beside: Tensors = ()


class Step(_Fields):
    """One step of a program.

    A tuple with attributes besides: programs are made once, so that all that is derived from a step
    is derived once, and costs no layer the host's time.

    Attributes:
        op: What is done.
        tensors: Names of the tensors that it is done to. An exchange moves one of q, k, v, o, or
            several of q, k, v together. A product is of one projection, or of all three (a chain of
            layers), or of the MLP. Attention makes o.
        grad: The step moves or makes gradients of these tensors. DGRAD and WGRAD always do.
        group: Head group; 0 for steps that are of all groups at once.
        chunk: Chunk of every rank's tokens, in a chain of layers.
        beside: Tensors whose values travel in the same exchange, in front of the gradients.
    """

    @cached_property
    def on_wire(self) -> bool:
        return self.op in (Op.START, Op.FINISH)

    @cached_property
    def exchange(self) -> Exchanged:
        """Which exchange it starts or finishes; the same for the exchange of its gradient."""
        return self.tensors, self.group, self.chunk

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Each tensor with the head group."""
        return tuple((kind, self.group) for kind in self.tensors)

    @cached_property
    def to_tokens(self) -> bool:
        """The exchange ends at this rank's tokens (sequence scatter), not at its heads."""
        return ("o" in self.tensors) != self.grad

    @cached_property
    def is_local_end(self) -> bool:
        """It is the end of an exchange at which there are this rank's tokens."""
        return (self.op is Op.FINISH) == self.to_tokens

    @cached_property
    def mirror(self) -> Step:
        """What autograd does in backward for this step of forward."""
        return self._replace(op=_MIRRORED.get(self.op, Op.DGRAD), grad=True)

    @cached_property
    def what(self) -> str:
        """What an exchange moves, in one word: ``q``, ``dqkv``, or ``odo`` for o beside do."""
        return "".join(self.beside) + "d" * self.grad + "".join(self.tensors)

    def __str__(self) -> str:
        is_product = self.op in (Op.DGRAD, Op.WGRAD)
        what = "".join(self.tensors) if is_product else self.what
        return f"{self.op.value} {what} {self.group}" + f".{self.chunk}" * (self.chunk > 0)


_MIRRORED = {Op.START: Op.FINISH, Op.FINISH: Op.START, Op.ATTEND: Op.ATTEND}
Program = tuple[Step, ...]
# The rest of a transformer layer, which a plan plays between forward and backward.
MLP = Step(Op.MLP, (), False, 0)


@dataclass(frozen=True)
class Schedule:
    """The programs of a layer, each in three sections. Forward has them in this order, backward in
    the other:

    section     forward                           backward
    inputs      project and start q, k, v         finish dq, dk, dv, dgrad and wgrad of each
    attention   finish q, k, v, attend, start o   finish do, attend, start dv, dk, dq
    output      finish o and merge                dgrad o, start do, wgrad o

    inputs and output are one node of autograd each where projections are computed part by part, so
    that their order in backward is free. attention is many nodes. Autograd runs them in reverse, so
    that backward must be the mirror image of forward.

    recompute is what is done again of forward where an activation checkpoint around the layer is
    computed again, but for what was saved; empty where that is all of forward.
    """

    forward: Program
    backward: Program
    recompute: Program = field(default=(), kw_only=True)

    @cached_property
    def groups(self) -> int:
        return 1 + max(step.group for step in self.forward)

    @cached_property
    def starts(self) -> Program:
        """The starts of q, k and v, in their order."""
        return tuple(step for step in self.inputs if step.op is Op.START)

    @cached_property
    def exchange_of(self) -> dict[Part, Step]:
        """The start with which q, k or v of a group travels, by itself or with others."""
        return {part: step for step in self.starts for part in step.parts}

    @property
    def parts(self) -> tuple[Part, ...]:
        """q, k or v of every group, in the order of their starts."""
        return tuple(self.exchange_of)

    @cached_property
    def alone(self) -> frozenset[Part]:
        """q, k or v of those groups where it travels by itself."""
        return frozenset(step.parts[0] for step in self.starts if len(step.tensors) == 1)

    @cached_property
    def inputs(self) -> Program:
        return _section(self.forward, "inputs")

    @cached_property
    def attention(self) -> Program:
        return _section(self.forward, "attention")

    @cached_property
    def last_attended(self) -> int:
        """The group that may change k and v in place, since no other reads them after it."""
        return [step.group for step in self.forward if step.op is Op.ATTEND][-1]

    @cached_property
    def output(self) -> Program:
        return _section(self.forward, "output")

    @cached_property
    def backward_of_output(self) -> Program:
        return _section(self.backward, "output")

    @cached_property
    def backward_of_inputs(self) -> Program:
        return _section(self.backward, "inputs")

    def name(self, step: Step) -> str:
        """Name of an exchange; without a number where there is one group."""
        return step.what if self.groups == 1 else f"{step.what}{step.group}"

    @cached_property
    def names_of_values(self) -> dict[Exchanged, str]:
        """Names of exchanges of values; made once, since a layer asks for them in every call."""
        steps = (*self.forward, *self.backward, *self.recompute)
        return {
            step.exchange: self.name(step._replace(grad=False, beside=()))
            for step in steps
            if step.on_wire
        }

    def label(self, step: Step) -> str:
        """What is written on the bar of a step of the compute row."""
        if step == MLP:
            return "MLP"
        number = "" if self.groups == 1 else step.group
        if step.op is Op.ATTEND:
            return f"attention {number}".rstrip() + " backward" * step.grad
        if step.grad and step.tensors == O:
            return f"Wo{number} dgrad" if step.op is Op.DGRAD else "Wo wgrad"
        return f"W{''.join(step.tensors)}{number}" + " backward" * step.grad


def stop_of(schedule: Schedule, step: Step) -> str:
    """A start or a finish in short: ``>q0``, ``<q0``."""
    return (">" if step.op is Op.START else "<") + schedule.name(step)


def section_of(step: Step) -> str:
    """The section of `Schedule` that a step belongs to."""
    if step.op is Op.ATTEND or step.on_wire and not step.is_local_end:
        return "attention"
    return "output" if step.tensors == O else "inputs"


def _section(program: Program, name: str) -> Program:
    return tuple(step for step in program if section_of(step) == name)
