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
from itertools import islice
from typing import Any, NamedTuple

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

    forward: InFlight | None = None
    gradient: InFlight | None = None

    def __init__(self, channel: Channel, layout: Layout, where: str, what: str, checked: bool = False, rope: Tables | None = None):
        self.channel, self.layout, self.where, self.what = channel, layout, where, what
        self.checked, self.rope = checked, rope
        self.needed: Sequence[bool] = (True,) * len(layout.each)  # whether there will be a gradient of each tensor

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
            self.start_forward(tensors[: len(self.needed)])
            return new_token(tensors[0])
        ((token,),) = together([Half(self, tensors, starts=True)])
        return token

    def finish(self, token: Tensor) -> Tensor:
        """Order the compute stream after an exchange of one tensor and return what was received, in the shape of ``layout.target``."""
        if not torch.is_grad_enabled():
            return self.finish_forward()[0]
        ((y,),) = together([Half(self, (token,))])
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


class Half(NamedTuple):
    """The start of an exchange, given what `Exchange.start` takes, or its finish, given its token."""

    exchange: Exchange
    given: tuple[Tensor, ...]
    starts: bool = False


def together(halves: Sequence[Half]) -> list[tuple[Tensor, ...]]:
    """Run halves that follow one another, in one node; returns the token of each start, what was received by each finish.

    One node instead of many costs the host less. In backward they are run the other way about, when every gradient is known.
    """
    if not torch.is_grad_enabled():
        return [(each.start(*given),) if starts else each.finish_forward() for each, given, starts in halves]
    made = _Halves.apply(halves, *[x for half in halves for x in half.given])  # guard: leads to each of them
    if len(halves) == 1:
        return [made]
    each = iter(made)
    return [tuple(islice(each, 1 if starts else len(exchange.needed))) for exchange, _, starts in halves]


def new_token(x: Tensor) -> Tensor:
    """An empty tensor like ``x``."""
    return x.new_empty(0)  # on the tensor's device: both halves stay in one ready queue of the autograd engine


class _Halves(Node):
    @staticmethod
    def forward(ctx, halves, *_):
        ctx.set_materialize_grads(False)
        at, needs = 1, ctx.needs_input_grad
        made: list[Tensor] = []
        unwanted: list[Tensor] = []
        ctx.halves = []  # with where what they are given begins, and what they make
        for exchange, given, starts in halves:
            ctx.halves.append((exchange, starts, at, len(made)))
            if starts:
                sent = len(exchange.needed)
                if sent > 1:  # one alone has a gradient if its token has: o even where attention computed it of nothing
                    exchange.needed = needs[at : at + sent]
                exchange.start_forward(given[:sent])
                made.append(new_token(given[0]))
            else:
                received = exchange.finish_forward()
                made += received
                if not (needs[at] and all(exchange.needed)):
                    unwanted += [x for x, needed in zip(received, exchange.needed) if not (needed and needs[at])]
            at += len(given)
        ctx.dtypes, ctx.device = [x.dtype for x in made], made[0].device
        if unwanted:
            ctx.mark_non_differentiable(*unwanted)
        return tuple(made)

    @staticmethod
    def backward(ctx, *gradients):
        """A finish moved no data; now it launches the exchange of each dy, the moment that they are known. A start waits for its dx.

        Zeros where nothing depends on what was received here: elsewhere something may.
        """
        refuse_second_derivatives(ctx.halves[0][0].where)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for exchange, starts, at, made in reversed(ctx.halves):  # guard: in the order drawn
            needed = exchange.needed
            if starts:
                if gradients[made] is not None:
                    found[at : at + len(needed)] = exchange.finish_gradient()
            elif ctx.needs_input_grad[at]:
                places = [place for place, is_needed in enumerate(needed) if is_needed]
                dys = [gradients[made + place] for place in places]
                if any([dy is None for dy in dys]):
                    shapes, dtypes = exchange.layout.targets.shapes, ctx.dtypes[made:]
                    zeros = [torch.zeros(shapes[place], dtype=dtypes[place], device=ctx.device) for place in places]
                    dys = [zero if dy is None else dy for dy, zero in zip(dys, zeros)]
                exchange.start_gradient(dys)
                found[at] = new_token(dys[0])
        return tuple(found)
