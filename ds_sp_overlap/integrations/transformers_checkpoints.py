"""transformers: gradient checkpointing of a model whose attention is kept over it.

``gradient_checkpointing_enable`` gives each layer the function that checkpoints it, whenever it is called. So the functions are
looked at in each forward of the model, and have our ``context_fn`` while it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..attention.kept import keep_attention
from ..exchange.channel import Channel

FUNCTION = "_gradient_checkpointing_func"


class Checkpoints:
    """The checkpoints in a model around ``layers``, which keep their attention."""

    def __init__(self, name: str, model: nn.Module, layers: Collection[nn.Module], channel: Channel):
        self.name, self.channel, self.agreed = name, channel, False
        found = [(at, module) for at, module in model.named_modules() if hasattr(module, "gradient_checkpointing")]
        around = [(at, module) for at, module in found if layers and any(inner in layers for inner in module.modules())]
        self.around = dict(sorted(around, key=lambda named: -named[0].count(".")))  # those that run the checkpoint go first

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """The body is a forward of the model. Collective the first time.

        Raises ValueError, before anything is exchanged, where a layer is checkpointed by something that attention can't be kept over.
        """
        before: dict[nn.Module, Callable] = {}
        if self.around and torch.is_grad_enabled():
            if not self.agreed:
                self.channel.agree(self.name, lambda: self._with_context() and None)  # guard: refused on all ranks
                self.agreed = True
            found = self._with_context()
            before = {module: getattr(module, FUNCTION) for module in found}
            for module, function in found.items():
                setattr(module, FUNCTION, function)
        try:
            yield
        finally:
            for module, function in before.items():
                setattr(module, FUNCTION, function)

    def _with_context(self) -> dict[nn.Module, Callable]:
        """Functions to checkpoint the modules with that are checkpointed."""
        found: dict[nn.Module, Callable] = {}
        for at, module in self.around.items():
            function = vars(module).get(FUNCTION)
            if function is None or not (module.training and module.gradient_checkpointing):
                continue
            if reason := _why_not(function):
                raise ValueError(
                    f"{at or self.name} ({type(module).__name__}) is checkpointed {reason}, over which sp_overlap.checkpointing can't "
                    'keep attention; use gradient_checkpointing_kwargs={"use_reentrant": False}, or set sp_overlap.checkpointing to '
                    '"recompute"'
                )
            found[module] = functools.partial(function, context_fn=keep_attention)
        return found


def can_keep(model: nn.Module) -> bool:
    """Whether ``model`` is checkpointed, as it is now, and nowhere by something that attention can't be kept over."""
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    functions = [vars(module)[FUNCTION] for module in checkpointed if FUNCTION in vars(module)]
    return bool(functions) and not any(map(_why_not, functions))


def _why_not(function: Any) -> str:
    """How a function checkpoints that takes no ``context_fn`` of ours, in words; empty if it does."""
    given = function.keywords if isinstance(function, functools.partial) else {}
    inner = function.func if isinstance(function, functools.partial) else function
    if inner is not checkpoint and not getattr(inner, "__module__", "").startswith("transformers."):
        return f"by {getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', type(inner).__name__)}"
    if given.get("use_reentrant") is not False:
        return f"with use_reentrant={given.get('use_reentrant')}"
    if given.get("context_fn", noop_context_fn) is not noop_context_fn:
        return "with a context_fn of its own"
    return ""
