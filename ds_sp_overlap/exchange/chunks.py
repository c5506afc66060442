"""Joins the exchanges of several chunks of tokens into one tensor, for attention.

    q, k, v = finish_chunks(exchanges, tokens)      receive every chunk into its places of q, k, v
    tokens  = start_chunks(exchanges, o, q, k, v)   send every chunk from its places of o

Each function is one node of autograd. In backward the roles swap, chunk by chunk, see
Note [Token order] in `exchange`. The last chunk goes first, since its gradient is the first that
the program of a block needs. At the local end, an exchange of a chunk is like any other:
`Exchange.start`, `Exchange.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from .exchange import Exchange, Node, new_token, refuse_second_derivatives


def finish_chunks(exchanges: list[Exchange], tokens: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Finish the exchanges of all chunks.

    Args:
        exchanges: Exchanges of q, k and v or some of them, in the order of their chunks
            (`Geometry.chunk_exchange`).
        tokens: Returned when the exchanges were started.

    Returns:
        The tensors of the whole sequence, in the order of ``layout.each``.
    """
    if not torch.is_grad_enabled():
        return _received(exchanges)
    return _FinishChunks.apply(exchanges, *tokens)


def start_chunks(
    exchanges: list[Exchange], *tensors: Tensor, meanwhile: Callable[[], object] = lambda: None
) -> tuple[Tensor, ...]:
    """Start the exchanges of all chunks, each with its part of the same tensors.

    Args:
        exchanges: Exchanges of o, in the order of their chunks (`Geometry.chunk_exchange`).
        tensors: As in `Exchange.start`: o, then the q, k and v that it was computed from.
        meanwhile: Called in backward, while the gradients are under way.

    Returns:
        The token of each exchange.
    """
    if not torch.is_grad_enabled():
        return _sent(exchanges, tensors)
    return _StartChunks.apply(exchanges, meanwhile, *tensors)


def _received(exchanges: list[Exchange]) -> tuple[Tensor, ...]:
    outs: tuple[Tensor, ...] = ()
    for exchange in exchanges:
        outs = exchange.finish_forward(outs)
    return outs


def _sent(exchanges: list[Exchange], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    for exchange in exchanges:
        exchange.start_forward(tensors[: len(exchange.layout.each)])
    return tuple(new_token(tensors[0]) for _ in exchanges)


class _FinishChunks(Node):
    @staticmethod
    def forward(ctx, exchanges, *tokens):
        ctx.exchanges, outs = exchanges, _received(exchanges)
        ctx.needed = [any(ctx.needs_input_grad[1:]) and needed for needed in exchanges[0].needed]
        ctx.mark_non_differentiable(*(out for out, needed in zip(outs, ctx.needed) if not needed))
        return outs

    @staticmethod
    def backward(ctx, *gradients):
        """Launch the exchange of each chunk of dq, dk and dv, the last chunk first."""
        refuse_second_derivatives(ctx.exchanges[0].where)
        for exchange in reversed(ctx.exchanges):  # guard: the last chunk first
            exchange.start_gradient(list(compress(gradients, ctx.needed)))
        return None, *(new_token(gradients[0]) for _ in ctx.exchanges)


class _StartChunks(Node):
    @staticmethod
    def forward(ctx, exchanges, meanwhile, *tensors):
        ctx.exchanges, ctx.meanwhile = exchanges, meanwhile
        ctx.unsent = [None] * (len(tensors) - len(exchanges[0].layout.each))
        return _sent(exchanges, tensors)

    @staticmethod
    def backward(ctx, *tokens):
        """Wait for the chunks of do, which are under way since the backward of their finish."""
        ctx.meanwhile()  # guard: run again, then waits for do
        outs: tuple[Tensor | None, ...] = ()
        for exchange in reversed(ctx.exchanges):
            outs = exchange.finish_gradient([out for out in outs if out is not None])
        return None, None, *outs, *ctx.unsent
