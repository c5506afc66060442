"""Simulates a program on two rows, the compute row and the wire, and draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .steps import Op, Program, Schedule, Step


class Bar(NamedTuple):
    """Describes an interval of time on a row.

    Attributes:
        label: Name of the step, or of the exchange.
        step: The step on the compute row; None while the compute row waits. On the wire, the step
            that starts the exchange.
        begin: Begin of the interval, in ms.
        end: End of the interval, in ms.
    """

    label: str
    step: Step | None
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Holds the result of `simulate`.

    Attributes:
        compute: Bars of the compute row. A wait is labelled with the exchange that it waits for.
        wire: Bars of the wire.
        step_ms: Time until both rows are done.
    """

    compute: list[Bar]
    wire: list[Bar]
    step_ms: float

    @cached_property
    def exposed_ms(self) -> dict[str, float]:
        """Return for each exchange how long the compute row waits for it, in ms."""
        waits = {bar.label: 0.0 for bar in self.wire}
        for bar in self.compute:
            if bar.step is None:
                waits[bar.label] += bar.end - bar.begin
        return waits


def simulate(schedule: Schedule, program: Program, ms: Callable[[Step], float]) -> Simulation:
    """Simulate a program on the compute row and the wire; packing and unpacking take no time.

    Args:
        schedule: The schedule of the program, for the names of steps.
        program: The program.
        ms: Returns the duration of a step in ms; for a start, the duration of the exchange.
    """
    # From ``now`` on the compute row is free, from ``free`` on the wire.
    now = free = 0.0
    compute = []
    wire = []
    arrives = {}
    for step in program:
        key = step[1:]  # the same for both ends of an exchange
        if step.op is Op.START:
            # The wire carries one exchange after another, in the order of their starts.
            begin = max(now, free)
            free = arrives[key] = begin + ms(step)
            wire.append(Bar(schedule.name(step), step, begin, free))
        elif step.op is Op.FINISH:
            if (arrived := arrives.pop(key)) > now:
                compute.append(Bar(schedule.name(step), None, now, arrived))
                now = arrived
        else:
            compute.append(Bar(schedule.label(step), step, now, now + ms(step)))
            now = compute[-1].end
    return Simulation(compute, wire, max(now, free))


def draw(schedule: Schedule, program: Program) -> str:
    """Return the two rows of a program as text.

    A bar is one column longer than its name. Dots mean that the compute row waits.
    """
    # The width of each step's bar, in characters. `simulate` takes this width as duration.
    columns = {}
    last = ""
    for step in program:
        if step.op is Op.START:
            columns[step] = len(schedule.name(step)) + 1
        elif step.op is not Op.FINISH:
            label = schedule.label(step)
            # Successive steps with the same name share the bar of the first.
            columns[step] = 0 if label == last else len(_short(label)) + 1
            last = label
    simulated = simulate(schedule, program, columns.__getitem__)
    rows = []
    for name, bars in (("compute", simulated.compute), ("wire", simulated.wire)):
        row = ""
        for bar in bars:
            begin, end = int(bar.begin), int(bar.end)
            # A name leaves the last column of its bar empty, which keeps names apart.
            text = "." * (end - begin) if bar.step is None else _short(bar.label)
            row = row.ljust(begin) + text[: end - begin]
        rows.append(f"{name:<7} | {row.rstrip()}")
    return "\n".join(rows)


def _short(label: str) -> str:
    """Return a label for a drawing: without " backward"."""
    return label.removesuffix(" backward")


def order(schedule: Schedule, program: Program) -> list[str]:
    """Return the starts (``>q0``) and finishes (``<q0``) of a program, in their order."""
    return [
        (">" if step.op is Op.START else "<") + schedule.name(step)
        for step in program
        if step.on_wire
    ]
