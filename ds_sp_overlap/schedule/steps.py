"""Steps, programs of them, and the schedule of a layer: two programs, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a program.

    act     on the compute row: "project", "attend", "merge", "MLP", "dgrad", "wgrad"; on the wire: "start", "finish"
    of      on the wire what it moves: q, k, v, or several of them in one exchange (qkv), or o; in backward dq, dqkv, do and so on;
            of a projection q, k, v, o; of attention o, in backward do
    group   head group
    chunk   of every rank's tokens, in the programs of a block; there projections and MLP are of all groups and have group 0, and what
            they are of may also be qkv or MLP
    """

    act: str
    of: str
    group: int
    chunk: int = 0

    @property
    def on_wire(self) -> bool:
        return self.act in ("start", "finish")


Program = tuple[Step, ...]
MLP = Step("MLP", "", 0)  # the rest of a transformer layer, which a plan plays between forward and backward


@dataclass(frozen=True)
class Schedule:
    """The programs of a layer, each in three sections. Forward has them in this order, backward in the other:

    section     forward                           backward
    inputs      project and start q, k, v         finish dq, dk, dv, dgrad and wgrad of each
    attention   finish q, k, v, attend, start o   finish do, attend, start dv, dk, dq
    output      finish o and merge                dgrad o, start do, wgrad o

    inputs and output are one node of autograd each where projections are computed part by part, so that their order in backward is
    free. attention is many nodes. Autograd runs them in reverse, so that backward must be the mirror image of forward.
    """

    forward: Program
    backward: Program

    @cached_property
    def groups(self) -> int:
        return 1 + max(step.group for step in self.forward)

    @cached_property
    def starts(self) -> tuple[tuple[str, int], ...]:
        """The exchanges to attention in their order: which of q, k, v it moves, and of which group."""
        return tuple((step.of, step.group) for step in self.inputs if step.act == "start")

    @cached_property
    def exchange_of(self) -> dict[tuple[str, int], str]:
        """What q, k or v of a group travels with: itself, or several of them."""
        return {(kind, group): of for of, group in self.starts for kind in of}

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """q, k or v of every group, in the order of their starts."""
        return tuple(self.exchange_of)

    @cached_property
    def inputs(self) -> Program:
        return tuple(step for step in self.forward if section_of(step) == "inputs")

    @cached_property
    def attention(self) -> tuple[Program, ...]:
        """Its steps as `execution` takes them: each attention alone, and what travels between two of them together."""
        steps = [step for step in self.forward if section_of(step) == "attention"]
        return tuple(tuple(between) for _, between in groupby(steps, key=lambda step: step.group if step.act == "attend" else None))

    @cached_property
    def last_attended(self) -> int:
        """The group that may change k and v in place, since no other reads them after it."""
        return [step.group for step in self.forward if step.act == "attend"][-1]

    @cached_property
    def output(self) -> Program:
        return tuple(step for step in self.forward if section_of(step) == "output")

    @cached_property
    def backward_of_output(self) -> Program:
        return tuple(step for step in self.backward if section_of(step) == "output")

    @cached_property
    def backward_of_inputs(self) -> Program:
        return tuple(step for step in self.backward if section_of(step) == "inputs")

    def name(self, of: str, group: int, chunk: int = 0) -> str:
        """Of an exchange; without a number where there is one group."""
        return of if self.groups == 1 else f"{of}{group}"

    def label(self, step: Step) -> str:
        """What is written on the bar of a step of the compute row."""
        if step == MLP:
            return "MLP"
        of, number = step.of[-1], "" if self.groups == 1 else step.group
        if step.act == "attend":
            return f"attention {number}".rstrip() + " backward" * (step.of == "do")
        if step.act in ("dgrad", "wgrad"):
            if of != "o":
                return f"W{of}{number} backward"
            return f"Wo{number} dgrad" if step.act == "dgrad" else "Wo wgrad"
        return f"W{of}{number}"


def section_of(step: Step) -> str:
    if step.act in ("project", "merge", "dgrad", "wgrad"):
        return "output" if step.of == "o" else "inputs"
    at_output = step.act == {"o": "finish", "do": "start"}.get(step.of)
    at_inputs = step.act == ("finish" if step.of[0] == "d" else "start") and step.of[-1] != "o"
    return "output" if at_output else "inputs" if at_inputs else "attention"
