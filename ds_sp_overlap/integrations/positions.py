"""What the ranks must know of each other's tokens in one step: positions, documents, local lengths."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from ..channel import Channel
from . import say_once


class Step:
    """What attention needs to know of the whole sequence in one step.

    position_ids  [b or 1, s]   of all ranks
    lengths       local sequence length of every rank
    documents     for each row, its documents as [start, stop); None if every row is one document
    """

    def __init__(self, position_ids: Tensor, lengths: list[int]):
        self.position_ids, self.lengths = position_ids, lengths
        rows, seq = position_ids.shape
        starts = (position_ids.diff(dim=1) != 1).nonzero().tolist()
        self.documents: list[list[tuple[int, int]]] | None = None
        if starts:
            edges = [[0, *(at + 1 for r, at in starts if r == row), seq] for row in range(rows)]
            self.documents = [list(zip(edge, edge[1:])) for edge in edges]
            shards = [0, *torch.tensor(lengths).cumsum(0).tolist()]
            if all(edge == shards for edge in edges) and not position_ids[:, 0].any():
                say_once(
                    "sp_overlap: position_ids start anew on every rank, so each rank's tokens are taken for documents of their "
                    "own; for one long sequence give position_ids of the whole sequence, cut like input_ids"
                )
        self._masks: dict[tuple[int, int], Tensor] = {}

    def window_mask(self, length: int, window: int) -> Tensor:
        """Causal mask [1, 1, length, length] of a sliding window, made once a step."""
        if (length, window) not in self._masks:
            at = torch.arange(length, device=self.position_ids.device)
            behind = at[:, None] - at[None, :]
            self._masks[length, window] = ((behind >= 0) & (behind < window))[None, None]
        return self._masks[length, window]


class Positions:
    """Gathers ``position_ids`` over the sp group, once for all layers that are given the same tensor."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.gathered: tuple[weakref.ref, int] | None = None  # from which tensor, at which version
        self.step: Step | None = None

    def gather(self, local: Tensor | None, where: str) -> Step:
        """The step that ``local`` [b or 1, s/P] belongs to. Collective, the first time for each tensor."""
        if local is None:
            raise ValueError(
                f"{where}: sequence parallelism needs position_ids in every forward: those of the whole sequence, cut over the "
                "ranks like input_ids"
            )
        version = None if local.is_inference() else local._version  # None: can't tell whether it was written anew
        if self.gathered is None or self.gathered[0]() is not local or self.gathered[1] != version or version is None:
            self.step, self.gathered = self._gather(local, where), (weakref.ref(local), version)
        return self.step

    def _gather(self, local: Tensor, where: str) -> Step:
        size, group = self.channel.size, self.channel.group
        shape = torch.tensor(local.shape, device=local.device)
        shapes = [torch.empty_like(shape) for _ in range(size)]
        dist.all_gather(shapes, shape, group=group)
        shapes = torch.stack(shapes).tolist()
        if len({rows for rows, _ in shapes}) > 1:
            raise ValueError(f"{where}: position_ids differ in batch over the sp ranks: shapes {shapes}")
        lengths = [length for _, length in shapes]
        padded = local.new_zeros(local.shape[0], max(lengths))
        padded[:, : local.shape[1]] = local
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        return Step(torch.cat([part[:, :length] for part, length in zip(parts, lengths)], dim=1), lengths)
