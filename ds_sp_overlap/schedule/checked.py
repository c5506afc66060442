"""Checks that a layer can run by a schedule.

A plan also simulates schedules that do not pass.
"""

from __future__ import annotations

from itertools import groupby, product

from .steps import QKV, Needs, O, Op, Part, Program, Q, Schedule, Step, Tensors, section, section_of
from .window import Windowed


def check(schedule: Schedule, kinds: tuple[str, ...]) -> Schedule:
    """Return ``schedule`` if a layer can run by it; raise ValueError if not.

    Every step of the layer must be there once, after the steps that it needs. The sections of
    `Schedule` must be three pieces in their order, and the attention section of backward must be
    the mirror image of that of forward. A `Windowed` has no sections; it attends to its groups in
    order, in backward in reverse, and has no more groups in memory than its window.

    A layer checks what its ``schedule=`` returns, by default `by_head_groups`; schedules that the
    config leads to are not checked.

    Args:
        schedule: The schedule.
        kinds: The tensors that travel with each head group, as for `by_head_groups`.

    Raises:
        ValueError: if one of these conditions does not hold.
    """
    sent: list[Part] = []
    # A start that is there twice is one step: `_check_program` refuses the second.
    for start in dict.fromkeys(schedule.starts):
        sent += start.parts
    for (group, expected_kinds), kind in product(enumerate(kinds), QKV):
        part = kind, group
        if sent.count(part) == expected_kinds.count(kind):
            continue
        fault = "is missing" if part not in sent else "is there twice"
        if kind not in expected_kinds:
            fault = "is no step of this layer"
        raise ValueError(f"schedule, forward: start {kind} {group} {fault}")
    forward, backward = needs_of(kinds, schedule.starts)
    if isinstance(schedule, Windowed):
        _check_window(schedule, forward, backward)
        return schedule
    for name, program, needs, pieces in (
        ("forward", schedule.forward, forward, ["inputs", "attention", "output"]),
        ("backward", schedule.backward, backward, ["output", "attention", "inputs"]),
    ):
        _check_program(name, program, needs)
        sections = [section for section, _ in groupby(program, key=section_of)]
        if sections != pieces:
            raise ValueError(
                f"schedule, {name}: its sections are {', '.join(sections)}; "
                "each is one piece, see `Schedule`"
            )
    mirrored = [step.mirror for step in reversed(section(schedule.forward, "attention"))]
    for step, expected in zip(section(schedule.backward, "attention"), mirrored):
        if step != expected:
            raise ValueError(
                f"schedule, backward: {step}, where autograd has {expected}: "
                "the mirror image of forward"
            )
    return schedule


def _check_program(name: str, program: Program, needs: Needs) -> None:
    """Check that every step of ``needs`` is there once, after those that it needs, and no other.

    Raises ValueError for the first fault; ``name`` is that of the program, for the message.
    """
    done: set[Step] = set()
    for step in program:
        if step not in needs or step in done:
            fault = "there twice" if step in done else "no step of this layer"
            raise ValueError(f"schedule, {name}: {step} is {fault}")
        early = [need for need in needs[step] if need not in done]
        if early:
            raise ValueError(f"schedule, {name}: {step} comes before {early[0]}")
        done.add(step)
    if missing := [step for step in needs if step not in done]:
        raise ValueError(f"schedule, {name}: {missing[0]} is missing")


