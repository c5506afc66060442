"""Compiles a list of operations to one Python function, with a local variable for each value.

For two operations, f0 and f1, this is the function:

    def run(call, given):
        [v0, v1] = given; given.clear()
        v2 = f0(call, v0, v1); del v0, v1
        v3, v4 = f1(call, v2); del v2
        return v3, v4

A loop that interprets the list would cost the host more time than most of the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

# The name of a value: ("q", 0) is q of group 0, ("d", ("q", 0)) its gradient.
Name = str | tuple[Any, ...]
# A list of names stands for a list of values.
Names = Sequence[Name | list[Any]]
# A function that takes the call and a list of values, empties the list, and returns values.
Flat = Callable[[Any, list[Any]], tuple[Any, ...]]


@dataclass(eq=False)
class Operation:
    """Describes an operation: its function, and the names of the values it takes and returns.

    Attributes:
        function: Takes the call and the values of ``takes``. Returns the values of ``gives``: a
            tuple of several, or the only one. With no ``gives``, the result is ignored.
        takes: The names of the values that the operation takes, in lists if it takes lists.
        gives: The names of the values that the operation returns, in lists if it returns lists.
        reads: The names in ``takes``.
        writes: The names in ``gives``.
    """

    function: Callable[..., Any]
    takes: Names
    gives: Names

    def __post_init__(self) -> None:
        self.reads, self.writes = _names_in(self.takes), _names_in(self.gives)


def _names_in(names: Names) -> list[Name]:
    """Return all names in one flat list."""
    found: list[Name] = []
    for name in names:
        found += name if isinstance(name, list) else [name]
    return found


def gradients(names: Iterable[Name]) -> list[Name]:
    """Return the names of the gradients of the values called ``names``."""
    return [("d", name) for name in names]


def flat(operations: Sequence[Operation], takes: Sequence[Name], gives: Sequence[Name]) -> Flat:
    """Return a function that runs operations and deletes each value after its last use.

    A name may be written several times, each time with a new value. The last use of a value is the
    last operation that reads the name before the name is written again.

    Args:
        operations: The operations. If an operation takes a name that was never written, it gets
            None.
        takes: The names of the values that the function takes.
        gives: The names of the values that the function returns: None for a name that was never
            written.
    """
    # The first operation unpacks the values that the function takes.
    operations = [Operation(list, [], [list(takes)]), *operations]
    # For each operation, from last to first, the dead names after the operation. A name is dead if
    # it is not read until it is written again.
    dead, live = list[list[Name]](), set(gives)
    for operation in reversed(operations):
        touched = dict.fromkeys(operation.reads + operation.writes)
        dead.append([name for name in touched if name not in live])
        live = live.difference(operation.writes).union(operation.reads)
    lines = []
    # The variable of each name that was written so far.
    variables: dict[Name, str] = {}
    for place, operation in enumerate(operations):
        arguments = ["call", *_texts(operation.takes, variables)]
        value = f"f{place}({', '.join(arguments)})" if place else "given"
        for name in operation.writes:
            variables.setdefault(name, f"v{len(variables)}")
        targets = ", ".join(_texts(operation.gives, variables))
        lines.append(f"{targets} = {value}" if targets else value)
        if gone := [variables[name] for name in dead.pop() if name in variables]:
            lines.append(f"del {', '.join(gone)}")  # guard: let go behind its last use
    lines.insert(1, "given.clear()")
    lines.append(f"return ({''.join(text + ', ' for text in _texts(gives, variables))})")
    functions = {f"f{place}": operation.function for place, operation in enumerate(operations)}
    return FunctionType(_compiled("\n    ".join(["def run(call, given):", *lines])), functions)


def _texts(names: Names, variables: dict[Name, str]) -> list[str]:
    """Return the source text of each name, or of each list of names: its variable, or "None"."""
    texts = []
    for name in names:
        if isinstance(name, list):
            texts.append(f"[{', '.join(_texts(name, variables))}]")
        else:
            texts.append(variables.get(name, "None"))
    return texts


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """Compile the function in ``source``; cached, since calls of most shapes have equal sources."""
    module = compile(source, "<operations of a piece>", "exec")
    return next(code for code in module.co_consts if isinstance(code, CodeType))
