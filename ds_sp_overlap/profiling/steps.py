"""Calls listeners after each optimizer step of this process, by a hook on all optimizers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook

# The objects whose ``note_step`` is called. The set is weak, so that it keeps no object alive.
listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: Any) -> None:
    """Call ``listener.note_step()`` after each optimizer step of this process.

    The calls end when the listener is freed, or by ``listeners.discard(listener)``.
    """
    _hook_optimizers()
    listeners.add(listener)


@functools.cache
def _hook_optimizers() -> None:
    """Make torch call `_tell` after each step of each optimizer; further calls do nothing."""
    register_optimizer_step_post_hook(_tell)


def _tell(*_: Any) -> None:
    # Iterate over a copy, since a listener may discard itself.
    for listener in list(listeners):
        listener.note_step()


def in_backward() -> bool:
    """Return whether this thread runs a backward.

    A layer that is called in a backward is being recomputed by an activation checkpoint.
    """
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Return whether this code runs in a non-reentrant activation checkpoint of PyTorch.

    Returns False in a reentrant checkpoint, whose forward runs without recording gradients.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
