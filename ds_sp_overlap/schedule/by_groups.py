"""Makes the schedule of a layer that holds all head groups in memory at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .steps import O, Op, Program, Schedule, Step, Tensors


@cache
def by_head_groups(kinds: tuple[str, ...], wgrad_last: bool = True) -> Schedule:
    """Return the schedule that projects and starts all groups, then attends one group at a time.

    Args:
        kinds: The tensors that travel with each head group: "qkv", or "q" for a group with which no
            rank needs a new KV head (`Geometry.kinds`).
        wgrad_last: Whether to compute all of dWo after the last exchange of do has started. If not,
            each group's part of dWo is computed before the group's dgrad.
    """
    # q, k and v of the first group travel one by one, so that the next projection hides each.
    # Attention hides q, k and v of a later group. These travel in one exchange, to save launches.
    later = [(together,) for together in kinds[1:]]
    return by_starts((tuple(kinds[0]), *later), wgrad_last)


def by_starts(starts: Sequence[Sequence[str | Tensors]], wgrad_last: bool) -> Schedule:
    """Return the schedule of `by_head_groups`, but with the given exchanges of q, k and v.

    Args:
        starts: For each group, its exchanges: ``("q", "kv")`` sends q alone, and k and v together.
        wgrad_last: Whether to compute all of dWo after the last exchange of do has started. If not,
            each group's part of dWo is computed before the group's dgrad.
    """
    inputs = []
    attended = []
    output = []
    for group, together in enumerate(starts):
        of_group = starts_of(together, group)
        inputs += projections(of_group)
        # While a group is attended, q, k and v of later groups and o of earlier groups travel.
        attended += attention(of_group, group)
        output += merge(group)
    of_output = gradients(output, wgrad_first=not wgrad_last)
    if wgrad_last:
        # All products of dWo come last, to hide the exchange of the last do.
        of_output.sort(key=lambda step: step.op is Op.WGRAD)
    backward = of_output + gradients(attended) + gradients(inputs)
    return Schedule(tuple(inputs + attended + output), tuple(backward))


def starts_of(together: Sequence[str | Tensors], group: int) -> Program:
    """Return a group's starts of q, k and v, one for each item of ``together``.

    The tensors that an item names travel in one exchange.
    """
    return tuple(Step(Op.START, tuple(tensors), False, group) for tensors in together)


def projections(starts: Program) -> list[Step]:
    """Return the given starts of q, k and v, each after the projections of its tensors."""
    steps = []
    for start in starts:
        steps += [start._replace(op=Op.PROJECT, tensors=(kind,)) for kind in start.tensors]
        steps.append(start)
    return steps


def attention(starts: Program, group: int) -> list[Step]:
    """Return the finishes of a group's q, k and v, its attention, and the start of its o."""
    attend = Step(Op.ATTEND, O, False, group)
    return [*(start.finish for start in starts), attend, attend._replace(op=Op.START)]


def merge(group: int) -> list[Step]:
    """Return the finish of the exchange of a group's o, and the output projection of this o."""
    return [Step(Op.FINISH, O, False, group), Step(Op.MERGE, O, False, group)]


def gradients(steps: Sequence[Step], wgrad_first: bool = False) -> list[Step]:
    """Return the backward of ``steps``: the mirror image of these steps, with the wgrads.

    A wgrad comes directly before the dgrad of the same product if ``wgrad_first``, else directly
    after this dgrad.
    """
    mirrored = []
    for step in reversed(steps):
        products = [step.mirror]
        if step.mirror.op is Op.DGRAD:
            products.insert(not wgrad_first, step.mirror._replace(op=Op.WGRAD))
        mirrored += products
    return mirrored
