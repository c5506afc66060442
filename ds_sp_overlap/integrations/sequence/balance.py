"""Splits the queries of packed documents by work, over the ranks that share query heads.

Two chunks for each share balance one long document (Note [Shares] in `exchange.shares`). In packed
documents, a query costs more the further it is from its document's start, so one share might get
the expensive ends of all documents. So this file cuts the sequence into more chunks. In descending
order of work, each chunk goes to the share with the least work so far.
"""

from __future__ import annotations

import numpy as np

from ...exchange.layout import chunk_of, joined
from ...exchange.shares import QueryChunks

# Chunks for each share. More chunks balance better, but each chunk is a separate attention call.
_CHUNKS = 8


def balanced(work: np.ndarray, shares: int) -> QueryChunks:
    """Assign the tokens of the sequence to shares; the result is the same on every rank.

    Args:
        work: [s]. The number of keys to which each token attends.
        shares: r, the number of shares; at most s.

    Returns:
        For each share, the ranges of its tokens in ascending order.
    """
    chunks = min(_CHUNKS, len(work) // shares)
    ranges = [chunk_of(len(work), at, chunks * shares) for at in range(chunks * shares)]
    of_chunks = np.add.reduceat(work, [start for start, _ in ranges]).tolist()
    # The work that each share has so far, and its chunks.
    loads, dealt = [0] * shares, [[] for _ in range(shares)]  # type: ignore[var-annotated]
    for chunk in sorted(range(len(ranges)), key=lambda chunk: -of_chunks[chunk]):
        # All shares get the same number of chunks, so that q and o have nearly equal sizes.
        free = [share for share in range(shares) if len(dealt[share]) < chunks]
        share = min(free, key=loads.__getitem__)
        loads[share] += of_chunks[chunk]
        dealt[share].append(ranges[chunk])
    return tuple(map(joined, dealt))
