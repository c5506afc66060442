"""Makes the schedule of a layer with few head groups in memory; backward recomputes q, k and v.

Forward saves the layer's input, the local o, and the tensors that the backward of local attention
reads beside q, k, v and o (the log-sum-exp). If local attention saves more, or changes q, k or v in
place, backward recomputes attention. At most W groups, the window, are projected and not yet
attended. Group g + W is projected when group g has been attended. The following are the programs
for four groups, W = 2, without ``products_last``:

    forward
    compute | Wq0 Wk0 Wv0 Wq1 Wk1 Wv1 attention 0 Wq2 Wk2 Wv2 attention 1 Wo0 Wq3 Wk3 Wv3 attention 2 Wo1 attention 3 Wo2 Wo3
    wire    |     q0  k0  v0          qkv1        o0          qkv2        o1              qkv3        o2              o3

Backward goes from the last group to the first. o travels with do, since the backward of attention
reads both. ``Wq Wk Wv``, in this order, are recomputed projections. ``Wv Wk Wq`` are dgrad and
wgrad:

    backward
    compute | Wo3 dgrad Wo wgrad Wq3 Wk3 Wv3 Wo2 dgrad Wo wgrad Wq2 Wk2 Wv2 attention 3 Wo1 dgrad Wo wgrad Wv3 Wk3 Wq3 Wq1
    wire    |                    odo3 q3 k3  v3                 odo2        qkv2        dqkv3              odo1

    compute | Wk1 Wv1 attention 2 Wo0 dgrad Wo wgrad Wv2 Wk2 Wq2 Wq0 Wk0 Wv0 attention 1 attention 0 Wv1 Wk1 Wq1 Wv0 Wk0 Wq0
    wire    |         qkv1        dqkv2              odo0                    qkv0        dqkv1       dv0 dk0 dq0

The attention of the previous group hides q, k and v. Projections and the attention of another group
hide o, and o with do. The products or the attention of another group hide dq, dk and dv. From W = 2
on, every exchange has work to hide it.

A layer runs in this order if the config sets ``window``, or sets ``checkpointing`` to "keep" or
"offload". (Without ``window``, these two set W = max(1, G // 2) for G groups.) If projections can't
be computed part by part, the layer warns, and holds all groups in memory. In the recompute of a
checkpoint that saved attention, the layer only computes the output projection of the saved o, with
no other projection, attention or exchange. Backward then runs as drawn. A checkpoint that saves no
attention repeats all of forward.

With W = 1, backward exchanges o with do, then q, k and v one by one. Each exchange is finished
before the next one starts. dq, dk and dv of a group are three exchanges, started one after
another, and finished before the next group begins. Wq hides o with do, Wk hides q, Wv hides k. In
forward, v of the first group and o of the last group are exposed. In backward, v and dv of each
group are exposed, or q and dq of a group that sends q alone.

Note [Shared KV heads]
~~~~~~~~~~~~~~~~~~~~~~
In forward, k and v travel with the first group that attends to them. Later groups may share these k
and v. Backward runs the groups in reverse, so the last of these groups needs k and v first. With
this group, backward recomputes and sends the shared k and v, in an exchange without q (kv0). dk and
dv are summed over the groups, and travel with the first group's dq.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from .by_groups import attention, gradients, merge, projections, starts_of
from .steps import O, Op, Program, Schedule, Step


def schedule_of(geometry: Any, window: int, wgrad_last: bool) -> Schedule:
    """Return the schedule of a layer with a window.

    Args:
        geometry: The `exchange.geometry.Geometry` of a call, or an object with the same ``heads``,
            ``kv_heads``, ``kinds`` and ``last_use``.
        window: The limit on groups that are in memory at a time.
        wgrad_last: Whether to compute a group's part of dWo after the group's do; if not, before.
    """
    # With few KV heads, keeping dq, dk and dv until the end takes less memory than keeping dx and
    # the weight gradients. So from four query heads per KV head on, these products come last.
    few_kv = geometry.heads >= 4 * geometry.kv_heads
    return by_window(geometry.kinds, geometry.last_use, window, wgrad_last, products_last=few_kv)


@cache
def by_window(
    kinds: tuple[str, ...],
    last_use: tuple[int, ...],
    window: int,
    wgrad_last: bool = True,
    products_last: bool = False,
) -> Schedule:
    """Return the schedule with at most ``window`` groups in memory.

    The module's docstring has the drawing for W = 2. Forward first projects W groups. Then, for
    each group g, forward has the steps: finish q, k, v, attend, start o, merge group g - 1, project
    group g + W. With W = 1, the last two steps are: project group g + 1, merge group g.

    Args:
        kinds: For each head group, the tensors that travel with the group: "qkv" or "q".
        last_use: For each group, the last group that attends to the KV heads of this group's
            exchanges (`Geometry.last_use`).
        window: W, the limit on groups that are projected and not yet attended.
        wgrad_last: Whether to compute a group's part of dWo after the group's do; if not, before.
        products_last: Whether to compute dx and the weight gradients of q, k and v after the
            attention of all groups. Until then dq, dk and dv stay in memory.
    """
    groups, window = range(len(kinds)), min(window, len(kinds))
    # The starts of q, k and v in forward. Where no attention hides q, k and v, each has its own
    # exchange, so that the next projection hides it.
    starts = [_starts(kinds[group], group, group == 0 or window == 1) for group in groups]
    forward = []
    for of_group in starts[:window]:
        forward += projections(of_group)
    for group in groups:
        forward += attention(starts[group], group)
        # With W = 1, group g is merged below, after the projections of group g + 1, which hide o.
        if group and window > 1:
            forward += merge(group - 1)
        for of_group in starts[group + window :][:1]:
            forward += projections(of_group)
        if window == 1:
            forward += merge(group)
    if window > 1:
        forward += merge(groups[-1])

    backward = []
    # For each group, the starts of q, k and v that backward repeats before the group's attention.
    # See Note [Shared KV heads].
    recomputed: list[Program] = [()] * len(groups)
    for group in groups:
        # Backward begins with the last group, whose exchanges no attention hides.
        alone = group == groups[-1] or window == 1
        shared = "k" in kinds[group] and last_use[group] > group
        own = _starts("q" if shared else kinds[group], group, alone)
        recomputed[group] = own + recomputed[group]
        if shared:
            recomputed[last_use[group]] += starts_of(["kv"], group)

    # For each group, three lists of steps in backward. ``begins``: dgrad and wgrad of Wo, and the
    # start of do. ``finishes``: the finishes before attention. ``projected``: the recomputed
    # projections and their starts.
    begins = []
    finishes = []
    for group in groups:
        # The start of do also sends the local o, and then frees it. So the wgrad, which reads this
        # o, comes before the start.
        *products_of_o, start = gradients(merge(group), wgrad_first=not wgrad_last)
        start = start._replace(beside=O)
        begins.append([*products_of_o, start])
        finishes.append([each.finish for each in (start, *recomputed[group])])
    projected = list(map(projections, recomputed))

    descending = groups[::-1]
    products_at_end = []
    # The finishes and products of dq, dk and dv of one of the last W groups of backward. They come
    # after the attention of the following group, which hides dq, dk and dv.
    deferred: list[Step] = []
    if window > 1:
        for group in descending[:window]:
            backward += begins[group] + projected[group]
        backward += finishes[-1]
    for group in descending:
        if window == 1:
            backward += _one_at_a_time(begins[group] + projected[group])
        # The finish of do is among ``finishes``.
        backward += gradients(attention(starts[group], group))[1:]
        backward += deferred
        input_gradients, deferred = gradients(projections(starts[group])), []
        # From W = 2 on, the products at the end hide dq, dk and dv of group 0. Group 0's own
        # products come after these.
        if products_last and (group > 0 or window == 1):
            products_at_end += [step for step in input_gradients if not step.on_wire]
            input_gradients = [step for step in input_gradients if step.on_wire]
        if window > 1 and group > 0:
            backward += finishes[group - 1]
        if window == 1:
            backward += input_gradients
        elif group >= window:
            later = group - window
            backward += begins[later] + input_gradients + projected[later]
        else:
            deferred = input_gradients
    return Schedule(tuple(forward), tuple(backward + products_at_end + deferred))


def _one_at_a_time(program: list[Step]) -> list[Step]:
    """Return ``program`` with finishes: each exchange finishes before the next one starts."""
    # So only one send buffer is in memory at a time.
    steps: list[Step] = []
    finishes: list[Step] = []
    for step in program:
        if step.op is Op.START:
            steps += finishes
            finishes = [step.finish]
        steps.append(step)
    return steps + finishes


def _starts(kinds: str, group: int, alone: bool) -> Program:
    """Return the starts of a group's tensors: one for each if ``alone``, else one for all."""
    return starts_of(kinds if alone else [kinds], group)


@cache
def without_o(schedule: Schedule) -> Schedule:
    """Return the same schedule, in which do travels without o.

    Such a schedule is valid if the backward of local attention reads o on no rank.
    ``attention.runtime.nodes`` calls this function after forward, when the ranks have agreed.
    """
    return replace(schedule, backward=tuple(step._replace(beside=()) for step in schedule.backward))
