"""The order between two attentions, where tokens don't meet, in chunks of every rank's tokens.

    finish q, k, v, attend, start o           as in a layer by itself, all chunks one after another
    finish o, merge, MLP, project, start      chunk by chunk: norms and residuals too, and q, k, v
                                              of the next layer

Two layers of one head group, C = 2:

    forward
    compute | Wqkv.0 Wqkv.1 ......attention ....Wo.0 MLP.0 Wqkv.0 Wo.1 MLP.1 Wqkv.1 ......attention ....Wo.0 MLP.0 Wo.1 MLP.1
    wire    |        qkv.0  qkv.1           o.0 o.1               qkv.0             qkv.1           o.0 o.1

    backward
    compute | MLP.1 Wo.1 MLP.0 Wo.0 Wo wgrad attention MLP wgrad Wqkv.1 MLP.1 Wo.1 Wqkv.0 MLP.0 Wo.0 Wo wgrad Wqkv wgrad
    wire    |            do.1       do.0               dqkv.1 dqkv.0               do.1              do.0

    compute | attention MLP wgrad Wqkv.1 Wqkv.0 Wqkv wgrad
    wire    |           dqkv.1 dqkv.0

In backward the same the other way about. Weight gradients wait for all chunks. Those of the
projections are made under the last exchange of do, those of the MLP under the first of dq, dk and
dv, which nothing else hides. Those in front of the first attention are made chunk by chunk, though
drawn at the end, and so are all where layers are run again.

A layer's first call is not started ahead: its ranks compare. Where layers are run again in backward
(gradient checkpointing), the segment is, and q, k and v travel once more, under the last exchange
of do; o does not, it was held. Attention is run again too, unless it was kept: then o travels
beside do (``odo.c``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

from .steps import OF_MLP, QKV, O, Op, Program, Q, Schedule, Step, stop_of


@dataclass(frozen=True)
class Block(Schedule):
    """The programs of a layer in the middle of a chain: of its attention, and of what lies between
    it and the next one.

    chunks   C
    """

    chunks: int = 1

    @cached_property
    def _cut(self) -> int:
        """Where the segment begins in forward."""
        return 1 + max(
            at for at, step in enumerate(self.forward) if step.op is Op.START and step.tensors == O
        )

    @cached_property
    def attention_steps(self) -> Program:
        return self.forward[: self._cut]

    @cached_property
    def tail(self) -> Program:
        """What the last layer does behind its attention."""
        return tuple(step for step in self.segment if _ends(step))

    @cached_property
    def head(self) -> Program:
        """What the first layer does in front of its attention."""
        return tuple(step for step in self.segment if not _ends(step))

    @cached_property
    def segment(self) -> Program:
        """What lies between two attentions."""
        return self.forward[self._cut :]

    @cached_property
    def crossings(self) -> set[tuple[str, str]]:
        """The stops around what lies between the last o of a chunk and the first q of the next layer."""
        stops = [step for step in self.segment if step.on_wire]
        return {
            (stop_of(self, end), stop_of(self, begin))
            for end, begin in zip(stops, stops[1:])
            if _ends(end) and not _ends(begin)
        }

    def chain(self, layers: int) -> Schedule:
        """Forward and backward of ``layers`` in one chain."""
        at = next(
            at
            for at, step in enumerate(self.backward)
            if step.op is Op.FINISH and step.tensors == O
        )
        segment, attention = self.backward[:at], self.backward[at:]
        tail = tuple(step for step in segment if _ends(step))
        head = tuple(step for step in segment if not _ends(step))
        forward = (
            self.head
            + (self.attention_steps + self.segment) * (layers - 1)
            + self.attention_steps
            + self.tail
        )
        return replace(
            self,
            forward=forward,
            backward=tail + (attention + segment) * (layers - 1) + attention + head,
        )

    def name(self, step: Step) -> str:
        return f"{super().name(step)}.{step.chunk}"

    def label(self, step: Step) -> str:
        if step.op is Op.ATTEND:
            return super().label(step)
        what = "MLP" if step.tensors == OF_MLP else f"W{''.join(step.tensors)}"
        if step.op is Op.WGRAD:
            return f"{what} wgrad"
        return f"{what}.{step.chunk}" + " backward" * step.grad


def _ends(step: Step) -> bool:
    """It belongs to the layer whose attention was run, not to the next one."""
    return step.tensors in (O, OF_MLP)


@cache
def by_chunks(kinds: tuple[str, ...], chunks: int) -> Block:
    """
    kinds    what travels with each head group, as for `by_head_groups`: in one exchange a chunk
    chunks   C
    """
    groups, every, sent = range(len(kinds)), range(chunks), [tuple(of) for of in kinds]
    forward, backward = [], []
    for group in groups:
        forward += [Step(Op.FINISH, sent[group], False, group, c) for c in every]
        forward += [Step(Op.ATTEND, O, False, group)]
        forward += [Step(Op.START, O, False, group, c) for c in every]
    for c in every:
        forward += [Step(Op.FINISH, O, False, group, c) for group in groups]
        forward += [Step(Op.MERGE, O, False, 0, c), Step(Op.MLP, OF_MLP, False, 0, c)]
        forward += [Step(Op.PROJECT, QKV, False, 0, c)]
        forward += [Step(Op.START, sent[group], False, group, c) for group in groups]

    for c in reversed(every):
        backward += [Step(Op.FINISH, sent[group], True, group, c) for group in reversed(groups)]
        backward += [Step(Op.DGRAD, of, True, 0, c) for of in (QKV, OF_MLP, O)]
        backward += [Step(Op.START, O, True, group, c) for group in reversed(groups)]
    backward += [Step(Op.WGRAD, of, True, 0) for of in (O, QKV)]
    for group in reversed(groups):
        backward += [Step(Op.FINISH, O, True, group, c) for c in reversed(every)]
        backward += [Step(Op.ATTEND, O, True, group)]
        backward += [Step(Op.START, sent[group], True, group, c) for c in reversed(every)]
    backward += [Step(Op.WGRAD, OF_MLP, True, 0)]
    return Block(tuple(forward), tuple(backward), chunks)


Needs = dict[Step, list[Step]]


def periods(kinds: tuple[str, ...], chunks: int) -> tuple[Needs, Needs]:
    """What lies between the attention of one layer and of the next whatever the order: each step
    with those that it comes after.

    Forward, from the end of one layer's last group to the end of the next layer's; backward
    likewise, but from group 0 to group 0. Left out is what may lie before or behind: exchanges of
    the other groups of o, or of dq, dk, dv; weight gradients.
    """
    groups, every, sent = range(len(kinds)), range(chunks), [tuple(of) for of in kinds]
    forward: Needs = {}
    backward: Needs = {}
    for c in every:
        chunk = [
            Step(Op.START, O, False, groups[-1], c),
            Step(Op.MERGE, O, False, 0, c),
            Step(Op.MLP, OF_MLP, False, 0, c),
            Step(Op.PROJECT, QKV, False, 0, c),
        ]
        forward.update((step, chunk[at - 1 : at] if at else []) for at, step in enumerate(chunk))
        for group in groups:
            forward[Step(Op.START, sent[group], False, group, c)] = chunk[-1:]
        chunk = [
            Step(Op.START, sent[0], True, 0, c),
            *(Step(Op.DGRAD, of, True, 0, c) for of in (QKV, OF_MLP, O)),
        ]
        backward.update((step, chunk[at - 1 : at] if at else []) for at, step in enumerate(chunk))
        for group in groups:
            backward[Step(Op.START, O, True, group, c)] = chunk[-1:]
    for group in groups:
        forward[Step(Op.ATTEND, O, False, group)] = [
            Step(Op.START, sent[of], False, of, c)
            for of in groups[: group + 1]
            if of == group or sent[of] != Q
            for c in every
        ]
        backward[Step(Op.ATTEND, O, True, group)] = [
            Step(Op.START, O, True, group, c) for c in every
        ]
    return forward, backward
