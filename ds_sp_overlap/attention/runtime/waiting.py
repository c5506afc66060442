"""Operands of weight gradients, which wait until backward is through all chunks of tokens.

A `Product` leaves them in a `Waiting`: `deferred` has that of a linear layer, `stacks` that of
experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Variable

from ...exchange.exchange import Node, refuse_second_derivatives


class Operands(NamedTuple):
    """Operands of the weight gradient of one product: dw = left^T right.

    Attributes:
        left: [tokens, rows of the weight].
        right: [tokens, columns of the weight]; None if the weight doesn't train.
        expert: Whose tokens they are; None for those of all experts, in their order.
        offs: [experts]. Behind the last token of each expert.
    """

    left: Tensor
    right: Any
    expert: int | None = None
    offs: Tensor | None = None


class Waiting(ABC):
    """Operands that the backward of chunks left, to be multiplied behind all of them.

    Attributes:
        where: Name of the attention layer, for errors.
        trains: For each gradient, whether it is needed; that of the weight comes first.
        backward: Autograd's id of the backward that the operands belong to; -1 for none.
        chunks: The operands of each product that was not yet multiplied.
    """

    where: str
    trains: Sequence[bool]

    def __init__(self) -> None:
        self.start(-1)

    def start(self, backward: int) -> None:
        """Drop everything, sums too, and wait for the operands of another backward; -1 for none."""
        self.backward, self.chunks = backward, []  # type: int, list[Operands]

    @property
    @abstractmethod
    def weight(self) -> Tensor | None:
        """Return what a `Product` saves for its dx: the weight, or the weights of all experts."""

    def add(self, chunk: Operands) -> None:
        """Add the operands of a chunk, which belong to the backward that runs."""
        now = torch._C._current_graph_task_id()
        if now != self.backward:  # guard: of this backward alone
            # A reentrant checkpoint runs a backward inside of another one. When the inner one ends,
            # the callback restores what the outer one had, and drops what the inner one left.
            before = dict(vars(self))
            self.start(now)
            Variable._execution_engine.queue_callback(partial(vars(self).update, before))
        self.chunks.append(chunk)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, and drop the operands.

        Called by the node `deferred._Weights` in backward. A list of None if this backward has left
        no operands.
        """
        if self.backward != torch._C._current_graph_task_id():
            return [None] * len(self.trains)
        gradients = self.summed()
        self.start(-1)
        return gradients

    @abstractmethod
    def summed(self) -> list[Tensor | None]:
        """Multiply what waits; return a gradient, or None, for each of ``trains``."""


class Product(Node):
    """y = x w + b of a chunk; backward computes dx, and leaves the operands of dw and db to wait.

    Args:
        waiting: Where they wait.
        x: [.., k].
        weight: [k, n], or [experts, k, n] with ``offs``. Has no gradient here, as the bias.
        bias: [n]; None without bias.
        expert: Whose weight it is; None for all experts, or where there are none.
        offs: [experts], see `Operands`.
        is_transposed: Whether the weight is [n, k] instead.
        token: Of the node `deferred._Weights`.
    """

    @staticmethod
    def forward(ctx, waiting, x, weight, bias, expert, offs, is_transposed, token):
        ctx.of_call = waiting, expert, is_transposed
        _, of_x, *_, of_token = ctx.needs_input_grad
        of_weight = of_token and waiting.trains[0]
        # Not an expert's weight, a view, which would keep a stack that ZeRO-3 has gathered.
        ctx.save_for_backward(x if of_weight else None, waiting.weight if of_x else None, offs)
        return _multiply(x, weight, bias, offs, is_transposed)

    @staticmethod
    def backward(ctx, dy):
        """Compute dx = dy w^T; dw = x^T dy waits, see Note [Deferred wgrads] in `deferred`.

        Called once a chunk. In a chain that recomputes, these are the nodes of forward: those of
        the recomputation only save tensors for them.
        """
        waiting, expert, is_transposed = ctx.of_call
        refuse_second_derivatives(waiting.where)
        x, weight, offs = ctx.saved_tensors
        if any(waiting.trains):
            # dw = x^T dy for [k, n]; dw = dy^T x for [n, k].
            left, right = (dy, x) if is_transposed else (x, dy)
            right = None if right is None else _by_token(right)
            waiting.add(Operands(_by_token(left), right, expert, offs))
        dx = None
        if weight is not None:
            weight = weight if expert is None else weight[expert]
            dx = _multiply(dy, weight.to(dy.dtype), None, offs, not is_transposed)
        # The token has no gradient: it only makes `_Weights` wait for this node.
        return None, dx, None, None, None, None, None, None


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor | None, is_transposed: bool
) -> Tensor:
    """Return the product of `Product.forward`."""
    if offs is None:
        return F.linear(x, weight if is_transposed else weight.t(), bias)
    weight = weight.transpose(-2, -1) if is_transposed else weight
    return F.grouped_mm(x, weight, offs=offs)


def _by_token(x: Tensor) -> Tensor:
    """Return ``x`` [.., k] as a matrix with a row for each token of the sequence.

    They may be in one dimension already, as in a mixture of experts.
    """
    return x.reshape(-1, x.shape[-1])
