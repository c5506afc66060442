"""When: the clock of a device, and the number of the optimizer step."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
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
    """Counts optimizer steps, alike on every rank that looks at the count at the same places.

    The count moves at the first look after an optimizer has stepped, and never during backward: there a checkpointed
    layer is computed again and must find what its first computation found. However often optimizers step in between
    (ZeRO-3 steps once a sub-group), it moves by one.
    """

    def __init__(self):
        self._count, self._stepped = 0, False
        me = weakref.ref(self)

        def note(*_: Any) -> None:
            if (steps := me()) is not None:
                steps._stepped = True

        self._hook = register_optimizer_step_post_hook(note)
        weakref.finalize(self, self._hook.remove)

    def now(self) -> int:
        if self._stepped and torch._C._current_graph_task_id() == -1:
            self._stepped, self._count = False, self._count + 1
        return self._count

    def close(self) -> None:
        """Count no further."""
        self._hook.remove()
