"""Megatron-DeepSpeed: replaces globals of its code while a layer's forward is read (`accounting`).

A forward may name modules of Megatron, as long as it uses nothing in them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from ..inspect.accounting import PACKAGES
from ..inspect.library import digest


def replacement(run: Any, name: str, value: Any) -> Any:
    """Return what replaces a global while ``run`` accounts for a forward; None if it stays.

    `symbolic_trace.replaced` calls this for each global that the code of the layer's class names.

    Args:
        run: The run of the forward.
        name: The name of the global.
        value: Its value.
    """
    einops = sys.modules.get("einops")
    if einops is not None and value is einops.rearrange:
        return _Rearrange(run, value)
    package = isinstance(value, types.ModuleType) and value.__name__.split(".")[0]
    return _Package(name, run) if package and package not in PACKAGES else None


class _Rearrange:
    """Stands for einops' ``rearrange``."""

    def __init__(self, run: Any, rearrange: Callable):
        self._run, self._rearrange = run, rearrange

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Its code needs no account: it only moves numbers.
        with self._run.accounting.suspended():
            return self._rearrange(*args, **kwargs)


class _Package:
    """Stands for a module that is neither torch's nor another known package's, such as Megatron's.

    The forward may load the module, but look nothing up in it.
    """

    def __init__(self, name: str, run: Any):
        self._name, self._run = name, run

    def __getattr__(self, name: str) -> Any:
        return self._run.fail(f"uses the global {self._name}.{name}")


def source_of(holder: Any, *names: str) -> str:
    """Return the `digest` of functions of a class or a module.

    Empty, which is in no set of known digests, if there is no source, or a function has a decorator
    that is not transformers'.
    """
    try:
        return digest(holder, *names)
    except (OSError, TypeError):
        return ""
