"""Which layers were called over an sp group, as far as its ranks must say the same."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Calls:
    """Calls of layers over one sp group in this process, whose names its ranks compare, `EVERY` at a time.

    Ranks that call other layers, or call them in another order, exchange what has the same shape and train on, wrongly. A layer's
    first call is compared at once (`Layer.call`). Later ones cost no waiting: a number that stands for the names of `EVERY` calls
    is on its way while the next `EVERY` are made. Not noticed: the last calls of a process; and ranks that call other numbers of
    layers come to collectives that don't fit together, and fail there.
    """

    EVERY = 32
    _of_groups: weakref.WeakKeyDictionary[Any, Calls] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.number = self.layers = 0  # of calls, and of layers that were called
        self.names: list[str] = []  # of calls that the other ranks were not asked about
        self.asked: tuple[list[str], Callable[[], bool]] = ([], lambda: True)  # about which they were; whether all say the same

    @classmethod
    def of(cls, group: Any) -> Calls:
        """The calls over ``group``, by whatever layers."""
        return cls() if group is None else cls._of_groups.setdefault(group, cls())

    def __deepcopy__(self, memo: dict) -> Calls:
        return self  # a copied layer calls over the same group

    def count(self, channel: Any, name: str, device: torch.device) -> None:
        """Count the call of a layer whose tensors are on ``device``; once in `EVERY` the ranks of ``channel`` compare the names.

        Raises RuntimeError then, on all ranks alike, if they had called different layers when they last asked.
        """
        self.number += 1
        if channel.size == 1:
            return
        self.names.append(name)  # guard: calls are told by name
        if len(self.names) < self.EVERY:
            return
        (earlier, alike), self.asked = self.asked, ([], lambda: True)
        names, self.names = self.names, []
        try:
            if alike():
                self.asked = names, _ask_whether_alike(channel, "\n".join(names), device)
                return
        except RuntimeError as error:
            raise channel.failed(name, "the comparison of calls", error) from error
        every = channel.gather(earlier, name)
        at = next(i for i, called in enumerate(zip(*every)) if len(set(called)) > 1)
        seen = "; ".join(f"sp rank {rank}: {called[at]}" for rank, called in enumerate(every))
        raise RuntimeError(
            f"sp_overlap: the ranks of the sp group have called different layers, first in call "
            f"{self.number - 2 * self.EVERY + at + 1} ({seen}), and what they have computed since is wrong; call the same layers "
            "in the same order on every rank (those that are dropped at random by one random state for the sp group)"
        )


def _ask_whether_alike(channel: Any, text: str, device: torch.device) -> Callable[[], bool]:
    """Ask the other ranks whether they have the same text. Collective; what is returned waits for the answer."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    side = channel.side(device)
    with side.after_compute():
        edges = torch.full((2,), number, dtype=torch.int64, device=device)
        edges[1].neg_()
        work = dist.all_reduce(edges, dist.ReduceOp.MAX, group=channel.group, async_op=True)  # the largest, minus the smallest
        if not side.blocks:
            work.wait()
            edges = edges.to("cpu", non_blocking=True)
    mark = side.mark()

    def alike() -> bool:
        work.wait() if side.blocks else mark.event.synchronize()
        largest, smallest = edges.tolist()
        return largest == -smallest

    return alike
