"""Megatron-DeepSpeed: what stands for the globals of its code while a layer's forward is read
(`accounting`).

Scripted functions are read as the Python that they were compiled from. Modules of Megatron may be
named and are not looked into, but for ``core.utils.make_viewless_tensor``, which gives a view
storage of its own: a function is known to be that one by its source.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..inspect.accounting import MISSING, PACKAGES, Dtype
from ..inspect.library import digest

VIEWLESS = "make_viewless_tensor"
PARTS = (VIEWLESS, "MakeViewlessTensor", "_kernel_make_viewless_tensor")
KNOWN = {"8f37e62e2c72da2a"}  # source of these: returns its ``inp``


def instead(run: Any) -> Callable[[str, Any], Any]:
    """What stands for a global while ``run`` looks on, by its name and value; None if it stays."""

    def of(name: str, value: Any) -> Any:
        if value is torch:
            return _Torch(run)
        if isinstance(value, torch.jit.ScriptFunction):
            return getattr(value, "_torchdynamo_inline", None)
        einops = sys.modules.get("einops")
        if einops is not None and value is einops.rearrange:
            return _rearranged(run, value)
        package = isinstance(value, types.ModuleType) and value.__name__.split(".")[0]
        return _Package(name, value, run) if package and package not in PACKAGES else None

    return of


def _rearranged(run: Any, rearrange: Callable) -> Callable:
    """einops' ``rearrange``, which moves numbers, and may look at sizes for that."""

    def moved(*args: Any, **kwargs: Any) -> Any:
        with run.accounting.looking_away():
            return rearrange(*args, **kwargs)

    return moved


class _Torch:
    """In place of ``torch``: makes a zero of the dtype of the tensors around, even where that is
    hidden.
    """

    def __init__(self, run: Any):
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        alike = isinstance(dtype, Dtype) or dtype is self._run.dtype
        if type(data) is not float or data != 0 or not alike:
            self._run.fail("makes a tensor")  # guard: a zero adds nothing
        with torch._C.DisableTorchFunction():
            return torch.zeros((), dtype=self._run.dtype)


class _Package:
    """In place of a module that a forward names."""

    def __init__(self, name: str, module: Any, run: Any):
        self._name, self._module, self._run = name, module, run

    def __getattr__(self, name: str) -> Any:
        run, path = self._run, f"{self._name}.{name}"
        value = run.look(self._module, name)
        run.accounting.names.append((vars(self._module), name, value))
        if isinstance(value, types.ModuleType):
            return _Package(path, value, run)
        with run.accounting.looking_away():
            known = (
                name == VIEWLESS
                and value is not MISSING
                and source_of(self._module, *PARTS) in KNOWN
            )
        if not known:
            run.fail(f"uses the global {path}")  # guard: only a function of a module that is known
        return _viewless


def source_of(holder: Any, *names: str) -> str:
    """The digest of some functions of a class or a module; empty where `digest` knows none."""
    try:
        return digest(holder, *names)
    except (OSError, TypeError):  # no source
        return ""


def _viewless(inp: Tensor, requires_grad: Any, keep_graph: bool) -> Tensor:
    return inp
