"""Gathers the positions, documents, padding and local lengths of the whole sequence on every rank.

A rank has only its own tokens, but attention after the exchange covers the whole sequence. So in
each forward of a model, the ranks gather the positions and masks of all tokens once. See
Note [One message, one wait].
"""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...exchange.layout import Range
from ...exchange.shares import QueryChunks
from ...exchange.sp_group import SPGroup
from ...exchange.streams import refuse_captured
from ...warn import by_rank
from .balance import balanced
from .documents import Documents, overlapping, to_device

# Note [One message, one wait]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# In each forward, the ranks gather positions and masks with one all-gather, after which the host
# waits for the device once (`Positions._every`). A message has a header of fixed length, and a
# body for values. The body must have the same size on all ranks, but local lengths differ, and a
# rank doesn't know the others' lengths. So the body has the largest size that any rank has needed
# so far. If the headers show that the body was too small for a rank, all ranks send another message
# with a larger body.
#
# Everything else is computed from the gathered values on the host with numpy. The tensors that
# attention reads are copied to the device once in each forward, and cached in `GlobalSequence`. A
# layer never waits.

# In a replay, a CUDA graph would use the positions of the forward in which it was captured.
NO_GRAPH = "positions of all ranks can't be read; capture what lies around the attention layers"
# The arguments of a model's forward that hold the sequence. A call passes one of the two.
TOKENS = ("input_ids", "inputs_embeds")
# The arguments that describe documents in addition to position_ids: by the documents' edges in the
# concatenated rows, or by the index of each token's document.
DOCUMENTS = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")
_NEEDED = "those of the whole sequence, cut over the ranks like input_ids"


def restarts(position_ids: np.ndarray) -> np.ndarray:
    """Return, for each token after the first, whether a document starts there: [b or 1, s - 1].

    A document starts where positions don't increase by 1. `masks` applies the same rule to tensors.

    Args:
        position_ids: [b or 1, s]; or [4, b or 1, s], where text positions come first; or [3, b or
            1, s] for images, without text positions. The positions of images show no documents.
    """
    of_text = position_ids.reshape(-1, *position_ids.shape[-2:])[0]
    return (np.diff(of_text) != 1) & (position_ids.shape[:-2] != (3,))


def first_tokens(starts: np.ndarray) -> np.ndarray:
    """Return the first token of each token's document [b, s], from `GlobalSequence.starts`."""
    token = np.arange(starts.shape[1])
    return np.maximum.accumulate(np.where(starts, token, 0), 1)


def bounds_of(starts: np.ndarray) -> np.ndarray:
    """Return row, start and stop [n, 3] of the documents, or chunks, with the given starts.

    Args:
        starts: [b, s]. Whether a document or chunk starts at a token; True at the start of a row.
    """
    row, start = starts.nonzero()
    # A document stops where the next document of the row starts, or at the end of the row.
    is_last = np.diff(row, append=len(starts)) != 0
    stop = np.where(is_last, starts.shape[1], np.roll(start, -1))
    return np.stack([row, start, stop], 1)


_Method = TypeVar("_Method", bound=Callable)


def once(method: _Method) -> _Method:
    """Cache the results of a method by its arguments, in the method's object."""
    results_name = f"_results of {method.__name__}"

    @functools.wraps(method)
    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        results, key = vars(self).setdefault(results_name, {}), (args, *kwargs.items())
        if key not in results:
            results[key] = method(self, *args, **kwargs)
        return results[key]

    return kept  # type: ignore[return-value]  # of the same signature


