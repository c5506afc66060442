"""What the code of transformers' modules refers to: its attention functions, and the functions of a
class.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

_Said = TypeVar("_Said")


def once(function: Callable[[Any], _Said]) -> Callable[[Any], _Said]:
    """functools.cache, whose types take no class for hashable."""
    return functools.cache(function)


def attention_functions() -> Any:
    """transformers' attention functions, if the process uses transformers at all."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS


@once
def functions_of(kind: type[nn.Module]) -> list[types.FunctionType]:
    """The functions of a module's class, without their decorators."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    unwrapped = (inspect.unwrap(f) for base in bases for f in vars(base).values() if callable(f))
    return [f for f in unwrapped if isinstance(f, types.FunctionType)]


def digest(holder: Any, *names: str) -> str:
    """Return a digest of the source of some functions, without comments and line breaks.

    Args:
        holder: A class, or a module of functions.
        names: Names of the functions; a name that ``holder`` doesn't have is skipped.

    Returns:
        The digest; empty where code other than transformers' decorates a function, since the source
        does not show what a decorator does.

    Raises:
        OSError: if the source is not there.
    """
    functions = [getattr(holder, name) for name in names if getattr(holder, name, None) is not None]
    if any(map(_is_decorated, functions)):
        return ""  # guard: what a decorator does is in no digest
    text = " ".join(inspect.getsource(inspect.unwrap(function)) for function in functions)
    words = re.sub("#.*", "", text).split()
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).hexdigest()


def _is_decorated(function: Any) -> bool:
    """Return whether code other than transformers' is wrapped around a function."""
    while hasattr(function, "__wrapped__"):
        # Not __module__: functools.wraps copies it. functools.cache makes no function, without globals.
        name = getattr(function, "__globals__", {}).get("__name__", "")
        if name.split(".")[0] != "transformers":
            return True
        function = function.__wrapped__
    return False
