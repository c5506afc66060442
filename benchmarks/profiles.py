"""The ranks of a benchmark, profiles of one run, and the kernels in them."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist


def join(rehearse: bool, seconds: int = 60) -> torch.device:
    """Join the ranks of the launcher: over NCCL, each on its GPU, or over gloo to rehearse on a CPU. Returns the device.

    A collective fails after ``seconds``.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a build
    device = torch.device("cpu" if rehearse else f"cuda:{os.environ['LOCAL_RANK']}")
    if not rehearse:
        torch.cuda.set_device(device)
    backend = "gloo" if rehearse else "nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))
    deepspeed.init_distributed(backend, dist_init_required=False, verbose=False)
    return device


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
