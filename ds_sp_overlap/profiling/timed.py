"""Times a forward and its backward, from inside of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Timed:
    """Marks one forward and each of its backwards on a clock.

    A backward begins when the gradient of the output arrives. It ends when the last nodes of the
    graph between `begin` and `end` have run: those that make the gradients of the inputs, or of the
    weights where no input needs a gradient.

    Args:
        clock: Makes the marks (`clocks`).
        forward: Called with the marks of begin and end of the forward.
        backward: Called with the marks of begin and end of each backward.
    """

    def __init__(
        self, clock: Any, forward: Callable[[Any, Any], Any], backward: Callable[[Any, Any], Any]
    ):
        self.clock, self.forward, self.backward = clock, forward, backward

    def begin(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Mark the begin of the forward; return the inputs that the forward must use instead."""
        if torch.is_grad_enabled():
            # The gradient of a view is that of this call alone.
            inputs = tuple(x.view_as(x) if x.requires_grad else x for x in inputs)
        self.inputs, self.first = inputs, torch._C._autograd._get_sequence_nr()
        self.begun = self.clock.mark()
        return inputs

    def end(self, y: Any) -> None:
        """Mark the end of the forward, which returned ``y``, and have its backwards marked."""
        clock, backward = self.clock, self.backward
        self.forward(self.begun, clock.mark())
        output = output_of(y)
        last = _last_nodes(output, self.inputs, self.first) if output.requires_grad else []
        # While a backward runs: the mark of its begin, and how many last nodes have not run. Empty
        # otherwise.
        running: list = []

        def began(_: Tensor) -> None:
            running[:] = [clock.mark(), len(last)]

        def ran(*_: Any) -> None:
            if running:
                running[1] -= 1
                if running[1] == 0:
                    backward(running[0], clock.mark())
                    running.clear()

        if last:
            output.register_hook(began)
        for node in last:
            node.register_hook(ran)


def output_of(y: Any) -> Tensor:
    """Return the output of a layer; some layers return a bias beside it."""
    return y[0] if isinstance(y, tuple) else y


class TimedCall:
    """One call of a layer, whose inputs and output others watch.

    Attributes:
        inputs: The inputs that the layer must use.
    """

    def __init__(self, inputs: tuple[Tensor, ...]):
        self.inputs = inputs
        self._at_end: list[Callable[[Any], None]] = []

    def timed(self, timed: Timed) -> None:
        """Time the call from now on, until `end`."""
        self.inputs = timed.begin(self.inputs)
        self.at_end(timed.end)

    def at_end(self, function: Callable[[Any], None]) -> None:
        """Have ``function`` called with the layer's output, before those that came earlier."""
        # What begins last ends first, so that a clock inside of another one is read first.
        self._at_end.insert(0, function)

    def end(self, y: Any) -> Any:
        """End the call, whose output is ``y``; return ``y``."""
        for function in self._at_end:
            function(y)
        return y


# Sequence number of the nodes that accumulate gradients of leaves, which run as soon as they can
# and are not counted as part of the forward.
_LEAF = 2**64 - 1


def _last_nodes(y: Tensor, inputs: tuple[Tensor, ...], first: int) -> list[Any]:
    """Return the nodes of one forward that run last in its backward: those with none behind them.

    Args:
        y: The output of the forward, where backward begins.
        inputs: The inputs of the forward. The nodes that made them belong to it.
        first: The sequence number of autograd when the forward began; nodes with a smaller number
            are left out.
    """
    of_inputs = {x.grad_fn for x in inputs if x.requires_grad}
    last: list[Any] = []
    todo: list[Any] = [y.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        behind = []
        for following, _ in () if node in of_inputs else node.next_functions:
            is_inside = following and first <= following._sequence_nr() < _LEAF
            if is_inside or following in of_inputs:
                behind.append(following)
        todo += behind
        if not behind:
            last.append(node)
    return last
