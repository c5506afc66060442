"""Names ranges of work for a running profiler."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.profiler import record_function

NOTHING = contextlib.nullcontext()

is_profiled = torch.autograd._profiler_enabled


def named(*words: str) -> Any:
    """Return a context manager whose body a running profiler shows under this name.

    The profiler is torch.profiler, or ``torch.autograd.profiler.emit_nvtx``. Without a profiler,
    the context manager does nothing.
    """
    return record_function(" ".join(words)) if is_profiled() else NOTHING
