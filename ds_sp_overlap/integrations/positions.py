"""What the ranks must know of each other's tokens in one forward: positions, documents, padding, local lengths."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.channel import Channel
from .documents import Documents, to_device

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
        "generation with a KV cache does not work on a sequence that is split over ranks; call ds_sp_overlap.disable(model, "
        "stock_too=True), which takes DeepSpeed's Ulysses out as well, and generate on each rank by itself",
    ),
}
_CODES = [None, *_FAULTS]


class GlobalSequence:
    """What attention needs to know of the global sequence in one forward, found out on the host.

    position_ids  [b or 1, s] or [axes, b or 1, s], of all ranks
    lengths       local sequence length of every rank
    rows          b
    mask          [b, s], true for tokens that are no padding; None if there is no padding
    device        of the tensors that attention asks for

    longest       the largest position there is
    bounds        [n, 3]   row, start, stop of each document; None if every row is one document
    padded        whether documents could be told apart with the attention mask only
    """

    def __init__(
        self, position_ids: np.ndarray, lengths: list[int], rows: int, mask: np.ndarray | None, device: torch.device, where: str
    ):
        self.lengths, self.rows, self.device = lengths, rows, device
        self.longest, seq = int(position_ids.max()), sum(lengths)
        starts = np.zeros((rows, seq), bool)
        starts[:, 0] = True
        if position_ids.ndim == 2 or len(position_ids) != 3:  # three axes are of images alone
            starts[:, 1:] = np.diff(position_ids if position_ids.ndim == 2 else position_ids[0]) != 1
        self.padded = False
        if mask is not None and not mask.all():  # guard: padding is a document
            starts = self._behind_padding(starts, mask, where)
        row, start = starts.nonzero()
        self.bounds: np.ndarray | None = None
        if len(row) > rows:
            stop = np.where(np.diff(row, append=rows) == 0, np.roll(start, -1), seq)
            self.bounds = np.stack([row, start, stop], 1)
        self._documents: dict[int | None, Documents | None] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}

    def _behind_padding(self, starts: np.ndarray, mask: np.ndarray, where: str) -> np.ndarray:
        """Documents [b, s] by their first tokens, where padding before one is a document of its own."""
        at = np.arange(mask.shape[1])
        before = mask.cumsum(1) - mask  # tokens that are no padding
        first = np.maximum.accumulate(np.where(starts, at, 0), 1)
        behind = mask & ~np.roll(mask, 1, 1) & ~starts
        if (behind & (before != np.take_along_axis(before, first, 1))).any():
            raise ValueError(
                f"{where}: attention_mask has padding between the tokens of a document; put it before or behind them, or let "
                "position_ids start anew behind it"
            )
        self.padded = bool(behind.any())
        return starts | behind

    def documents(self, chunk: int | None = None) -> Documents | None:
        """The documents, cut every ``chunk`` tokens; None if every row is one document."""
        if chunk not in self._documents:
            seq, bounds = sum(self.lengths), self.bounds
            if chunk is not None and chunk < seq:
                row, start, stop = self._each()
                count = (stop - start + chunk - 1) // chunk
                nth = np.arange(count.sum()) - (count.cumsum() - count).repeat(count)
                row, start, stop = (x.repeat(count) for x in (row, start, stop))
                start = start + nth * chunk
                bounds = np.stack([row, start, np.minimum(start + chunk, stop)], 1)
            self._documents[chunk] = None if bounds is None else Documents(bounds, self.rows, seq, self.device)
        return self._documents[chunk]

    def _each(self) -> tuple[np.ndarray, ...]:
        """Row, start and stop of each document, or of each row."""
        rows = np.arange(self.rows)
        return (rows, rows * 0, rows * 0 + sum(self.lengths)) if self.bounds is None else tuple(self.bounds.T)

    @functools.cached_property
    def for_flash(self) -> dict[str, Any]:
        """By what transformers' flash attention keeps documents apart, all rows one after the other; empty if a row is one document.

        Told by ``position_ids`` instead, it would ask the device in every call how many documents there are.
        """
        if self.bounds is None:
            return {}
        seq, (row, start, stop) = sum(self.lengths), self._each()
        (edges,) = to_device([np.append(row * seq + start, self.rows * seq).astype(np.int32)], self.device)
        longest = int((stop - start).max())
        return dict(cu_seq_lens_q=edges, cu_seq_lens_k=edges, max_length_q=longest, max_length_k=longest)

    @functools.cached_property
    def position_ids(self) -> Tensor:
        """[b, s], from 0 in each document."""
        seq, (row, start, stop) = sum(self.lengths), self._each()
        positions = np.arange(self.rows * seq) - (row * seq + start).repeat(stop - start)
        return to_device([positions.reshape(self.rows, seq)], self.device)[0]

    def window_mask(self, length: int, window: int) -> Tensor:
        """Causal mask [1, 1, length, length] of a sliding window, made once a forward."""
        if (length, window) not in self._masks:
            at = torch.arange(length, device=self.device)
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
        self._room = 0  # for values in the first message, the same on all ranks: as many as were ever sent; more take a second one
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
        mine, sent = [_CODES.index(fault), 0, 0, 0, 0, 0], []
        if fault is None:
            axes, (rows, length) = position_ids.shape[0] if position_ids.dim() == 3 else 0, position_ids.shape[-2:]
            mine = [0, axes, rows, rows if tokens is None else tokens.shape[0], length, mask is not None]
            sent = [position_ids] if mask is None else [position_ids, mask != 0]
        device = next((x.device for x in (position_ids, tokens) if isinstance(x, Tensor)), torch.device("cpu"))
        every = self._every(mine, sent, device)
        shapes = every[:, : len(mine)].tolist()
        self._refuse(where, shapes)
        needed = max((max(axes, 1) * rows + masked * batch) * length for _, axes, rows, batch, length, masked in shapes)
        if needed > self._room:  # guard: travels in one message
            self._room = needed
            every = self._every(mine, sent, device)
        _, axes, rows, batch, _, _ = shapes[0]
        lengths, masked, lines = [shape[4] for shape in shapes], [shape[5] for shape in shapes], max(axes, 1) * rows
        positions, masks = [], []
        for values, length, has_mask in zip(every[:, len(mine) :], lengths, masked):
            positions.append(values[: lines * length].reshape(lines, length))
            mask_of_rank = values[lines * length :][: batch * length] if has_mask else np.ones(batch * length)
            masks.append(mask_of_rank.reshape(batch, length))
        whole = np.concatenate(positions, 1).reshape(*((axes, rows) if axes else (rows,)), sum(lengths))
        self._refuse_restart(where, whole, lengths)
        return GlobalSequence(whole, lengths, batch, np.concatenate(masks, 1) != 0 if any(masked) else None, device, where)

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
            raise ValueError(
                f"{where}: position_ids differ in batch or axes over the sp ranks ({'; '.join(told)}); cut one batch over them"
            )

    def _refuse_restart(self, where: str, position_ids: np.ndarray, lengths: list[int]) -> None:
        """Refuse positions that start anew on every rank; once others were seen, documents end there."""
        starts = [sum(lengths[:rank]) for rank, length in enumerate(lengths) if length]
        if self._may_restart or len(starts) == 1:
            return
        flat = position_ids.ndim == 2
        elsewhere = flat and (np.diff(position_ids) != 1).sum() > len(position_ids) * (len(starts) - 1)
        self._may_restart = bool(position_ids[..., starts].any() or elsewhere)
        if not self._may_restart:
            raise ValueError(
                f"{where}: position_ids start anew on every rank; for one long sequence give {_NEEDED}. Where documents are "
                'packed so that they do begin with every rank, set sp_overlap.documents to "per_rank"'
            )

    def _every(self, mine: list[int], sent: list[Tensor], device: torch.device) -> np.ndarray:
        """``mine`` of every rank and what it sent, zeros if there is no room: [P, len(mine) + room], on the host.

        The one place where the host waits for the device.
        """
        (head,) = to_device([np.array(mine)], device)
        values = torch.cat([x.long().to(device).flatten() for x in sent]) if sent else head.new_zeros(0)
        values = values if len(values) <= self._room else values.new_zeros(0)
        line = torch.cat([head, values, head.new_zeros(self._room - len(values))])
        every = line.new_empty(self.channel.size, len(line))
        dist.all_gather(list(every), line, group=self.channel.group)
        return every.cpu().numpy()
