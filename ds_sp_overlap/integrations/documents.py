"""Attention that keeps the documents of a packed sequence apart, in few calls however they are packed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_LONG = 8  # a document longer than an eighth of a row is attended to by itself
_BATCH = 2**15  # what every attention kernel takes


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of one type as tensors, in one copy from pinned memory, for which the host doesn't wait."""
    host = torch.from_numpy(np.concatenate([x.ravel() for x in arrays]))
    host = host if device.type == "cpu" else host.pin_memory()
    parts = host.to(device, non_blocking=True).split([x.size for x in arrays])
    return [part.view(x.shape) for part, x in zip(parts, arrays)]


class Documents:
    """The documents of every row, and how attention takes them.

    long    slices, one call each, or one for all rows where they share it
    short   documents of about one length, gathered and padded behind to a power of two, one call
    alone   documents of one token, which sees itself alone: for attention o = v, no call

    So there are at most 8 calls a row and one for each power of two below an eighth of the sequence.
    """

    def __init__(self, bounds: np.ndarray, rows: int, seq: int, device: torch.device):
        self.rows, length = rows, bounds[:, 2] - bounds[:, 1]
        is_long = length * _LONG > seq
        placed = []  # which tokens come out of each call, of all rows one after the other

        self.long: list[tuple[slice, int, int]] = []
        shared: dict[tuple[int, int], list[int]] = {}
        for row, start, stop in bounds[is_long].tolist():
            shared.setdefault((start, stop), []).append(row)
        for (start, stop), those in sorted(shared.items()):
            for some in [slice(None)] if len(those) == rows else [slice(row, row + 1) for row in those]:
                self.long.append((some, start, stop))
                placed.append((np.arange(rows)[some, None] * seq + np.arange(start, stop)).ravel())
        self.in_order = all(rows == slice(None) for rows, _, _ in self.long) and bool(is_long.all())

        short: list[np.ndarray] = []
        first, power = bounds[:, 0] * seq + bounds[:, 1], 2
        while power // 2 * _LONG <= seq:
            (alike,) = np.nonzero(~is_long & (length > power // 2) & (length <= power))
            for these in np.split(alike, range(_BATCH, len(alike), _BATCH)) if len(alike) else ():
                nth, long = np.arange(power), length[these, None]
                index, real = first[these, None] + np.minimum(nth, long - 1), nth < long
                short += [index, real.ravel().nonzero()[0]]
                placed.append(index[real])
            power *= 2

        alone = first[~is_long & (length == 1)]
        order = np.concatenate([*placed, alone])
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        *sent, self.alone, self.order = to_device([*short, alone, place], device)
        self.short: list[tuple[Tensor, Tensor]] = list(zip(sent[::2], sent[1::2]))

    def attend(
        self, attention: Callable[..., Tensor], alone: Callable[[Tensor], Tensor] | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """q, k, v [b, s, h, d] -> o [b, s, h, d].

        attention   the same of documents [n, length, h, d]
        alone       v [n, h_kv, d] -> o [n, h, d] of tokens that see themselves alone; None for ``attention`` of one token each
        """
        outputs = [attention(*(x[rows, start:stop] for x in (q, k, v))) for rows, start, stop in self.long]
        if self.in_order:
            return torch.cat(outputs, 1)
        outputs = [o.flatten(0, 1) for o in outputs]
        tokens = [x.flatten(0, 1) for x in (q, k, v)]
        for index, real in self.short:
            some = (x.index_select(0, index.flatten()).unflatten(0, index.shape) for x in tokens)
            outputs.append(attention(*some).flatten(0, 1).index_select(0, real))
        if len(self.alone):
            if alone is not None:
                outputs.append(alone(tokens[2].index_select(0, self.alone)))
            else:
                some = (x.index_select(0, self.alone).unsqueeze(1) for x in tokens)
                outputs.append(attention(*some).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.order).unflatten(0, (self.rows, -1))
