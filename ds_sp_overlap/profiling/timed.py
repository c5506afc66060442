"""Marks at the begin and end of a forward, and of its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Timed:
    """Marks of one forward and of each of its backwards.

    forward, backward   are told begin and end

    A backward begins when the output's gradient arrives and ends when the last nodes between `begin` and `end` have run: those that
    give the inputs' gradients, or the weights' alone where no input needs one.
    """

    def __init__(self, clock: Any, forward: Callable[[Any, Any], Any], backward: Callable[[Any, Any], Any]):
        self.clock, self.forward, self.backward = clock, forward, backward

    def begin(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs that are to be used from here on."""
        if torch.is_grad_enabled():
            inputs = tuple(x.view_as(x) if x.requires_grad else x for x in inputs)  # whose gradients are of this call alone
        self.inputs, self.first = inputs, torch._C._autograd._get_sequence_nr()
        self.begun = self.clock.mark()
        return inputs

    def end(self, y: Any) -> None:
        """``y`` was computed."""
        clock, backward = self.clock, self.backward
        self.forward(self.begun, clock.mark())
        output = output_of(y)
        last = _last_nodes(output, self.inputs, self.first) if output.requires_grad else []
        running: list = []  # of one backward: when it began, and how many of the last nodes have not run

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
    """What a layer computed; some return a bias beside it."""
    return y[0] if isinstance(y, tuple) else y


class Run:
    """One call of a layer while others look on.

    inputs   what the layer's body is to use
    """

    def __init__(self, inputs: tuple[Tensor, ...]):
        self.inputs = inputs
        self._at_end: list[Callable[[Any], None]] = []

    def timed(self, timed: Timed) -> None:
        """From now to the end."""
        self.inputs = timed.begin(self.inputs)
        self.at_end(timed.end)

    def at_end(self, function: Callable[[Any], None]) -> None:
        """Have ``function`` called with what the body returns; the one that came last is called first."""
        self._at_end.insert(0, function)

    def end(self, y: Any) -> Any:
        """Returns ``y``, what the body returned."""
        for function in self._at_end:
            function(y)
        return y


_LEAF = 2**64 - 1  # sequence number of the nodes that accumulate gradients, which run as soon as they can


def _last_nodes(y: Tensor, inputs: tuple[Tensor, ...], first: int) -> list[Any]:
    """Nodes of the graph of ``y``, down to ``inputs`` or to those that this thread made before number ``first``, that no
    other of them waits for."""
    given = {x.grad_fn for x in inputs if x.requires_grad}
    last: list[Any] = []
    todo: list[Any] = [y.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        before = (
            [] if node in given else [n for n, _ in node.next_functions if n and first <= n._sequence_nr() < _LEAF or n in given]
        )
        last += [] if before else [node]
        todo += before
    return last
