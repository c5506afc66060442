"""The order of a layer that holds few head groups at a time, and makes q, k and v again in
backward.

Forward keeps the layer's input, the local o and what local attention's backward reads beside q, k,
v and o (the log-sum-exp). Group g + W is projected when group g was attended. With two groups at a
time, of four:

    forward
    compute | Wq0 Wk0 Wv0 Wq1 Wk1 Wv1 attention 0 Wq2 Wk2 Wv2 attention 1 Wo0 Wq3 Wk3 Wv3 attention 2 Wo1 attention 3 Wo2 Wo3
    wire    |     q0  k0  v0          qkv1        o0          qkv2        o1              qkv3        o2              o3

Backward goes from the last group to the first. o travels with do, since attention's backward reads
both. ``Wq Wk Wv`` in this order are projections again, ``Wv Wk Wq`` dgrad and wgrad:

    backward
    compute | Wo3 dgrad Wo wgrad Wq3 Wk3 Wv3 Wo2 dgrad Wo wgrad Wq2 Wk2 Wv2 attention 3 Wo1 dgrad Wo wgrad Wv3 Wk3 Wq3 Wq1
    wire    |                    odo3 q3 k3  v3                 odo2        qkv2        dqkv3              odo1

    compute | Wk1 Wv1 attention 2 Wo0 dgrad Wo wgrad Wv2 Wk2 Wq2 Wq0 Wk0 Wv0 attention 1 attention 0 Wv1 Wk1 Wq1 Wv0 Wk0 Wq0
    wire    |         qkv1        dqkv2              odo0                    qkv0        dqkv1       dv0 dk0 dq0

k and v that later groups attend to as well come back with the last of these, in an exchange of
their own (kv0), apart from their q. Their dk and dv go out with the group that they came with in
forward, when every group has added to them.

In a checkpoint that keeps attention the layer runs in this order too, with half the groups at a
time unless a window is given. Run again, it does no more than merge the o that was kept: no q, k,
v, no attention, no exchange. Then comes backward as drawn.

With one group at a time a group's gradients are finished before the next group is begun, and each
exchange of backward but dq, dk and dv is finished before the next one is started: one send buffer
is held, and the compute row waits for every exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeVar

from .by_groups import products
from .steps import O, Op, Program, Schedule, Step, Tensors


@dataclass(frozen=True)
class Windowed(Schedule):
    """A schedule whose backward begins with nothing but x, o and dy: it projects, sends and attends
    each group again.

    Steps of its backward that those of other schedules don't have: ``project q``, ``start q``,
    ``finish q``, as in forward; and ``start odo``, the exchange of do with that of the local o
    `Step.beside` it, which local attention's backward reads.

    last_use, window   as `by_window` was given them
    """

    last_use: tuple[int, ...]
    window: int

    @cached_property
    def last_attended(self) -> int:
        """None: backward attends in another order."""
        return -1


@cache
def by_window(
    kinds: tuple[str, ...],
    last_use: tuple[int, ...],
    window: int,
    wgrad_last: bool = True,
    products_last: bool = False,
) -> Windowed:
    """At most ``window`` groups are between their projections and the end of their attention.

    kinds        what travels with each head group: "qkv", or "q" if no rank needs a new KV head
                 (`Geometry.kinds_of`)
    last_use     the last group that attends to the KV heads that travel with each
                 (`Geometry.last_use`)
    wgrad_last   compute a group's part of dWo when its do has started; else before
    products_last   compute dx and the weight gradients of q, k and v when all groups have attended:
                    dq, dk and dv of few KV heads are
                 less to hold than dx and those gradients. Layers do so from four query heads a KV
                 head on
    """
    groups, window = range(len(kinds)), min(window, len(kinds))
    starts = {group: _starts(kinds[group], group == 0 or window == 1) for group in groups}
    forward: list[Step] = []

    def project(program: list[Step], of: Tensors, group: int) -> None:
        program += [Step(Op.PROJECT, (kind,), False, group) for kind in of]
        program += [Step(Op.START, of, False, group)]

    def merge(group: int) -> None:
        forward.extend((Step(Op.FINISH, O, False, group), Step(Op.MERGE, O, False, group)))

    for group in groups[:window]:
        for of in starts[group]:
            project(forward, of, group)
    for group in groups:
        forward += [Step(Op.FINISH, of, False, group) for of in starts[group]]
        forward += [Step(Op.ATTEND, O, False, group), Step(Op.START, O, False, group)]
        if group and window > 1:
            merge(group - 1)
        for later in groups[group + window : group + window + 1]:
            for of in starts[later]:
                project(forward, of, later)
        if window == 1:
            merge(group)
    if window > 1:
        merge(groups[-1])

    backward: list[Step] = []
    # KV heads come back with the last group that attends to them, which is the first one here.
    again: dict[int, list[tuple[Tensors, int]]] = {group: [] for group in groups}
    for group in groups:
        alone = group == groups[-1] or window == 1
        shared = "k" in kinds[group] and last_use[group] > group
        own = _starts("q" if shared else kinds[group], alone)
        again[group] = [(of, group) for of in own] + again[group]
        if shared:
            again[last_use[group]].append((("k", "v"), group))

    def begin(group: int, between: Program = ()) -> None:
        dgrad, wgrad = Step(Op.DGRAD, O, True, group), Step(Op.WGRAD, O, True, group)
        start = Step(Op.START, O, True, group, beside=O)
        program = [*((dgrad, wgrad) if wgrad_last else (wgrad, dgrad)), start, *between]
        for of, sent in again[group]:
            project(program, of, sent)
        backward.extend(_one_at_a_time(program) if window == 1 else program)

    def arrived(group: int) -> None:
        backward.append(Step(Op.FINISH, O, True, group, beside=O))
        backward.extend(Step(Op.FINISH, of, False, sent) for of, sent in again[group])

    order = groups[::-1]
    at_end: list[Step] = []
    # Of a group behind which none is begun: its gradients travel under the next one's attention.
    behind: list[Step] = []
    for group in order[:window]:
        begin(group)
    for at, group in enumerate(order):
        if window > 1 and at == 0:
            arrived(group)
        backward += [Step(Op.ATTEND, O, True, group)]
        backward += [Step(Op.START, of, True, group) for of in reversed(starts[group])] + behind
        retired, behind = [], []
        for of in reversed(starts[group]):
            retired += [Step(Op.FINISH, of, True, group), *products(of, group)]
        if products_last:
            at_end += [step for step in retired if step.op is not Op.FINISH]
            retired = [step for step in retired if step.op is Op.FINISH]
        if window > 1 and at + 1 < len(order):
            arrived(order[at + 1])
        if window == 1:
            backward += retired
            for later in order[at + 1 : at + 2]:
                begin(later)
        elif at + window < len(order):
            begin(order[at + window], tuple(retired))
        else:
            behind = retired
    backward += behind
    recompute = tuple(step for step in forward if step.op is Op.MERGE)
    programs = tuple(forward), (*backward, *at_end)
    return Windowed(*programs, last_use, window, recompute=recompute)


def _one_at_a_time(program: list[Step]) -> list[Step]:
    """Each exchange finished before the next one is started, so that one send buffer is held."""
    steps: list[Step] = []
    started: list[Step] = []
    for step in program:
        if step.op is Op.START:
            steps += [before._replace(op=Op.FINISH) for before in started]
            started = [step]
        steps.append(step)
    return steps + [before._replace(op=Op.FINISH) for before in started]


def _starts(kinds: str, alone: bool) -> tuple[Tensors, ...]:
    """What travels alone, each under the next projection, or in one exchange, which attention
    hides.
    """
    return tuple((kind,) for kind in kinds) if alone else (tuple(kinds),)


_Kind = TypeVar("_Kind", bound=Schedule)


@cache
def without_o(schedule: _Kind) -> _Kind:
    """The same where no rank's attention reads o in backward, for instance since it is run again
    there.
    """
    return replace(schedule, backward=tuple(step._replace(beside=()) for step in schedule.backward))
