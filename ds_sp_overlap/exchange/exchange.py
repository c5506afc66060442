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

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .in_flight import InFlight, Tables
from .layout import Layout
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
        return super(above, kind).apply  # type: ignore[misc]  # untyped in torch


class Node(torch.autograd.Function):
    """A node of autograd, the base class of all nodes in this package."""

    apply: Any = _Apply()


def save_groups(ctx: Any, *groups: Sequence[Tensor | None]) -> None:
    """Save groups of tensors in a node's forward, for `saved_groups` in its backward."""
    ctx.sizes = tuple(map(len, groups))
    ctx.save_for_backward(*chain(*groups))


def saved_groups(ctx: Any) -> list[tuple[Any, ...]]:
    """Return the groups of `save_groups`.

    A tensor is freed when its group is let go of, unless the graph is retained.
    """
    saved = iter(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return [tuple(islice(saved, size)) for size in ctx.sizes]


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
        ((token,),) = run_halves([Half(self, tensors, starts=True)])
        return token

    def finish(self, token: Tensor) -> Tensor:
        """Order the compute stream after an exchange of one tensor.

        Returns:
            What was received, in the shape of ``layout.target``.
        """
        ((y,),) = run_halves([Half(self, (token,))])
        return y

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
        return in_flight.finish()

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


class Half(NamedTuple):
    """The start or the finish of an exchange.

    Attributes:
        exchange: The exchange.
        given: For a finish, the token. For a start, the tensors that are sent; for a start of o,
            then also q, k and v that o was computed from. These are not sent. They make the token
            depend on q, k and v even where local attention of one rank does not use them, so that
            every rank takes part in the exchanges of do, dq, dk and dv.
        starts: Whether this is the start.
    """

    exchange: Exchange
    given: tuple[Tensor, ...]
    starts: bool = False


def run_halves(halves: Sequence[Half]) -> list[tuple[Tensor, ...]]:
    """Run halves that follow one another in one node of autograd.

    One node instead of many costs the host less. In backward the halves run in reverse, once the
    gradients of all outputs are known. Without autograd the halves run at once, with no node.

    Returns:
        For each half a tuple: the tokens of a start, the received tensors of a finish.
    """
    # Forward-mode differentiation, which may run without gradients, is refused by the node.
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return [_run(half) for half in halves]
    inputs: list[Tensor] = []
    for half in halves:
        inputs += half.given
    outputs = _Halves.apply(halves, *inputs)  # guard: leads to each of them
    if len(halves) == 1:
        return [outputs]
    remaining = iter(outputs)
    by_half = []
    for exchange, _, starts in halves:
        count = 1 if starts else len(exchange.needed)
        by_half.append(tuple(islice(remaining, count)))
    return by_half


def _run(half: Half) -> tuple[Tensor, ...]:
    """Run a half without autograd."""
    exchange, given, starts = half
    if not starts:
        return exchange.finish_forward()
    exchange.start_forward(given[: len(exchange.needed)])
    return (new_token(given[0]),)


def new_token(x: Tensor) -> Tensor:
    """Make an empty tensor like ``x``."""
    # On the device of x, so that both halves stay in one ready queue of the autograd engine.
    return x.new_empty(0)


class _Halves(Node):
    """The node of `run_halves`. Inputs and outputs are those of all halves, one after another."""

    @staticmethod
    def forward(ctx, halves, *_):
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        outputs: list[Tensor] = []
        undifferentiable: list[Tensor] = []
        # Each half with the index of its first input and of its first output.
        ctx.halves = []
        # Input 0 is ``halves``.
        first = 1
        for exchange, given, starts in halves:
            ctx.halves.append((exchange, starts, first, len(outputs)))
            if starts:
                sent = len(exchange.needed)
                # A single tensor stays `needed`: its gradient is exchanged if its token needs one.
                # So is that of an o which needs none here, but on other ranks (`Half.given`).
                if sent > 1:
                    exchange.needed = needs[first : first + sent]
                exchange.start_forward(given[:sent])
                outputs.append(new_token(given[0]))
            else:
                received = exchange.finish_forward()
                outputs += received
                for x, needed in zip(received, exchange.needed):
                    if not (needed and needs[first]):
                        undifferentiable.append(x)
            first += len(given)
        ctx.dtypes, ctx.device = [x.dtype for x in outputs], outputs[0].device
        if undifferentiable:
            ctx.mark_non_differentiable(*undifferentiable)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        """Launch the exchange of dy for each finish; wait for dx for each start.

        Before: dx = all_to_all(dy). Now: the two halves swap roles, see Note [Token order].
        """
        refuse_second_derivatives(ctx.halves[0][0].where)
        dxs: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for half in reversed(ctx.halves):  # guard: in the order drawn
            exchange, starts, first, first_output = half
            needed = exchange.needed
            if starts:
                # The gradient of a token is an empty tensor, or None if this backward does not
                # reach the finish. Inputs that were not sent (`Half.given`) keep None.
                if gradients[first_output] is not None:
                    dxs[first : first + len(needed)] = exchange.finish_gradient()
            elif ctx.needs_input_grad[first]:
                dys = []
                for index, shape in enumerate(exchange.layout.targets.shapes):
                    if not needed[index]:
                        continue
                    dy = gradients[first_output + index]
                    if dy is None:
                        # Nothing depends on what this rank received; on other ranks something may.
                        dtype = ctx.dtypes[first_output + index]
                        dy = torch.zeros(shape, dtype=dtype, device=ctx.device)
                    dys.append(dy)
                exchange.start_gradient(dys)
                dxs[first] = new_token(dys[0])
        return tuple(dxs)
