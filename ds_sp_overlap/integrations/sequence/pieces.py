"""Finds the documents among one rank's tokens, for mixers that work on these tokens only."""

from __future__ import annotations

import numpy as np

from ...attention.mixer import Pieces
from .documents import Documents, to_device
from .positions import GlobalSequence, bounds_of, first_tokens, once


@once
def pieces_of(
    sequence: GlobalSequence, rank: int, reach: int, by_states: bool, by_heads: bool
) -> Pieces:
    """Return the pieces of documents that a rank holds; cached in ``sequence``. No collective.

    Args:
        sequence: The global sequence.
        rank: The rank, in the sp group.
        reach: The number of earlier tokens that the rank receives for a convolution.
        by_states: Whether the mixer exchanges states.
        by_heads: Whether the mixer exchanges heads.
    """
    lengths = sequence.lengths
    if sequence.one_document:
        return Pieces(lengths)
    first = sum(lengths[:rank])
    last = first + lengths[rank]

    def documents(begin: int) -> Documents | None:
        """Return the documents of the tokens from ``begin``; None if each row has one piece."""
        starts = sequence.starts[:, begin:last].copy()
        starts[:, :1] = True
        bounds = bounds_of(starts)
        return None if len(bounds) == sequence.rows else Documents(bounds, sequence.device)

    # [b, s/P]. For each token of this rank, the first token of its document.
    began = first_tokens(sequence.starts)[:, first:last]
    arrays = [began < first, began[:, :1] < np.cumsum(lengths)[:rank]]
    reached, reaches = to_device(arrays, sequence.device)
    return Pieces(
        lengths,
        window=documents(max(0, first - reach)) if reach else None,
        own=documents(first) if by_states else None,
        whole=sequence.documents() if by_heads else None,
        last_starts=(began[:, -1] - first).clip(0).tolist(),
        reached=reached,
        reaches=reaches,
    )
