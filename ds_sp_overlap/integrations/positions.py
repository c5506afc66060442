"""What the ranks must know of each other's tokens in one forward: positions, documents, padding, local lengths."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.channel import Channel
from .documents import Documents

_NEEDED = "those of the whole sequence, cut over the ranks like input_ids"
_FAULTS: dict[str, tuple[type[Exception], str]] = {
    "missing": (ValueError, f"sequence parallelism needs position_ids in every forward: {_NEEDED}"),
    "axes": (ValueError, f"position_ids must be [b, s/P] or [axes, b, s/P]; give {_NEEDED}"),
    "length": (ValueError, f"position_ids and input_ids differ in batch or length; give {_NEEDED}"),
    "mask": (
        ValueError,
        "of a sequence that is split over ranks only a 2-D attention_mask [b, s/P], which tells padding, can be honoured, not a "
        "4-D mask, a BlockMask or a dict of masks; leave it out, and let position_ids start anew with each document",
    ),
    "mask length": (ValueError, "attention_mask must be [b, s/P], cut over the ranks like input_ids"),
    "cache": (
        RuntimeError,
        "generation with a KV cache does not work on a sequence that is split over ranks; call ds_sp_overlap.disable(model) "
        "and generate without sequence parallelism",
    ),
}
_CODES = [None, *_FAULTS]


class GlobalSequence:
    """What attention needs to know of the global sequence in one forward.

    position_ids  [b, s]   of all ranks, from 0 in each document if ``padded``; None where they have axes for images alone
    longest       []       the largest position there is
    lengths       local sequence length of every rank
    rows          b
    bounds        [n, 3]   row, start, stop of each document, on the host; None if every row is one document
    padded        whether documents could be told apart with the attention mask only
    """

    def __init__(self, position_ids: Tensor, lengths: list[int], rows: int, mask: Tensor | None, where: str):
        self.lengths, self.rows, self.longest = lengths, rows, position_ids.max()
        axes = position_ids.dim() == 3
        self.position_ids = (
            None if axes and len(position_ids) == 3 else (position_ids[0] if axes else position_ids).expand(rows, -1)
        )
        first = torch.ones(rows, 1, dtype=torch.bool, device=position_ids.device)
        if self.position_ids is None:
            starts = torch.cat([first, first.new_zeros(rows, sum(lengths) - 1)], 1)
        else:
            starts = torch.cat([first, self.position_ids.diff(dim=1) != 1], 1)
        self.padded = False
        if mask is not None and not mask.all():
            starts = self._behind_padding(starts, mask, where)
        row, start = starts.nonzero().cpu().unbind(1)
        self.bounds: Tensor | None = None
        if len(row) > rows:
            stop = torch.where(row.diff(append=torch.tensor([rows])) == 0, start.roll(-1), sum(lengths))
            self.bounds = torch.stack([row, start, stop], 1)
        self._documents: dict[int | None, Documents | None] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}

    def _behind_padding(self, starts: Tensor, mask: Tensor, where: str) -> Tensor:
        """Documents [b, s] by their first tokens, where padding before one is a document of its own."""
        at = torch.arange(mask.shape[1], device=mask.device)
        before = mask.cumsum(1) - mask.long()  # tokens that are no padding
        first = torch.where(starts, at, 0).cummax(1).values
        behind = mask & ~mask.roll(1, 1) & ~starts
        if (behind & (before != before.gather(1, first))).any():
            raise ValueError(
                f"{where}: attention_mask has padding between the tokens of a document; put it before or behind them, or let "
                "position_ids start anew behind it"
            )
        if behind.any():
            self.padded, starts = True, starts | behind
            self.position_ids = at - torch.where(starts, at, 0).cummax(1).values
        return starts

    def documents(self, chunk: int | None = None) -> Documents | None:
        """The documents, cut every ``chunk`` tokens; None if every row is one document."""
        if chunk not in self._documents:
            seq, bounds = sum(self.lengths), self.bounds
            if chunk is not None and chunk < seq:
                rows = torch.arange(self.rows)
                bounds = torch.stack([rows, rows * 0, rows * 0 + seq], 1) if bounds is None else bounds
                row, start, stop = bounds.unbind(1)
                count = (stop - start + chunk - 1) // chunk
                nth = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
                row, start, stop = (x.repeat_interleave(count) for x in (row, start, stop))
                start = start + nth * chunk
                bounds = torch.stack([row, start, torch.minimum(start + chunk, stop)], 1)
            self._documents[chunk] = None if bounds is None else Documents(bounds, self.rows, seq, self.longest.device)
        return self._documents[chunk]

    def window_mask(self, length: int, window: int) -> Tensor:
        """Causal mask [1, 1, length, length] of a sliding window, made once a forward."""
        if (length, window) not in self._masks:
            at = torch.arange(length, device=self.longest.device)
            behind = at[:, None] - at[None, :]
            self._masks[length, window] = ((behind >= 0) & (behind < window))[None, None]
        return self._masks[length, window]


class Positions:
    """Gathers what the ranks must know, once for each forward of the model.

    documents   ``sp_overlap.documents``
    """

    def __init__(self, channel: Channel, documents: str):
        self.channel = channel
        self.current: GlobalSequence | None = None  # of the model's forward that is running
        self._may_restart = documents == "per_rank"  # or positions were seen that did not start anew on every rank
        self._caches: weakref.WeakSet = weakref.WeakSet()

    @contextlib.contextmanager
    def forward(self, where: str, given: dict[str, Any]) -> Iterator[GlobalSequence]:
        """The body is the forward of the model ``where`` with the arguments ``given``. Collective."""
        tokens = next((x for x in map(given.get, ("input_ids", "inputs_embeds")) if x is not None), None)
        mask, cache = given.get("attention_mask"), given.get("past_key_values")
        self.current = self.gather(where, tokens, given.get("position_ids"), mask, cache)
        try:
            yield self.current
        finally:
            self.current = None

    @torch.compiler.disable
    def gather(self, where: str, tokens: Tensor | None, position_ids: Any, mask: Any = None, cache: Any = None) -> GlobalSequence:
        """The global sequence of a call with ``tokens`` [b, s/P, ..], the same on all ranks. Collective, and so is every refusal."""
        fault = self._fault(tokens, position_ids, mask, cache)
        if fault is None:
            position_ids, tokens = position_ids.long(), position_ids if tokens is None else tokens
            axes, rows = position_ids.shape[0] if position_ids.dim() == 3 else 0, position_ids.shape[-2]
            mine = [
                0,
                axes,
                rows,
                tokens.shape[0] if tokens is not position_ids else rows,
                position_ids.shape[-1],
                mask is not None,
            ]
        else:
            mine = [_CODES.index(fault), 0, 0, 0, 0, 0]
        device = next((x.device for x in (position_ids, tokens) if isinstance(x, Tensor)), torch.device("cpu"))
        every = self._every(torch.tensor(mine, device=device))
        shapes = torch.stack(every).tolist()
        self._refuse(where, shapes)
        _, axes, rows, batch, _, _ = shapes[0]
        lengths, masked = [shape[4] for shape in shapes], any(shape[5] for shape in shapes)
        sent = position_ids.flatten(0, -2)
        if masked:
            mask = torch.ones(batch, sent.shape[1], device=device) if mask is None else mask
            sent = torch.cat([sent, (mask != 0).long().to(device)])
        padded = sent.new_zeros(sent.shape[0], max(lengths))
        padded[:, : sent.shape[1]] = sent
        whole = torch.cat([local[:, :length] for local, length in zip(self._every(padded), lengths)], dim=1)
        mask = whole[-batch:].bool() if masked else None
        whole = whole[: max(axes, 1) * rows].unflatten(0, (axes, rows) if axes else (rows,))
        self._refuse_restart(where, whole, lengths)
        return GlobalSequence(whole, lengths, batch, mask, where)

    def _fault(self, tokens: Tensor | None, position_ids: Any, mask: Any, cache: Any) -> str | None:
        """What is wrong with the arguments on this rank; None if nothing is."""
        if cache is not None:
            if cache in self._caches or cache.get_seq_length() > 0:
                return "cache"
            self._caches.add(cache)  # a cache comes new and empty by default; one that is seen again is decoded from
        if not isinstance(position_ids, Tensor):
            return "missing"
        if position_ids.dim() not in (2, 3):
            return "axes"
        shape = position_ids.shape[-2:] if tokens is None else tokens.shape[:2]
        if position_ids.shape[-1] != shape[1] or position_ids.shape[-2] not in (1, shape[0]):
            return "length"
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            return "mask"
        return "mask length" if mask is not None and mask.shape != shape else None

    def _refuse(self, where: str, shapes: list[list[int]]) -> None:
        faults = [_CODES[shape[0]] for shape in shapes]
        if any(faults):
            known = [fault for fault in faults if fault]
            kind = _FAULTS[known[0]][0]
            each = [f"sp rank {rank}: {_FAULTS[fault][1]}" for rank, fault in enumerate(faults) if fault]
            raise kind(f"{where}: " + (_FAULTS[known[0]][1] if len(set(faults)) == 1 else "; ".join(each)))
        if len({tuple(shape[1:4]) for shape in shapes}) > 1:
            told = [f"sp rank {rank}: {shape[2]} of batch {shape[3]}, {shape[1]} axes" for rank, shape in enumerate(shapes)]
            raise ValueError(f"{where}: position_ids differ in batch or axes over the sp ranks ({'; '.join(told)})")

    def _refuse_restart(self, where: str, position_ids: Tensor, lengths: list[int]) -> None:
        """Refuse positions that start anew on every rank; once others were seen, documents end there."""
        starts = [sum(lengths[:rank]) for rank, length in enumerate(lengths) if length]
        if self._may_restart or len(starts) == 1:
            return
        at = torch.tensor(starts, device=position_ids.device)
        elsewhere = position_ids.diff(dim=-1) != 1 if position_ids.dim() == 2 else at.new_zeros(1)
        cuts = len(position_ids) * (len(starts) - 1) if position_ids.dim() == 2 else 0
        self._may_restart = bool(position_ids.index_select(-1, at).any() | (elsewhere.sum() > cuts))
        if not self._may_restart:
            raise ValueError(
                f"{where}: position_ids start anew on every rank; for one long sequence give {_NEEDED}. Where documents are "
                'packed so that they do begin with every rank, set sp_overlap.documents to "per_rank"'
            )

    def _every(self, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in range(self.channel.size)]
        dist.all_gather(every, mine, group=self.channel.group)
        return every
