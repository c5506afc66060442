"""Detects ranks that call different layers, or the same layers in another order."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..warn import by_rank
from .modes import outside_modes
from .streams import is_captured


class Calls:
    """Counts the calls of layers over one sp group, and compares them between the ranks.

    Ranks that call different layers may exchange tensors of equal shapes, and silently train wrong.
    So ranks compare the names of the layers that they call. A layer's first call is compared at
    once (`LayerRuntime.compare`). Later calls cost no waiting: a hash of the names of `EVERY` calls
    is reduced over the ranks while the next `EVERY` calls are made.

    The last calls of a process are not compared. If ranks make different numbers of calls, their
    collectives don't fit together, and fail.
    """

    # docs/correctness.md names this number. The planner and a benchmark record one rank, and set
    # ``EVERY`` so high that no call is compared.
    EVERY = 32
    _of_groups: weakref.WeakKeyDictionary[Any, Calls] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        # The number of calls, and the number of layers that were called (`LayerRuntime.compare`).
        self.number = self.layers = 0
        # For each call that is not compared yet, the name of its layer.
        self.names: list[str] = []
        # The comparison in flight, or None.
        self.asked: _Comparison | None = None

    @classmethod
    def of(cls, group: Any) -> Calls:
        """Return the `Calls` that all layers over ``group`` share; a new `Calls` for None."""
        return cls() if group is None else cls._of_groups.setdefault(group, cls())

    def __deepcopy__(self, memo: dict) -> Calls:
        # A copied layer uses the same group, and so the same counts.
        return self

    def count(self, sp_group: Any, name: str, device: torch.device) -> None:
        """Count a call; every `EVERY` calls, read the comparison in flight and begin the next.

        `LayerRuntime.run` calls this before the layer exchanges anything. Collective in every
        `EVERY`-th call. Calls that are captured in a CUDA graph are counted, and compared after the
        capture.

        Args:
            sp_group: The sp group.
            name: Name of the layer.
            device: The device of the layer's tensors.

        Raises:
            RuntimeError: on all ranks, if the previous comparison found different layers; or if a
                comparison failed, for instance because a rank has died.
        """
        self.number += 1
        if sp_group.size == 1:
            return
        self.names.append(name)  # guard: calls are told by name
        if len(self.names) < self.EVERY or is_captured():  # guard: nobody waits in a graph
            return
        self._compare(sp_group, name, device)

    @outside_modes()
    def _compare(self, sp_group: Any, name: str, device: torch.device) -> None:
        """Read the comparison in flight and begin the next; see `count` for the arguments."""
        # Clear both attributes first, so that no comparison is pending if the code below raises.
        asked, self.asked = self.asked, None
        names, self.names = self.names, []
        try:
            if asked is None or asked.is_alike():
                self.asked = _Comparison(sp_group, names, device)
                return
        except RuntimeError as error:
            raise sp_group.failed(name, "the comparison of calls", error) from error
        # The hash shows that some call differs; the names show which call.
        every = sp_group.gather(asked.names, name)
        differs = [len(set(of_ranks)) > 1 for of_ranks in zip(*every)].index(True)
        number = self.number - len(asked.names + names) + differs + 1
        seen = by_rank(called[differs] for called in every)
        raise RuntimeError(
            f"sp_overlap: the ranks of the sp group have called different layers, first in call "
            f"{number} ({seen}), and what they have computed since is wrong; call the same layers "
            "in the same order on every rank (those that are dropped at random by one random state "
            "for the sp group)"
        )


class _Comparison:
    """Compares the names of called layers between the ranks, by one hash of all. Collective.

    Other work goes on meanwhile.
    """

    def __init__(self, sp_group: Any, names: list[str], device: torch.device):
        self.names, self.side = names, sp_group.streams(device)
        digest = hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest()
        self.mark = self.side.begin()
        try:
            # One reduction by MAX of (hash, -hash) gives the largest hash and the negated smallest
            # hash. The largest equals the smallest if all ranks have the same names.
            edges = torch.full((2,), int.from_bytes(digest, "big"), device=device)
            edges[1].neg_()
            group = sp_group.group
            self.work = dist.all_reduce(edges, dist.ReduceOp.MAX, group=group, async_op=True)
            if not self.side.blocks:
                self.work.wait()
                edges = edges.to("cpu", non_blocking=True)
            self.edges = edges
        finally:
            self.side.end(self.mark)

    def is_alike(self) -> bool:
        """Return whether all ranks have the same names; block the host until this is known."""
        self.work.wait() if self.side.blocks else self.mark[0].synchronize()
        self.side.before_compute(self.mark)
        largest, smallest = self.edges.tolist()
        return largest == -smallest
