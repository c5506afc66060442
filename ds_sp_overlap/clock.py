"""When: the clock of a device, the number of the optimizer step, and ranges for profilers."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any, Callable

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


class Steps:
    """Counts optimizer steps, alike on every rank that looks at the count between steps and steps its optimizers alike.

    The count moves at the first look after an optimizer has stepped, and never during backward: there a checkpointed
    layer is computed again and must find what its first computation found. However often optimizers step in between
    (ZeRO-3 steps once a sub-group), it moves by one.

    at_end   called when an optimizer steps for the first time since the count moved
    """

    def __init__(self, at_end: Callable[[], None] = lambda: None):
        self._count, self._stepped, self._at_end = 0, False, at_end
        me = weakref.ref(self)

        def note(*_: Any) -> None:
            if (steps := me()) is not None and not steps._stepped:
                steps._stepped = True
                steps._at_end()

        self._hook = register_optimizer_step_post_hook(note)
        weakref.finalize(self, self._hook.remove)

    def now(self) -> int:
        if self._stepped and torch._C._current_graph_task_id() == -1:
            self._stepped, self._count = False, self._count + 1
        return self._count

    def close(self) -> None:
        """Count no further."""
        self._hook.remove()


def watched(
    clock: Any, body: Callable[..., Tensor], inputs: tuple[Tensor, ...], forward: Callable, backward: Callable
) -> Tensor:
    """``body(*inputs)``; ``forward(begin, end)`` is told its marks, ``backward(begin, end)`` those of each backward.

    A backward begins when the output's gradient arrives and ends when the last of the inputs' has.
    """
    follow = torch.is_grad_enabled()
    expected = sum(x.requires_grad for x in inputs) if follow else 0
    running: list = []  # of one backward: when it began, and how many gradients have not arrived

    def began(_: Tensor) -> None:
        running[:] = [clock.mark(), expected]

    def arrived(_: Tensor) -> None:
        if running:
            running[1] -= 1
            if running[1] == 0:
                backward(running[0], clock.mark())
                running.clear()

    if expected:
        inputs = tuple(x.view_as(x) if x.requires_grad else x for x in inputs)  # whose gradients are of this call alone
        for x in inputs:
            if x.requires_grad:
                x.register_hook(arrived)
    begin = clock.mark()
    y = body(*inputs)
    forward(begin, clock.mark())
    output = y[0] if isinstance(y, tuple) else y  # some layers return a bias beside it
    if expected and output.requires_grad:
        output.register_hook(began)
    return y


_nothing = contextlib.nullcontext()


def named(*words: str) -> Any:
    """A range of this name for the profiler that is running, if any: torch.profiler, or NVTX through ``emit_nvtx``."""
    return record_function(" ".join(words)) if torch.autograd._profiler_enabled() else _nothing
