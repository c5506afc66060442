"""What holds for every schedule that a layer is given, and for those of a window; `plan` plays others too."""

from __future__ import annotations

from itertools import groupby

from .block import Block
from .steps import Program, Schedule, Step, section_of
from .window import Windowed

Needs = dict[Step, list[Step]]


def check(schedule: Schedule, kinds: tuple[str, ...]) -> Schedule:
    """Return ``schedule``. Raises ValueError if it can't be run where ``kinds`` travel with the head groups: if a step is missing,
    unknown, there twice or too early, if the sections are not three pieces in their order, or if backward's attention section is not
    the mirror image of forward's. A `Windowed` one has no sections; there, if more groups are held than its window lets. Of a
    `Block` all of backward but the weight gradients is the mirror image."""
    if isinstance(schedule, Block):
        _block(schedule, kinds)
        return schedule
    for group, here in enumerate(kinds):
        sent = [kind for of, at in dict.fromkeys(schedule.starts) if at == group for kind in of]
        for kind in "qkv":
            if sent.count(kind) != here.count(kind):
                wrong = "is no step of this layer" if kind not in here else "is missing" if kind not in sent else "is there twice"
                raise ValueError(f"schedule, forward: start {kind} {group} {wrong}")
    forward, backward = needs_of(kinds, schedule.starts)
    if isinstance(schedule, Windowed):
        _window(schedule, forward, backward)
        return schedule
    for name, program, needs in (("forward", schedule.forward, forward), ("backward", schedule.backward, backward)):
        _each_in_its_turn(name, program, needs)
        sections = [section for section, _ in groupby(program, key=section_of)]
        if sections != ["inputs", "attention", "output"][:: 1 if name == "forward" else -1]:
            raise ValueError(f"schedule, {name}: its sections are {', '.join(sections)}; each is one piece, see `Schedule`")
    mirrored = [_mirrored(step) for node in reversed(schedule.attention) for step in reversed(node)]
    for step, expected in zip((step for step in schedule.backward if section_of(step) == "attention"), mirrored):
        if step != expected:
            raise ValueError(
                f"schedule, backward: {_words(step)}, where autograd has {_words(expected)}: the mirror image of forward"
            )
    return schedule


def _each_in_its_turn(name: str, program: Program, needs: Needs) -> None:
    """Every step of ``needs`` once, behind those that it needs, and no other."""
    done: set[Step] = set()
    for step in program:
        if step not in needs or step in done:
            raise ValueError(f"schedule, {name}: {_words(step)} is {'there twice' if step in done else 'no step of this layer'}")
        early = [need for need in needs[step] if need not in done]
        if early:
            raise ValueError(f"schedule, {name}: {_words(step)} comes before {_words(early[0])}")
        done.add(step)
    if missing := [step for step in needs if step not in done]:
        raise ValueError(f"schedule, {name}: {_words(missing[0])} is missing")


def _window(schedule: Windowed, forward: Needs, backward: Needs) -> None:
    """What holds beside: q, k and v are made again in backward; k and v are let go of with the last group that attends to them,
    which in backward is the one that they came with; at most ``window`` groups are held."""
    again = [step for step in schedule.backward if step.act == "start" and step.of[0] in "qkv"]
    for start in again:
        projects = [start._replace(act="project", of=kind) for kind in start.of]
        backward |= {start: projects, start._replace(act="finish"): [start], **{project: [] for project in projects}}
    for part in schedule.parts:
        if part not in {(kind, start.group) for start in again for kind in start.of}:
            raise ValueError(f"schedule, backward: start {part[0]} {part[1]} is missing")
    last = schedule.groups - 1
    for group in range(schedule.groups):
        if group:
            forward[Step("attend", "o", group)].append(Step("attend", "o", group - 1))
        attend = backward[Step("attend", "do", group)]
        attend += [Step("attend", "do", group + 1)] if group < last else []
        for start in again:
            is_read = start.group == group or start.of != "q" and start.group < group <= schedule.last_use[start.group]
            attend += [start._replace(act="finish")] if is_read else []
    sent = next((step.of for step in schedule.backward if step.act == "start" and step.of[-1] == "o"), "do")
    backward = {_sending(step, sent): [_sending(need, sent) for need in needs] for step, needs in backward.items()}
    for name, program, needs in (("forward", schedule.forward, forward), ("backward", schedule.backward, backward)):
        _each_in_its_turn(name, program, needs)
        held: set[int] = set()
        for step in program:
            if step.act == "project" and step.of == "q":
                held.add(step.group)
            if len(held) > schedule.window:
                raise ValueError(
                    f"schedule, {name}: {_words(step)} while {len(held) - 1} groups are held; the window is {schedule.window}"
                )
            if step.act == "attend":
                held.discard(step.group)


def _block(block: Block, kinds: tuple[str, ...]) -> None:
    """Group after group is attended, all its o started; then chunk after chunk goes on, in which o of its groups comes first."""
    groups, every = range(len(kinds)), range(block.chunks)
    forward: Needs = {}
    started: list[Step] = []  # of the group before, of the chunk before
    for group in groups:
        arrived = [at for at in groups[: group + 1] if at == group or kinds[at] != "q"]
        attend = Step("attend", "o", group)
        forward[attend] = [Step("finish", kinds[at], at, c) for at in arrived for c in every]
        for c in every:
            forward[Step("finish", kinds[group], group, c)] = started
            forward[Step("start", "o", group, c)] = [attend]
        started = [Step("start", "o", group, c) for c in every]
    for c in every:
        merge, mlp, project = Step("merge", "o", 0, c), Step("MLP", "MLP", 0, c), Step("project", "qkv", 0, c)
        for group in groups:
            finish = Step("finish", "o", group, c)
            forward[finish], started = started, [finish]
        forward |= {merge: started, mlp: [merge], project: [mlp]}
        started = [Step("start", kinds[group], group, c) for group in groups]
        forward |= {start: [project] for start in started}
    _each_in_its_turn("forward", block.forward, forward)
    mirrored = [_mirror(step) for part in (block.segment, block.attention_steps) for step in reversed(part)]
    backward: Needs = {step: [before] if before else [] for before, step in zip([None, *mirrored], mirrored)}
    backward |= {Step("wgrad", of, 0): [Step("dgrad", of, 0, c) for c in every] for of in ("o", "qkv", "MLP")}
    _each_in_its_turn("backward", block.backward, backward)


def _mirror(step: Step) -> Step:
    """What autograd does in backward for a step of a block."""
    if step.on_wire or step.act == "attend":
        act = {"start": "finish", "finish": "start"}.get(step.act, step.act)
        return step._replace(act=act, of="d" + step.of)
    return step._replace(act="dgrad")


def _sending(step: Step, of: str) -> Step:
    """Of an exchange of do, ``of``: beside o or alone."""
    return step._replace(of=of) if step.on_wire and step.of == "do" else step


def needs_of(kinds: tuple[str, ...], starts: tuple[tuple[str, int], ...]) -> tuple[Needs, Needs]:
    """The steps of both programs, each with those that it comes after."""
    forward: Needs = {}
    backward: Needs = {}
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


def _mirrored(step: Step) -> Step:
    """What the backward of a step of the attention section does."""
    act = {"start": "finish", "finish": "start"}.get(step.act, step.act)
    return Step(act, "d" + step.of, step.group)


def _words(step: Step) -> str:
    return " ".join(map(str, step[:3])) + f".{step.chunk}" * (step.chunk > 0)
