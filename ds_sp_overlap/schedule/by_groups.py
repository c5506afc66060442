"""The order of head groups that are all in flight at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .steps import O, Op, Schedule, Step, Tensors


@cache
def by_head_groups(kinds: tuple[str, ...], wgrad_last: bool = True) -> Schedule:
    """Project and start all groups, then attend group after group. Later q, k, v and earlier o
    travel meanwhile.

    q, k and v of the first group travel one by one, each under the next projection. Those of a
    later group are hidden by attention anyway, and travel in one exchange: fewer are launched.

    kinds        what travels with each head group: "qkv", or "q" if no rank needs a new KV head
                 (`Geometry.kinds_of`)
    wgrad_last   compute dWo when every do has started; else each group's part before its do
    """
    return by_starts((tuple(kinds[0]), *((together,) for together in kinds[1:])), wgrad_last)


def by_starts(starts: Sequence[Sequence[str | Tensors]], wgrad_last: bool) -> Schedule:
    """The same order for any exchanges of each group: ``("q", "kv")`` is q alone, k and v together."""
    groups = range(len(starts))
    exchanged = [[tuple(of) for of in of_group] for of_group in starts]
    forward, backward = [], []
    for group in groups:
        for of in exchanged[group]:
            forward += [Step(Op.PROJECT, (kind,), False, group) for kind in of]
            forward += [Step(Op.START, of, False, group)]
    for group in groups:
        forward += [Step(Op.FINISH, of, False, group) for of in exchanged[group]]
        forward += [Step(Op.ATTEND, O, False, group), Step(Op.START, O, False, group)]
    for group in groups:
        forward += [Step(Op.FINISH, O, False, group), Step(Op.MERGE, O, False, group)]

    for group in reversed(groups):
        if not wgrad_last:
            backward += [Step(Op.WGRAD, O, True, group)]
        backward += [Step(Op.DGRAD, O, True, group), Step(Op.START, O, True, group)]
    if wgrad_last:
        backward += [Step(Op.WGRAD, O, True, group) for group in groups]
    for group in reversed(groups):
        backward += [Step(Op.FINISH, O, True, group), Step(Op.ATTEND, O, True, group)]
        backward += [Step(Op.START, of, True, group) for of in reversed(exchanged[group])]
    for group in reversed(groups):
        for of in reversed(exchanged[group]):
            backward += [Step(Op.FINISH, of, True, group), *products(of, group)]
    return Schedule(tuple(forward), tuple(backward))


def products(of: Tensors, group: int) -> list[Step]:
    """dgrad and wgrad of the projections of what travelled together."""
    return [Step(op, (kind,), True, group) for kind in reversed(of) for op in (Op.DGRAD, Op.WGRAD)]
