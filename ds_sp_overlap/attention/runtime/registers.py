"""The registers of a plan, and operations on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# Names a register: ("value", "q", 0) is q of group 0, ("d", "value", "q", 0) its gradient.
Name = tuple[Any, ...]


class Operation(NamedTuple):
    """An operation, with the indices of the registers that it reads and writes.

    Attributes:
        function: Takes the call, and what ``reads`` hold. Returns what ``writes`` are to hold; a
            single value for one.
        reads: The registers that it reads.
        writes: The registers that it writes.
        dead: The registers that nothing reads behind it.
    """

    function: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...] = ()


class Names(dict[Name, int]):
    """Gives each name the index of its register, in the order in which they are asked for."""

    def __call__(self, *name: Any) -> int:
        return self.setdefault(name, len(self))


def listed(operations: list[Operation], keep: set[int]) -> list[Operation]:
    """Find behind which operation each register is dead; those in ``keep`` never are."""
    result: list[Operation] = []
    alive = set(keep)
    for operation in reversed(operations):
        used = dict.fromkeys((*operation.reads, *operation.writes))
        dead = tuple(index for index in used if index not in alive)
        result.append(operation._replace(dead=dead))
        alive.update(used)
    return result[::-1]
