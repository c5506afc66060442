"""Marks at the begin and end of a forward, and of its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def watched(clock: Any, body: Callable[..., Tensor], inputs: tuple[Tensor, ...], forward: Callable, backward: Callable) -> Tensor:
    """``body(*inputs)``; ``forward(begin, end)`` is told its marks, ``backward(begin, end)`` those of each backward.

    A backward begins when the output's gradient arrives and ends when the last nodes of ``body`` have run: those that give
    the inputs' gradients, or the weights' alone where no input needs one.
    """
    running: list = []  # of one backward: when it began, and how many of the last nodes have not run
    if torch.is_grad_enabled():
        inputs = tuple(x.view_as(x) if x.requires_grad else x for x in inputs)  # whose gradients are of this call alone
    first = torch._C._autograd._get_sequence_nr()
    begin = clock.mark()
    y = body(*inputs)
    forward(begin, clock.mark())
    output = output_of(y)
    last = _last_nodes(output, inputs, first) if output.requires_grad else []

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
    return y


def output_of(y: Any) -> Tensor:
    """What a layer computed; some return a bias beside it."""
    return y[0] if isinstance(y, tuple) else y


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
