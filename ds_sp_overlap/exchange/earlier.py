"""Lays out what a rank receives from the ranks whose tokens come before its own.

A convolution needs the last few tokens before the first of this rank: `tail_layout`. A recurrence
needs what every earlier rank left behind, its state: `state_layout`. Nothing travels to a rank
whose tokens come before.
"""

from __future__ import annotations

from functools import lru_cache

from .layout import Layout, Side, end_to_end


@lru_cache(maxsize=4096)
def tail_layout(rank: int, lengths: tuple[int, ...], reach: int, batch: int, width: int) -> Layout:
    """Lay out the exchange of tokens that the ranks behind need.

    Args:
        rank: This rank, in the sp group.
        lengths: Local sequence length of every rank, in tokens.
        reach: How many tokens before its own a rank needs.
        batch: ``b``.
        width: Numbers a token.

    Returns:
        A layout from this rank's last tokens [b, n, width], as many as the rank behind that needs
        most, to the tokens before this rank's first, [b, ``reach`` or all there are, width].
    """
    edges = end_to_end(lengths)

    def sent(source: int, target: int) -> int:
        """Return how many of its last tokens rank ``source`` sends to rank ``target``."""
        (start, stop), (first, _) = edges[source], edges[target]
        return max(0, stop - max(start, first - reach)) if source < target else 0

    to_peers = [sent(rank, peer) for peer in range(len(lengths))]
    most = max(to_peers)
    parts = tuple((most - tokens, most) for tokens in to_peers)
    received = [sent(peer, rank) for peer in range(len(lengths))]
    target = Side((batch, sum(received), width), 1, end_to_end(received))
    return Layout(Side((batch, most, width), 1, parts), target)


@lru_cache(maxsize=4096)
def state_layout(rank: int, size: int, batch: int, heads: int, width: int) -> Layout:
    """Lay out the exchange of states.

    Args:
        rank: This rank, in the sp group.
        size: ``P``.
        batch: ``b``.
        heads: Heads of a state.
        width: Numbers a head.

    Returns:
        A layout from this rank's state [b, heads, width], of no heads on the last rank, to those of
        the earlier ranks, [b, ``rank`` x heads, width].
    """
    sent = heads if rank < size - 1 else 0
    parts = tuple((0, sent) if peer > rank else (0, 0) for peer in range(size))
    received = [heads if peer < rank else 0 for peer in range(size)]
    target = Side((batch, rank * heads, width), 1, end_to_end(received))
    return Layout(Side((batch, sent, width), 1, parts), target)
