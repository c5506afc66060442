"""Hides the package's own computations from the torch modes that a user's model runs in."""

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
    """Run the body with all dispatch modes and torch-function modes off.

    A selective activation checkpoint is such a mode. It expects the recompute to run the same
    operations as forward, in the same order. The default device, also a mode, stays on.
    """
    functions = [overrides._pop_mode() for _ in overrides._get_current_function_mode_stack()]
    devices = [mode for mode in functions if isinstance(mode, DeviceContext)]
    for mode in reversed(devices):
        overrides._push_mode(mode)
    try:
        with dispatch._disable_current_modes():  # guard: no mode sees it
            yield
    finally:
        for _ in devices:
            overrides._pop_mode()
        for mode in reversed(functions):
            overrides._push_mode(mode)


def in_selective_checkpoint() -> bool:
    """Return whether a selective activation checkpoint is active, in its forward or recompute.

    In the recompute, an operation returns its saved result and does not write to its output.
    """
    stack = dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _SELECTIVE) for mode in stack)  # guard: buffers are written again
