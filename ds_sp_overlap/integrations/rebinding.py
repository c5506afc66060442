"""Replaces the forward of one module, so that the module can still be copied, saved and restored.

An overlapped layer stays the same module object with the same parameters. Only the attribute
``forward`` of this object changes.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# The type of a function that restores the forward of a module. The function takes the module as its
# argument, since a reference to the module in the function would keep the model alive.
Undo = Callable[[nn.Module], None]


def is_ours(module: nn.Module) -> bool:
    """Return whether `rebind` set the forward of ``module``.

    Also true for a deep copy of a rebound module. False if somebody has wrapped that forward:
    ``functools.wraps`` copies the attribute ``__sp_overlap__`` to the wrapper, but its value is the
    ``id`` of the wrapped function.
    """
    function = getattr(vars(module).get("forward"), "__func__", None)
    return function is not None and getattr(function, "__sp_overlap__", None) == id(function)


def rebind(
    module: nn.Module,
    forward: Callable,
    whole: bool = True,
    of_copy: Callable[[nn.Module], None] = lambda copy: None,
) -> Undo:
    """Replace the forward of ``module`` by ``forward``.

    `enable` calls this. ``forward`` works for this module object only. A copy of the module (an EMA
    model, a frozen reference model) therefore runs the forward of its class.

    Args:
        module: The module whose attribute ``forward`` is set.
        forward: Called with the module's own forward, then the arguments of the call. The own
            forward is the forward that had been set on the module before; without one, it is the
            forward of the module's class at the time of the call.
        whole: Whether ``torch.compile`` also skips the functions that ``forward`` calls.
            ``torch.compile`` always skips ``forward`` itself.
        of_copy: Called with a copy of the module, each time before the copy's forward runs; may
            raise an error to refuse the copy.

    Returns:
        A function that restores the forward of the module that it is called with.
    """
    original, active = weakref.ref(module), True
    before = vars(module).get("forward")

    @functools.partial(torch.compiler.disable, recursive=whole)
    def dispatch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``; for a copy of the module, or after undo, call the own forward."""
        own = functools.partial(type(self).forward, self)
        # For a deep copy of the module, ``forward`` is this same function, bound to the copy.
        if self is not original():
            of_copy(self)
            return own(*args, **kwargs)
        own = before or own
        return forward(own, *args, **kwargs) if active else own(*args, **kwargs)

    def undo(module: nn.Module) -> None:
        """Restore the forward that ``module`` had before."""
        nonlocal active
        # If somebody has wrapped `dispatch`, the wrapper stays on the module. From now on
        # `dispatch` calls the earlier forward.
        active = False
        if is_ours(module):
            # Read the earlier forward from the module: a reference in this closure would keep the
            # module alive, since that forward may be a method bound to the module.
            before = vars(module).pop("forward").before
            if before is not None:
                module.forward = before

    # A pickle stores a method by its name. With this name, a module that is loaded from a pickle
    # gets the forward of its class.
    dispatch.__name__ = "forward"
    dispatch.__sp_overlap__, dispatch.before = id(dispatch), before
    module.forward = types.MethodType(dispatch, module)
    return undo
