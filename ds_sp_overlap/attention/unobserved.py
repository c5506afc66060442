"""Tries things out beside the program, which does not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..exchange.modes import outside_modes
from .memory.forward_state import Random, drawing_again
from .runtime.linear import EVERYWHERE


@contextlib.contextmanager
def unobserved(device: torch.device, backward: bool = False) -> Iterator[None]:
    """Let the body compute, forward and backward, so that nobody notices.

    The random numbers that it draws are drawn again behind it. No mode runs, no hook of all modules
    and no hook of saved tensors. Code that somebody else wrote must not run in it.

    Args:
        device: The device of the tensors.
        backward: Whether to record gradients.
    """
    with contextlib.ExitStack() as stack:
        for hooks in EVERYWHERE:
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
        # A checkpoint around the layer counts the tensors that are saved. Hooks that do nothing,
        # on top of the checkpoint's, hide the tensors from it.
        unhooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        stack.enter_context(outside_modes())
        stack.enter_context(unhooked)
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(drawing_again(Random.now(device)))  # guard: takes no random numbers
        yield
