"""Hides an all-to-all behind the work between its two differentiable halves.

    token = exchange.start(x)      launch; returns an empty tensor that autograd tracks
    y     = exchange.finish(token) wait on the compute stream; returns the received tensor

    Before:  x -> [all-to-all] -> y                         dx <- [all-to-all] <- dy
    Now:     x -> start -> token -> finish -> y             dx <- start' <- token <- finish' <- dy
                  launch            wait                          wait             launch

Note [Token order]
~~~~~~~~~~~~~~~~~~
In backward the roles swap: the backward of ``finish`` launches the exchange of the gradient, and
the backward of ``start`` waits for that exchange. Autograd runs nodes that are ready in the reverse
order of their creation. So the work between ``start`` and ``finish`` hides the exchange, and the
backward of this work hides the gradient's exchange. The overlap depends on autograd's order;
correctness does not.

The token carries no data. It only ties ``finish`` to ``start`` in the graph. The buffers in flight
belong to the `Exchange`, and an `Exchange` belongs to one call of one layer.

Note [Second derivatives]
~~~~~~~~~~~~~~~~~~~~~~~~~
The backward of a layer uses buffers that autograd does not see, so autograd cannot differentiate
this backward again. Every backward of a layer begins in a node that calls
`refuse_second_derivatives` before anything is launched. So all ranks raise together, and no other
node of the layer needs a check; torch's decorator ``once_differentiable`` would check only the
decorated nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..profiling.ranges import named
from .in_flight import InFlight
from .layout import Layout
from .modes import in_selective_checkpoint, outside_modes
from .sp_group import SPGroup


def refuse_second_derivatives(where: str) -> None:
    """Refuse a backward with ``create_graph=True``, see Note [Second derivatives].

    The first node in the backward of the layer ``where`` calls this.

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
    """Provides ``Node.apply``, which skips torch's preparations for functorch if functorch is off.

    The preparations cost the host time in every call.
    """

    def __get__(self, node: object, kind: type[Node]) -> Any:
        # ``super(Node, ..)`` finds Function's own apply, written in Python. ``super(Function, ..)``
        # finds the C implementation, which Function's own apply calls at its end.
        above = Node if torch._C._are_functorch_transforms_active() else torch.autograd.Function
        apply = super(above, kind).apply  # type: ignore[misc]  # untyped in torch
        # Nodes write to buffers. The recompute of a selective checkpoint would skip these writes.
        if torch._C._len_torch_dispatch_stack() and in_selective_checkpoint():
            return outside_modes()(apply)
        return apply


class Node(torch.autograd.Function):
    """An autograd Function with a faster ``apply``; the base class of the nodes of layers."""

    apply: Any = _Apply()


class Exchange:
    """Runs one exchange of one call in two halves, `start` and `finish`, forward and backward.

    Args:
        sp_group: The sp group.
        layout: The shapes and parts of the tensor that is sent and of the tensor that is received.
        where: Name of the layer, for instance ``layers.7``.
        name: Name of the exchange, for instance ``q``; the exchange of its gradient is then ``dq``.
        checked: Whether to compare with a plain exchange (``sp_overlap.check``).
    """

    # The transfer in flight between its start and its finish; else None.
    in_flight: InFlight | None = None

    def __init__(
        self, sp_group: SPGroup, layout: Layout, where: str, name: str, checked: bool = False
    ):
        self.sp_group, self.layout, self.where, self.checked = sp_group, layout, where, checked
        # The names of the exchange in forward, and in backward.
        self.names = f"{where} {name}", f"{where} d{name}"

    def start(self, x: Tensor) -> Tensor:
        """Launch the exchange and return at once.

        Collective: every rank of the sp group starts the same exchanges in the same order.

        Args:
            x: The tensor to send, in the shape that ``layout.sources`` gives; kept alive
                until the exchange is finished.

        Returns:
            An empty tensor that autograd tracks; pass it to `finish`.

        Raises:
            ValueError: before any communication, if ``x`` has another shape.
        """
        return _Start.apply(self, x)

    def finish(self, token: Tensor) -> Tensor:
        """Order the compute stream after the exchange.

        Returns:
            The received tensor, in the shape that ``layout.targets`` gives.

        Raises:
            RuntimeError: if nothing was launched since the last finish.
        """
        return _Finish.apply(self, token)

    def launch(self, x: Tensor, gradient: bool = False) -> None:
        """Launch a transfer of ``x`` (a gradient if ``gradient``), without autograd. Collective."""
        layout, name = self.layout.inverse if gradient else self.layout, self.names[gradient]
        with named(name, "start"):
            self.in_flight = InFlight(layout, self.sp_group, name, [x], self.checked)

    def received(self, gradient: bool = False) -> Tensor:
        """Finish the transfer of `launch`, and return the received tensor; a second call raises."""
        name, in_flight = self.names[gradient], self.in_flight
        if in_flight is None:
            raise never_started(name)
        self.in_flight = None
        with named(name, "finish"):
            return in_flight.finish()[0]


def never_started(name: str) -> RuntimeError:
    """Return the exception for an exchange that is finished without having been started."""
    return RuntimeError(
        f"{name}: finished without having been started, or finished twice; gradients of a layer's "
        "inputs and of its weights come of one backward, ask for them together"
    )


class _Start(Node):
    """Implements `Exchange.start`; its backward waits for the exchange of the gradient."""

    @staticmethod
    def forward(ctx, exchange: Exchange, x: Tensor):
        # The token's gradient is None if a backward does not reach the finish.
        ctx.set_materialize_grads(False)
        ctx.exchange = exchange
        exchange.launch(x)
        # The token is on the device of x, so that autograd runs both halves in one ready queue.
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, token):
        return None, None if token is None else ctx.exchange.received(gradient=True)


class _Finish(Node):
    """Implements `Exchange.finish`; its backward launches the exchange of the gradient."""

    @staticmethod
    def forward(ctx, exchange: Exchange, token: Tensor):
        ctx.exchange, ctx.empty = exchange, token.new_empty(0)
        return exchange.received()

    @staticmethod
    def backward(ctx, dy):
        # On a rank that lacks a gradient, dy is zeros, so the rank still joins the exchange.
        exchange = ctx.exchange
        refuse_second_derivatives(exchange.where)
        exchange.launch(dy, gradient=True)
        return None, ctx.empty
