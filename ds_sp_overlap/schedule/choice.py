"""Which schedule a layer runs by where it says nothing else."""

from __future__ import annotations

from typing import Protocol

from .by_groups import by_head_groups
from .steps import Schedule
from .window import by_window


class Groups(Protocol):
    """What is known of the head groups of a layer; `exchange.geometry.Geometry` tells it."""

    @property
    def heads(self) -> int:
        """All query heads."""

    @property
    def kv_heads(self) -> int:
        """All KV heads."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What travels with each head group."""

    @property
    def last_use(self) -> tuple[int, ...]:
        """For each group, the last one that attends to KV heads that travel with it."""


def schedule_of(groups: Groups, window: int | None = None, wgrad_last: bool = True) -> Schedule:
    """Return the schedule of a layer in head groups.

    Args:
        groups: The head groups.
        window: The most groups that are live at a time; None for all of them.
        wgrad_last: As for `by_head_groups` and `by_window`.
    """
    if window is None:
        return by_head_groups(groups.kinds, wgrad_last)
    few_kv = groups.heads >= 4 * groups.kv_heads
    return by_window(groups.kinds, groups.last_use, window, wgrad_last, few_kv)
