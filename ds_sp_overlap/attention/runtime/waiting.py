"""Operands of weight gradients, which wait until backward is through all chunks of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Variable


class Waiting(ABC):
    """Operands that the backward of chunks left, to be multiplied behind all of them.

    Attributes:
        gradient_count: How many gradients the products are.
        backward: Autograd's id of the backward that the operands belong to; -1 for none.
        chunks: The operands of each product that was not yet multiplied.
    """

    gradient_count: ClassVar[int]

    def __init__(self) -> None:
        self.start(-1)

    def start(self, backward: int) -> None:
        """Drop everything, sums too, and wait for the operands of another backward; -1 for none."""
        self.backward, self.chunks = backward, []  # type: int, list[Any]

    def add(self, chunk: Any) -> None:
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
            return [None] * self.gradient_count
        gradients = self.summed()
        self.start(-1)
        return gradients

    @abstractmethod
    def summed(self) -> list[Tensor | None]:
        """Multiply what waits; return a gradient, or None, for each of ``parameters``."""
