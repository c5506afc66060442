"""Names ranges of work for the profiler that is running, if any."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.profiler import record_function

NOTHING = contextlib.nullcontext()

is_profiled = torch.autograd._profiler_enabled


def named(*words: str) -> Any:
    """Return a context manager that names its body for the running profiler, if any.

    The profiler is torch.profiler, or NVTX through ``emit_nvtx``.
    """
    return record_function(" ".join(words)) if is_profiled() else NOTHING
