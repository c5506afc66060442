"""The order of work in an attention layer, as plain data. No torch here.

An exchange is one all-to-all: from all heads of a piece of the sequence to some heads of all of it, or back.
A head group is a part of the heads that each rank attends with.

A schedule is two programs, forward and backward; a program is a tuple of steps:

    project q 0    W x, norm and RoPE of head group 0: q0         dgrad q 0    dx += dq0 W     wgrad q 0    dW = dq0^T x
    attend o 0     attention of the group: o0 of q, k, v         attend do 0  its backward: dq0, dk0, dv0 of do0
    merge o 0      y += o0 Wo of the group                       dgrad o 0    do0 = dy Wo     wgrad o 0    dWo = dy^T o0
    start q 0      launch an exchange, which goes on by itself   finish q 0   the compute row waits for it

With two head groups, as `draw` prints it. Bars are as long as their names, not as their times. Dots: the compute row waits.
The wire carries one exchange at a time. ``Wo wgrad`` is one product a group. In backward ``Wq0`` is dgrad and wgrad.

    forward
    compute | Wq0 Wk0 Wv0 Wq1 Wk1 Wv1 attention 0 attention 1 Wo0 Wo1
    wire    |     q0  k0  v0          qkv1        o0          o1

    backward
    compute | Wo1 dgrad Wo0 dgrad Wo wgrad attention 1 attention 0 Wv1 Wk1 Wq1 Wv0 Wk0 Wq0
    wire    |           do1       do0                  dqkv1       dv0 dk0 dq0

With one head group nothing hides v, o and dv. There is no other choice where a rank attends with one query head:

    forward
    compute | Wq Wk Wv ..attention ..Wo
    wire    |    q  k  v           o

    backward
    compute | Wo dgrad Wo wgrad attention ...Wv Wk Wq
    wire    |          do                 dv dk dq

A KV head travels once, with the first group that needs it. A group that needs no new one sends q alone. Autograd sums dk and dv
over the groups before they start. q, k and v of the first group travel one by one, each under the next projection; those of a later
group are hidden by attention anyway, and travel in one exchange.

Who reads it: `execution` walks forward. `nodes` walks the two ends of backward; autograd does its middle. `plan` plays it with
costs. `timeline` names measured bars by it. Tests hold a recorded layer against it.

Projections that are called whole, or by the caller (the drop-in), are not cut: ``project`` is then a slice, ``merge`` collects,
and autograd orders all of backward. A step whose result nobody needs is left out.

Another schedule is another function ``(kinds, wgrad_last) -> Schedule``, see `by_head_groups`: ``SelfAttention(schedule=...)``.
Give the same on every rank. It is asked for each number of head groups that is tried. The layer checks what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import NamedTuple


class Step(NamedTuple):
    """One step of a program.

    act     on the compute row: "project", "attend", "merge", "dgrad", "wgrad"; on the wire: "start", "finish"
    of      on the wire what it moves: q, k, v, or several of them in one exchange (qkv), or o; in backward dq, dqkv, do and so on;
            of a projection q, k, v, o; of attention o, in backward do
    group   head group
    """

    act: str
    of: str
    group: int

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

    inputs and output are one node of autograd each (if not cut, see above), so that their order in backward is free. attention is
    many nodes. Autograd runs them in reverse, so that backward must be the mirror image of forward.
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
        return tuple(step for step in self.forward if _section(step) == "inputs")

    @cached_property
    def attention(self) -> tuple[Program, ...]:
        """Its steps as `execution` takes them: finishes of one group that follow one another together, any other step alone."""
        steps = [step for step in self.forward if _section(step) == "attention"]
        return tuple(tuple(same) for _, same in groupby(steps, key=lambda step: (step.act, step.group)))

    @cached_property
    def last_attended(self) -> int:
        """The group that may change k and v in place, since no other reads them after it."""
        return [step.group for step in self.forward if step.act == "attend"][-1]

    @cached_property
    def output(self) -> Program:
        return tuple(step for step in self.forward if _section(step) == "output")

    @cached_property
    def backward_of_output(self) -> Program:
        return tuple(step for step in self.backward if _section(step) == "output")

    @cached_property
    def backward_of_inputs(self) -> Program:
        return tuple(step for step in self.backward if _section(step) == "inputs")

    def name(self, of: str, group: int) -> str:
        """Of an exchange; without a number where there is one group."""
        return of if self.groups == 1 else f"{of}{group}"

    def label(self, step: Step) -> str:
        """What is written on the bar of a step of the compute row."""
        if step == MLP:
            return "MLP"
        of, number = step.of[-1], self.name("", step.group)
        if step.act == "attend":
            return f"attention {number}".rstrip() + " backward" * (step.of == "do")
        if step.act in ("dgrad", "wgrad"):
            if of != "o":
                return f"W{of}{number} backward"
            return f"Wo{number} dgrad" if step.act == "dgrad" else "Wo wgrad"
        return f"W{of}{number}"


def _section(step: Step) -> str:
    if step.act in ("project", "merge", "dgrad", "wgrad"):
        return "output" if step.of == "o" else "inputs"
    at_output = step.act == {"o": "finish", "do": "start"}.get(step.of)
    at_inputs = step.act == ("finish" if step.of[0] == "d" else "start") and step.of[-1] != "o"
    return "output" if at_output else "inputs" if at_inputs else "attention"


@cache
def by_head_groups(kinds: tuple[str, ...], wgrad_last: bool = True) -> Schedule:
    """Project and start all groups, then attend group after group. Later q, k, v and earlier o travel meanwhile.

    q, k and v of the first group travel one by one, each under the next projection. Those of a later group are hidden by attention
    anyway, and travel in one exchange: fewer are launched.

    kinds        what travels with each head group: "qkv", or "q" if no rank needs a new KV head (`Geometry.kinds_of`)
    wgrad_last   compute dWo when every do has started; else each group's part before its do
    """
    return by_starts((tuple(kinds[0]), *((together,) for together in kinds[1:])), wgrad_last)


def by_starts(starts: tuple[tuple[str, ...], ...], wgrad_last: bool = True) -> Schedule:
    """The same order for any exchanges of each group: ``("q", "kv")`` is q alone, k and v together."""
    groups = range(len(starts))
    forward, backward = [], []
    for group in groups:
        for of in starts[group]:
            forward += [Step("project", kind, group) for kind in of] + [Step("start", of, group)]
    for group in groups:
        forward += [Step("finish", of, group) for of in starts[group]]
        forward += [Step("attend", "o", group), Step("start", "o", group)]
    for group in groups:
        forward += [Step("finish", "o", group), Step("merge", "o", group)]

    for group in reversed(groups):
        if not wgrad_last:
            backward += [Step("wgrad", "o", group)]
        backward += [Step("dgrad", "o", group), Step("start", "do", group)]
    if wgrad_last:
        backward += [Step("wgrad", "o", group) for group in groups]
    for group in reversed(groups):
        backward += [Step("finish", "do", group), Step("attend", "do", group)]
        backward += [Step("start", "d" + of, group) for of in reversed(starts[group])]
    for group in reversed(groups):
        for of in reversed(starts[group]):
            backward += [Step("finish", "d" + of, group)]
            backward += [Step(act, kind, group) for kind in reversed(of) for act in ("dgrad", "wgrad")]
    return Schedule(tuple(forward), tuple(backward))


# What holds for every schedule that a layer runs; `plan` plays others too.


def check(schedule: Schedule, kinds: tuple[str, ...]) -> Schedule:
    """Return ``schedule``. Raises ValueError if it can't be run where ``kinds`` travel with the head groups: if a step is missing,
    unknown, there twice or too early, if the sections are not three pieces in their order, or if backward's attention section is not
    the mirror image of forward's."""
    for group, here in enumerate(kinds):
        sent = [kind for of, at in dict.fromkeys(schedule.starts) if at == group for kind in of]
        for kind in "qkv":
            if sent.count(kind) != here.count(kind):
                wrong = "is no step of this layer" if kind not in here else "is missing" if kind not in sent else "is there twice"
                raise ValueError(f"schedule, forward: start {kind} {group} {wrong}")
    forward, backward = _needs(kinds, schedule.starts)
    for name, program, needs in (("forward", schedule.forward, forward), ("backward", schedule.backward, backward)):
        done: set[Step] = set()
        for step in program:
            if step not in needs or step in done:
                raise ValueError(
                    f"schedule, {name}: {_words(step)} is {'there twice' if step in done else 'no step of this layer'}"
                )
            early = [need for need in needs[step] if need not in done]
            if early:
                raise ValueError(f"schedule, {name}: {_words(step)} comes before {_words(early[0])}")
            done.add(step)
        if missing := [step for step in needs if step not in done]:
            raise ValueError(f"schedule, {name}: {_words(missing[0])} is missing")
        sections = [section for section, _ in groupby(program, key=_section)]
        if sections != ["inputs", "attention", "output"][:: 1 if name == "forward" else -1]:
            raise ValueError(f"schedule, {name}: its sections are {', '.join(sections)}; each is one piece, see `Schedule`")
    mirrored = tuple(step for node in reversed(schedule.attention) for step in _mirrored(node))
    for step, expected in zip((step for step in schedule.backward if _section(step) == "attention"), mirrored):
        if step != expected:
            raise ValueError(
                f"schedule, backward: {_words(step)}, where autograd has {_words(expected)}: the mirror image of forward"
            )
    return schedule


