"""Ranges for whatever profiler is running."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.profiler import record_function

NOTHING = contextlib.nullcontext()


is_profiled = torch.autograd._profiler_enabled


def named(*words: str) -> Any:
    """A range of this name for the profiler that is running, if any: torch.profiler, or NVTX through ``emit_nvtx``."""
    return record_function(" ".join(words)) if is_profiled() else NOTHING
