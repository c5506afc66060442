"""Determines whether a function is torch's, transformers' or third-party code.

Also provides transformers' registry of attention functions, the names of KV caches, the functions
of a class, and digests of source.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_Result = TypeVar("_Result")

# The keyword arguments of a call, by name.
Keywords = dict[str, Any]

# The "value" of an attribute or a global that does not exist.
MISSING: Any = object()

# The names that forwards have for the argument with a KV cache or a recurrent state. transformers
# 5.24 replaced them by a single name.
CACHES = "cache", "past_key_values", "past_key_value", "cache_params", "layer_past"


def once(function: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """Cache a function of one argument.

    Unlike ``functools.cache``, this function has types with which mypy accepts a class as argument.
    """
    return functools.cache(function)


def by_class(function: Callable[[Any], _Result]) -> Callable[[nn.Module], _Result]:
    """Turn a function of a class into a function of a module, computed once for each class."""
    cached = once(function)
    return functools.wraps(cached)(lambda module: cached(type(module)))


def attention_functions() -> Any:
    """Return transformers' registry of attention functions; None if transformers isn't loaded."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS


@contextlib.contextmanager
def replaced(names: Any, name: str, value: Any) -> Iterator[None]:
    """Set the entry ``name`` of a dict to ``value`` while the body runs; then restore the entry."""
    before = names.get(name, MISSING)
    names[name] = value
    try:
        yield
    finally:
        if before is MISSING:
            del names[name]
        else:
            names[name] = before


def in_registry(module: Any, function: Callable) -> AbstractContextManager[None]:
    """Make ``function`` the attention function of ``module`` while the body runs."""
    return replaced(attention_functions(), module.config._attn_implementation, function)


@once
def own_class(kind: type) -> type:
    """Return the class that a module of class ``kind`` had before ``fully_shard``.

    ``fully_shard`` changes the class of a module to a new subclass.
    """
    # Only the subclass has this method.
    if not hasattr(kind, "_get_fsdp_state"):
        return kind
    bases = kind.__mro__
    return next(base for base in bases if not base.__module__.startswith("torch.distributed."))


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter, even if ZeRO-3 has partitioned it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@once
def functions_of(kind: type[nn.Module]) -> list[types.FunctionType]:
    """Return the functions of a class and its bases below ``nn.Module``, without decorators."""
    functions, bases = [], own_class(kind).__mro__
    for base in bases[: bases.index(nn.Module)]:
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, types.FunctionType):
                functions.append(function)
    return functions


def names_around(layer: nn.Module) -> dict[str, Any]:
    """Return the globals of the file that defines a layer's forward and its model."""
    return inspect.unwrap(type(layer).forward).__globals__


def defined_in(function: Any) -> str:
    """Return the name of the module that defines a function, or its outermost decorator if any.

    Returns "" for an object without globals, such as the result of functools.cache.
    """
    # Don't use ``__module__``, which functools.wraps copies to the decorator.
    return getattr(function, "__globals__", {}).get("__name__", "")


def _packages_of(function: Any) -> list[str]:
    """Return the packages of a function's decorators, outermost first, and of the function."""
    packages = []
    while function is not None:
        packages.append(defined_in(function).split(".")[0])
        function = getattr(function, "__wrapped__", None)
    return packages


def is_library_function(function: Any) -> bool:
    """Return whether a function and all its decorators are torch's, transformers' or PEFT's."""
    return {"torch", "transformers", "peft"}.issuperset(_packages_of(function))


def renames_cache(function: Any) -> bool:
    """Return whether a function's outermost decorator only renames the argument of a KV cache."""
    # transformers 5.24 decorates forwards in this way, to accept the old names.
    if defined_in(function) != "transformers.utils.deprecation":
        return False
    # The closure of the decorator holds the old and the new name of the argument.
    names = inspect.getclosurevars(function).nonlocals
    return {names.get("old_name"), names.get("new_name")} <= set(CACHES)  # guard: only a cache


def digest(holder: Any, *names: str) -> str:
    """Return a digest of the source of some functions, without comments and line breaks.

    The digest serves to recognise code that can't be traced, such as the code of a known fork.

    Args:
        holder: A class or a module that has the functions.
        names: Names of the functions. A name that ``holder`` doesn't have is skipped.

    Returns:
        The digest; empty if a function has a decorator that is not transformers'.
    """
    functions = [getattr(holder, name) for name in names if hasattr(holder, name)]
    for function in functions:
        *decorators, _ = _packages_of(function)
        if not {"transformers"}.issuperset(decorators):
            return ""  # guard: what a decorator does is in no digest
    words = " ".join(map(source_of, functions)).split()
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).hexdigest()


def source_of(function: Any) -> str:
    """Return a function's source without comments, below its decorators; "" if unavailable."""
    try:
        return re.sub("#.*", "", inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return ""
