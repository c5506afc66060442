"""Put a forward in the place of a module's own, and take it away again."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Undo = Callable[[nn.Module], None]  # is given the module rather than holding it, which would keep the model alive


def is_ours(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__sp_overlap__", False)


def rebind(
    module: nn.Module, forward: Callable, whole: bool = True, of_copy: Callable[[nn.Module], None] = lambda copy: None
) -> Undo:
    """Put ``forward`` in place of the module's; returns what undoes that. A compiler steps over ``forward``, ``whole`` or not.

    A copy of the module (an EMA, a frozen reference model) gets its class's forward: ``forward`` drives the original.

    of_copy   is called before that, and may refuse
    """
    original, active = weakref.ref(module), [True]
    before = vars(module).get("forward")

    @functools.partial(torch.compiler.disable, recursive=whole)
    def dispatch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not original():
            of_copy(self)
            return type(self).forward(self, *args, **kwargs)
        if not active:
            return before(*args, **kwargs) if before else type(self).forward(self, *args, **kwargs)
        return forward(*args, **kwargs)

    def undo(module: nn.Module) -> None:
        active.clear()  # where somebody wrapped ours, the wrapper stays, and ours passes calls on
        if is_ours(module):
            before = vars(module).pop("forward").before  # held by the module alone: it may be the module's own method
            if before is not None:
                module.forward = before

    dispatch.__name__ = "forward"  # a pickle names a method: a module that is loaded from one has its class's forward
    dispatch.__sp_overlap__, dispatch.before = True, before
    module.forward = types.MethodType(dispatch, module)
    return undo
