"""A program played on two rows, with the time that its steps take and the bytes that are held; and
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .steps import Op, Program, Schedule, Step, stop_of


class Bar(NamedTuple):
    """What a row is busy with, in ms; ``step`` is the start of an exchange on the wire, None where
    the compute row waits.
    """

    label: str
    step: Step | None
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """
    compute, wire   bars of the two rows; among those of the compute row the waits, labelled as what
                    they wait for
    step_ms         until the last row is done
    memory            bytes, and from when on, in ms (`memory_bytes`)
    """

    compute: list[Bar]
    wire: list[Bar]
    step_ms: float
    memory: list[tuple[float, int]]

    @property
    def peak(self) -> int:
        """Most bytes at once; 0 where nobody asked."""
        return max((memory for _, memory in self.memory), default=0)

    @cached_property
    def compute_ms(self) -> float:
        return sum(bar.end - bar.begin for bar in self.compute if bar.step is not None)

    @cached_property
    def wire_ms(self) -> float:
        return sum(bar.end - bar.begin for bar in self.wire)

    @property
    def exposed(self) -> float:
        """Share of the time in which nothing is computed."""
        return 1 - self.compute_ms / self.step_ms if self.step_ms else 0.0

    @cached_property
    def exposed_ms(self) -> dict[str, float]:
        """Of each exchange, how long the compute row stands still for it."""
        waits = {bar.label: 0.0 for bar in self.wire}
        for bar in self.compute:
            if bar.step is None:
                waits[bar.label] += bar.end - bar.begin
        return waits


def simulate(
    schedule: Schedule, program: Program, ms: Callable[[Step], float], memory: Sequence[int] = ()
) -> Simulation:
    """Play a program: the compute row does one step after another, the wire carries exchanges in
    the order of their starts.

    ms     of a step on the compute row; of the transfer, for a start
    memory   bytes while each step runs; empty where nobody asks
    """
    now = free = 0.0
    compute: list[Bar] = []
    wire: list[Bar] = []
    arrives: dict[tuple[Any, ...], float] = {}
    begins: list[float] = []
    for step in program:
        begins.append(now)
        what = step[1:]  # as of its other end
        if step.op is Op.START:
            begin = max(now, free)
            free = arrives[what] = begin + ms(step)
            wire.append(Bar(schedule.name(step), step, begin, free))
        elif step.op is Op.FINISH:
            if (arrived := arrives.pop(what)) > now:
                compute.append(Bar(schedule.name(step), None, now, arrived))
                now = arrived
        else:
            compute.append(Bar(schedule.label(step), step, now, now + ms(step)))
            now = compute[-1].end
    return Simulation(compute, wire, max(now, free), list(zip(begins, memory)))


def draw(schedule: Schedule, program: Program) -> str:
    """The two rows of a program as text, each step as long as its name; where the compute row waits
    there are dots.
    """
    begun = None

    def columns(step: Step) -> int:
        nonlocal begun
        if step.op is Op.START:
            return len(schedule.name(step)) + 1
        again, begun = schedule.label(step) == begun, schedule.label(step)
        return 0 if again else len(_short(begun)) + 1

    played = simulate(schedule, program, columns)
    rows = []
    for name, bars in (("compute", played.compute), ("wire", played.wire)):
        row = [" "] * int(played.step_ms)
        for bar in bars:
            begin, end = int(bar.begin), int(bar.end)
            text = "." * (end - begin) if bar.step is None else _short(bar.label)
            row[begin : begin + len(text[: end - begin])] = text[: end - begin]
        rows.append(f"{name:<7} | {''.join(row).rstrip()}")
    return "\n".join(rows)


def _short(label: str) -> str:
    return label.removesuffix(" backward")


def order(schedule: Schedule, program: Program) -> list[str]:
    """Starts and finishes of a program: ``>q0`` and ``<q0``."""
    return [stop_of(schedule, step) for step in program if step.on_wire]
