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
        backward: The backward that the operands belong to.
        chunks: The operands of each product that was not yet multiplied.
    """

    gradient_count: ClassVar[int]

    def __init__(self) -> None:
        self.start(-1)

    def start(self, backward: int) -> None:
        """Drop everything, and wait for the operands of another backward."""
        self.backward, self.chunks = backward, []  # type: int, list[Any]

    def add(self, chunk: Any) -> None:
        """Add the operands of a chunk, which belong to the backward that runs."""
        now = torch._C._current_graph_task_id()
        if now != self.backward:  # guard: of this backward alone
            # A reentrant checkpoint runs a backward inside of another one, which then goes on with
            # what it had. What has not reached the weights by then is dropped.
            before = dict(vars(self))
            self.start(now)
            Variable._execution_engine.queue_callback(partial(vars(self).update, before))
        self.chunks.append(chunk)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, and drop the operands.

        None for each if the backward that runs has left no operands.
        """
        if self.backward != torch._C._current_graph_task_id():
            return [None] * self.gradient_count
        gradients = self.summed()
        self.start(-1)
        return gradients

    @abstractmethod
    def summed(self) -> list[Tensor | None]:
        """Multiply what waits, and return the gradients."""
