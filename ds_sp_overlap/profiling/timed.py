"""Times a forward and its backward, by hooks on nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class TimedCall:
    """Times the forward and the backwards of one call of a layer, if `time` is called.

    A backward begins when the gradient of the output arrives. The backward ends when all nodes have
    run that were recorded between `time` and `end`. The last of these nodes compute the gradients
    of the inputs; or of the weights, if no input needs a gradient.

    Attributes:
        inputs: The inputs that the layer must use.
        arrives: A hook to call when the gradient of the output arrives; or None.
    """

    arrives: Callable[[Tensor], None] | None = None
    # The clock; None if the call is not timed.
    _clock: Any = None

    def __init__(self, inputs: tuple[Tensor, ...]):
        self.inputs = inputs

    def time(self, clock: Any, marks: tuple[list, list], tokens: int) -> None:
        """Time the call from now on, until `end`, and each of its backwards.

        Args:
            clock: A clock of `clocks`.
            marks: Two lists, to which (begin, end, ``tokens``) is appended: the first for the
                forward, the second for each backward.
            tokens: The tokens of the call.
        """
        self._clock, (self._forwards, self._backwards), self._tokens = clock, marks, tokens
        self._first = torch._C._autograd._get_sequence_nr()
        # Use views as inputs, since the node of a view belongs to this call alone.
        self.inputs = tuple(x.view_as(x) if x.requires_grad else x for x in self.inputs)
        self._begun = clock.mark()

    def end(self, y: Any) -> Any:
        """End the call, whose output is ``y``; return ``y``."""
        # Some layers return a bias beside their output.
        output = y[0] if isinstance(y, tuple) else y
        # Drop the inputs: the hooks below hold this object, and it must hold no part of the graph.
        self.inputs = ()
        if self._clock is not None:
            self._forwards.append((self._begun, self._clock.mark(), self._tokens))
        if not output.requires_grad:
            return y
        if self._clock is not None:
            last = _last_nodes(output, self._first)
            # The number of last nodes; and the number of those that the current backward has not
            # run yet.
            self._last, self._left = len(last), 0
            output.register_hook(self._begin_backward)
            for node in last:
                node.register_hook(self._end_backward)
        if self.arrives is not None:
            output.register_hook(self.arrives)
        return y

    def _begin_backward(self, _: Tensor) -> None:
        self._begun, self._left = self._clock.mark(), self._last

    def _end_backward(self, *_: Any) -> None:
        """Count a last node that has run; after all of them, mark the end of the backward."""
        self._left -= 1
        if self._left == 0:
            self._backwards.append((self._begun, self._clock.mark(), self._tokens))


# The sequence number of the nodes that accumulate the gradients of leaves. These nodes are no part
# of a forward: autograd runs them as soon as they are ready.
_LEAF = 2**64 - 1


def _last_nodes(y: Tensor, first: int) -> list[Any]:
    """Return the nodes where the backward of a forward ends: no node behind belongs to the forward.

    Args:
        y: The output of the forward, where backward begins.
        first: The sequence number of autograd when the forward began. Nodes with a smaller number
            are no part of the forward.
    """
    last = []
    todo: list[Any] = [y.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        behind = []
        for following, _ in node.next_functions:
            if following and first <= following._sequence_nr() < _LEAF:
                behind.append(following)
        todo += behind
        if not behind:
            last.append(node)
    return last
