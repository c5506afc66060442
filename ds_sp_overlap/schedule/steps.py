"""Steps, programs, and schedules. A schedule is the programs of forward and backward of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Op(Enum):
    """Kind of work of a step.

    START and FINISH are the two ends of an exchange; all other steps compute.
    """

    # Each value is the word that messages use, and in lower case the method of `Operations` that
    # performs the step.
    PROJECT = "project"  # makes q, k and v
    ATTEND = "attend"
    MERGE = "merge"  # the output projection, which adds up the head groups
    MLP = "MLP"
    # The gradients of input and weight of a product.
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    START = "start"
    FINISH = "finish"

    # Each member is one object; the hash of enum costs the host more time.
    __hash__ = object.__hash__


Q, O = (("q",), ("o",))  # noqa: E741
QKV = ("q", "k", "v")
Tensors = tuple[str, ...]
# q, k, v or o of a head group.
Part = tuple[str, int]
# Tensors and head group: the key of an exchange, and of the exchange of its gradient.
Exchanged = tuple[Tensors, int]


class _Fields(NamedTuple):
    op: Op
    tensors: Tensors
    grad: bool
    group: int
    beside: Tensors = ()


class Step(_Fields):
    """One step of a program.

    Attributes:
        op: Kind of work.
        tensors: Names of the tensors. An exchange moves one of q, k, v, o, or several of q, k, v
            together. A product belongs to one projection. The tensor of attention is o.
        grad: Whether the step makes, moves or reads gradients of these tensors. Always True for
            DGRAD and WGRAD; False where backward recomputes.
        group: Head group.
        beside: Tensors whose values travel in the same exchange, in front of the gradients.
    """

    # The base class is a tuple. There are no ``__slots__`` here, so that a cached property computes
    # once per step: programs are made once, and a layer walks them in every call.

    @cached_property
    def on_wire(self) -> bool:
        """Return whether the step is an end of an exchange."""
        return self.op in (Op.START, Op.FINISH)

    @cached_property
    def exchange(self) -> Exchanged:
        """Key of the exchange that the step starts or finishes."""
        return self.tensors, self.group

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The tensors, each with the head group."""
        return tuple((kind, self.group) for kind in self.tensors)

    @cached_property
    def is_local_end(self) -> bool:
        """Return whether tensors have local sequences at this end of an exchange."""
        # A sequence scatter ends there: that of o in forward, of dq, dk and dv in backward.
        scatters_sequence = ("o" in self.tensors) != self.grad
        return (self.op is Op.FINISH) == scatters_sequence

    @cached_property
    def mirror(self) -> Step:
        """The step with which autograd mirrors this step of forward in backward."""
        # A start becomes the finish of the gradient's exchange, a product its dgrad.
        return self._replace(op=_MIRRORED.get(self.op, Op.DGRAD), grad=True)

    @cached_property
    def payload(self) -> str:
        """Tensors of an exchange in one word: ``q``, ``dqkv``, or ``odo`` for o beside do."""
        return "".join(self.beside) + "d" * self.grad + "".join(self.tensors)

    def __str__(self) -> str:
        is_product = self.op in (Op.DGRAD, Op.WGRAD)
        names = "".join(self.tensors) if is_product else self.payload
        return f"{self.op.value} {names} {self.group}"


_MIRRORED = {Op.START: Op.FINISH, Op.FINISH: Op.START, Op.ATTEND: Op.ATTEND}
Program = tuple[Step, ...]
# Each step with the steps that it comes after.
Needs = dict[Step, list[Step]]
# The rest of a transformer layer, which a plan simulates between forward and backward.
MLP = Step(Op.MLP, (), False, 0)


# Hashed by identity, since every call of a layer asks for the hash.
@dataclass(frozen=True, eq=False)
class Schedule:
    """The programs of a layer.

    Each program of a plain schedule has three sections; a windowed one interleaves them.
    Forward has them in this order, backward in the reverse order:

    section     forward                           backward
    inputs      project and start q, k, v         finish dq, dk, dv, dgrad and wgrad of each
    attention   finish q, k, v, attend, start o   finish do, attend, start dv, dk, dq
    output      finish o and merge                dgrad o, start do, wgrad o

    Where projections are computed part by part, inputs and output are one node of autograd each,
    so that the order of their backward is free. The attention section has many nodes, which
    autograd runs in reverse. So its backward must be the mirror image of its forward.

    Attributes:
        forward: The program of forward.
        backward: The program of backward.
        recompute: The steps of forward that run again and that ``backward`` does not list.
            In a windowed schedule the merges, which a checkpoint that saved attention repeats. Else
            none, since an activation checkpoint repeats all of forward.
    """

    forward: Program
    backward: Program
    recompute: Program = ()

    @property
    def is_windowed(self) -> bool:
        """Return whether backward recomputes q, k and v, see `window.by_window`."""
        return bool(self.recompute)

    @cached_property
    def groups(self) -> int:
        """Number of head groups."""
        return 1 + max(step.group for step in self.forward)

    @cached_property
    def starts(self) -> Program:
        """The starts of q, k and v, in the order of forward."""
        return tuple(s for s in section(self.forward, "inputs") if s.op is Op.START)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """q, k or v of every group, in the order of their starts."""
        return tuple(part for start in self.starts for part in start.parts)

    @cached_property
    def alone(self) -> frozenset[Part]:
        """The q, k and v of groups that travel in an exchange of their own."""
        return frozenset(step.parts[0] for step in self.starts if len(step.tensors) == 1)

    @cached_property
    def last_attended(self) -> int:
        """The group that attends last in forward.

        It alone may change KV heads in place that several groups attend to. -1, no group, in a
        windowed schedule, whose backward attends in another order.
        """
        return (
            -1
            if self.is_windowed
            else [step.group for step in self.forward if step.op is Op.ATTEND][-1]
        )

    @cached_property
    def beside(self) -> Tensors:
        """The tensors that travel beside do."""
        # o, where the backward of attention reads o and forward saved the local o; else none.
        return next((step.beside for step in self.backward if step.beside), ())

    def name(self, step: Step) -> str:
        """Return the name of an exchange; without a number if there is one head group."""
        return step.payload if self.groups == 1 else f"{step.payload}{step.group}"

    def label(self, step: Step) -> str:
        """Return the text on the bar of a step of the compute row."""
        if step == MLP:
            return "MLP"
        number = "" if self.groups == 1 else step.group
        if step.op is Op.ATTEND:
            return f"attention {number}".rstrip() + " backward" * step.grad
        if step.grad and step.tensors == O:
            return f"Wo{number} dgrad" if step.op is Op.DGRAD else "Wo wgrad"
        return f"W{''.join(step.tensors)}{number}" + " backward" * step.grad


def section_of(step: Step) -> str:
    """Return the section of `Schedule` that a step belongs to."""
    if step.op is Op.ATTEND or step.on_wire and not step.is_local_end:
        return "attention"
    return "output" if step.tensors == O else "inputs"


def section(program: Program, name: str) -> Program:
    """Return the steps of one section of a program, in their order."""
    return tuple(step for step in program if section_of(step) == name)