def _check_window(schedule: Windowed, forward: Needs, backward: Needs) -> None:
    """Check both programs of a window.

    ``forward`` and ``backward`` are the needs of any schedule, to which those of a window are added
    here. Raises ValueError for the first fault.
    """
    # Backward recomputes q, k and v.
    restarts = [step for step in schedule.backward if step.op is Op.START and not step.grad]
    for start in restarts:
        projects = [start._replace(op=Op.PROJECT, tensors=(kind,)) for kind in start.tensors]
        backward |= {start: projects, start._replace(op=Op.FINISH): [start]}
        backward |= {project: [] for project in projects}
    for kind, group in schedule.parts:
        if not any((kind, group) in start.parts for start in restarts):
            raise ValueError(f"schedule, backward: start {kind} {group} is missing")
    last = schedule.groups - 1
    for group in range(schedule.groups):
        if group:
            forward[Step(Op.ATTEND, O, False, group)].append(Step(Op.ATTEND, O, False, group - 1))
        # The start of do with o frees the local o, which wgrad o reads.
        if schedule.beside:
            backward[Step(Op.START, O, True, group)].append(Step(Op.WGRAD, O, True, group))
        attend_needs = backward[Step(Op.ATTEND, O, True, group)]
        if group < last:
            attend_needs.append(Step(Op.ATTEND, O, True, group + 1))
        # A group reads q, k and v that are recomputed with it, and shared k and v that were
        # recomputed with a later group, see Note [Shared KV heads] in `window`.
        for start in restarts:
            is_shared = start.group < group <= schedule.last_use[start.group]
            if start.group == group or start.tensors != Q and is_shared:
                attend_needs.append(start._replace(op=Op.FINISH))
    # o travels beside do in all groups or in none.
    backward_beside: Needs = {}
    for step, earlier in backward.items():
        with_o = [_with(schedule.beside, need) for need in earlier]
        backward_beside[_with(schedule.beside, step)] = with_o
    for name, program, needs in (
        ("forward", schedule.forward, forward),
        ("backward", schedule.backward, backward_beside),
    ):
        _check_program(name, program, needs)
        # The groups between their projection of q and the end of their attention.
        live: set[int] = set()
        for step in program:
            if step.op is Op.PROJECT and step.tensors == Q:
                live.add(step.group)
            if len(live) > schedule.window:
                raise ValueError(
                    f"schedule, {name}: {step} while {len(live) - 1} groups are held; "
                    f"the window is {schedule.window}"
                )
            if step.op is Op.ATTEND:
                live.discard(step.group)
    if schedule.recompute != tuple(step for step in schedule.forward if step.op is Op.MERGE):
        raise ValueError(
            f"schedule, recompute: {', '.join(map(str, schedule.recompute)) or 'empty'}; where a "
            "checkpoint saved attention, the merges of forward run again, and nothing else"
        )


def _with(beside: Tensors, step: Step) -> Step:
    """Return the step; with ``beside`` if it starts or finishes the exchange of do."""
    sends_do = step.on_wire and step.tensors == O and step.grad
    return step._replace(beside=beside) if sends_do else step


def needs_of(kinds: tuple[str, ...], starts: Program) -> tuple[Needs, Needs]:
    """Return the steps of forward and of backward, each with the steps that it must come after.

    `check` and the `limit` of a plan start from them.

    Args:
        kinds: The tensors that travel with each head group, as for `by_head_groups`.
        starts: The starts of q, k and v (`Schedule.starts`).
    """
    forward: Needs = {}
    backward: Needs = {}
    groups = range(len(kinds))
    for start in starts:
        tensors, group = start.tensors, start.group
        start_gradient = Step(Op.START, tensors, True, group)
        finish_gradient = Step(Op.FINISH, tensors, True, group)
        # Later groups may attend to the same KV heads, and add to dk and dv.
        readers = [group] if tensors == Q else groups[group:]
        forward[start] = [Step(Op.PROJECT, (kind,), False, group) for kind in tensors]
        forward[start._replace(op=Op.FINISH)] = [start]
        backward[start_gradient] = [Step(Op.ATTEND, O, True, reader) for reader in readers]
        backward[finish_gradient] = [start_gradient]
        for kind in tensors:
            forward[Step(Op.PROJECT, (kind,), False, group)] = []
            backward[Step(Op.DGRAD, (kind,), True, group)] = [finish_gradient]
            backward[Step(Op.WGRAD, (kind,), True, group)] = [finish_gradient]
    for group in groups:
        # A group attends to KV heads that came with it or with any group before.
        inputs = []
        for start in starts:
            if start.group == group or start.group < group and start.tensors != Q:
                inputs.append(start._replace(op=Op.FINISH))
        attend = Step(Op.ATTEND, O, False, group)
        start, finish = Step(Op.START, O, False, group), Step(Op.FINISH, O, False, group)
        forward |= {attend: inputs, start: [attend], finish: [start]}
        forward[Step(Op.MERGE, O, False, group)] = [finish]
        dgrad = Step(Op.DGRAD, O, True, group)
        start, finish = start._replace(grad=True), finish._replace(grad=True)
        backward |= {dgrad: [], start: [dgrad], finish: [start], attend.mirror: [finish]}
        backward[Step(Op.WGRAD, O, True, group)] = []
    return forward, backward
