"""Hides an all-to-all behind the work between its two differentiable halves.

    token = exchange.start(x)      launch; returns an empty tensor that autograd tracks
    y     = exchange.finish(token) order the compute stream after it; the received tensor

    Before:  x -> [all-to-all] -> y                         dx <- [all-to-all] <- dy
    Now:     x -> start -> token -> finish -> y             dx <- start' <- token <- finish' <- dy
                  launch            wait                          wait             launch

Note [Token order]
~~~~~~~~~~~~~~~~~~
In backward the roles swap: the backward of ``finish`` launches the exchange of the gradient, and
the backward of ``start`` waits for that exchange. Autograd runs nodes that are ready in the reverse
order of their creation. So whatever is computed between ``start`` and ``finish`` hides the
exchange, and the backward of that work hides the gradient's exchange. The overlap depends on this
order; correctness does not.

The token carries no data. It only ties ``finish`` to ``start`` in the graph. The buffers in flight
belong to the `Exchange`, and an `Exchange` belongs to one call of one layer.

Note [Second derivatives]
~~~~~~~~~~~~~~~~~~~~~~~~~
The backward of a layer uses buffers of its `Exchange`s, which autograd does not see, so autograd
cannot differentiate it again. ``once_differentiable`` would raise only in the nodes that carry it.
Instead, every backward of a layer begins in a node that calls `refuse_second_derivatives`: before
anything is launched, and on every rank alike. No other node of the layer needs a check.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from .in_flight import InFlight, Tables
from .layout import Layout
from .modes import in_selective_checkpoint, outside_modes
from .sp_group import SPGroup


def refuse_second_derivatives(where: str) -> None:
    """Refuse a backward with ``create_graph=True``, see Note [Second derivatives].

    Called where the backward of the layer ``where`` begins.

    Raises:
        RuntimeError: if autograd records this backward.
    """
    if torch.is_grad_enabled():  # guard: no second derivatives
        raise RuntimeError(
            f"{where}: a backward with create_graph=True, but overlapped layers have no second "
            "derivatives; leave it out, or run this model with DeepSpeed's own "
            "DistributedAttention (ds_sp_overlap.disable)"
        )


class _Apply:
    """Gives `Node` its ``apply``: without torch's preparations for functorch, where that is off.

    The preparations cost the host time in every call.
    """

    def __get__(self, node: object, kind: type[Node]) -> Any:
        # ``super(Node, ..)`` finds Function's own apply; ``super(Function, ..)`` skips it and finds
        # the C implementation, which Function's own apply calls at its end.
        above = Node if torch._C._are_functorch_transforms_active() else torch.autograd.Function
        apply = super(above, kind).apply  # type: ignore[misc]  # untyped in torch
        # Nodes write to buffers.
        if torch._C._len_torch_dispatch_stack() and in_selective_checkpoint():
            return outside_modes()(apply)
        return apply


class Node(torch.autograd.Function):
    """A node of autograd, the base class of all nodes in this package."""

    apply: Any = _Apply()


class Exchange:
    """One exchange of one call, with its transfers in flight in forward and in backward.

    Args:
        sp_group: The sp group.
        layout: The tensors that are sent and received.
        where: Name of the layer, for instance ``layers.7``.
        name: Name of the exchange, for instance ``q``; the gradient's is ``dq``.
        checked: Whether to compare with a plain exchange (``sp_overlap.check``).
        rope: (cos, sin), each [.., d_rot], broadcast to the tokens of the local side. The kernel
            that packs the tensor also rotates it; the kernel that unpacks the gradient rotates the
            gradient back.
    """

    # Dtype and device of each tensor that was received.
    like: list[tuple[torch.dtype, torch.device]]
    # The transfers in flight, each between its start and its finish, else None.
    forward: InFlight | None = None
    gradient: InFlight | None = None

    def __init__(
        self,
        sp_group: SPGroup,
        layout: Layout,
        where: str,
        name: str,
        checked: bool = False,
        rope: Tables | None = None,
    ):
        self.sp_group, self.layout, self.where, self.name = sp_group, layout, where, name
        self.checked, self.rope = checked, rope
        # For each tensor, whether its gradient will be exchanged; alike on all ranks.
        self.needed: Sequence[bool] = (True,) * len(layout.each)

    def start(self, *tensors: Tensor) -> Tensor:
        """Launch the exchange and return at once.

        Collective: every rank of the sp group starts the same exchanges in the same order.

        Args:
            tensors: What is sent, in the shapes of the sources of ``layout.each``; kept alive until
                the exchange is finished.

        Returns:
            An empty tensor that autograd tracks; pass it to `finish`.

        Raises:
            ValueError: before any communication, if a tensor has another shape.
        """
        return _Start.apply(self, *tensors)

    def finish(self, token: Tensor) -> Any:
        """Order the compute stream after the exchange.

        Returns:
            What was received, in the shape of ``layout.target``; a tuple of several tensors.
        """
        return _Finish.apply(self, token)

    def start_forward(self, xs: Sequence[Tensor]) -> None:
        """Launch the transfer without autograd; for nodes of autograd, in their own forward.

        Collective, as is `start`; so is `start_gradient`.

        Args:
            xs: As for `start`.
        """
        name = f"{self.where} {self.name}"
        forward = InFlight(self.sp_group, self.layout, name, self.rope)
        self.forward = forward.launch(xs, self.checked)

    def finish_forward(self) -> tuple[Tensor, ...]:
        """Finish what `start_forward` launched, once; returns as `InFlight.finish` does.

        Raises:
            RuntimeError: if nothing was launched since the last finish.
        """
        if self.forward is None:
            raise RuntimeError(
                f"{self.where} {self.name}: finished without having been started, or finished twice"
            )
        in_flight, self.forward = self.forward, None  # guard: forward is let go
        received = in_flight.finish()
        self.like = [(x.dtype, x.device) for x in received]
        return received

    def filled(self, dys: Sequence[Tensor | None]) -> Sequence[Any]:
        """Return the gradients of the tensors that are `needed`, with zeros for None.

        Nothing depends on what this rank received then; on other ranks something may.
        """
        if not any(map(_is_none, dys)):
            return dys
        layout, like = self.layout.only(self.needed), compress(self.like, self.needed)
        return [
            torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy
            for dy, shape, (dtype, device) in zip(dys, layout.targets.shapes, like)
        ]

    def start_gradient(self, dys: Sequence[Tensor]) -> None:
        """Launch the transfer of the gradients of those tensors that are `needed`.

        Args:
            dys: The gradients of the tensors that were received, of those that are `needed` alone.
        """
        name, layout = f"{self.where} d{self.name}", self.layout.only(self.needed).inverse
        gradient = InFlight(self.sp_group, layout, name, rope_back=self.rope)
        self.gradient = gradient.launch(dys, self.checked)

    def finish_gradient(self) -> tuple[Tensor | None, ...]:
        """Finish what `start_gradient` launched, once.

        Returns:
            The gradient of each tensor that was sent; None for tensors that are not `needed`.

        Raises:
            RuntimeError: if nothing was launched, as where a second backward asks for the rest of
                the gradients.
        """
        if self.gradient is None:
            raise RuntimeError(
                f"{self.where} d{self.name}: finished without having been started; gradients of a "
                "layer's inputs and of its weights come of one backward, ask for them together"
            )
        in_flight, self.gradient = self.gradient, None  # guard: gradient is let go
        received = in_flight.finish()
        if len(received) == len(self.needed):
            return received
        arrived, gradients = iter(received), list[Tensor | None]()
        for needed in self.needed:
            gradients.append(next(arrived) if needed else None)  # guard: to those that need it
        return tuple(gradients)


_is_none = partial(operator.is_, None)


def new_token(x: Tensor) -> Tensor:
    """Make an empty tensor like ``x``."""
    # On the device of x, so that both halves stay in one ready queue of the autograd engine.
    return x.new_empty(0)


class _Start(Node):
    """The node of `Exchange.start`; its backward waits for the gradient's exchange."""

    @staticmethod
    def forward(ctx, exchange: Exchange, *xs: Tensor):
        ctx.set_materialize_grads(False)
        ctx.exchange = exchange
        # A single tensor stays `needed`: its gradient is exchanged if its token needs one.
        if len(xs) > 1:
            exchange.needed = ctx.needs_input_grad[1:]
        exchange.start_forward(xs)
        return new_token(xs[0])

    @staticmethod
    def backward(ctx, token):
        # None if this backward does not reach the finish.
        if token is None:
            return None, *[None] * len(ctx.exchange.needed)
        return None, *ctx.exchange.finish_gradient()


class _Finish(Node):
    """The node of `Exchange.finish`; its backward launches the gradient's exchange."""

    @staticmethod
    def forward(ctx, exchange: Exchange, token: Tensor):
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.empty = exchange, new_token(token)
        received = exchange.finish_forward()
        unneeded = [x for x, needed in zip(received, exchange.needed) if not needed]
        ctx.mark_non_differentiable(*unneeded)
        return received if len(received) > 1 else received[0]

    @staticmethod
    def backward(ctx, *dys):
        exchange = ctx.exchange
        refuse_second_derivatives(exchange.where)
        exchange.start_gradient(exchange.filled(list(compress(dys, exchange.needed))))
        return None, ctx.empty
