"""Checks that a layer can run by a schedule. (The planner can also simulate other schedules.)"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from .by_groups import attention, merge, projections
from .steps import Needs, Op, Part, Program, Q, Schedule, section, section_of


def check(schedule: Schedule, kinds: tuple[str, ...]) -> Schedule:
    """Return ``schedule`` if a layer can run by it; raise ValueError if not.

    Each step of the layer must occur once, after the steps that it needs. The three sections of
    `Schedule` must be contiguous and in order. The attention section of backward must be the mirror
    image of the attention section of forward. Windowed schedules are refused, since only the config
    can ask for a window.

    A layer checks each schedule that its ``schedule=`` function returns (by default,
    `by_head_groups`). A layer does not check the windowed schedules that the config asks for.

    Args:
        schedule: The schedule.
        kinds: For each head group, the tensors that travel with the group: "qkv" or "q".

    Raises:
        ValueError: if one of these conditions does not hold.
    """
    if schedule.is_windowed:
        raise ValueError(
            "schedule= makes a windowed schedule, whose backward makes q, k and v again; return one "
            "with nothing to recompute, or leave schedule= out and set sp_overlap.window"
        )
    check_starts(schedule, kinds)
    forward, backward = needs_of(kinds, schedule.starts)
    for name, program, needs, pieces in (
        ("forward", schedule.forward, forward, ["inputs", "attention", "output"]),
        ("backward", schedule.backward, backward, ["output", "attention", "inputs"]),
    ):
        check_program(name, program, needs)
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


def check_starts(schedule: Schedule, kinds: tuple[str, ...]) -> None:
    """Check that each group's q, k and v are sent once; the arguments are those of `check`."""
    # Here a repeated start counts once. `check_program` refuses it, with a message of its own.
    sent = sorted(chain(*[start.parts for start in dict.fromkeys(schedule.starts)]))
    expected = sorted((kind, group) for group, of_group in enumerate(kinds) for kind in of_group)
    if sent != expected:
        raise ValueError(
            f"schedule, forward: its starts send {_listed(sent)}; a layer sends {_listed(expected)}"
        )


def _listed(parts: Sequence[Part]) -> str:
    return ", ".join(f"{kind} {group}" for kind, group in parts)


def check_program(name: str, program: Program, needs: Needs) -> None:
    """Check that a program has each step of ``needs`` once, after the steps required before it.

    Args:
        name: Name of the program, for the message.
        program: The program.
        needs: All steps that the program must have, each with the steps that must come before.

    Raises:
        ValueError: for the first fault.
    """
    done = set()
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


def needs_of(kinds: tuple[str, ...], starts: Program) -> tuple[Needs, Needs]:
    """Return the steps of forward and of backward, each with the steps required before it.

    Args:
        kinds: For each head group, the tensors that travel with the group: "qkv" or "q".
        starts: The starts of q, k and v (`Schedule.starts`).
    """
    forward: Needs = {}
    for start in starts:
        *projects, _ = projections((start,))
        forward |= {project: [] for project in projects}
        forward |= {start: projects, start.finish: [start]}
    for group in range(len(kinds)):
        # A group attends to KV heads that travelled with this group or an earlier one.
        inputs = []
        for start in starts:
            if start.group == group or start.group < group and start.tensors != Q:
                inputs.append(start.finish)
        (attend, start), (finish, merged) = attention((), group), merge(group)
        forward |= {attend: inputs, start: [attend], finish: [start], merged: [finish]}
    # Backward reverses the order: if step a comes before step b in forward, the mirror of b comes
    # before the mirror of a in backward.
    backward: Needs = {step.mirror: [] for step in forward}
    for step, needs in forward.items():
        for need in needs:
            backward[need.mirror].append(step.mirror)
    for step, needs in list(backward.items()):
        if step.op is Op.DGRAD:
            backward[step._replace(op=Op.WGRAD)] = [*needs]
    return forward, backward
