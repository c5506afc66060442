"""Makes the schedule of a layer that holds all head groups in memory at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .steps import O, Op, Schedule, Step, Tensors


@cache
def by_head_groups(kinds: tuple[str, ...], wgrad_last: bool = True) -> Schedule:
    """Return the schedule that projects and starts all groups, then attends one group at a time.

    Args:
        kinds: The tensors that travel with each head group: "qkv", or "q" if no rank needs a new
            KV head (`Geometry.kinds`).
        wgrad_last: Whether to compute dWo after the exchange of every do has started; otherwise
            each group's part of dWo is computed before the group's dgrad.
    """
    # q, k and v of the first group travel one by one, each hidden by the next projection. q, k and
    # v of a later group travel in one exchange, which attention hides: fewer launches.
    later = [(together,) for together in kinds[1:]]
    return by_starts((tuple(kinds[0]), *later), wgrad_last)


def by_starts(starts: Sequence[Sequence[str | Tensors]], wgrad_last: bool) -> Schedule:
    """Return the schedule of `by_head_groups`, but with the given exchanges of q, k and v.

    Args:
        starts: The exchanges of each group: ``("q", "kv")`` sends q alone, and k and v together.
        wgrad_last: As for `by_head_groups`.
    """
    groups = range(len(starts))
    exchanges = [tuple(map(tuple, of_group)) for of_group in starts]
    forward, backward = [], []
    for group in groups:
        for tensors in exchanges[group]:
            forward += projections(tensors, group)
    # While a group is attended, q, k and v of later groups and o of earlier groups travel.
    for group in groups:
        forward += [Step(Op.FINISH, tensors, False, group) for tensors in exchanges[group]]
        forward += attention(group)
    for group in groups:
        forward += merge(group)

    for group in reversed(groups):
        if not wgrad_last:
            backward += [Step(Op.WGRAD, O, True, group)]
        backward += [Step(Op.DGRAD, O, True, group), Step(Op.START, O, True, group)]
    if wgrad_last:
        # The exchanges of all do have started by now; the weight gradients hide the last one.
        backward += [Step(Op.WGRAD, O, True, group) for group in groups]
    for group in reversed(groups):
        backward += [Step(Op.FINISH, O, True, group), Step(Op.ATTEND, O, True, group)]
        for tensors in reversed(exchanges[group]):
            backward += [Step(Op.START, tensors, True, group)]
    for group in reversed(groups):
        for tensors in reversed(exchanges[group]):
            backward += [Step(Op.FINISH, tensors, True, group), *products(tensors, group)]
    return Schedule(tuple(forward), tuple(backward))


def attention(group: int) -> list[Step]:
    """Return the steps: attention of a group, start of the exchange of its o."""
    return [Step(Op.ATTEND, O, False, group), Step(Op.START, O, False, group)]


def merge(group: int) -> list[Step]:
    """Return the steps: finish of the exchange of a group's o, output projection of this o."""
    return [Step(Op.FINISH, O, False, group), Step(Op.MERGE, O, False, group)]


def projections(tensors: Tensors, group: int) -> list[Step]:
    """Return the steps: projections of tensors that travel together, start of their exchange."""
    steps = [Step(Op.PROJECT, (kind,), False, group) for kind in tensors]
    return [*steps, Step(Op.START, tensors, False, group)]


def products(tensors: Tensors, group: int) -> list[Step]:
    """Return the steps: dgrad and wgrad of the projections of tensors that travel together."""
    steps = []
    for kind in reversed(tensors):
        steps += [Step(Op.DGRAD, (kind,), True, group), Step(Op.WGRAD, (kind,), True, group)]
    return steps
