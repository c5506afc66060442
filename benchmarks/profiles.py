"""Joins the ranks of a benchmark, makes profiles of a run, and finds the kernels in a profile."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist


def join(rehearse: bool, seconds: int = 60) -> torch.device:
    """Join the ranks of the launcher, and return the device: over NCCL, each rank on its GPU; or over gloo on a CPU to rehearse.

    A collective fails after ``seconds``.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    device = torch.device("cpu" if rehearse else f"cuda:{os.environ['LOCAL_RANK']}")
    if not rehearse:
        torch.cuda.set_device(device)
    backend = "gloo" if rehearse else "nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))
    deepspeed.init_distributed(backend, dist_init_required=False, verbose=False)
    return device


def synchronise(device: torch.device) -> float:
    """Wait for the device; then return the time, in seconds."""
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
    """Return the kernels and copies that ran on the GPU, in the order of their begin.

    Leaves out ranges of ``record_function``, which the profiler also lists as events of the device.

    Args:
        events: ``profile.profiler.kineto_results.events()``.
    """
    ran = [e for e in events if e.device_type() == torch.profiler.DeviceType.CUDA and not e.is_user_annotation()]
    return sorted(ran, key=lambda event: event.start_ns())
