"""The order of a chain of layers, in which each rank's tokens are cut into C chunks.

Nothing between two attentions mixes tokens, so that chunks can be computed one by one:

    finish q, k, v, attend, start o           as in a layer by itself; all chunks are exchanged
                                              before the attention, and all after it
    finish o, merge, MLP, project, start      chunk by chunk, with norms and residuals; the last two
                                              make and send q, k, v of the next layer

Two layers of one head group, C = 2:

    forward
    compute | Wqkv.0 Wqkv.1 ......attention ....Wo.0 MLP.0 Wqkv.0 Wo.1 MLP.1 Wqkv.1 ......attention ....Wo.0 MLP.0 Wo.1 MLP.1
    wire    |        qkv.0  qkv.1           o.0 o.1               qkv.0             qkv.1           o.0 o.1

    backward
    compute | MLP.1 Wo.1 MLP.0 Wo.0 Wo wgrad attention MLP wgrad Wqkv.1 MLP.1 Wo.1 Wqkv.0 MLP.0 Wo.0 Wo wgrad Wqkv wgrad
    wire    |            do.1       do.0               dqkv.1 dqkv.0               do.1              do.0

    compute | attention MLP wgrad Wqkv.1 Wqkv.0 Wqkv wgrad
    wire    |           dqkv.1 dqkv.0

In forward, the first chunk of o and the last of q, k, v are exposed. Backward has the reverse
order. Weight gradients of plain linear layers and of experts wait for all chunks (Note [Deferred
wgrads] in ``attention.runtime.deferred``); those of other parameters are left to autograd. But
those of MLP weights that ZeRO-3 partitions, that belong to a unit of FSDP inside the MLP, or that
are computed from other tensors, are computed with those of the projections. Where a layer starts
its own q, k and v, the weight gradients of these projections are computed chunk by chunk, although
the drawing has them at the end; so are all weight gradients of a layer that runs by itself.

The layer before starts a layer's q, k and v. A layer starts its own if it is the first one, in its
first call, in which the ranks compare their calls, wherever else `Chain._may_start` forbids the
layer before to start them, or if `Started.serves` denies that they fit the call.

With ``recompute`` (gradient checkpointing), backward recomputes the segment in front of an
attention, and the attention, under the last exchange of do; forward saves the hidden states and the
local o. What lies behind the last attention is recomputed first, while nothing travels. q, k and v
travel once more; o does not, since it was saved. Weight gradients are computed chunk by chunk, so
that none is left to hide the first dq, dk and dv. With "but attention" the attention is not
recomputed, since the log-sum-exp was saved too, and o travels beside do (``odo.c``); where q, k and
v need no gradient, or attention saves more, it is recomputed nevertheless. A chain of one layer, C
= 2, "but attention". Wo.0 MLP.0 Wo.1 MLP.1 at the beginning, and Wqkv.0 Wqkv.1 before the
attention, are recomputed. MLP.1 after MLP wgrad is the dgrad of chunk 1:

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

from .steps import OF_MLP, QKV, Needs, O, Op, Program, Q, Schedule, Step, stop_of

# The part of a layer that backward recomputes.
Recompute = Literal["none", "all", "but attention"]


@dataclass(frozen=True)
class Block(Schedule):
    """The programs of a layer in the middle of a chain.

    Forward has two parts: the attention, and the segment between this attention and the next.
    ``recompute`` has the steps of the segment in front of an attention, then of that attention.
    """

    @cached_property
    def _cut(self) -> int:
        """Index in forward of the first step of the segment: behind the last start of o."""
        starts_o = [step for step in self.forward if step.op is Op.START and step.tensors == O]
        return 1 + self.forward.index(starts_o[-1])

    @cached_property
    def attention_steps(self) -> Program:
        """The steps of forward around the attention, from finish q to start o."""
        return self.forward[: self._cut]

    @cached_property
    def segment(self) -> Program:
        """The steps of forward between two attentions."""
        return self.forward[self._cut :]

    @cached_property
    def recomputes(self) -> Recompute:
        """Return what is computed again in backward, read off the steps of ``recompute``."""
        if not self.recompute:
            return "none"
        is_whole = any(step.op is Op.ATTEND for step in self.recompute)
        return "all" if is_whole else "but attention"

    @cached_property
    def recomputed_segment(self) -> Program:
        """The steps of the segment that backward recomputes."""
        return tuple(step for step in self.recompute if step in self.segment)

    @cached_property
    def recomputed_attention(self) -> Program:
        """The steps around the attention that backward recomputes."""
        return tuple(step for step in self.recompute if step in self.attention_steps)

    @cached_property
    def crossings(self) -> set[tuple[str, str]]:
        """Pairs of exchanges, as `stop_of` writes them, between which the next layer begins."""
        stops = [step for step in self.segment if step.on_wire]
        crossings = set()
        for before, after in zip(stops, stops[1:]):
            # The finish of the last o of a chunk, and the start of the q, k and v that the next
            # layer makes of this chunk.
            if _is_tail(before) and not _is_tail(after):
                crossings.add((stop_of(self, before), stop_of(self, after)))
        return crossings

    def chain(self, layers: int, follows: bool = False, is_followed: bool = False) -> Schedule:
        """Return one schedule of successive layers, to be drawn, simulated and named in a timeline.

        A layer that runs walks the parts of its own `Block` instead.

        Args:
            layers: Number of layers.
            follows: Whether another layer comes before the first one, and computes its q, k and v.
            is_followed: Whether another layer comes after the last one.
        """
        # Backward goes through the segment behind an attention, then through the attention, which
        # begins with the first finish of do.
        finishes_do = [step for step in self.backward if step.op is Op.FINISH and step.tensors == O]
        cut = self.backward.index(finishes_do[0])
        segment, attention = self.backward[:cut], self.backward[cut:]
        # At the ends of a chain a segment has no layer on one of its sides: a first layer begins
        # with the head of a segment, a last layer ends with the tail.
        forward = self.segment if follows else head(self.segment)
        forward += (self.attention_steps + self.segment) * (layers - 1) + self.attention_steps
        forward += self.segment if is_followed else tail(self.segment)
        # What lies behind the last attention is recomputed first, while nothing travels.
        backward = segment if is_followed else tail(self.recomputed_segment) + tail(segment)
        backward += (self.recompute + attention + segment) * (layers - 1)
        backward += self.recomputed_segment if follows else head(self.recomputed_segment)
        backward += self.recomputed_attention + attention
        backward += segment if follows else head(segment)
        return replace(self, forward=forward, backward=backward)

    def name(self, step: Step) -> str:
        """Return the name of an exchange, with its chunk."""
        return f"{super().name(step)}.{step.chunk}"

    def label(self, step: Step) -> str:
        """Return the text on the bar of a step of the compute row, with its chunk."""
        if step.op is Op.ATTEND:
            return super().label(step)
        weights = "MLP" if step.tensors == OF_MLP else f"W{''.join(step.tensors)}"
        if step.op is Op.WGRAD:
            return f"{weights} wgrad"
        return f"{weights}.{step.chunk}" + " backward" * step.grad


def _is_tail(step: Step) -> bool:
    """Return whether a step of a segment belongs to the layer before it, not to the next layer."""
    return step.tensors in (O, OF_MLP)


@cache
def tail(segment: Program) -> Program:
    """Return the steps of a segment that the last layer of a chain has, after its attention."""
    return tuple(step for step in segment if _is_tail(step))


@cache
def head(segment: Program) -> Program:
    """Return the steps of a segment that the first layer of a chain has, before its attention."""
    return tuple(step for step in segment if not _is_tail(step))


@cache
def by_chunks(kinds: tuple[str, ...], chunks: int, recompute: Recompute = "none") -> Block:
    """Return the schedule of a layer in a chain, in chunks of tokens; drawn above.

    Args:
        kinds: The tensors that travel with each head group, as for `by_head_groups`; here in one
            exchange per chunk.
        chunks: C, the number of chunks.
        recompute: The part of a layer that backward recomputes.
    """
    groups, each_chunk, sent = range(len(kinds)), range(chunks), [tuple(names) for names in kinds]
    # Backward goes through groups and chunks from the last to the first.
    groups_back, each_chunk_back = groups[::-1], each_chunk[::-1]
    # Where attention is saved, its backward reads o, which travels beside do.
    beside = O if recompute == "but attention" else ()
    wgrad_by_chunk = recompute != "none"
    attention: list[Step] = []
    segment: list[Step] = []
    backward: list[Step] = []
    for group in groups:
        attention += [Step(Op.FINISH, sent[group], False, group, c) for c in each_chunk]
        attention += [Step(Op.ATTEND, O, False, group)]
        attention += [Step(Op.START, O, False, group, c) for c in each_chunk]
    # The segment ends in the next layer, whose q, k and v it makes and sends.
    for c in each_chunk:
        segment += [Step(Op.FINISH, O, False, group, c) for group in groups]
        segment += [Step(Op.MERGE, O, False, 0, c), Step(Op.MLP, OF_MLP, False, 0, c)]
        segment += [Step(Op.PROJECT, QKV, False, 0, c)]
        segment += [Step(Op.START, sent[group], False, group, c) for group in groups]

    for c in each_chunk_back:
        backward += [Step(Op.FINISH, sent[group], True, group, c) for group in groups_back]
        for tensors in (QKV, OF_MLP, O):
            if wgrad_by_chunk:
                backward += [Step(Op.WGRAD, tensors, True, 0, c)]
            backward += [Step(Op.DGRAD, tensors, True, 0, c)]
        backward += [Step(Op.START, O, True, group, c, beside=beside) for group in groups_back]
    if not wgrad_by_chunk:
        # They hide the last exchange of do.
        backward += [Step(Op.WGRAD, O, True, 0), Step(Op.WGRAD, QKV, True, 0)]
    for group in groups_back:
        backward += [Step(Op.FINISH, O, True, group, c, beside=beside) for c in each_chunk_back]
        backward += [Step(Op.ATTEND, O, True, group)]
        backward += [Step(Op.START, sent[group], True, group, c) for c in each_chunk_back]
    if not wgrad_by_chunk:
        # It hides the first exchange of dq, dk and dv, which nothing else hides.
        backward += [Step(Op.WGRAD, OF_MLP, True, 0)]
    block = Block(tuple(attention + segment), tuple(backward), chunks=chunks)
    return replace(block, recompute=recomputed(block, recompute))


def recomputed(block: Block, recompute: Recompute) -> Program:
    """Return the program that backward recomputes."""
    if recompute == "none":
        return ()
    steps = []
    for step in (*block.segment, *block.attention_steps):
        # o was saved, so it does not travel again.
        exchanges_o = step.on_wire and step.tensors == O
        if not exchanges_o and not (step.op is Op.ATTEND and recompute == "but attention"):
            steps.append(step)
    return tuple(steps)


def periods(kinds: tuple[str, ...], chunks: int) -> tuple[Needs, Needs]:
    """Return one period of a chain in forward and in backward: steps, with those they come after.

    A plan computes from it the time that no order of a long chain can beat. A period of forward
    goes from the end of the last group's attention in one layer to the same point in the next
    layer. A period of backward goes from group 0 to group 0. Only those steps are in it that every
    order must place there. Left out are exchanges of the other groups of o, or of dq, dk and dv,
    and weight gradients.

    Args:
        kinds: The tensors that travel with each head group, as for `by_head_groups`.
        chunks: C, the number of chunks.
    """
    groups, each_chunk, sent = range(len(kinds)), range(chunks), [tuple(names) for names in kinds]
    forward: Needs = {}
    backward: Needs = {}
    for c in each_chunk:
        steps = [
            Step(Op.START, O, False, groups[-1], c),
            Step(Op.MERGE, O, False, 0, c),
            Step(Op.MLP, OF_MLP, False, 0, c),
            Step(Op.PROJECT, QKV, False, 0, c),
        ]
        forward |= one_after_another(steps)
        for group in groups:
            forward[Step(Op.START, sent[group], False, group, c)] = steps[-1:]
        steps = [Step(Op.START, sent[0], True, 0, c)]
        steps += [Step(Op.DGRAD, tensors, True, 0, c) for tensors in (QKV, OF_MLP, O)]
        backward |= one_after_another(steps)
        for group in groups:
            backward[Step(Op.START, O, True, group, c)] = steps[-1:]
    for group in groups:
        starts = []
        for source in groups[: group + 1]:
            # KV heads that came with a group before may be attended to as well.
            if source == group or sent[source] != Q:
                starts += [Step(Op.START, sent[source], False, source, c) for c in each_chunk]
        forward[Step(Op.ATTEND, O, False, group)] = starts
        starts = [Step(Op.START, O, True, group, c) for c in each_chunk]
        backward[Step(Op.ATTEND, O, True, group)] = starts
    return forward, backward


def one_after_another(steps: list[Step]) -> Needs:
    """Return the steps, each with the step before it."""
    # The slice is empty for the first step.
    return {step: steps[max(index - 1, 0) : index] for index, step in enumerate(steps)}