class GlobalSequence:
    """Holds the positions, documents and padding of the global sequence in one forward.

    In each forward, `Positions.gather` makes this object on the host, equal on all ranks. Tensors
    are made on first use, and cached for all layers. No method communicates.

    Args:
        position_ids: [b or 1, s], or [3 or 4, b or 1, s] (see `restarts`). The positions of all
            ranks' tokens.
        lengths: [P]. Local sequence length of every rank, in tokens.
        mask: [b, s]. True for tokens that are not padding.
        device: Holds the tensors.
        where: The name of the model, for errors.
        fallbacks: The names of the layers that must fall back on some rank (`Forwards.fallible`).

    Attributes:
        rows: The batch size b.
        largest_position: The largest position of all ranks, by which some rotary embeddings choose
            their frequencies (`transformers.forward`).
        mask: [b, s]. True for tokens that are not padding.
        starts: [b, s]. Whether a document starts at each token. Padding after a document belongs to
            that document. Padding at the start of a row is a document.
        bounds: [n, 3]. Row, start and stop of each document.
        one_document: Whether every row is one document.
        has_padding: Whether the mask marks padding.
        padded: Whether only the mask shows the start of some document, which begins after padding,
            but whose positions continue. `Forwards.of` then refuses a layer without a mask.
        mask_made: Whether the model has made a mask that attention needs; `Masks` sets it.

    Raises:
        ValueError: if there is padding between the tokens of a document.
    """

    def __init__(
        self,
        position_ids: np.ndarray,
        lengths: list[int],
        mask: np.ndarray,
        device: torch.device,
        where: str,
        fallbacks: Collection[str] = (),
    ):
        self.lengths, self.device, self.fallbacks = lengths, device, fallbacks
        self.rows, self.largest_position = len(mask), int(position_ids.max())
        starts = np.ones_like(mask)
        starts[:, 1:] = restarts(position_ids)
        self.padded = self.mask_made = False
        self.has_padding = not mask.all()
        if self.has_padding:  # guard: padding is a document
            starts = self._with_padding(starts, mask, where)
        self.mask, self.starts, self.bounds = mask, starts, bounds_of(starts)
        self.one_document = len(self.bounds) == self.rows

    def _with_padding(self, starts: np.ndarray, mask: np.ndarray, where: str) -> np.ndarray:
        """Return the starts of documents [b, s] in a sequence with padding.

        The first token after padding is a start. Padding is no start, except at the start of a row.
        Sets `padded` if the positions don't show a start that was added.

        Raises:
            ValueError: if there is padding between the tokens of a document.
        """
        # For each token, the number of earlier tokens that are not padding.
        real_before = mask.cumsum(1) - mask
        behind_padding = mask & ~np.roll(mask, 1, 1) & ~starts
        real_before_document = np.take_along_axis(real_before, first_tokens(starts), 1)
        if (behind_padding & (real_before != real_before_document)).any():
            raise ValueError(
                f"{where}: attention_mask has padding between the tokens of a document; put it "
                "before or behind them, or let position_ids start anew behind it"
            )
        self.padded = bool(behind_padding.any())
        starts = (starts | behind_padding) & mask
        starts[:, 0] = True
        return starts

    def knows(self, rank: int, told: Mapping[str, Tensor]) -> bool:
        """Return whether position_ids show every document edge in the arguments of a rank.

        Args:
            rank: The rank, in the sp group.
            told: The `DOCUMENTS` arguments by name: edges in this rank's tokens or in all tokens;
                or the document index of each of this rank's tokens [b or 1, s/P].
        """
        # In an argument, documents may also start in padding, where a start has no effect.
        first, may_be_told = sum(self.lengths[:rank]), self.starts | ~self.mask
        own = may_be_told[:, first : first + self.lengths[rank]].copy()
        own[:, :1] = True
        known = [{*np.flatnonzero(edges), edges.size} for edges in (own, may_be_told)]
        for name, x in told.items():
            values = x.cpu().numpy()
            fits = any({*values.flatten()} <= edges for edges in known)
            if name == "seq_idx":
                # The index may change only at known edges.
                same_length = values.shape[-1] == own.shape[1]
                fits = same_length and ((np.diff(values) != 0) <= own[:, 1:]).all()
            if not fits:
                return False
        return True

    @once
    def documents(self, chunk: int | None = None, queries: Range | None = None) -> Documents | None:
        """Return the documents, cut into chunks; None if every row is one document and one chunk.

        `transformers.attention_function.local_attention` calls this method.

        Args:
            chunk: The length of a chunk in tokens, counted from the document's start; None for
                whole documents.
            queries: The range of tokens whose queries attend; None for all tokens.
        """
        bounds = self.bounds if chunk is None else bounds_of(self._places() % chunk == 0)
        if len(bounds) == self.rows:
            return None
        return Documents(bounds, self.device, queries)

    @once
    def for_flash(self, queries: Range) -> tuple[list[int], dict[str, Any]]:
        """Return the arguments with which transformers' flash attention separates documents.

        Args:
            queries: The range of tokens whose queries attend.

        Returns:
            A pair. First, for each row, the first token of its keys: the start of the first
            document that overlaps the range. (The keys end where the queries end.) Second, the
            keywords with the edges of the documents in the concatenated rows; {} if every row is
            one document.
        """
        if self.one_document:
            return [0] * self.rows, {}
        row, start, stop = overlapping(self.bounds, *queries)
        lengths = [stop - np.maximum(start, queries[0]), stop - start]
        edges = [np.append(0, length.cumsum()).astype(np.int32) for length in lengths]
        of_queries, of_keys = to_device(edges, self.device)
        keywords = dict(
            cu_seq_lens_q=of_queries,
            cu_seq_lens_k=of_keys,
            max_length_q=int(lengths[0].max()),
            max_length_k=int(lengths[1].max()),
        )
        # The documents are sorted by row, so ``searchsorted`` finds the first document of each row.
        first_keys = start[np.searchsorted(row, np.arange(self.rows))]
        return first_keys.tolist(), keywords

    @once
    def query_chunks(self, shares: int) -> QueryChunks | None:
        """Return, for each share, the tokens of its queries, balanced by work.

        None if every row is one document, if no ranks share heads, or if there are fewer tokens
        than shares. `Geometry` then chooses the tokens.

        Args:
            shares: r, the number of ranks that share their query heads.
        """
        seq = sum(self.lengths)
        if self.one_document or not 1 < shares <= seq:
            return None
        # The work of a query is its position in its document, counted from 1. Layers with a small
        # window get the same split, since all their queries cost about the same.
        return balanced((self._places() + 1).sum(0), shares)

    @functools.cached_property
    def position_ids(self) -> Tensor:
        """Return positions [b, s], from 0 in each document, for flash attentions of third parties."""
        return to_device([self._places()], self.device)[0]

    def _places(self) -> np.ndarray:
        """Return the index of each token in its document [b, s], counted from 0."""
        return np.arange(sum(self.lengths)) - first_tokens(self.starts)

    @once
    def window_mask(self, queries: int, keys: int, window: int) -> Tensor:
        """Return the causal mask [1, 1, queries, keys] of a sliding window of ``window`` tokens.

        The queries belong to the last tokens of the keys.
        """
        token = torch.arange(keys, device=self.device)
        distance = token[keys - queries :, None] - token[None, :]
        return ((distance >= 0) & (distance < window))[None, None]


