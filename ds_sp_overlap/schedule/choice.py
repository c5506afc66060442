"""Chooses between `by_head_groups` and `by_window` for a layer that was passed no schedule."""

from __future__ import annotations

from typing import Protocol

from .by_groups import by_head_groups
from .steps import Schedule
from .window import by_window


class Groups(Protocol):
    """The head groups of a layer, as `exchange.geometry.Geometry` describes them."""

    @property
    def heads(self) -> int:
        """Number of query heads, of all ranks."""

    @property
    def kv_heads(self) -> int:
        """Number of KV heads, of all ranks."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The tensors that travel with each head group: "qkv" or "q"."""

    @property
    def last_use(self) -> tuple[int, ...]:
        """For each group, the last group that attends to the KV heads that travel with it."""


def schedule_of(groups: Groups, window: int | None = None, wgrad_last: bool = True) -> Schedule:
    """Return the schedule of a layer in head groups.

    Args:
        groups: The head groups.
        window: The most groups that are in memory at a time; None for all of them.
        wgrad_last: As for `by_head_groups` and `by_window`.
    """
    if window is None:
        return by_head_groups(groups.kinds, wgrad_last)
    # dq, dk and dv of few KV heads take less memory than dx and the weight gradients.
    few_kv = groups.heads >= 4 * groups.kv_heads
    return by_window(
        groups.kinds, groups.last_use, window, wgrad_last=wgrad_last, products_last=few_kv
    )
