"""An exchange in two differentiable halves.

    token = exchange.start(x)      launch; returns an empty tensor that autograd tracks
    y     = exchange.finish(token) order the compute stream after it; the received tensor

    Before:  x -> [all-to-all] -> y                         dx <- [all-to-all] <- dy
    Now:     x -> start -> token -> finish -> y             dx <- start' <- token <- finish' <- dy
                  launch            wait                          wait             launch

In backward the roles swap: the backward of ``finish`` launches the exchange of the gradient, the backward of ``start``
waits for it. Autograd runs nodes that are ready in the reverse order of their creation, so whatever is computed between
``start`` and ``finish`` hides the exchange, and its backward hides the gradient's exchange. Correctness never depends on
that order, only the overlap does.

The token carries no data. What is in flight hangs on the `Exchange`, which belongs to one call of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress, islice
from typing import Any

import torch
from torch import Tensor

from .channel import Channel
from .in_flight import InFlight, Tables
from .layout import Layout


def refuse_second_derivatives(where: str) -> None:
    """Called where the backward of a layer begins: before it has launched anything, and on every rank alike.

    What it computes behind autograd's back, from what hangs on the `Exchange`, can't be differentiated again. No other node of
    a layer runs in backward before one that calls this, so that none of them needs ``once_differentiable``, which would raise
    where its own node is differentiated and be silent where the others are.
    """
    if torch.is_grad_enabled():  # guard: no second derivatives
        raise RuntimeError(
            f"{where}: a backward with create_graph=True, but overlapped layers have no second derivatives; leave it out, or run "
            "this model with DeepSpeed's own DistributedAttention (ds_sp_overlap.disable)"
        )


class _Apply:
    """``apply`` for less of the host's time: what torch does for functorch first is left out where that is off."""

    def __get__(self, node: object, kind: type[Node]) -> Any:
        above = Node if torch._C._are_functorch_transforms_active() else torch.autograd.Function
        return super(above, kind).apply  # type: ignore[misc]  # untyped in torch


class Node(torch.autograd.Function):
    """A node of autograd."""

    apply: Any = _Apply()