def _is_filled(cache: Any) -> bool:
    """Return whether a KV cache of transformers is not empty."""
    try:
        return cache.get_seq_length() > 0
    except ValueError:
        # The cache of a model without attention layers doesn't count tokens.
        return cache.has_previous_state()


def _compared(of_ranks: list[tuple], where: str) -> set[str]:
    """Compare the ranks; return the names of the layers that must fall back on some rank.

    Args:
        of_ranks: [P]. For each rank: the error in its arguments, or None; the shape of its
            positions without the sequence dimension; and its ``names`` (`Positions.gather`).
        where: The name of the model, for errors.

    Raises:
        Exception: on all ranks, the error of some rank.
        ValueError: on all ranks, if the shapes of positions or the checkpointed modules differ
            between ranks.
    """
    faults, forms, names = zip(*of_ranks)
    texts = [fault and str(fault) for fault in faults]
    if any(texts):
        message = by_rank(texts) if len(set(texts)) > 1 else texts[0]
        raise type(next(filter(None, faults)))(f"{where}: {message}")
    if len(set(forms)) > 1:
        raise ValueError(
            f"{where}: position_ids differ in axes or batch over the sp ranks "
            f"({by_rank(map(list, forms))}); cut one batch over them"
        )
    fallbacks, texts = set[str](), []
    for falling_back, checkpointed in names:
        fallbacks.update(falling_back)
        more = f" and {len(checkpointed) - 1} more" if len(checkpointed) > 1 else ""
        texts.append(f"{checkpointed[0] if checkpointed else 'nothing'}{more}")
    if any(checkpointed != names[0][1] for _, checkpointed in names):
        raise ValueError(
            f"{where}: gradient checkpointing is on for other modules, or of another kind, on other "
            f"ranks ({by_rank(texts)}), and what backward computes again exchanges again; switch "
            "it on or off for the same modules on every rank"
        )
    return fallbacks


