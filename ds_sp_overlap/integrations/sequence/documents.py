"""Attends within each document of a packed sequence, in few kernel calls.

One call per document would be slow if a row packs many short documents. `Documents` sorts the
documents by length: each long document has its own call, and short documents of similar length
share a call. So there are fewer than 8 calls per row for long documents. For short documents, there
is one call for each power of two up to an eighth of the sequence.

The queries may cover only a range of the sequence. A document that begins in the range is treated
as above. A document that began before the range has its own call, in which the queries belong to
the last tokens of the keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...exchange.layout import Range

# A document is long if it is longer than an eighth of a row.
_LONG = 8
# The largest batch that every attention kernel takes.
_BATCH = 2**15


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays of one dtype to ``device`` in one transfer, for which the host does not wait.

    Returns:
        For each array, a tensor of the same shape.
    """
    host = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    # Only a copy from pinned memory is asynchronous.
    host = host if device.type == "cpu" else host.pin_memory()
    parts = host.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays)]


def overlapping(bounds: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return row, start and stop [3, n] of the documents with tokens in a range.

    A document may start before the range. Its stop is at most ``last``.

    Args:
        bounds: [n, 3]. Row, start and stop of each document.
        first: The first token of the range.
        last: The first token after the range.
    """
    row, start, stop = bounds[(bounds[:, 1] < last) & (bounds[:, 2] > first)].T
    return np.stack([row, start, np.minimum(stop, last)])


class Documents:
    """Sorts the documents of every row of a batch into calls of attention.

    `GlobalSequence` makes this object on the host, once for all layers of a forward of the model.

    Args:
        bounds: [n, 3]. Row, start and stop of each document, sorted by row and start. All tokens
            of all rows are in a document.
        device: Holds the index tensors.
        queries: The range of tokens whose queries attend, (first, last + 1); None for all tokens.

    Attributes:
        queries: The range of tokens whose queries attend; (0, s) for all tokens.
        long: For each call of attention on a long document: row, start and stop. Documents that
            began before the range of queries are included, even if short.
        short: For each call on short documents: the tokens to gather, [n, length]; and, for the
            tokens that are not padding, their indices in the flattened result. The length is a
            power of two. A shorter document is padded with copies of its last token.
        order: [b * n] for n queries in a row. The index of each query in the concatenated results
            of all calls; None if the results are in order, because all documents are long.
    """

    def __init__(self, bounds: np.ndarray, device: torch.device, queries: Range | None = None):
        last_row, _, seq = bounds[-1].tolist()
        self.rows, self.queries = last_row + 1, queries or (0, seq)
        first, last = self.queries
        row, start, stop = found = overlapping(bounds, first, last)
        # From here on, a row has only its queries, and indices count from the first query.
        seq, length = last - first, stop - start
        is_long = (start < first) | (length * _LONG > seq)
        self.long = found.T[is_long].tolist()
        self.short: list[tuple[Tensor, Tensor]] = []
        self.order: Tensor | None = None
        if is_long.all():
            return
        # For each call, in the order of its results: the queries, as indices into the concatenated
        # rows.
        tokens_of_calls = []
        for at, begin, end in self.long:
            tokens_of_calls.append(at * seq - first + np.arange(max(begin, first), end))
        index_arrays = []
        starts = row * seq + start - first
        # The padded length of each document in its call; 0 for a long document.
        powers = np.where(is_long, 0, 2 ** np.ceil(np.log2(length)).astype(int))
        for power in np.unique(powers[powers > 0]):
            (similar,) = np.nonzero(powers == power)
            for batch in np.split(similar, range(_BATCH, len(similar), _BATCH)):
                # Pad a shorter document with copies of its last token. ``real`` marks other tokens.
                nth, lengths = np.arange(power), length[batch, None]
                index, real = starts[batch, None] + np.minimum(nth, lengths - 1), nth < lengths
                index_arrays += [index, np.flatnonzero(real)]
                tokens_of_calls.append(index[real])

        # The inverse permutation of ``tokens_of_calls``: the index of each query's result.
        order = np.argsort(np.concatenate(tokens_of_calls))
        *short, self.order = to_device([*index_arrays, order], device)
        self.short = list(zip(short[::2], short[1::2]))

    def attend(self, attention: Callable[..., Tensor], q: Tensor, *others: Tensor) -> Tensor:
        """Attend within each document: in those of `long` one by one and in order, then in `short`.

        Args:
            attention: Takes q, k, v [n, length, h, d] of n documents; returns o [n, length, h, d].
                For a document that began before the range of queries, q is shorter than k and v.
            q: [b, n, h, d]. The queries of all s tokens, or of the range.
            *others: k and v [b, s, h_kv, d]; or other arguments of ``attention``, [b, s, ..].

        Returns:
            o [b, n, h, d].
        """
        first, last = self.queries
        outputs = []
        for row, start, stop in self.long:
            of_document = q[row, None, max(start - first, 0) : stop - first]
            outputs.append(attention(of_document, *(x[row, None, start:stop] for x in others))[0])
        if self.order is None:
            return torch.cat(outputs).unflatten(0, (self.rows, -1))
        tokens = [x.flatten(0, 1) for x in (q, *(x[:, first:last] for x in others))]
        for index, real in self.short:
            gathered = [
                x.index_select(0, index.flatten()).unflatten(0, index.shape) for x in tokens
            ]
            outputs.append(attention(*gathered).flatten(0, 1).index_select(0, real))
        return torch.cat(outputs).index_select(0, self.order).unflatten(0, (self.rows, -1))
