"""Notices optimizer steps of this process, by one hook for all listeners."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook

# The objects to tell of each step. Weak, so that none is kept alive.
listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: Any) -> None:
    """Call ``listener.note_step()`` whenever an optimizer of this process has stepped.

    `listeners` forgets the listener once it is gone, or by ``discard``.
    """
    _hook_optimizers()
    listeners.add(listener)


@functools.cache
def _hook_optimizers() -> None:
    """Have torch call `_tell` behind each step of each optimizer, from now on."""
    register_optimizer_step_post_hook(_tell)


def _tell(*_: Any) -> None:
    # A copy: listeners may be discarded meanwhile.
    for listener in list(listeners):
        listener.note_step()


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