class Exchange:
    """One exchange of one call: state of its forward transfer, and of the gradient's.

    channel   the sp group
    layout    what is given and what is received
    name      of the layer and the exchange, for instance ``layers.7 q``; the gradient's is ``layers.7 dq``
    checked   compare with a plain exchange (``sp_overlap.check``)
    rope      (cos, sin) [.., d_rot], broadcast to the local side's tokens: rotary embedding on the way out, and its
              transpose on the gradient's way in, in the kernels that move the data
    """

    def __init__(self, channel: Channel, layout: Layout, where: str, what: str, checked: bool = False, rope: Tables | None = None):
        self.channel, self.layout, self.where, self.what = channel, layout, where, what
        self.checked, self.rope = checked, rope
        self.needed: Sequence[bool] = (True,) * len(layout.each)  # whether there will be a gradient of each tensor
        self.forward: InFlight | None = None
        self.gradient: InFlight | None = None

    def start(self, *tensors: Tensor) -> Tensor:
        """Launch the exchange and return at once.

        tensors   what is sent, in the shapes of ``layout.each``' sources; kept alive until finished. For o behind it q, k and v of
                  which it was computed: whatever local attention does with them on one rank, every rank finds their nodes behind
                  the token in backward, and takes part in the exchanges of do, dq, dk and dv
        token     [0]   tracked by autograd; give it to ``finish``

        Collective: every rank of the sp group starts the same exchanges in the same order.
        Raises ValueError, before any communication, if a tensor has another shape.
        """
        if not torch.is_grad_enabled():
            self.start_forward(tensors[: len(self.layout.each)])
            return new_token(tensors[0])
        return _Start.apply(self, *tensors)  # guard: leads to each of them

    def finish(self, token: Tensor) -> Tensor:
        """Order the compute stream after an exchange of one tensor and return what was received, in the shape of ``layout.target``."""
        (y,) = finish_together([self], [token])
        return y

    def start_forward(self, xs: Sequence[Tensor]) -> None:
        """The first half of the forward, for a node that does more than that."""
        name = f"{self.where} {self.what}"
        self.forward = InFlight(self.channel, self.layout, name, self.rope).launch(xs, self.checked)

    def finish_forward(self, into: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """The second half; ``into`` as in `InFlight.finish`."""
        if self.forward is None:
            raise RuntimeError(f"{self.where} {self.what}: finished without having been started, or finished twice")
        in_flight, self.forward = self.forward, None  # guard: forward is let go
        return in_flight.finish(into)

    def start_gradient(self, dys: Sequence[Tensor]) -> None:
        """The first half of the backward, with the gradients of those tensors that are `needed`."""
        name, layout = f"{self.where} d{self.what}", self.layout.only(self.needed).inverse
        self.gradient = InFlight(self.channel, layout, name, None, self.rope).launch(dys, self.checked)

    def finish_gradient(self, into: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
        """The second half; None for tensors that need none. ``into`` as in `InFlight.finish`, of those that need one."""
        if self.gradient is None:
            raise RuntimeError(
                f"{self.where} d{self.what}: finished without having been started; gradients of a layer's inputs and of its "
                "weights come of one backward, ask for them together"
            )
        in_flight, self.gradient = self.gradient, None  # guard: gradient is let go
        found = in_flight.finish(into)
        if len(found) == len(self.needed):
            return found
        given = iter(found)
        return tuple(next(given) if needed else None for needed in self.needed)  # guard: to those that need it


def finish_together(exchanges: list[Exchange], tokens: list[Tensor]) -> tuple[Tensor, ...]:
    """`Exchange.finish` of several, in one node: their gradients are started when all are known, the last one first."""
    if not torch.is_grad_enabled():
        return tuple(chain.from_iterable(exchange.finish_forward() for exchange in exchanges))
    return _Finish.apply(exchanges, *tokens)


class _Start(Node):
    @staticmethod
    def forward(ctx, exchange, *tensors):
        sent = len(exchange.layout.each)
        ctx.exchange, ctx.unsent = exchange, [None] * (len(tensors) - sent)
        ctx.set_materialize_grads(False)
        if sent > 1:  # one alone has a gradient if its token has: o even where attention computed it of nothing
            exchange.needed = ctx.needs_input_grad[1 : 1 + sent]
        exchange.start_forward(tensors[:sent])
        return new_token(tensors[0])

    @staticmethod
    def backward(ctx, token):
        """Before: dx = all_to_all(dy). Now: that exchange is under way since `_Finish.backward`; wait for it."""
        found = [None] * len(ctx.exchange.needed) if token is None else ctx.exchange.finish_gradient()
        return None, *found, *ctx.unsent


def new_token(x: Tensor) -> Tensor:
    """An empty tensor like ``x``."""
    return x.new_empty(0)  # on the tensor's device: both halves stay in one ready queue of the autograd engine


class _Finish(Node):
    @staticmethod
    def forward(ctx, exchanges, *tokens):
        ctx.exchanges = exchanges
        received, unwanted = [], []
        for exchange, is_tracked in zip(exchanges, ctx.needs_input_grad[1:]):
            outs = exchange.finish_forward()
            received += outs
            if not is_tracked or not all(exchange.needed):
                unwanted += [out for out, needed in zip(outs, exchange.needed) if not (needed and is_tracked)]
        ctx.mark_non_differentiable(*unwanted)
        return tuple(received)

    @staticmethod
    def backward(ctx, *gradients):
        """Before: nothing, finish moved no data. Now: launch the exchange of each dy, the moment that they are known.

        Zeros where nothing depends on y here: elsewhere something may.
        """
        refuse_second_derivatives(ctx.exchanges[0].where)
        given = iter(gradients)
        of_each = [list(islice(given, len(exchange.needed))) for exchange in ctx.exchanges]
        launched = list(zip(ctx.exchanges, of_each, ctx.needs_input_grad[1:]))
        for exchange, dys, is_tracked in reversed(launched):  # guard: in the order drawn
            if is_tracked:
                exchange.start_gradient(list(compress(dys, exchange.needed)))
        token = new_token(gradients[0])
        return None, *(token if is_tracked else None for *_, is_tracked in launched)
