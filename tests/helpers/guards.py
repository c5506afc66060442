"""Take a guard out of the package: a piece of the source of one function, replaced while a test looks on.

The tests that name a guard say which of their checks watches it (`Watched`): one that finds nothing while the guard is there.
"""

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.helpers.ranks import on_ranks


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


SEEN_BY_PROGRAMS = {  # what the random programs notice too
    "a half waits before it reads": Guard("exchange.in_flight:InFlight._wait", "self.handle.wait()", "pass"),
    "replicas are summed": Guard("relayout.ops:_copy_in", ".sum(1, dtype=exact)", "[:, 0]"),
    "gradients of shared rows are summed": Guard(
        "attention.slices:Pieces.put",
        "add=not self.once)",
        "add=False)",
    ),
    "what travels as it lies is contiguous": Guard(
        "exchange.in_flight:_as_it_travels", "return x.contiguous().view(-1)", "return x.as_strided((x.numel(),), (1,))"
    ),
}


class Watched(NamedTuple):
    """
    guard    what is taken out
    check    finds nothing while it is there
    ranks    that the check runs on; 0 for one that needs none
    raises   whether all there is to see is an exception; any other guard is seen by a wrong result, or it isn't seen
    """

    guard: Guard
    check: Callable[..., list[str]]
    ranks: int = 2
    raises: bool = False


CRASHED = "crashed: "


def found(rank, watched):
    """What the check finds; a failed assertion is its way to say so, any other exception is a crash."""
    try:
        return watched.check(*[rank] * (watched.ranks > 0))
    except AssertionError as error:
        return [str(error)]
    except Exception as error:
        return [CRASHED + repr(error)]


def found_without(rank, watched):
    with removed(watched.guard):
        return found(rank, watched)


def must_notice(watched):
    """The check finds something while the guard is out, and nothing before and afterwards."""

    def everywhere(function):
        return on_ranks(watched.ranks, function, watched, timeout_s=60) if watched.ranks else [function(0, watched)]

    before = everywhere(found)
    assert not any(before), before
    findings = [finding for each in everywhere(found_without) for finding in each]
    assert findings, "nobody noticed"
    assert watched.raises == any(str(finding).startswith(CRASHED) for finding in findings), findings
    assert not any(everywhere(found)), "the guard was not put back"
