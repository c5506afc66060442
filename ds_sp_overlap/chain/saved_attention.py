"""Saves attention of a chain whose layers are recomputed otherwise.

    tokens = AttendSaved.apply(..)         attention, and a start of every chunk of o
    o_c = OutputExchange(..).finish(token) a chunk of o, local; its backward sends o and do

Backward recomputes q, k and v, but not attention. For attention only a log-sum-exp is saved. The
local o is saved anyway, since the layer behind it is recomputed from o.

Before:  do = all_to_all(dy), and attention saves o of the whole sequence
Now:     o, do = all_to_all(o_c, do_c) of each chunk, where attention's backward reads o
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..attention.memory.recompute import attend_once
from ..attention.runtime.execution import Call
from ..exchange.exchange import Exchange, Node, new_token, refuse_second_derivatives
from ..schedule import Exchanged, Op, Step

# For each head group, what attention's backward reads beside q, k, v and o.
Saved = dict[int, list[Tensor]]


class SavedAttention:
    """Holds what the attention of one call and the chunks of its o have in common.

    Args:
        call: The call.
        head_dim: ``d``.

    Attributes:
        reads_o: Whether attention's backward reads o, so that o travels beside do. After attention
            has run, the ranks agree on it: True if it reads o on any rank.
        foreign: A tensor that attention learns without being called with it, in words; empty for
            none. The agreement refuses it.
        flights: Exchanges of o and do that are under way in backward, from a chunk's finish to the
            backward of `AttendSaved`.
    """

    def __init__(self, call: Call, head_dim: int):
        self.call, self.head_dim, self.reads_o, self.foreign = call, head_dim, False, ""
        self.flights: dict[Exchanged, Exchange] = {}

    def exchange_beside(self, chunk: Exchanged) -> Exchange:
        """Make the exchange that takes a chunk of o, and do with it, to attention in backward.

        ``chunk`` names the exchange of the chunk of o in forward.
        """
        tensors, group, number = chunk
        step = Step(Op.START, tensors, True, group, number, beside=tensors)
        return self.call.exchange(step, (self.head_dim,) * 2)


class OutputExchange(Exchange):
    """The exchange of a chunk of o, whose gradient travels beside o where attention's backward
    reads o.

    Args:
        saved: What is saved of the call.
        chunk: The head group and the chunk, as `Step.exchange` names them.
        exchange: Arguments of `Exchange`.
    """

    # The chunk that forward received, where backward recomputes the finish: nothing travels, the
    # finish returns this chunk and its node saves it. None in forward.
    received: Tensor | None = None

    def __init__(self, saved: SavedAttention, chunk: Exchanged, *exchange: Any):
        super().__init__(*exchange)
        self.saved, self.chunk = saved, chunk

    @property
    def saves_received(self) -> bool:  # type: ignore[override]
        return self.saved.reads_o

    def finish_forward(self, into: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        if self.received is None:
            return super().finish_forward(into)
        return (self.received.view_as(self.received),)

    def start_gradient(self, dys: Sequence[Tensor], *received: Tensor) -> None:
        # ``received`` is o, if it is read. `AttendSaved.backward` finishes either exchange.
        if not received:
            super().start_gradient(dys)
        else:
            flight = self.saved.flights[self.chunk] = self.saved.exchange_beside(self.chunk)
            flight.start_forward([*received, *dys])


class AttendSaved(Node):
    """Attends with a head group, and starts the exchanges of its o.

    Returns a token for each exchange, and takes:

    saved              the `SavedAttention` of the call
    tensors_of_groups  for each group, the tensors that backward reads beside q, k, v and o; forward
                       adds those of ``group``
    group              the head group
    attend             the attention of the group
    local              the local attention of the call
    exchanges          those of all chunks of o. Empty in a recomputation: the node does not attend,
                       only saves q, k, v and the others again, and never has a backward
    tensors            q, k and v, then the tensors that attention learns
    """

    @staticmethod
    def forward(ctx, saved, tensors_of_groups, group, attend, local, exchanges, *tensors):
        heads = tensors[:3]
        # A recomputation: the node never has a backward.
        if not exchanges:
            ctx.save_for_backward(*heads, *tensors_of_groups[group])
            return (new_token(heads[0]),)
        ctx.parts = saved, attend, local, exchanges
        wanted = ctx.wanted = ctx.needs_input_grad[6:9]
        o, ctx.attended, tensors_of_groups[group] = attend_once(attend, heads, wanted, local)
        ctx.save_for_backward(*heads, *tensors_of_groups[group])
        saved.reads_o = saved.reads_o or ctx.attended.reads_o
        saved.foreign = saved.foreign or ctx.attended.foreign
        for exchange in exchanges.values():
            exchange.start_forward([o])
        return tuple(new_token(o) for _ in exchanges)

    @staticmethod
    def backward(ctx, *tokens):
        """Recompute q, k and v; then wait for o and do, which each chunk's finish has launched."""
        saved, attend, local, exchanges = ctx.parts
        refuse_second_derivatives(next(iter(exchanges.values())).where)
        # Before the wait, which it hides: reading saved tensors recomputes the segment.
        q, k, v, *tensors_of_groups = ctx.saved_tensors
        outs: tuple[Tensor, ...] = ()
        # All chunks are received into the same tensors: o and do, or do alone.
        for chunk, exchange in reversed(exchanges.items()):
            outs = (
                saved.flights.pop(chunk).finish_forward(outs)
                if saved.reads_o
                else exchange.finish_gradient(outs)
            )
        *front, do = outs
        o = front[0] if front else None
        gradients = ctx.attended.backward(
            attend, (q, k, v), ctx.wanted, o, do, tensors_of_groups, local
        )
        return None, None, None, None, None, None, *gradients
