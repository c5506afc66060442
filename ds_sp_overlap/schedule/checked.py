"""What holds for every schedule that a layer is given, and for those of a window; `plan` plays
others too.
"""

from __future__ import annotations

from itertools import groupby

from .block import Block, Recompute, recomputed
from .steps import OF_MLP, QKV, O, Op, Program, Q, Schedule, Step, section_of
from .window import Windowed

Needs = dict[Step, list[Step]]


def check(schedule: Schedule, kinds: tuple[str, ...]) -> Schedule:
    """Return ``schedule``. Raises ValueError if it can't be run where ``kinds`` travel with the
    head groups: if a step is missing, unknown, there twice or too early, if the sections are not
    three pieces in their order, or if backward's attention section is not the mirror image of
    forward's. A `Windowed` one has no sections; there, if more groups are held than its window
    lets. Of a `Block` all of backward but the weight gradients is the mirror image.
    """
    if isinstance(schedule, Block):
        _block(schedule, kinds)
        return schedule
    for group, here in enumerate(kinds):
        starts = [step for step in dict.fromkeys(schedule.starts) if step.group == group]
        sent = [kind for step in starts for kind in step.tensors]
        for kind in QKV:
            if sent.count(kind) != here.count(kind):
                wrong = (
                    "is no step of this layer"
                    if kind not in here
                    else "is missing"
                    if kind not in sent
                    else "is there twice"
                )
                raise ValueError(f"schedule, forward: start {kind} {group} {wrong}")
    forward, backward = needs_of(kinds, schedule.starts)
    if isinstance(schedule, Windowed):
        _window(schedule, forward, backward)
        return schedule
    for name, program, needs in (
        ("forward", schedule.forward, forward),
        ("backward", schedule.backward, backward),
    ):
        _each_in_its_turn(name, program, needs)
        sections = [section for section, _ in groupby(program, key=section_of)]
        if sections != ["inputs", "attention", "output"][:: 1 if name == "forward" else -1]:
            raise ValueError(
                f"schedule, {name}: its sections are {', '.join(sections)}; each is one piece, see `Schedule`"
            )
    mirrored = [step.mirror for step in reversed(schedule.attention)]
    for step, expected in zip(
        (step for step in schedule.backward if section_of(step) == "attention"), mirrored
    ):
        if step != expected:
            raise ValueError(
                f"schedule, backward: {step}, where autograd has {expected}: the mirror image of forward"
            )
    return schedule


def _each_in_its_turn(name: str, program: Program, needs: Needs) -> None:
    """Every step of ``needs`` once, behind those that it needs, and no other."""
    done: set[Step] = set()
    for step in program:
        if step not in needs or step in done:
            raise ValueError(
                f"schedule, {name}: {step} is {'there twice' if step in done else 'no step of this layer'}"
            )
        early = [need for need in needs[step] if need not in done]
        if early:
            raise ValueError(f"schedule, {name}: {step} comes before {early[0]}")
        done.add(step)
    if missing := [step for step in needs if step not in done]:
        raise ValueError(f"schedule, {name}: {missing[0]} is missing")


def _window(schedule: Windowed, forward: Needs, backward: Needs) -> None:
    """What holds beside: q, k and v are made again in backward; k and v are let go of with the last
    group that attends to them, which in backward is the one that they came with; at most ``window``
    groups are held.
    """
    again = [step for step in schedule.backward if step.op is Op.START and not step.grad]
    for start in again:
        projects = [start._replace(op=Op.PROJECT, tensors=(kind,)) for kind in start.tensors]
        backward |= {
            start: projects,
            start._replace(op=Op.FINISH): [start],
            **{project: [] for project in projects},
        }
    made_again = {part for start in again for part in start.parts}
    for kind, group in schedule.parts:
        if (kind, group) not in made_again:
            raise ValueError(f"schedule, backward: start {kind} {group} is missing")
    last = schedule.groups - 1
    for group in range(schedule.groups):
        if group:
            forward[Step(Op.ATTEND, O, False, group)].append(Step(Op.ATTEND, O, False, group - 1))
        attend = backward[Step(Op.ATTEND, O, True, group)]
        attend += [Step(Op.ATTEND, O, True, group + 1)] if group < last else []
        for start in again:
            is_read = (
                start.group == group
                or start.tensors != Q
                and start.group < group <= schedule.last_use[start.group]
            )
            attend += [start._replace(op=Op.FINISH)] if is_read else []
    # o travels beside do in all groups or in none.
    beside = next((step.beside for step in schedule.backward if _sends_do(step)), ())
    backward = {
        _with(beside, step): [_with(beside, need) for need in needs]
        for step, needs in backward.items()
    }
    for name, program, needs in (
        ("forward", schedule.forward, forward),
        ("backward", schedule.backward, backward),
    ):
        _each_in_its_turn(name, program, needs)
        held: set[int] = set()
        for step in program:
            if step.op is Op.PROJECT and step.tensors == Q:
                held.add(step.group)
            if len(held) > schedule.window:
                raise ValueError(
                    f"schedule, {name}: {step} while {len(held) - 1} groups are held; the window is {schedule.window}"
                )
            if step.op is Op.ATTEND:
                held.discard(step.group)