class Positions:
    """Gathers positions and masks from all ranks, once in each forward of a model.

    Args:
        sp_group: The sp group.
        documents: The value of ``sp_overlap.documents``.
    """

    def __init__(self, sp_group: SPGroup, documents: str):
        self.sp_group = sp_group
        # Whether to accept positions that start anew on every rank, which are mostly a mistake: if
        # the section says so, or once a forward has had other positions.
        self._may_restart = documents == "per_rank"
        # The size of the body of a message, in values. See Note [One message, one wait].
        self._room = 0
        # The KV caches of earlier forwards. In training, each forward has a new cache. In decoding,
        # a cache is passed again.
        self._caches: weakref.WeakSet = weakref.WeakSet()

    @torch._disable_dynamo
    def gather(
        self,
        where: str,
        tokens: Tensor | None,
        position_ids: Any,
        mask: Any = None,
        cache: Any = None,
        names: tuple[list[str], list[str]] = ([], []),
        told: Mapping[str, Tensor] | None = None,
    ) -> GlobalSequence:
        """Gather the global sequence of one call.

        Collective; errors are raised on all ranks. `Host` calls this method. `Forwards.of` calls it
        for a layer that is called outside a model's forward. The host waits for the device once.

        Args:
            where: The name of the model or layer, for errors.
            tokens: [b, s/P, ..]. Token ids or hidden states; may be None.
            position_ids: [b or 1, s/P] or [axes, b or 1, s/P].
            mask: [b, s/P]. Nonzero for tokens that are not padding; None without padding.
            cache: The KV cache, which must be empty; or None.
            names: The names of the layers that must fall back on this rank (`Forwards.fallible`),
                and those of the checkpointed modules.
            told: The `DOCUMENTS` arguments of this rank's call, by name.

        Returns:
            The global sequence, the same on all ranks.

        Raises:
            ValueError: for arguments that are missing, have a wrong form, or were not cut from one
                global sequence.
            RuntimeError: for a KV cache that is in use.
        """
        refuse_captured(where, NO_GRAPH)
        self.sp_group.refuse_destroyed(where)
        tensors = [x for x in (position_ids, tokens) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        fault, values = None, torch.empty(0, dtype=torch.long, device=device)
        try:
            values = self._checked(tokens, position_ids, mask, cache=cache)
        except (RuntimeError, ValueError) as error:
            # Send a header anyway, since the other ranks wait for it; all ranks raise below.
            fault = error
        form, length = tuple(values.shape[:-1]), -1 if fault else values.shape[-1]
        # The local length, or -1 after an error; whether `DOCUMENTS` arguments were given; a
        # checksum of what else must be equal on all ranks.
        header = [length, int(bool(told)), zlib.crc32(repr((form, names)).encode())]
        messages = self._every(header, values)
        lengths, are_told, checksums = messages[:, : len(header)].T.tolist()
        fallbacks = set(names[0])
        if min(lengths) < 0 or len(set(checksums)) > 1:  # guard: recomputed on all ranks
            fallbacks = _compared(self.sp_group.gather((fault, form, names), where), where)
        lines = math.prod(form)
        if not lines * sum(lengths):  # guard: somebody has a token
            raise ValueError(
                f"{where}: no sp rank has a token (batch {form[-1]}, local lengths {lengths}); leave "
                "such a batch out on all ranks"
            )
        if lines * max(lengths) > self._room:  # guard: travels in one message
            self._room = lines * max(lengths)
            messages = self._every(header, values)
        of_ranks = []
        for rank_length, rank_values in zip(lengths, messages[:, len(header) :]):
            of_ranks.append(rank_values[: lines * rank_length].reshape(*form, rank_length))
        whole = np.concatenate(of_ranks, -1)
        positions, is_real = whole >> 1, (whole & 1).astype(bool)
        self._refuse_restart(where, positions, lengths)
        sequence = GlobalSequence(
            positions,
            lengths,
            # All axes hold the same mask.
            mask=is_real.reshape(-1, *is_real.shape[-2:])[0],
            device=device,
            where=where,
            fallbacks=fallbacks,
        )
        if any(are_told):
            self._refuse_untold(where, sequence, told or {})
        return sequence

    def _refuse_untold(
        self, where: str, sequence: GlobalSequence, told: Mapping[str, Tensor]
    ) -> None:
        """Raise ValueError, on all ranks, if position_ids lack an edge in ``told``. Collective.

        Attention and mixers derive documents from position_ids only.
        """
        index = told.get("seq_idx")
        first, rank = None, self.sp_group.rank
        start = sum(sequence.lengths[:rank])
        # Padding after a document may have its own index.
        if index is not None and index.numel() and sequence.mask[0, start : start + 1].all():
            first = int(index.flatten()[0])
        answer = sequence.knows(rank, told), first
        known, firsts = zip(*self.sp_group.gather(answer, where))
        # Each rank may number its documents from 0. If every row is one document, the first tokens
        # of all ranks must have the same document index.
        several = sequence.one_document and len({*firsts} - {None}) > 1
        if several or not all(known):  # guard: documents are known
            raise ValueError(
                f"{where}: {', '.join(DOCUMENTS)} tell documents that position_ids don't tell; let "
                "position_ids start anew with each document"
            )

    def _checked(self, tokens: Tensor | None, position_ids: Any, mask: Any, cache: Any) -> Tensor:
        """Check the arguments on this rank, and record the KV cache.

        Returns:
            [b, s/P] or [axes, b, s/P]. Twice each position, plus 1 for a token that is not padding.

        Raises:
            RuntimeError: for a KV cache in use: not empty, or passed to an earlier forward.
            ValueError: for arguments that are missing or of a wrong form.
        """
        if cache is not None:
            # `generate` passes no position_ids. A paged cache or a tuple lacks this method, and is
            # never new.
            may_be_new = isinstance(position_ids, Tensor) and hasattr(cache, "get_seq_length")
            if not may_be_new or cache in self._caches or _is_filled(cache):
                raise RuntimeError(
                    "generation with a KV cache does not work on a sequence that is split over "
                    "ranks; call ds_sp_overlap.disable(model, stock_too=True), which takes "
                    "DeepSpeed's Ulysses out as well, and generate on each rank by itself"
                )
            self._caches.add(cache)
        if not isinstance(position_ids, Tensor):
            raise ValueError(f"sequence parallelism needs position_ids in every forward: {_NEEDED}")
        axes = position_ids.shape[:-2]
        if position_ids.dim() not in (2, 3) or axes not in ((), (3,), (4,)):
            raise ValueError(
                "position_ids must be [b, s/P]; or [axes, b, s/P] with 3 axes, of images, or 4, "
                f"those of text in front of them; give {_NEEDED}"
            )
        shape = position_ids.shape[-2:] if tokens is None else tokens.shape[:2]
        if len(shape) < 2 or position_ids.shape[-2:] not in (shape, (1, shape[1])):
            raise ValueError(
                f"position_ids and input_ids differ in batch or length; give {_NEEDED}"
            )
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise ValueError(
                "of a sequence that is split over ranks only a 2-D attention_mask [b, s/P], which "
                "tells padding, can be honoured, not a 4-D mask, a BlockMask or a dict of masks; "
                "leave it out, and let position_ids start anew with each document"
            )
        if mask is not None and mask.shape != shape:
            raise ValueError("attention_mask must be [b, s/P], cut over the ranks like input_ids")
        is_real = 1 if mask is None else (mask != 0).to(position_ids.device)
        return 2 * position_ids.long().expand(*axes, *shape) + is_real

    def _refuse_restart(self, where: str, position_ids: np.ndarray, lengths: list[int]) -> None:
        """Raise ValueError, on all ranks, if positions start anew on every rank and only there.

        If a forward has other positions, this method records that, and checks no later forward.
        """
        # The first token of each rank that has tokens.
        starts = [sum(lengths[:rank]) for rank, length in enumerate(lengths) if length]
        if self._may_restart or len(starts) == 1:
            return
        # If positions start anew on every rank, each row has one restart on every rank but the
        # first. Any further restarts lie elsewhere.
        found = restarts(position_ids)
        elsewhere = found.sum() > len(found) * (len(starts) - 1)
        # Such positions are taken for a mistake, unless a forward had others before: then documents
        # may happen to end where the ranks' tokens end.
        self._may_restart = bool(elsewhere or position_ids[..., starts].any())
        if not self._may_restart:
            raise ValueError(
                f"{where}: position_ids start anew on every rank; for one long sequence give "
                f"{_NEEDED}. Where documents are packed so that they do begin with every rank, "
                'set sp_overlap.documents to "per_rank"'
            )

    def _every(self, header: list[int], values: Tensor) -> np.ndarray:
        """Gather the messages of all ranks [P, len(header) + body] on the host. Collective.

        Only here does the host wait for the device. If ``values`` don't fit into the body, the body
        is zeros. The header holds the number of values, by which `gather` knows to send again.
        """
        (head,) = to_device([np.array(header)], values.device)
        fitting = values.flatten() if values.numel() <= self._room else head[:0]
        message = torch.cat([head, fitting, head.new_zeros(self._room - len(fitting))])
        messages = message.new_empty(self.sp_group.size, len(message))
        dist.all_gather(list(messages), message, group=self.sp_group.group)
        return messages.cpu().numpy()
