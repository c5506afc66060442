"""Measures times on the host or on a device, by marks for which the host does not wait."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """Measures times by the host's clock, for work on the CPU."""

    # Returns the current time, in s.
    mark = staticmethod(time.perf_counter)

    def between_ms(self, begin: float, end: float) -> float:
        """Return the time between two marks, in ms."""
        return (end - begin) * 1e3


class DeviceClock:
    """Measures times by events on the current stream of a device; only `between_ms` waits."""

    def __init__(self, device: torch.device):
        self.device, self.backend = device, torch.get_device_module(device)

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = self.backend.Event(enable_timing=True)
        event.record(self.backend.current_stream(self.device))
        return event

    def between_ms(self, begin: Any, end: Any) -> float:
        """Return the time between two events, in ms; the host waits for ``end``."""
        end.synchronize()
        return begin.elapsed_time(end)


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock for work on ``device``."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
