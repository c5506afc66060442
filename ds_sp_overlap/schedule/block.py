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
drawn at the end.

A layer's first call is not started ahead: its ranks compare.

With ``recompute`` (gradient checkpointing) the segment in front of an attention, and the attention,
are computed once more in backward, under the last exchange of do: q, k and v travel again, o was
saved and does not. Weight gradients are made chunk by chunk. With "but attention" the attention is
not computed again, since the log-sum-exp was saved too, and o travels beside do (``odo.c``). A
layer by itself, C = 2, "but attention":

    backward
    compute | Wo.0 MLP.0 Wo.1 MLP.1 MLP wgrad MLP.1 Wo wgrad Wo.1 MLP wgrad MLP.0 Wo wgrad Wo.0 Wqkv.0 Wqkv.1 ......attention
    wire    |                                                     odo.1                         odo.0  qkv.0  qkv.1

    compute | .......Wqkv wgrad Wqkv.1 Wqkv wgrad Wqkv.0
    wire    | dqkv.1 dqkv.0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from .steps import OF_MLP, QKV, O, Op, Program, Q, Schedule, Step, stop_of

# What of a layer is computed again in backward.
Recompute = Literal["none", "all", "but attention"]


@dataclass(frozen=True)
class Block(Schedule):
    """The programs of a layer in the middle of a chain: of its attention, and of what lies between
    it and the next one. ``recompute`` is what lies in front of the next attention, and that
    attention.

    Attributes:
        chunks: C.
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
    def segment(self) -> Program:
        """What lies between two attentions."""
        return self.forward[self._cut :]

    @cached_property
    def recomputes(self) -> Recompute:
        """What is computed again in backward."""
        if not self.recompute:
            return "none"
        is_whole = any(step.op is Op.ATTEND for step in self.recompute)
        return "all" if is_whole else "but attention"

    @cached_property
    def recomputed_segment(self) -> Program:
        return tuple(step for step in self.recompute if step in self.segment)

    @cached_property
    def recomputed_attention(self) -> Program:
        return tuple(step for step in self.recompute if step in self.attention_steps)

    @cached_property
    def crossings(self) -> set[tuple[str, str]]:
        """The stops around what lies between the last o of a chunk and the first q of the next layer."""
        stops = [step for step in self.segment if step.on_wire]
        return {
            (stop_of(self, end), stop_of(self, begin))
            for end, begin in zip(stops, stops[1:])
            if _ends(end) and not _ends(begin)
        }

    def chain(self, layers: int, follows: bool = False, is_followed: bool = False) -> Schedule:
        """Return forward and backward of some layers in one chain.

        Args:
            layers: Number of layers.
            follows: Another layer comes before, and does what lies in front of the first attention.
            is_followed: Another layer comes behind the last one.
        """
        at = next(
            at
            for at, step in enumerate(self.backward)
            if step.op is Op.FINISH and step.tensors == O
        )
        segment, attention = self.backward[:at], self.backward[at:]
        forward = self.segment if follows else head(self.segment)
        forward += (self.attention_steps + self.segment) * (layers - 1) + self.attention_steps
        forward += self.segment if is_followed else tail(self.segment)
        backward = segment if is_followed else tail(self.recomputed_segment) + tail(segment)
        backward += (self.recompute + attention + segment) * (layers - 1)
        backward += self.recomputed_segment if follows else head(self.recomputed_segment)
        backward += self.recomputed_attention + attention
        backward += segment if follows else head(segment)
        return replace(self, forward=forward, backward=backward)

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
def tail(segment: Program) -> Program:
    """What the last layer does behind its attention."""
    return tuple(step for step in segment if _ends(step))


@cache
def head(segment: Program) -> Program:
    """What the first layer does in front of its attention."""
    return tuple(step for step in segment if not _ends(step))


@cache
def by_chunks(kinds: tuple[str, ...], chunks: int, recompute: Recompute = "none") -> Block:
    """Return the order of a layer in a chain, in chunks of tokens.

    Args:
        kinds: What travels with each head group, as for `by_head_groups`: in one exchange a chunk.
        chunks: C.
        recompute: What of a layer is computed again in backward.
    """
    groups, every, sent = range(len(kinds)), range(chunks), [tuple(of) for of in kinds]
    saves_o, at_once = recompute == "but attention", recompute != "none"
    attention: list[Step] = []
    segment: list[Step] = []
    backward: list[Step] = []
    for group in groups:
        attention += [Step(Op.FINISH, sent[group], False, group, c) for c in every]
        attention += [Step(Op.ATTEND, O, False, group)]
        attention += [Step(Op.START, O, False, group, c) for c in every]
    for c in every:
        segment += [Step(Op.FINISH, O, False, group, c) for group in groups]
        segment += [Step(Op.MERGE, O, False, 0, c), Step(Op.MLP, OF_MLP, False, 0, c)]
        segment += [Step(Op.PROJECT, QKV, False, 0, c)]
        segment += [Step(Op.START, sent[group], False, group, c) for group in groups]

    beside = O if saves_o else ()
    for c in reversed(every):
        backward += [Step(Op.FINISH, sent[group], True, group, c) for group in reversed(groups)]
        for of in (QKV, OF_MLP, O):
            backward += [Step(Op.WGRAD, of, True, 0, c)] * at_once + [
                Step(Op.DGRAD, of, True, 0, c)
            ]
        backward += [Step(Op.START, O, True, group, c, beside=beside) for group in reversed(groups)]
    if not at_once:
        backward += [Step(Op.WGRAD, of, True, 0) for of in (O, QKV)]
    for group in reversed(groups):
        backward += [Step(Op.FINISH, O, True, group, c, beside=beside) for c in reversed(every)]
        backward += [Step(Op.ATTEND, O, True, group)]
        backward += [Step(Op.START, sent[group], True, group, c) for c in reversed(every)]
    if not at_once:
        backward += [Step(Op.WGRAD, OF_MLP, True, 0)]
    made = Block(tuple(attention + segment), tuple(backward), chunks)
    return replace(made, recompute=recomputed(made, recompute))


def recomputed(block: Block, recompute: Recompute) -> Program:
    """Return what is computed again: all but the exchange of o, which was saved."""
    if recompute == "none":
        return ()
    return tuple(
        step
        for step in (*block.segment, *block.attention_steps)
        if not (step.on_wire and step.tensors == O)
        and not (step.op is Op.ATTEND and recompute == "but attention")
    )


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
