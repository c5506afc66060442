"""Take a guard out of the package: a piece of the source of one function, replaced while a test looks on."""

import ast
import contextlib
import importlib
import inspect
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """
    function   where it is, ``module:qualified.name`` below ds_sp_overlap
    text       the guard as it stands there, once
    without    what stands there if somebody takes it out
    """

    function: str
    text: str
    without: str


def _inner(guard):
    """The function itself, without its decorators, and their caches."""
    module, path = guard.function.split(":")
    found = importlib.import_module("ds_sp_overlap." + module)
    for name in path.split("."):
        found = getattr(found, name)
    return inspect.unwrap(found), getattr(found, "cache_clear", lambda: None)


@contextlib.contextmanager
def removed(guard):
    """Run the body without the guard. Whoever holds the function holds it without: its code is exchanged in place."""
    function, clear_cache = _inner(guard)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(guard.text) != 1:
        raise LookupError(f"{guard.function} holds {source.count(guard.text)} times the guard {guard.text!r}; follow the code here")
    tree = ast.parse(source.replace(guard.text, guard.without))
    tree.body[0].decorator_list = []
    tree.body.insert(0, ast.parse("from __future__ import annotations").body[0])
    namespace: dict = {}
    exec(compile(tree, guard.function, "exec"), function.__globals__, namespace)
    code, function.__code__ = function.__code__, namespace[function.__name__].__code__
    clear_cache()
    try:
        yield
    finally:
        function.__code__ = code
        clear_cache()
