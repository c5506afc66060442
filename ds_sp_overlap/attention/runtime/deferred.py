"""Modules that are called once and work chunk by chunk, their weight gradients made when all chunks
have gone by.

    Before:  y   = module(x)        dx = ...,  dw = dy^T x
    Now:     y_c = shadow(x_c)      dx_c = ... for each chunk, then dw = sum of dy_c^T x_c

A shadow is a copy of a module without its hooks, over the same parameters. The module itself is
called once, around all chunks (`linear.call_through`), and there its hooks run. Of the linear
layers in it the weight gradients wait in a node of their own, which was made before any chunk: so
autograd comes to it behind them all, and in front of the attention that gave the chunks. Whatever
else has parameters (a norm) is left to autograd, which adds up a parameter's gradients before it
delivers them, once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...exchange.exchange import Node, new_token, refuse_second_derivatives
from .linear import Plain, autocast, can_split, without_hooks


class _Slot:
    """A linear layer in one call, and what its gradients will be made of.

    leaves   whether it leaves its bias to its caller, and autograd; None where it returns one
             tensor
    """

    def __init__(self, module: Any, where: str, at_once: bool, leaves: bool | None):
        self.module, self.where, self.at_once, self.leaves = module, where, at_once, leaves
        self.dtypes = [
            None if x is None or not x.requires_grad else x.dtype for x in self.parameters
        ]
        self.trains = [dtype is not None for dtype in self.dtypes]
        self.operands: Sequence[Tensor | None] = ()  # weight and bias, while chunks go by
        self._start(-1)

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Of its product."""
        return self.module.weight, None if self.leaves else self.module.bias

    def open(self) -> None:
        """The weights are there."""
        with torch.no_grad():
            self.operands = autocast(*self.parameters)

    def forward(self, x: Tensor, token: Tensor | None) -> Any:
        """As the layer's, for a chunk."""
        y = _Linear.apply(self, *autocast(x), token)
        return y if self.leaves is None else (y, self.module.bias if self.leaves else None)

    def _start(self, backward: int) -> None:
        self.backward = backward
        self.left: list[tuple[Tensor, Tensor | None]] = []
        self.sums: list[Tensor | None] = [None, None]

    def leave(self, dy: Tensor, x: Tensor | None) -> None:
        """Take a chunk's dy [tokens, n], and x [tokens, m] if the weight trains."""
        if (
            now := torch._C._current_graph_task_id()
        ) != self.backward:  # guard: of this backward alone
            self._start(now)
        self.left.append((dy, x))
        if self.at_once:
            self._add_up()

    def _add_up(self) -> None:
        left, self.left = self.left, []
        rounds = bool(left) and left[0][0].dtype in (torch.float16, torch.bfloat16)
        if len(left) > 1 and rounds:  # one product, so that no sum is rounded
            dys, xs = zip(*left)
            left = [(torch.cat(dys), torch.cat(xs) if self.trains[0] else None)]
        dw, db = self.sums
        for dy, x in left:
            if x is not None and rounds and self.at_once:
                product = dy.t() @ x
                dw = (
                    product.float() if dw is None else dw.add_(product)
                )  # nor is a sum of what comes one after another
            elif x is not None:
                dw = dy.t() @ x if dw is None else dw.addmm_(dy.t(), x)
            if self.trains[1]:
                of_bias = dy.sum(0, dtype=torch.float32 if rounds else None)
                db = of_bias if db is None else db.add_(of_bias)
        self.sums = [dw, db]

    def gradients(self) -> list[Tensor | None]:
        """Of weight and bias; None where this backward came by no chunk."""
        if self.backward != torch._C._current_graph_task_id():
            return [None, None]
        self._add_up()
        found = [x if x is None else x.to(dtype) for x, dtype in zip(self.sums, self.dtypes)]
        self._start(-1)
        return found


class Wgrads:
    """A node of autograd in which the weight gradients of linear layers wait: it comes, in
    backward, behind all that was made later.

    roots     the linear layers, or modules that they are in
    besides   where others of them wait already
    here      leave out those whose weights are not there, or are made of others, which come with
              their hooks
    where     name of the layer, for errors
    plain     forwards of linear layers, see `linear`
    at_once   add up the gradients as chunks go by: where what is waited for between them is longer
              than behind them
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        where: str,
        plain: Plain,
        at_once: bool = False,
        besides: Container[nn.Module] = (),
        here: bool = False,
    ):
        self.slots = {
            module: _Slot(module, where, at_once, plain[type(module).forward](module))
            for root in roots
            for module in root.modules()
            if module not in besides
            and can_split(module, plain)
            and not (here and _is_away(module))
        }
        parameters = [x for slot in self.slots.values() for x in slot.parameters]
        self.token = _Weights.apply(list(self.slots.values()), *parameters) if parameters else None


def _is_away(module: Any) -> bool:
    return module._parameters.get("weight") is None or not module.weight.numel()


class Shadows:
    """What runs in place of modules for a chunk; to be made and used inside their own calls
    (`linear.call_through`).

    wgrads   where weight gradients wait
    """

    def __init__(self, *wgrads: Wgrads):
        self.slots = {
            module: (slot, of.token) for of in wgrads for module, slot in of.slots.items()
        }
        self.made: dict[nn.Module, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if module not in self.made:
            copy = self.made[module] = without_hooks(module)
            if module in self.slots:
                slot, token = self.slots[module]
                slot.open()
                vars(copy)["forward"] = partial(slot.forward, token=token)
            else:
                children = {
                    name: child if child is None else self.of(child)
                    for name, child in module._modules.items()
                }
                vars(copy)["_modules"] = children
        return self.made[module]

    def end(self) -> None:
        """Let go of the weights: ZeRO-3 gathers them again."""
        for slot, _ in self.slots.values():
            slot.operands = ()


def _by_token(x: Tensor) -> Tensor:
    """``x`` [.., k] as a matrix; tokens may be in one dimension already, as in a mixture of
    experts.
    """
    return x.reshape(-1, x.shape[-1])


class _Weights(Node):
    @staticmethod
    def forward(ctx, slots, *parameters):
        ctx.slots = slots
        return new_token(parameters[0])

    @staticmethod
    def backward(ctx, _):
        return None, *(gradient for slot in ctx.slots for gradient in slot.gradients())


class _Linear(Node):
    """y = x w^T + b of a chunk; its backward gives dx, and leaves dy and x with the slot."""

    @staticmethod
    def forward(ctx, slot, x, token):
        weight, bias = slot.operands
        ctx.slot, (_, of_x, of_token) = slot, ctx.needs_input_grad
        ctx.save_for_backward(weight if of_x else None, x if of_token and slot.trains[0] else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivatives(ctx.slot.where)
        weight, x = ctx.saved_tensors
        if any(ctx.slot.trains):
            ctx.slot.leave(_by_token(dy), None if x is None else _by_token(x))
        return (
            None,
            None if weight is None else dy @ weight,
            None,
        )  # the token's node is waited for, not told anything
