"""Tries out modules beside the program, which does not notice."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..exchange.modes import outside_modes
from .memory.forward_state import Random, drawing_again
from .runtime.linear import hooks_of, is_harmless


@contextlib.contextmanager
def unobserved(
    modules: Iterable[nn.Module], device: torch.device, backward: bool = False
) -> Iterator[None]:
    """Let the body run modules, forward and backward, so that nobody notices.

    Behind the body the modules hold what they held before, and the next body begins alike. The
    random numbers that it draws are drawn again behind it. No mode and no hook runs, be it on
    modules, parameters or saved tensors, but the hooks by which a framework gathers weights
    (`linear.is_harmless`). Autocast keeps no cast of a weight, and dropouts drop nothing.

    Args:
        modules: The modules, and all their parts.
        device: The device of the tensors.
        backward: Whether to record gradients. None are where a framework gathers weights, since its
            hooks count backward passes.
    """
    parts, copies = list(dict.fromkeys(modules)), dict[int, Any]()
    with contextlib.ExitStack() as stack:
        gathering = {part for part in parts if _without_hooks(part, stack)}
        # A checkpoint around the modules counts the tensors that are saved. Hooks that do nothing,
        # on top of the checkpoint's, hide the tensors from it.
        unhooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        stack.enter_context(outside_modes())
        stack.enter_context(unhooked)
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.set_grad_enabled(backward and not gathering))
        stack.enter_context(drawing_again(Random.now(device)))  # guard: takes no random numbers
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for part in parts:
            _hold_copies(part, part in gathering, copies, stack)
        yield


def _without_hooks(part: nn.Module, stack: contextlib.ExitStack) -> bool:
    """Take away hooks until ``stack`` is closed; return whether those of a framework are left."""
    for hooks in hooks_of(part):
        before = dict(hooks)
        hooks.clear()
        hooks.update((key, hook) for key, hook in before.items() if is_harmless(hook))
        stack.callback(_refill, hooks, before)
    return bool(hooks_of(part))


def _hold_copies(
    part: nn.Module, gathers: bool, copies: dict[int, Any], stack: contextlib.ExitStack
) -> None:
    """Put copies in the place of what a module holds, until ``stack`` is closed.

    Args:
        part: The module.
        gathers: Whether a framework gathers its parameters, and keeps counts of its own in it.
        copies: The copies by the id of the original, which modules may share.
        stack: Puts back the originals.
    """
    holds, before = vars(part), dict(vars(part))
    names = ["_buffers", "training"] if gathers else list(before)
    for name in names:
        x = before[name]
        if name in ("_parameters", "_buffers"):
            holds[name] = {key: _copy(tensor, copies) for key, tensor in x.items()}
        else:
            holds[name] = _copy(x, copies)
    if isinstance(part, nn.modules.dropout._DropoutNd):
        holds["training"] = False
    if gathers:
        stack.callback(holds.update, {name: before[name] for name in names})
    else:
        stack.callback(_refill, holds, before)  # guard: the probe leaves no trace


def _refill(holds: dict, before: dict) -> None:
    holds.clear()
    holds.update(before)


def _copy(x: Any, copies: dict[int, Any]) -> Any:
    """Copy a tensor, or a list, dict or set; a parameter becomes a leaf over the same memory."""
    if id(x) in copies:
        return copies[id(x)]
    made = x
    if isinstance(x, nn.Parameter):
        # One that does not learn is seen by no hook. It may be quantised, with a type of its own.
        if x.requires_grad:
            made = x.detach().requires_grad_()
        if x.requires_grad and type(x) is nn.Parameter:
            made = nn.Parameter(made)
            # Megatron's fused gradient accumulation adds to an attribute of the parameter.
            vars(made).update((name, _copy(value, copies)) for name, value in vars(x).items())
    elif isinstance(x, Tensor):
        made = x.detach().clone()
    elif type(x).__module__ in ("builtins", "collections") and isinstance(x, (list, dict, set)):
        made = copy.copy(x)
    return copies.setdefault(id(x), made)
