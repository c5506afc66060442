"""Compiles a list of operations to one Python function, with a local variable for each value.

    def run(call, given):
        v0, v1 = given; given.clear()
        v2 = f0(call, v0, v1); del v0, v1
        v3, v4 = f1(call, v2); del v2
        return v3, v4

A loop that interprets the list would cost the host more time than most of the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

# The name of a value: ("q", 0) is q of group 0, ("d", ("q", 0)) its gradient.
Name = tuple[Any, ...]
# A function that takes the call and a list of values, empties the list, and returns values.
Flat = Callable[[Any, list[Any]], tuple[Any, ...]]


class Operation(NamedTuple):
    """Describes an operation by its function and the names of the values it reads and writes.

    Attributes:
        function: Takes the call and the values of ``reads``. Returns the values of ``writes``; the
            value itself if there is one; anything if there is none.
        reads: The names of the values that the operation reads.
        writes: The names of the values that the operation writes.
    """

    function: Callable[..., Any]
    reads: tuple[Name, ...]
    writes: tuple[Name, ...]


def gradients(names: Iterable[Name]) -> list[Name]:
    """Return the names of the gradients of the values called ``names``."""
    return [("d", name) for name in names]


def flat(operations: Sequence[Operation], takes: Sequence[Name], gives: Sequence[Name]) -> Flat:
    """Return a function that runs operations and deletes each value after its last use.

    The last use is the last operation that reads the value before its name is written again.

    Args:
        operations: The operations. They read None for a value that was not written.
        takes: The names of the values that the function takes.
        gives: The names of the values that the function returns; a value that was not written is
            None.
    """
    variables: dict[Name, str] = {}

    def variable(name: Name) -> str:
        return variables.setdefault(name, f"v{len(variables)}")

    # The dead values after each operation, from last to first: those that no later operation reads
    # before writing them again.
    dead, live = list[list[Name]](), set(gives)
    for operation in reversed(operations):
        touched = dict.fromkeys(operation.reads + operation.writes)
        dead.append([name for name in touched if name not in live])
        live = live.difference(operation.writes).union(operation.reads)
    dead.append([name for name in takes if name not in live])
    lines, there = [_assigned(map(variable, takes), "given"), "given.clear()"], set(takes)
    for place in range(-1, len(operations)):
        if place >= 0:
            operation = operations[place]
            read = [variable(name) if name in there else "None" for name in operation.reads]
            call = f"f{place}({', '.join(['call', *read])})"
            lines.append(
                _assigned(map(variable, operation.writes), call, len(operation.writes) == 1)
            )
            there.update(operation.writes)
        if gone := [variable(name) for name in dead.pop() if name in there]:
            lines.append(f"del {', '.join(gone)}")  # guard: let go behind its last use
    given = [variable(name) if name in there else "None" for name in gives]
    lines.append(f"return ({''.join(each + ', ' for each in given)})")
    functions = {f"f{place}": operation.function for place, operation in enumerate(operations)}
    return FunctionType(_compiled("\n    ".join(["def run(call, given):", *lines])), functions)


def _assigned(variables: Any, value: str, is_one: bool = False) -> str:
    """Return a statement that assigns ``value`` to one variable, or unpacks it to several."""
    names = list(variables)
    if not names:
        return value
    return f"{', '.join(names)}{'' if is_one else ','} = {value}"


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """Compile the function in ``source``; cached, since most shapes give the same source."""
    module = compile(source, "<operations of a piece>", "exec")
    return next(code for code in module.co_consts if isinstance(code, CodeType))
