"""Runs trial computations without visible side effects on the user's program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..exchange.modes import outside_modes
from .memory.forward_state import Random, drawing_again
from .runtime.linear import EVERYWHERE


@contextlib.contextmanager
def unobserved(device: torch.device, backward: bool = False) -> Iterator[None]:
    """Run the body, which may compute forward and backward, without visible side effects.

    Afterwards the random generators have their states from before the body. In the body, torch's
    modes, hooks on every module's call and the user's hooks for saved tensors are off. The body
    must not call the user's code.

    Args:
        device: The device of the tensors.
        backward: Whether to record gradients.
    """
    with contextlib.ExitStack() as stack:
        for hooks in EVERYWHERE:
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
        # A checkpoint around the layer counts saved tensors. The hooks here, on top of the
        # checkpoint's hooks, hide the body's tensors. They detach each tensor, since a node that
        # saves its own output with the graph would never be freed.
        unhooked = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)
        stack.enter_context(outside_modes())
        stack.enter_context(unhooked)
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(drawing_again(Random.now(device)))  # guard: takes no random numbers
        yield
