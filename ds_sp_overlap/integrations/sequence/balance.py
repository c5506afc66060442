"""Dealing the queries of packed documents to the ranks that share query heads, by work.

Two chunks for each share (`exchange.geometry`, Note [Shares]) balance one long document. Behind the
start of a document attention is cheap again, so that of packed documents one share may get the ends
of all. Here the sequence is cut into more chunks. The one with most work is dealt first, each to
the share that has least.
"""

from __future__ import annotations

import numpy as np

from ...exchange.layout import chunk_of, joined
from ...exchange.shares import QueryChunks

# Chunks for each share. More chunks balance better, but each is a call of attention of its own.
_CHUNKS = 8


def balanced(work: np.ndarray, shares: int) -> QueryChunks:
    """Deal the tokens of the sequence to shares; the same on every rank.

    Args:
        work: [s]. The number of keys that the query of each token sees.
        shares: r; at most s.

    Returns:
        For each share, its tokens in ascending ranges.
    """
    chunks = min(_CHUNKS, len(work) // shares)
    ranges = [chunk_of(len(work), at, chunks * shares) for at in range(chunks * shares)]
    of_chunks = np.add.reduceat(work, [start for start, _ in ranges]).tolist()
    # The work that each share was dealt so far, and its chunks.
    loads, dealt = [0] * shares, [[] for _ in range(shares)]  # type: ignore[var-annotated]
    for chunk in sorted(range(len(ranges)), key=lambda chunk: -of_chunks[chunk]):
        # All shares get equally many chunks, so that q and o stay equally large.
        free = [share for share in range(shares) if len(dealt[share]) < chunks]
        share = min(free, key=loads.__getitem__)
        loads[share] += of_chunks[chunk]
        dealt[share].append(ranges[chunk])
    return tuple(map(joined, dealt))
