"""Attention of a chain that is run once, though what is around it is run again: of it, q, k and v
are made again, o is received again.

    o_0, o_1, ..   = attend_kept(..)       attention, and a start of every chunk of o
    OutputExchange(..).finish(o_c)         a chunk of o, local; its backward sends o and do

Before:  do = all_to_all(dy), and o is kept whole
Now:     o, do = all_to_all(o_c, do_c) of each chunk, where o is read; beside o_c, which the region
         holds, a log-sum-exp is kept
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..attention.memory.recompute import AttendGroup, attend_once
from ..attention.runtime.runner import LocalAttention
from ..exchange.exchange import Exchange, Node, new_token, refuse_second_derivatives
from ..schedule import Exchanged

Chunk = Exchanged  # o, of a head group, of a chunk
Saved = dict[int, list[Tensor]]


class SavedAttention:
    """What the attention of one call and the chunks of its o have in common.

    beside    an exchange of a chunk's o and do
    reads_o   whether o travels beside do
    foreign   what attention learns that is not known, in words
    """

    def __init__(self, beside: Callable[[Chunk], Exchange]):
        self.beside, self.reads_o, self.foreign = beside, False, ""
        self.flights: dict[Chunk, Exchange] = {}

    def agree(self, local: LocalAttention) -> None:
        """Have all ranks do the same; collective on the first call of a kind."""
        self.reads_o = local.agree(self.reads_o, self.foreign)


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

    def __init__(self, saved: SavedAttention, chunk: Chunk, *exchange: Any):
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


def attend_kept(
    kept: SavedAttention,
    held: Saved,
    group: int,
    attend: AttendGroup,
    local: LocalAttention,
    exchanges: dict[Chunk, Exchange],
    *heads: Tensor,
) -> tuple[Tensor, ...]:
    """Attend with q, k and v of a head group, and start the exchanges of o; returns their tokens.

    held        of each group, what its backward reads beside q, k, v and o
    exchanges   of all chunks; none where it is run again: then there is but the same node, for what
                it saves
    """
    return _Attend.apply(kept, held, group, attend, local, exchanges, *heads, *local.learned)


class _Attend(Node):
    @staticmethod
    def forward(ctx, kept, held, group, attend, local, exchanges, *tensors):
        heads = tensors[:3]
        if not exchanges:
            ctx.save_for_backward(*heads, *held[group])
            return (new_token(heads[0]),)
        ctx.parts = kept, attend, local, exchanges
        wanted = ctx.wanted = ctx.needs_input_grad[6:9]
        o, ctx.attended, held[group] = attend_once(
            attend, heads, wanted, local.given, local.learned
        )
        ctx.save_for_backward(*heads, *held[group])
        kept.reads_o, kept.foreign = (
            kept.reads_o or ctx.attended.reads_o,
            kept.foreign or ctx.attended.foreign,
        )
        for exchange in exchanges.values():
            exchange.start_forward([o])
        return tuple(new_token(o) for _ in exchanges)

    @staticmethod
    def backward(ctx, *tokens):
        """Before: o and do are under way since the finish of each chunk. Now: what is around is run
        again; then wait for them.
        """
        kept, attend, local, exchanges = ctx.parts
        refuse_second_derivatives(next(iter(exchanges.values())).where)
        q, k, v, *held = (
            ctx.saved_tensors
        )  # now, so that what is around is run again before the wait
        outs: tuple[Tensor, ...] = ()
        for chunk, exchange in reversed(exchanges.items()):
            outs = (
                kept.flights.pop(chunk).finish_forward(outs)
                if kept.reads_o
                else exchange.finish_gradient(outs)
            )
        *front, do = outs
        o = front[0] if front else None
        found = ctx.attended.backward(attend, (q, k, v), ctx.wanted, o, do, held, local.learned)
        return None, None, None, None, None, None, *found
