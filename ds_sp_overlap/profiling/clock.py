"""When: the clock of a device, the number of the optimizer step, and ranges for profilers."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_post_hook


class HostClock:
    """The host's clock, which is the only one where the host computes."""

    def mark(self) -> float:
        return time.perf_counter()

    def between_ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3


class DeviceClock:
    """Events on the stream that is current when they are marked; nobody waits before they are read."""

    def __init__(self, device: torch.device):
        self.device, self.backend = device, torch.get_device_module(device)

    def mark(self) -> Any:
        event = self.backend.Event(enable_timing=True)
        event.record(self.backend.current_stream(self.device))
        return event

    def between_ms(self, begin: Any, end: Any) -> float:
        """Waits for ``end``."""
        end.synchronize()
        return begin.elapsed_time(end)


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def after_each_step(method: Callable[[], None]) -> Any:
    """Call a bound method whenever an optimizer of this process has stepped; its object is not kept alive for it."""
    method = weakref.WeakMethod(method)

    def note(*_: Any) -> None:
        if (alive := method()) is not None:
            alive()

    hook = register_optimizer_step_post_hook(note)
    weakref.finalize(method().__self__, hook.remove)
    return hook


def in_backward() -> bool:
    """Whether this thread runs a backward; a layer that is called there is a checkpointed one, computed again."""
    return torch._C._current_graph_task_id() != -1


class Steps:
    """Counts optimizer steps, alike on every rank that looks at the count between steps and steps its optimizers alike.

    The count moves at the first look after an optimizer has stepped, and never during backward: there a checkpointed
    layer is computed again and must find what its first computation found. However often optimizers step in between
    (ZeRO-3 steps once a sub-group), it moves by one.
    """

    def __init__(self) -> None:
        self._count, self._stepped = 0, False
        self._hook = after_each_step(self._note)

    def _note(self) -> None:
        self._stepped = True

    def now(self) -> int:
        if self._stepped and not in_backward():
            self._stepped, self._count = False, self._count + 1
        return self._count

    def close(self) -> None:
        """Count no further."""
        self._hook.remove()


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
    last, seen, todo = [], set(), [y.grad_fn]
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


_nothing = contextlib.nullcontext()


def named(*words: str) -> Any:
    """A range of this name for the profiler that is running, if any: torch.profiler, or NVTX through ``emit_nvtx``."""
    return record_function(" ".join(words)) if torch.autograd._profiler_enabled() else _nothing
