"""The order of a layer that has few head groups in memory at a time, and recomputes q, k and v in
backward.

Forward saves the layer's input, the local o, and the tensors that the backward of local attention
reads beside q, k, v and o (the log-sum-exp). If local attention saves more, or changes q, k or v in
place, its backward computes attention again. Let W be the window: the most groups between ``project
q`` and the end of their attention. Group g + W is projected when group g has been attended. Four
groups, W = 2, `by_window` without ``products_last``:

    forward
    compute | Wq0 Wk0 Wv0 Wq1 Wk1 Wv1 attention 0 Wq2 Wk2 Wv2 attention 1 Wo0 Wq3 Wk3 Wv3 attention 2 Wo1 attention 3 Wo2 Wo3
    wire    |     q0  k0  v0          qkv1        o0          qkv2        o1              qkv3        o2              o3

Backward goes from the last group to the first. o travels with do, since the backward of attention
reads both. ``Wq Wk Wv`` in this order are recomputed projections; ``Wv Wk Wq`` are dgrad and wgrad:

    backward
    compute | Wo3 dgrad Wo wgrad Wq3 Wk3 Wv3 Wo2 dgrad Wo wgrad Wq2 Wk2 Wv2 attention 3 Wo1 dgrad Wo wgrad Wv3 Wk3 Wq3 Wq1
    wire    |                    odo3 q3 k3  v3                 odo2        qkv2        dqkv3              odo1

    compute | Wk1 Wv1 attention 2 Wo0 dgrad Wo wgrad Wv2 Wk2 Wq2 Wq0 Wk0 Wv0 attention 1 attention 0 Wv1 Wk1 Wq1 Wv0 Wk0 Wq0
    wire    |         qkv1        dqkv2              odo0                    qkv0        dqkv1       dv0 dk0 dq0

q, k and v travel under the attention of the group before. o, and o with do, travel under
projections and the attention of another group; dq, dk and dv under the products of another group or
under its attention. From W = 2 on, every exchange has work to hide it.

A layer runs in this order if the config sets a window, or with ``checkpointing`` "keep" or
"offload" (W = max(1, G // 2), unless a window is set). If projections
can't be computed part by part, the layer warns and holds all groups. When a checkpoint that saved attention reruns the layer, the layer merges the
saved o and does nothing else: no q, k, v, no attention, no exchange. Backward then runs as drawn. A
checkpoint that saves no attention repeats all of forward.

With W = 1, backward sends (o with do), q, k and v one at a time, each finished before the next one
is started; dq, dk and dv of a group are three exchanges, started one after another, and finished
before the next group begins. o with do travels under Wq, q under Wk, k under Wv. Exposed are, in
forward, v of the first group and o of the last; in backward v and dv of each group, or q and dq
where a group sends q alone.

Note [Shared KV heads]
~~~~~~~~~~~~~~~~~~~~~~
KV heads travel with the first group that attends to them, and later groups may attend to them too.
Backward meets these groups in reverse. So it recomputes shared k and v with the last group that
attends to them, in an exchange of their own (kv0), apart from the q they travelled with in forward.
Their dk and dv leave with the group that they came with in forward, when every group has added to
them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from .by_groups import attention, by_head_groups, merge, products, projections
from .steps import O, Op, Schedule, Step, Tensors


def schedule_of(geometry: Any, window: int | None = None, wgrad_last: bool = True) -> Schedule:
    """Return the schedule for a window, or that of a layer without one.

    Layers without a window call `by_head_groups` themselves; planner and policy ask here for both.

    Args:
        geometry: The `exchange.geometry.Geometry` of a call, or what has its ``heads``,
            ``kv_heads``, ``kinds`` and ``last_use``.
        window: The most groups that are in memory at a time; None for all of them.
        wgrad_last: As for `by_head_groups` and `by_window`.
    """
    kinds = geometry.kinds
    if window is None:
        return by_head_groups(kinds, wgrad_last)
    # With few KV heads it takes less memory to keep dq, dk and dv to the end than dx and the weight
    # gradients meanwhile: from four query heads per KV head on, their products come last.
    few_kv = geometry.heads >= 4 * geometry.kv_heads
    return by_window(kinds, geometry.last_use, window, wgrad_last, products_last=few_kv)


@cache
def by_window(
    kinds: tuple[str, ...],
    last_use: tuple[int, ...],
    window: int,
    wgrad_last: bool = True,
    products_last: bool = False,
) -> Schedule:
    """Return the schedule in which few groups are in memory at a time; drawn above for W = 2.

    Forward projects W groups. Then, for each group: finish q, k, v, attend, start o, merge the
    group before, project the W-th group from here. For W = 1 it projects the next group first, and
    then merges this one.

    Args:
        kinds: The tensors that travel with each head group, as for `by_head_groups`.
        last_use: For each group, the last group that attends to the KV heads that travel with it
            (`Geometry.last_use`).
        window: W. At any time, at most so many groups are projected and not yet attended.
        wgrad_last: Whether to compute the part of dWo of a group after the dgrad of the same group;
            else before.
        products_last: Whether to compute dx and the weight gradients of q, k and v when all groups
            have been attended. Then dq, dk and dv stay in memory.
    """
    groups, window = range(len(kinds)), min(window, len(kinds))
    # The exchanges of q, k and v in forward, and those of their gradients. Where no attention hides
    # them, q, k and v travel one by one, each under the next projection.
    starts = {group: _starts(kinds[group], group == 0 or window == 1) for group in groups}
    forward: list[Step] = []
    for group in groups[:window]:
        for tensors in starts[group]:
            forward += projections(tensors, group)
    for group in groups:
        forward += [Step(Op.FINISH, tensors, False, group) for tensors in starts[group]]
        forward += attention(group)
        # With W = 1, o travels under the projections of the next group instead.
        if group and window > 1:
            forward += merge(group - 1)
        if group + window in groups:
            for tensors in starts[group + window]:
                forward += projections(tensors, group + window)
        if window == 1:
            forward += merge(group)
    if window > 1:
        forward += merge(groups[-1])

    backward: list[Step] = []
    # The exchanges that are recomputed with each group, each with the group that it belongs to in
    # forward, see Note [Shared KV heads].
    recomputed: dict[int, list[tuple[Tensors, int]]] = {group: [] for group in groups}
    for group in groups:
        # The last group is the first of backward.
        alone = group == groups[-1] or window == 1
        shared = "k" in kinds[group] and last_use[group] > group
        own = _starts("q" if shared else kinds[group], alone)
        recomputed[group] = [(tensors, group) for tensors in own] + recomputed[group]
        if shared:
            recomputed[last_use[group]].append((("k", "v"), group))

    # For each group: what begins it; the projections that are recomputed with it; and, before its
    # attention, the finishes of do with o and of these projections.
    begins: dict[int, list[Step]] = {}
    projected: dict[int, list[Step]] = {}
    finishes: dict[int, list[Step]] = {}
    for group in groups:
        products_of_o = [Step(Op.DGRAD, O, True, group), Step(Op.WGRAD, O, True, group)]
        start = Step(Op.START, O, True, group, beside=O)
        # Both come before the start, which frees the local o that the wgrad reads.
        begins[group] = [*products_of_o[:: 1 if wgrad_last else -1], start]
        projected[group], finishes[group] = [], [start._replace(op=Op.FINISH)]
        for tensors, owner in recomputed[group]:
            projected[group] += projections(tensors, owner)
            finishes[group].append(Step(Op.FINISH, tensors, False, owner))

    descending = groups[::-1]
    products_at_end: list[Step] = []
    # Finishes and products of dq, dk and dv of the group before, where no further group begins
    # behind it. They wait for the attention of the next group, under which dq, dk and dv travel.
    deferred: list[Step] = []
    if window > 1:
        for group in descending[:window]:
            backward += begins[group] + projected[group]
        backward += finishes[groups[-1]]
    for group in descending:
        if window == 1:
            backward += _one_at_a_time(begins[group] + projected[group])
        backward += [Step(Op.ATTEND, O, True, group)]
        backward += [Step(Op.START, tensors, True, group) for tensors in reversed(starts[group])]
        backward += deferred
        input_gradients, deferred = [], []
        for tensors in reversed(starts[group]):
            input_gradients.append(Step(Op.FINISH, tensors, True, group))
            # From W = 2 on, products that were left to the end hide the last input gradients, whose
            # own products come behind them.
            if products_last and (group > 0 or window == 1):
                products_at_end += products(tensors, group)
            else:
                input_gradients += products(tensors, group)
        if window > 1 and group > 0:
            backward += finishes[group - 1]
        if window == 1:
            backward += input_gradients
        elif group >= window:
            later = group - window
            backward += begins[later] + input_gradients + projected[later]
        else:
            deferred = input_gradients
    recompute = tuple(step for step in forward if step.op is Op.MERGE)
    programs = tuple(forward), (*backward, *products_at_end, *deferred)
    return Schedule(*programs, recompute)


def _one_at_a_time(program: list[Step]) -> list[Step]:
    """Return the steps with a finish of each exchange before the next start, and of the last."""
    # One send buffer is there at a time.
    steps: list[Step] = []
    finishes: list[Step] = []
    for step in program:
        if step.op is Op.START:
            steps += finishes
            finishes = [step._replace(op=Op.FINISH)]
        steps.append(step)
    return steps + finishes


def _starts(kinds: str, alone: bool) -> tuple[Tensors, ...]:
    """Return the exchanges of a group: one for each tensor, or one for all together."""
    return tuple((kind,) for kind in kinds) if alone else (tuple(kinds),)


@cache
def without_o(schedule: Schedule) -> Schedule:
    """Return the schedule in which no o travels beside do.

    For local attention whose backward reads o on no rank, for instance since it recomputes o.
    ``attention.runtime.nodes`` calls it after forward, once ranks have agreed.
    """
    return replace(schedule, backward=tuple(step._replace(beside=()) for step in schedule.backward))
