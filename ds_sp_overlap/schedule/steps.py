"""Defines steps, programs and schedules. A schedule has two programs, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Op(Enum):
    """Names the kind of work of a step.

    START and FINISH are the two ends of an exchange; all other steps compute.
    """

    # Messages show these values. Each is also the name of a method: the method of
    # `attention.runtime.compiler.Compiler` that compiles the step.
    PROJECT = "project"  # makes q, k and v
    ATTEND = "attend"
    MERGE = "merge"  # the output projection, which adds up the head groups
    # The gradients of a product: of its input, and of its weight.
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    START = "start"
    FINISH = "finish"

    # Hashing members by identity takes the host less time than the hash that Enum defines.
    __hash__ = object.__hash__


Q, O = (("q",), ("o",))  # noqa: E741
Tensors = tuple[str, ...]
# A part of a tensor: "q", "k", "v" or "o", and the index of the head group.
Part = tuple[str, int]
# The key of an exchange: its tensors and the head group. The exchange of these tensors' gradients
# has the same key.
Exchanged = tuple[Tensors, int]


class _Fields(NamedTuple):
    op: Op
    tensors: Tensors
    grad: bool
    group: int
    beside: Tensors = ()


class Step(_Fields):
    """Describes one step of a program.

    Attributes:
        op: Kind of work.
        tensors: Names of the tensors. An exchange moves one of q, k, v, o, or several of q, k, v
            together. A product names the tensor of its projection. The tensor of attention is o.
        grad: Whether the step makes, moves or reads gradients of these tensors. True for DGRAD and
            WGRAD. False for the steps of forward, also where backward recomputes these.
        group: Head group.
        beside: Tensors whose values travel in an exchange of gradients: ``("o",)`` where o travels
            with do, else ().
    """

    # Layers use the steps in every call, so properties are cached. A named tuple itself has no room
    # for cached values, but a subclass without ``__slots__`` has.

    @cached_property
    def on_wire(self) -> bool:
        """Return whether the step is an end of an exchange."""
        return self.op in (Op.START, Op.FINISH)

    @cached_property
    def exchange(self) -> Exchanged:
        """Return the key of the exchange that the step starts or finishes."""
        return self.tensors, self.group

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts of the tensors: each name with the head group."""
        return tuple((kind, self.group) for kind in self.tensors)

    @cached_property
    def finish(self) -> Step:
        """Return the finish of the exchange that the step starts."""
        return self._replace(op=Op.FINISH)

    @cached_property
    def is_local_end(self) -> bool:
        """Return whether the tensors have local sequences at this end of an exchange."""
        # The exchanges of o, dq, dk and dv scatter the sequence: they finish with local sequences.
        # The exchanges of q, k, v and do scatter heads: they start with local sequences.
        scatters_sequence = ("o" in self.tensors) != self.grad
        return (self.op is Op.FINISH) == scatters_sequence

    @cached_property
    def mirror(self) -> Step:
        """Return the step of backward that mirrors this step of forward under autograd."""
        # The mirror of a start is the finish of the gradient's exchange. That of a product is its
        # dgrad.
        return self._replace(op=_MIRRORED.get(self.op, Op.DGRAD), grad=True)

    @cached_property
    def payload(self) -> str:
        """Return the tensors' names as one word: ``q``, ``dqkv``, or ``odo`` for o and do."""
        return "".join(self.beside) + "d" * self.grad + "".join(self.tensors)

    def __str__(self) -> str:
        is_product = self.op in (Op.DGRAD, Op.WGRAD)
        names = "".join(self.tensors) if is_product else self.payload
        return f"{self.op.value} {names} {self.group}"


_MIRRORED = {Op.START: Op.FINISH, Op.FINISH: Op.START, Op.ATTEND: Op.ATTEND}
Program = tuple[Step, ...]
# For each step, the steps that must come before it.
Needs = dict[Step, list[Step]]


# Schedules are hashed by identity, to save time: every call of a layer asks for the hash.
@dataclass(frozen=True, eq=False)
class Schedule:
    """Holds the programs of a layer.

    Each program of a plain schedule has three sections; a windowed schedule interleaves them.
    Forward has the sections in this order, backward in the reverse order:

    section     forward                           backward
    inputs      project and start q, k, v         finish dq, dk, dv, dgrad and wgrad of each
    attention   finish q, k, v, attend, start o   finish do, attend, start dv, dk, dq
    output      finish o and merge                dgrad o, start do, wgrad o

    Where projections are computed part by part, the inputs section is one node of autograd, and so
    is the output section. So backward may order the steps of these two sections freely. The
    attention section has many nodes, which autograd runs in reverse. So this section of backward
    must be the mirror image of the section of forward.

    Attributes:
        forward: The program of forward.
        backward: The program of backward.
    """

    forward: Program
    backward: Program

    @cached_property
    def is_windowed(self) -> bool:
        """Return whether backward recomputes q, k and v (see `window.by_window`)."""
        return any(step.op is Op.PROJECT for step in self.backward)

    @cached_property
    def groups(self) -> int:
        """Return the number of head groups."""
        return 1 + max(step.group for step in self.forward)

    @cached_property
    def starts(self) -> Program:
        """Return the starts of q, k and v in forward, in their order."""
        return tuple(s for s in section(self.forward, "inputs") if s.op is Op.START)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return all parts of q, k and v, in the order of their starts."""
        return tuple(part for start in self.starts for part in start.parts)

    @cached_property
    def alone(self) -> frozenset[Part]:
        """Return the parts of q, k and v that have an exchange of their own."""
        return frozenset(step.parts[0] for step in self.starts if len(step.tensors) == 1)

    @cached_property
    def last_attended(self) -> int:
        """Return the group that attends last in forward; -1 in a windowed schedule.

        If several groups use the same KV heads, only the attention of the last group may change
        them in place. In a windowed schedule no group may, since backward recomputes attention in
        another order.
        """
        attended = [step.group for step in self.forward if step.op is Op.ATTEND]
        return -1 if self.is_windowed else attended[-1]

    def name(self, step: Step) -> str:
        """Return the name of an exchange: ``q0``, or ``q`` if there is only one head group."""
        return step.payload if self.groups == 1 else f"{step.payload}{step.group}"

    def label(self, step: Step) -> str:
        """Return the label of a step of the compute row, for drawings and profiler ranges."""
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
