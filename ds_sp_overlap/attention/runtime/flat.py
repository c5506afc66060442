"""Joins operations to one Python function, whose local variables hold what they read and write.

    def run(call, given):
        v0, v1 = given; given.clear()
        v2 = f0(call, v0, v1); del v0, v1
        v3, v4 = f1(call, v2); del v2
        return v3, v4

A loop over a list of operations would cost the host more than most of them do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

# Names a value: ("value", ("q", 0)) is q of group 0, ("d", ("value", ("q", 0))) its gradient.
Name = tuple[Any, ...]
# Takes the call and a list of values, which it empties; returns values.
Flat = Callable[[Any, list[Any]], tuple[Any, ...]]


class Operation(NamedTuple):
    """An operation, with the names of the values that it reads and writes.

    Attributes:
        function: Takes the call, and what ``reads`` name. Returns what ``writes`` name; a single
            value for one.
        reads: The values that it reads.
        writes: The values that it writes.
    """

    function: Callable[..., Any]
    reads: tuple[Name, ...]
    writes: tuple[Name, ...]


def flat(operations: Sequence[Operation], takes: Sequence[Name], gives: Sequence[Name]) -> Flat:
    """Return a function that runs operations, and lets go of each value behind its last use.

    Args:
        operations: The operations. They read None for a value that nobody has written.
        takes: The values that the function is given.
        gives: The values that the function returns; None for a value that nobody has written.
    """
    variables: dict[Name, str] = {}

    def variable(name: Name) -> str:
        return variables.setdefault(name, f"v{len(variables)}")

    last_uses: dict[Name, int] = dict.fromkeys(takes, -1)
    for place, operation in enumerate(operations):
        last_uses.update(dict.fromkeys((*operation.reads, *operation.writes), place))
    last_uses.update(dict.fromkeys(gives, len(operations)))
    dead: dict[int, list[Name]] = {}
    for name, place in last_uses.items():
        dead.setdefault(place, []).append(name)
    lines = [_assigned(map(variable, takes), "given"), "given.clear()"]
    there = set(takes)
    for place in range(-1, len(operations)):
        if place >= 0:
            operation = operations[place]
            read = [variable(name) if name in there else "None" for name in operation.reads]
            call = f"f{place}({', '.join(['call', *read])})"
            lines.append(
                _assigned(map(variable, operation.writes), call, len(operation.writes) == 1)
            )
            there.update(operation.writes)
        if gone := [variable(name) for name in dead.get(place, ()) if name in there]:
            lines.append(f"del {', '.join(gone)}")  # guard: let go behind its last use
    given = [variable(name) if name in there else "None" for name in gives]
    lines.append(f"return ({''.join(each + ', ' for each in given)})")
    functions = {f"f{place}": operation.function for place, operation in enumerate(operations)}
    return FunctionType(_compiled("\n    ".join(["def run(call, given):", *lines])), functions)


def _assigned(variables: Any, value: str, is_one: bool = False) -> str:
    """Return the statement that assigns a value to one variable, or unpacks it to some or none."""
    names = list(variables)
    if not names:
        return value
    return f"{', '.join(names)}{'' if is_one else ','} = {value}"


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """Compile the one function of ``source``; it is the same for most shapes."""
    module = compile(source, "<operations of a piece>", "exec")
    return next(code for code in module.co_consts if isinstance(code, CodeType))