def _needs(kinds: tuple[str, ...], starts: tuple[tuple[str, int], ...]) -> tuple[dict[Step, list[Step]], dict[Step, list[Step]]]:
    """The steps of both programs, each with those that it comes after."""
    forward: dict[Step, list[Step]] = {}
    backward: dict[Step, list[Step]] = {}
    groups = range(len(kinds))
    for of, group in starts:
        start, finish, back = Step("start", of, group), Step("finish", of, group), Step("finish", "d" + of, group)
        forward[start], forward[finish] = [Step("project", kind, group) for kind in of], [start]
        attended = [group] if of == "q" else groups[group:]  # by whom
        backward[back._replace(act="start")] = [Step("attend", "do", at) for at in attended]
        backward[back] = [back._replace(act="start")]
        for kind in of:
            forward[Step("project", kind, group)] = []
            backward[Step("dgrad", kind, group)] = backward[Step("wgrad", kind, group)] = [back]
    for group in groups:
        # The KV heads that a group attends to may have come with it or with any before.
        arrived = [Step("finish", of, at) for of, at in starts if at == group or at < group and of != "q"]
        forward[Step("attend", "o", group)] = arrived
        forward[Step("start", "o", group)] = [Step("attend", "o", group)]
        forward[Step("finish", "o", group)] = [Step("start", "o", group)]
        forward[Step("merge", "o", group)] = [Step("finish", "o", group)]
        backward[Step("dgrad", "o", group)] = backward[Step("wgrad", "o", group)] = []
        backward[Step("start", "do", group)] = [Step("dgrad", "o", group)]
        backward[Step("finish", "do", group)] = [Step("start", "do", group)]
        backward[Step("attend", "do", group)] = [Step("finish", "do", group)]
    return forward, backward


