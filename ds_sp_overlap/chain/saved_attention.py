"""Attention of a chain that is saved, though the layers around it are recomputed.

    tokens = AttendSaved.apply(..)         attention, and a start of every chunk of o
    o_c = OutputExchange(..).finish(token) a chunk of o, local; its backward sends o and do

q, k and v are recomputed. Of attention, only a log-sum-exp is saved, beside o, which is saved for
the layers around it.

Before:  do = all_to_all(dy), and attention saves o of the whole sequence
Now:     o, do = all_to_all(o_c, do_c) of each chunk, where attention's backward reads o
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..attention.memory.recompute import attend_once
from ..exchange.exchange import Exchange, Node, new_token, refuse_second_derivatives
from ..schedule import Exchanged

# For each head group, what attention's backward reads beside q, k, v and o.
Saved = dict[int, list[Tensor]]


class SavedAttention:
    """What the attention of one call and the chunks of its o have in common.

    Attributes:
        beside: Makes the exchange of a chunk's o and do.
        reads_o: Whether attention's backward reads o.
        foreign: A tensor that attention learns and was not told of, in words; empty for none.
        flights: Exchanges of o and do that are under way.
    """

    def __init__(self, beside: Callable[[Exchanged], Exchange]):
        self.beside, self.reads_o, self.foreign = beside, False, ""
        self.flights: dict[Exchanged, Exchange] = {}


class OutputExchange(Exchange):
    """The exchange of a chunk of o, whose gradient travels beside o where attention's backward
    reads o.

    Args:
        saved: What is saved of the call.
        chunk: The chunk.
        exchange: Arguments of `Exchange`.
    """

    # o, where the finish is recomputed and nothing travels.
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
        if not received:
            super().start_gradient(dys)
        else:
            flight = self.saved.flights[self.chunk] = self.saved.beside(self.chunk)
            flight.start_forward([*received, *dys])


class AttendSaved(Node):
    """Attends with a head group, and starts the exchanges of its o.

    Takes, and returns a token for each exchange:

    saved              what is saved of the call
    tensors_of_groups  takes the tensors that are saved
    group              the head group
    attend             the attention of the group
    local              the local attention of the call
    exchanges          those of all chunks of o; empty where q, k and v are recomputed, and the node
                       only saves its tensors once more
    tensors            q, k and v, then the tensors that attention learns
    """

    @staticmethod
    def forward(ctx, saved, tensors_of_groups, group, attend, local, exchanges, *tensors):
        heads = tensors[:3]
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
        # Asked for before the wait: this recomputes the segment.
        q, k, v, *tensors_of_groups = ctx.saved_tensors
        outs: tuple[Tensor, ...] = ()
        for chunk, exchange in reversed(exchanges.items()):
            outs = (
                saved.flights.pop(chunk).finish_forward(outs)
                if saved.reads_o
                else exchange.finish_gradient(outs)
            )
        *front, do = outs
        o = front[0] if front else None
        gradients = ctx.attended.backward(
            attend, (q, k, v), ctx.wanted, o, do, tensors_of_groups, local.learned
        )
        return None, None, None, None, None, None, *gradients
