"""The order of head groups that are all in flight at once."""

from __future__ import annotations

from functools import cache

from .steps import Schedule, Step


@cache
def by_head_groups(kinds: tuple[str, ...], wgrad_last: bool = True) -> Schedule:
    """Project and start all groups, then attend group after group. Later q, k, v and earlier o travel meanwhile.

    q, k and v of the first group travel one by one, each under the next projection. Those of a later group are hidden by attention
    anyway, and travel in one exchange: fewer are launched.

    kinds        what travels with each head group: "qkv", or "q" if no rank needs a new KV head (`Geometry.kinds_of`)
    wgrad_last   compute dWo when every do has started; else each group's part before its do
    """
    return by_starts((tuple(kinds[0]), *((together,) for together in kinds[1:])), wgrad_last)


def by_starts(starts: tuple[tuple[str, ...], ...], wgrad_last: bool) -> Schedule:
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
