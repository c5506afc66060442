"""Runs a module beside the program, which must not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.memory.forward_state import in_modes
from .accounting import is_plain


@contextlib.contextmanager
def isolated(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Let the body run a module, forward and backward, and leave no trace in the program.

    Random numbers that the body draws are drawn again behind it. Buffers in the modules get their
    values back, as do constants in modules without hooks. Dropout is off, hooks on saved tensors
    are not called, and where modules have hooks, no gradient is recorded.

    Yields:
        The hidden states ``x`` as a leaf. It requires a gradient if the body may go backward: in
        all modes but inference mode, if no module has hooks.
    """
    # Those of adapters, which would draw other numbers in each of the two runs.
    dropouts = []
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            dropouts.append(part)
    devices = [x.device] if x.device.type != "cpu" else []
    # The hooks of ZeRO-3 and FSDP2 count backward passes.
    backward = not x.is_inference() and not any(map(_is_hooked, module.modules()))
    # A checkpoint around the module counts the tensors that are saved. Hooks that do nothing, on
    # top of the checkpoint's, hide the tensors from it.
    unhooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with (
        torch.random.fork_rng(devices),
        torch.set_grad_enabled(backward),
        unhooked,
        in_modes(dropouts, [False] * len(dropouts)),
        _restored(module),
    ):
        yield x.detach().requires_grad_(backward)


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore buffers of all parts of a module behind the body, and constants of parts without
    hooks; delete constants that the body made.

    An observer of quantisation, for instance, keeps the range of what it has seen.
    """
    buffers: list[tuple[dict[str, Any], str, Tensor | None, Tensor | None]] = []
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is None:
                buffers.append((part._buffers, name, None, None))
            elif not buffer.is_meta and not buffer.is_inference():
                buffers.append((part._buffers, name, buffer, buffer.detach().clone()))
        # Hooks, such as ZeRO-3's, keep counts of their own in the modules.
        if not _is_hooked(part):
            attributes.append((vars(part), dict(vars(part))))
    try:
        yield
    finally:
        with torch.no_grad():
            for holder, name, buffer, before in buffers:
                holder[name] = buffer
                if buffer is None or before is None:
                    continue
                is_same = buffer.shape == before.shape and torch.equal(buffer, before)
                if not is_same:  # guard: the probe leaves no trace
                    buffer.resize_(before.shape).copy_(before)
        for now, before_body in attributes:
            for name in [
                name for name, x in now.items() if is_plain(x) and name not in before_body
            ]:
                del now[name]
            now.update((name, x) for name, x in before_body.items() if is_plain(x))


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module has any hook of its own."""
    forward_hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(forward_hooks or module._backward_hooks or module._backward_pre_hooks)
