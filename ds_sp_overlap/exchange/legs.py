"""Lays out the two legs in which k and v travel once to each node.

Note [Once per node]
~~~~~~~~~~~~~~~~~~~~
Where several ranks of a node need the same KV heads, k and v would travel to each of them, over the
network too. With `Geometry.nodes`, they travel in two legs. In the first, these ranks, m
*siblings*, receive a *piece* each: the i-th of them gets the tokens of ranks i, i + m, i + 2m, ..
of the sp group. In the second, siblings give each other their pieces, inside the node. Gradients go
the same way back: siblings sum those of a piece, and send the sum to the ranks that hold its
tokens. The pieces interleave the ranks so that each sibling receives as much over the network as
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .geometry import Geometry
from .layout import Layout, Patches, Range, Side, joint


class Legs(NamedTuple):
    """The two legs of k, v or both, in the order in which they travel.

    Attributes:
        first: The layout of the leg that travels first.
        second: That of the other one.
        is_gradient: Whether gradients travel, so that the leg inside a node is the first.
    """

    first: Layout
    second: Layout
    is_gradient: bool = False

    def gradient(self, needed: Sequence[bool]) -> Legs | None:
        """Return the legs of those gradients that are needed; None if none is."""
        if not any(needed):
            return None
        return Legs(self.second.only(needed).inverse, self.first.only(needed).inverse, True)


@lru_cache(maxsize=4096)
def legs_of(
    geometry: Geometry,
    kinds: tuple[str, ...],
    group: int,
    head_dims: tuple[int, ...],
) -> Legs | None:
    """Lay out the two legs of k and v of an exchange, see Note [Once per node].

    Args:
        geometry: Which heads of which tokens each rank holds.
        kinds: What the exchange moves, as for `Geometry.exchange`.
        group: The head group.
        head_dims: ``d`` of each.

    Returns:
        The legs; None where there is one leg: without k and v, or where no rank
        has siblings. All ranks find the same.
    """
    relayed = [(kind, dim) for kind, dim in zip(kinds, head_dims) if kind in ("k", "v")]
    # v travels to the ranks that k travels to.
    siblings = [_siblings(geometry, group, rank) for rank in range(geometry.sp_size)]
    if not relayed or all(len(ranks) == 1 for ranks in siblings):
        return None
    sent = geometry.local_tokens
    # For each rank, the tokens of its piece: those of every m-th rank.
    pieces = [sent[ranks.index(rank) :: len(ranks)] for rank, ranks in enumerate(siblings)]
    first, second = [], []
    for kind, dim in relayed:
        first.append(geometry.lay_out(kind, group, dim, pieces))
        own = siblings[geometry.sp_rank]
        second.append(_spread(geometry, first[-1].target.shape, own, pieces))
    return Legs(joint(first, apart=True), joint(second, apart=True))


def _siblings(geometry: Geometry, group: int, rank: int) -> list[int]:
    """Return the ranks of the node of ``rank`` that are sent the same heads of k and v.

    ``rank`` is among them; alone if it is sent none, or if nodes don't count.
    """
    nodes, heads = geometry.nodes, geometry.sent_range("k", rank, group)
    if nodes is None or heads[0] >= heads[1]:
        return [rank]
    every = [(node, geometry.sent_range("k", other, group)) for other, node in enumerate(nodes)]
    return [other for other, its_own in enumerate(every) if its_own == every[rank]]


def _spread(
    geometry: Geometry,
    piece: tuple[int, ...],
    siblings: list[int],
    pieces: list[tuple[Range, ...]],
) -> Layout:
    """Lay out the second leg: the rank gives its siblings its piece, and gets theirs.

    Args:
        geometry: The geometry, with the rank.
        piece: Shape of the rank's own piece.
        siblings: The rank and its siblings.
        pieces: For each rank, the tokens of its piece.
    """
    seq_dim = geometry.seq_dim
    length, heads, head_dim = piece[seq_dim], piece[2], piece[3]
    parts, heads_of, tokens = [], [], []
    for rank in range(geometry.sp_size):
        is_sibling = rank in siblings
        # Each sibling is sent the whole piece, this rank too; other ranks are sent nothing.
        parts.append((0, length if is_sibling else 0))
        heads_of.append((0, heads if is_sibling else 0))
        tokens.append(pieces[rank] if is_sibling else ())
    whole = geometry.shape(sum(geometry.seq_lens), heads, head_dim)
    return Layout(
        Side(piece, seq_dim, tuple(parts)),
        Patches(whole, 2, tuple(heads_of), seq_dim, tuple(tokens)),
    )