def _mirrored(node: Program) -> Program:
    """What the backward of a node of the attention section does."""
    if node[0].act == "attend":
        return (Step("attend", "do", node[0].group),)
    act = "finish" if node[0].act == "start" else "start"
    return tuple(Step(act, "d" + step.of, step.group) for step in reversed(node))


def _words(step: Step) -> str:
    return " ".join(map(str, step))


# Played on two rows.


class Bar(NamedTuple):
    """What a row is busy with, in ms; ``step`` is the start of an exchange on the wire, None where the compute row waits."""

    label: str
    step: Step | None
    begin: float
    end: float


@dataclass(frozen=True)
class Played:
    """
    compute, wire   bars of the two rows; among those of the compute row the waits, labelled as what they wait for
    step_ms         until the last row is done
    held            most bytes of buffers between start and finish at once
    """

    compute: list[Bar]
    wire: list[Bar]
    step_ms: float
    held: int

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


def play(schedule: Schedule, program: Program, ms: Callable[[Step], float], held: Callable[[Step], int] = lambda step: 0) -> Played:
    """Play a program: the compute row does one step after another, the wire carries exchanges in the order of their starts.

    ms     of a step on the compute row; of the transfer, for a start
    held   bytes of the buffers of an exchange, from its start to its finish
    """
    now = free = 0.0
    compute: list[Bar] = []
    wire: list[Bar] = []
    arrives: dict[tuple[str, int], float] = {}
    bytes_of: dict[tuple[str, int], int] = {}
    most = 0
    for step in program:
        what = step.of, step.group
        if step.act == "start":
            begin = max(now, free)
            free = arrives[what] = begin + ms(step)
            wire.append(Bar(schedule.name(*what), step, begin, free))
            bytes_of[what] = held(step)
            most = max(most, sum(bytes_of.values()))
        elif step.act == "finish":
            if (arrived := arrives.pop(what)) > now:
                compute.append(Bar(schedule.name(*what), None, now, arrived))
                now = arrived
            del bytes_of[what]
        else:
            compute.append(Bar(schedule.label(step), step, now, now + ms(step)))
            now = compute[-1].end
    return Played(compute, wire, max(now, free), most)


def draw(schedule: Schedule, program: Program) -> str:
    """The two rows of a program as text, each step as long as its name; where the compute row waits there are dots."""
    begun = None

    def columns(step: Step) -> int:
        nonlocal begun
        if step.act == "start":
            return len(schedule.name(step.of, step.group)) + 1
        again, begun = schedule.label(step) == begun, schedule.label(step)
        return 0 if again else len(_short(begun)) + 1

    played = play(schedule, program, columns)
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
    return [{"start": ">", "finish": "<"}[step.act] + schedule.name(step.of, step.group) for step in program if step.on_wire]
