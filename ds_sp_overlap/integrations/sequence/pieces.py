"""The documents of one rank's tokens, for mixers that work on these tokens alone."""

from __future__ import annotations

import numpy as np

from ...attention.mixer import Mixer, Pieces
from .documents import Documents, to_device
from .positions import GlobalSequence


def pieces_of(sequence: GlobalSequence, rank: int, reach: int, mixer: Mixer) -> Pieces:
    """Return the pieces of documents that a rank holds; cached in ``sequence``. No collective.

    Args:
        sequence: The global sequence.
        rank: The rank, in the sp group.
        reach: How many tokens before its own the rank is given.
        mixer: For whom; the documents that it has no use for are left out.
    """
    key = rank, reach, mixer.states is None, mixer.heads is None
    if key not in sequence.pieces:
        sequence.pieces[key] = _pieces_of(sequence, rank, reach, mixer)
    return sequence.pieces[key]


def _pieces_of(sequence: GlobalSequence, rank: int, reach: int, mixer: Mixer) -> Pieces:
    """Return the pieces of documents that a rank holds; see `pieces_of`."""
    starts, lengths, bounds = sequence.recurrent_starts, sequence.lengths, sequence.recurrent_bounds
    if bounds is None:
        return Pieces(lengths)
    first = sum(lengths[:rank])
    last = first + lengths[rank]

    def documents(begin: int) -> Documents | None:
        """Return the documents of the tokens from ``begin``; None if each row has one piece."""
        row, start, stop = bounds[(bounds[:, 1] < last) & (bounds[:, 2] > begin)].T
        if len(row) == sequence.rows:
            return None
        start, stop = np.maximum(start, begin) - begin, np.minimum(stop, last) - begin
        clipped = np.stack([row, start, stop], 1)
        return Documents(clipped, sequence.rows, last - begin, device=sequence.device)

    own = starts[:, first:last]
    token = np.arange(starts.shape[1])
    # For each row, the first token of the document that this rank's first token belongs to.
    began = np.maximum.accumulate(np.where(starts, token, 0), 1)[:, first]
    ends = np.cumsum(lengths)[:rank]
    reached, reaches = to_device(
        [own.cumsum(1) == 0, began[:, None] < ends[None, :]], sequence.device
    )
    last_starts = np.where(own, np.arange(last - first), 0).max(1)
    return Pieces(
        lengths,
        window=documents(max(0, first - reach)) if reach else None,
        own=documents(first) if mixer.states else None,
        whole=sequence.recurrent_documents if mixer.heads else None,
        last_starts=last_starts.tolist(),
        reached=reached,
        reaches=reaches,
    )
