"""Megatron-DeepSpeed: replaces globals of its code while a layer's forward is read (`accounting`).

A scripted function is read as the Python function that it was compiled from. A forward may name
modules of Megatron, but one function in them alone is known, by its source code.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..inspect.accounting import MISSING, PACKAGES, HiddenDtype, LoadedGlobal
from ..inspect.library import digest

# A function of ``megatron.core.utils``. It returns its tensor, with storage of its own where the
# tensor is a view.
VIEWLESS = "make_viewless_tensor"
PARTS = (VIEWLESS, "MakeViewlessTensor", "_kernel_make_viewless_tensor")
# The digest of these parts, in versions whose `VIEWLESS` returns its ``inp``.
KNOWN = {"8f37e62e2c72da2a"}


def replacement(run: Any, name: str, value: Any) -> Any:
    """Return what replaces a global while ``run`` accounts for a forward; None if it stays.

    `symbolic_trace.replaced` calls this for each global that the code of the layer's class names.

    Args:
        run: The run of the forward, of a decoder layer or of an attention.
        name: The name of the global.
        value: Its value.
    """
    if value is torch:
        return _Torch(run)
    if isinstance(value, torch.jit.ScriptFunction):
        # The Python function that it was compiled from.
        return getattr(value, "_torchdynamo_inline", None)
    einops = sys.modules.get("einops")
    if einops is not None and value is einops.rearrange:
        return _Rearrange(run, value)
    package = isinstance(value, types.ModuleType) and value.__name__.split(".")[0]
    return _Package(name, value, run) if package and package not in PACKAGES else None


class _Rearrange:
    """Stands for einops' ``rearrange``."""

    def __init__(self, run: Any, rearrange: Callable):
        self._run, self._rearrange = run, rearrange

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Its code needs no account: it only moves numbers.
        with self._run.accounting.suspended():
            return self._rearrange(*args, **kwargs)


class _Torch:
    """Stands for ``torch``; makes zeros in the dtype of the run, even if that dtype is hidden."""

    def __init__(self, run: Any):
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        """Return a zero of no dims; fail for any other number or dtype."""
        same_dtype = isinstance(dtype, HiddenDtype) or dtype is self._run.dtype
        if type(data) is not float or data != 0 or not same_dtype:
            self._run.fail("makes a tensor")  # guard: a zero adds nothing
        with torch._C.DisableTorchFunction():
            return torch.zeros((), dtype=self._run.dtype)


class _Package:
    """Stands for a module that is neither torch's nor another known package's, such as Megatron's.

    The forward may look up modules in it, and `VIEWLESS`; anything else fails the run.
    """

    def __init__(self, name: str, module: Any, run: Any):
        self._name, self._module, self._run = name, module, run

    def __getattr__(self, name: str) -> Any:
        """Return what stands for ``name`` in the module, and record the lookup as a global."""
        run, path = self._run, f"{self._name}.{name}"
        value = run.look_up(self._module, name)
        with run.accounting.suspended():
            loaded = LoadedGlobal(vars(self._module), name, value)
        run.accounting.loaded_globals.append(loaded)
        if isinstance(value, types.ModuleType):
            return _Package(path, value, run)
        is_viewless = name == VIEWLESS and value is not MISSING
        # To read a source opens files, which is no part of the forward.
        with run.accounting.suspended():
            source = source_of(self._module, *PARTS) if is_viewless else ""
        if source not in KNOWN:
            run.fail(f"uses the global {path}")  # guard: only a function of a module that is known
        return functools.partial(_viewless, run)


def source_of(holder: Any, *names: str) -> str:
    """Return the `digest` of functions of a class or a module.

    Empty, which is in no set of known digests, if there is no source, or a function has a decorator
    that is not transformers'.
    """
    try:
        return digest(holder, *names)
    except (OSError, TypeError):
        return ""


def _viewless(run: Any, inp: Tensor, requires_grad: Any, keep_graph: bool) -> Tensor:
    """Return the tensor; stands for `VIEWLESS`. Fail where that would cut the graph."""
    if keep_graph is not True:
        run.fail(f"calls {VIEWLESS} without keep_graph=True")
    return inp
