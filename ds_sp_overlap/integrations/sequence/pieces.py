"""Finds the documents among one rank's tokens, for mixers that work on these tokens only."""

from __future__ import annotations

import numpy as np

from ...attention.mixer import Pieces
from .documents import Documents, to_device
from .positions import GlobalSequence, once


@once
def pieces_of(
    sequence: GlobalSequence, rank: int, reach: int, by_states: bool, by_heads: bool
) -> Pieces:
    """Return the pieces of documents that a rank holds; cached in ``sequence``. No collective.

    Args:
        sequence: The global sequence.
        rank: The rank, in the sp group.
        reach: The number of tokens, before the rank's own, that it receives for a convolution.
        by_states: Whether the mixer exchanges states.
        by_heads: Whether the mixer exchanges heads.
    """
    starts, lengths, bounds = sequence.starts, sequence.lengths, sequence.bounds
    if sequence.one_document:
        return Pieces(lengths)
    first = sum(lengths[:rank])
    last = first + lengths[rank]

    def documents(begin: int) -> Documents | None:
        """Return the documents of the tokens from ``begin``; None if each row has one piece."""
        row, start, stop = bounds[(bounds[:, 1] < last) & (bounds[:, 2] > begin)].T
        if len(row) == sequence.rows:
            return None
        start, stop = np.maximum(start, begin) - begin, np.minimum(stop, last) - begin
        return Documents(np.stack([row, start, stop], 1), sequence.device)

    start_of = np.where(starts, np.arange(starts.shape[1]), 0)
    # For each row, the first token of the document that contains this rank's first token.
    began = start_of[:, : first + 1].max(1, keepdims=True)
    last_starts = (start_of[:, first:last].max(1) - first).clip(0)
    arrays = [starts[:, first:last].cumsum(1) == 0, began < np.cumsum(lengths)[:rank]]
    reached, reaches = to_device(arrays, sequence.device)
    return Pieces(
        lengths,
        window=documents(max(0, first - reach)) if reach else None,
        own=documents(first) if by_states else None,
        whole=sequence.documents() if by_heads else None,
        last_starts=last_starts.tolist(),
        reached=reached,
        reaches=reaches,
    )
