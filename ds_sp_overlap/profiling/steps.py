"""Notices optimizer steps of this process, by one hook for all listeners."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener:
    """Calls a bound method whenever an optimizer of this process has stepped.

    Args:
        method: The bound method. The listener does not keep the method's object alive.
    """

    _all: set[Listener] = set()
    # The hook of all listeners; None while there are no listeners.
    _hook: Any = None

    def __init__(self, method: Callable[[], None]):
        self.method = weakref.WeakMethod(method)
        Listener._all.add(self)
        if Listener._hook is None:
            Listener._hook = register_optimizer_step_post_hook(Listener._tell)
        # ``method`` is a bound method, for which typing has no name but Callable.
        weakref.finalize(method.__self__, self.remove)  # type: ignore[attr-defined]

    @staticmethod
    def _tell(*_: Any) -> None:
        """Call the methods of all listeners: the hook that torch runs behind each step."""
        # A copy: the garbage collector may remove listeners meanwhile.
        for listener in list(Listener._all):
            method = listener.method()
            if method is not None:
                method()

    def remove(self) -> None:
        """Call the method no more; the last listener takes the hook with it."""
        Listener._all.discard(self)
        if not Listener._all and Listener._hook is not None:
            Listener._hook.remove()
            Listener._hook = None


def in_backward() -> bool:
    """Return whether this thread runs a backward.

    A layer that is called in backward is a checkpointed layer, which is recomputed.
    """
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Return whether a forward runs in a non-reentrant activation checkpoint of torch's.

    A reentrant one records no gradients.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
