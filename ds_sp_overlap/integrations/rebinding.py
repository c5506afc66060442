"""Replacing the forward of one module, so that the module can be copied, saved and given back.

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

# Restores the forward of the module that it is called with. The module is an argument because an
# undo function that held its module would keep the model alive.
Undo = Callable[[nn.Module], None]


def is_ours(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is one that `rebind` put there.

    True for a deep copy of a rebound module as well. Not for somebody's wrapper around such a
    forward, to which ``functools.wraps`` copies the mark.
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

    `enable` calls this. ``forward`` drives this module object alone. A copy of the module (an EMA,
    a frozen reference model) therefore runs the forward of its class.

    Args:
        module: The module whose attribute ``forward`` is set.
        forward: Called with the forward that the module would run without the overlap, and the
            arguments of the module's call. That forward is the one that somebody had set on the
            module, or the one that the class has now: somebody may have patched the class.
        whole: Whether ``torch.compile`` skips the functions that ``forward`` calls, too. It always
            skips ``forward`` itself.
        of_copy: Called with a copy of the module, each time before the copy's forward runs; may
            raise to refuse the copy.

    Returns:
        A function that restores the forward of the module that it is called with.
    """
    original, active = weakref.ref(module), True
    before = vars(module).get("forward")

    @functools.partial(torch.compiler.disable, recursive=whole)
    def dispatch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the forward for ``self``: of the class, the earlier one, or the overlapped one."""
        own = functools.partial(type(self).forward, self)
        # A deep copy of the module holds this function as well, bound to the copy.
        if self is not original():
            of_copy(self)
            return own(*args, **kwargs)
        own = before or own
        return forward(own, *args, **kwargs) if active else own(*args, **kwargs)

    def undo(module: nn.Module) -> None:
        """Restore the forward that ``module`` had before."""
        nonlocal active
        # Where somebody wrapped `dispatch`, without copying its marks, the wrapper stays on the
        # module. `dispatch` then passes calls on to the earlier forward.
        active = False
        if is_ours(module):
            # Read from the module: a reference here would keep the module alive, since the earlier
            # forward may be the module's own bound method.
            before = vars(module).pop("forward").before
            if before is not None:
                module.forward = before

    # A pickle stores a method by its name, so that a module that is loaded from the pickle has the
    # forward of its class.
    dispatch.__name__ = "forward"
    dispatch.__sp_overlap__, dispatch.before = id(dispatch), before
    module.forward = types.MethodType(dispatch, module)
    return undo