def _block(block: Block, kinds: tuple[str, ...]) -> None:
    """Group after group is attended, all its o started; then chunk after chunk goes on, in which o
    of its groups comes first.
    """
    groups, every = range(len(kinds)), range(block.chunks)
    sent = [tuple(of) for of in kinds]
    forward: Needs = {}
    started: list[Step] = []  # of the group before, of the chunk before
    for group in groups:
        arrived = [at for at in groups[: group + 1] if at == group or sent[at] != Q]
        attend = Step(Op.ATTEND, O, False, group)
        forward[attend] = [Step(Op.FINISH, sent[at], False, at, c) for at in arrived for c in every]
        for c in every:
            forward[Step(Op.FINISH, sent[group], False, group, c)] = started
            forward[Step(Op.START, O, False, group, c)] = [attend]
        started = [Step(Op.START, O, False, group, c) for c in every]
    for c in every:
        merge, mlp = Step(Op.MERGE, O, False, 0, c), Step(Op.MLP, OF_MLP, False, 0, c)
        project = Step(Op.PROJECT, QKV, False, 0, c)
        for group in groups:
            finish = Step(Op.FINISH, O, False, group, c)
            forward[finish], started = started, [finish]
        forward |= {merge: started, mlp: [merge], project: [mlp]}
        started = [Step(Op.START, sent[group], False, group, c) for group in groups]
        forward |= {start: [project] for start in started}
    _each_in_its_turn("forward", block.forward, forward)
    _recomputed(block)
    parts = block.segment, block.attention_steps
    mirrored = [step.mirror for part in parts for step in reversed(part)]
    beside = next((step.beside for step in block.backward if _sends_do(step)), ())
    mirrored = [_with(beside, step) for step in mirrored]
    backward: Needs = {}
    for before, step in zip([None, *mirrored], mirrored):
        backward[step] = [before] if before else []
    for of in (O, QKV, OF_MLP):
        if block.recompute:  # chunk by chunk, as soon as the gradient is there
            for c in every:
                dgrad = Step(Op.DGRAD, of, True, 0, c)
                backward[dgrad._replace(op=Op.WGRAD)] = backward[dgrad]
        else:
            backward[Step(Op.WGRAD, of, True, 0)] = [Step(Op.DGRAD, of, True, 0, c) for c in every]
    _each_in_its_turn("backward", block.backward, backward)


def _recomputed(block: Block) -> None:
    """Some recomputation, or none; o travels beside do only where attention is not recomputed."""
    known: tuple[Recompute, ...] = ("none", "all", "but attention")
    for kind in known:
        if block.recompute == recomputed(block, kind):
            break
    else:
        raise ValueError(
            f"schedule, recompute: {', '.join(map(str, block.recompute))} is neither all of a layer but the exchange of o, "
            "nor that without attention; see `by_chunks`"
        )
    if kind != "but attention" and any(step.beside for step in block.backward):
        raise ValueError("schedule, backward: o travels beside do, but attention is not saved")


def _sends_do(step: Step) -> bool:
    return step.on_wire and step.tensors == O and step.grad


def _with(beside: tuple[str, ...], step: Step) -> Step:
    return step._replace(beside=beside) if _sends_do(step) else step


def needs_of(kinds: tuple[str, ...], starts: Program) -> tuple[Needs, Needs]:
    """The steps of both programs, each with those that it comes after.

    starts   of q, k and v (`Schedule.starts`)
    """
    forward: Needs = {}
    backward: Needs = {}
    groups = range(len(kinds))
    for start in starts:
        of, group = start.tensors, start.group
        back = Step(Op.START, of, True, group)
        arrival = Step(Op.FINISH, of, True, group)
        attended = [group] if of == Q else groups[group:]  # by whom
        forward[start] = [Step(Op.PROJECT, (kind,), False, group) for kind in of]
        forward[start._replace(op=Op.FINISH)] = [start]
        backward[back] = [Step(Op.ATTEND, O, True, at) for at in attended]
        backward[arrival] = [back]
        for kind in of:
            forward[Step(Op.PROJECT, (kind,), False, group)] = []
            backward[Step(Op.DGRAD, (kind,), True, group)] = [arrival]
            backward[Step(Op.WGRAD, (kind,), True, group)] = [arrival]
    for group in groups:
        # The KV heads that a group attends to may have come with it or with any before.
        arrived = [
            start._replace(op=Op.FINISH)
            for start in starts
            if start.group == group or start.group < group and start.tensors != Q
        ]
        attend, back = Step(Op.ATTEND, O, False, group), Step(Op.ATTEND, O, True, group)
        start, finish = Step(Op.START, O, False, group), Step(Op.FINISH, O, False, group)
        forward |= {attend: arrived, start: [attend], finish: [start]}
        forward[Step(Op.MERGE, O, False, group)] = [finish]
        dgrad = Step(Op.DGRAD, O, True, group)
        start, finish = start._replace(grad=True), finish._replace(grad=True)
        backward |= {dgrad: [], start: [dgrad], finish: [start], back: [finish]}
        backward[Step(Op.WGRAD, O, True, group)] = []
    return forward, backward
