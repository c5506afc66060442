"""Keeps what the package computes for itself out of the modes that a user runs a model in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import overrides
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# The modes of selective activation checkpoints, in forward and in the recompute.
_SELECTIVE = _CachingTorchDispatchMode, _CachedTorchDispatchMode


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Run the body outside of all modes of dispatch and of torch's functions.

    Selective activation checkpoints are such a mode: it saves results of forward by their number,
    so that backward must run the same operations. The default device stays, which is a mode, too.
    """
    functions = [overrides._pop_mode() for _ in overrides._get_current_function_mode_stack()]
    devices = [mode for mode in functions if isinstance(mode, DeviceContext)]
    for mode in reversed(devices):
        overrides._push_mode(mode)
    stack = dispatch._get_current_dispatch_mode_stack()
    operations = [dispatch._pop_mode() for _ in stack]  # guard: no mode sees it
    try:
        yield
    finally:
        for mode in reversed(operations):
            dispatch._push_mode(mode)
        for _ in devices:
            overrides._pop_mode()
        for mode in reversed(functions):
            overrides._push_mode(mode)


def in_selective_checkpoint() -> bool:
    """Return whether this is in a selective activation checkpoint, in forward or in its recompute.

    In the recompute an operation returns the result that was saved, and what it was to write to
    stays as it is.
    """
    stack = dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _SELECTIVE) for mode in stack)  # guard: buffers are written again
