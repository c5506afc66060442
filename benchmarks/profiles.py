"""Profiles of one run, and the kernels in them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronise(device: torch.device) -> float:
    """Wait for the device; return the time then, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def profiled(run: Callable[[], object], device: torch.device) -> torch.profiler.profile:
    """Return a profile of one run."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        synchronise(device)
    return profile


def kernels(events) -> list:
    """Return what ran on the GPU, kernels and copies, in the order of their begin.

    A range of ``record_function`` turns up among the events of the device as well, as long as all kernels in it together.

    Args:
        events: ``profile.profiler.kineto_results.events()``.
    """
    ran = [e for e in events if e.device_type() == torch.profiler.DeviceType.CUDA and not e.is_user_annotation()]
    return sorted(ran, key=lambda event: event.start_ns())
