"""Joins the exchanges of several chunks of tokens into one tensor, for attention.

At the local end, an exchange of a chunk is like any other: `Exchange.start`, `Exchange.finish`. At
the end where attention is, all chunks are one `Half`:

    q, k, v = run_halves([Half(ChunkedExchange(exchanges), tokens)])
    tokens  = run_halves([Half(ChunkedExchange(exchanges), (o, q, k, v), starts=True)])

In backward the roles swap, chunk by chunk, see Note [Token order] in `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .exchange import Exchange


class ChunkedExchange(Exchange):
    """The exchanges of all chunks, each with its part of the same tensors.

    Args:
        exchanges: Exchanges of q, k and v or some of them, or of o, in the order of their chunks
            (`Geometry.exchange`).

    Attributes:
        tokens: The number of chunks: each has a token of autograd.
        meanwhile: Called in the backward of o's start, before it waits for the gradients of o;
            None for nothing. `chain.block` recomputes a segment there.
    """

    meanwhile: Callable[[], object] | None = None

    def __init__(self, exchanges: Sequence[Exchange]):
        self.exchanges, self.tokens = exchanges, len(exchanges)
        first = exchanges[0]
        self.layout, self.where, self.needed = first.layout, first.where, first.needed

    def start_forward(self, xs: Sequence[Tensor]) -> None:
        # Each sends its chunk of the same tensors.
        for exchange in self.exchanges:
            exchange.start_forward(xs)

    def finish_forward(self, into: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        # The first chunk allocates the whole tensors; the others receive into them.
        received = tuple(into)
        for exchange in self.exchanges:
            received = exchange.finish_forward(received)
        return received

    def start_gradient(self, dys: Sequence[Tensor], *received: Tensor) -> None:
        # The gradient of the last chunk is the first that the program of a block needs.
        for exchange in reversed(self.exchanges):  # guard: the last chunk first
            exchange.start_gradient(dys)

    def finish_gradient(self, into: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
        if self.meanwhile is not None:
            self.meanwhile()  # guard: run again, then waits for do
        # As in `finish_forward`; ``into`` has no places for tensors that need no gradient.
        received: tuple[Tensor | None, ...] = tuple(into)
        for exchange in reversed(self.exchanges):
            received = exchange.finish_gradient([x for x in received if x is not None])
        return received
