"""The clock of a device."""

from __future__ import annotations

import time
from typing import Any

import torch


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
