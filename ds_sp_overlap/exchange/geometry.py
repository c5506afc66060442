"""Lays out every exchange of a layer: which heads of which tokens each rank sends and receives.

A `Geometry` is a frozen value, without tensors and without torch.distributed. `heads` chooses the
heads that a rank attends with, and `shares` the queries. If k and v travel once to each node,
`relayed` lays out their two legs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from .heads import Heads
from .layout import HEADS, Held, Layout, Range, Side, between
from .shares import possible_shares


@lru_cache(maxsize=4096)
def shares_for(sp_size: int, heads: int, kv_heads: int) -> int:
    """Return the number of shares r for ``"shares": "auto"``, see Note [Shares] in `shares`."""
    # The smallest r for which the heads divide evenly by the u = P / r parts.
    even = next(r for r in possible_shares(sp_size, heads) if heads % (sp_size // r) == 0)
    if even == 1 or heads < sp_size:
        return even
    # Every rank can have a head without sharing. With sharing, ranks receive less of q and o and
    # more of k and v. Share only if the largest amount that a rank receives does not grow.
    alone = Geometry(sp_size, 0, (sp_size,) * sp_size, 1, heads, kv_heads)
    shared = replace(alone, shares=even)
    return even if shared.most_received <= alone.most_received else 1


class Geometry(Heads):
    """Describes heads, tokens and ranks of one call of an attention layer.

    Attributes:
        sp_size: Ranks of the sp group, ``P``.
        sp_rank: This rank, in the sp group.
        seq_lens: Local sequence length of every rank, in tokens.
        batch: ``b``.
        heads: Query heads, ``h``.
        kv_heads: KV heads, ``h_kv``; divides ``heads``.
        groups: Head groups, ``G``; at most the smallest number of query heads on any rank.
        batch_first: Whether tensors are ``[b, s, h, d]`` instead of ``[s, b, h, d]``.
        shares: Ranks that share their query heads, ``r``; divides ``P``. See Note [Shares] in
            `shares`.
        query_chunks: For each share, the ranges of tokens whose queries belong to the share; None
            for two chunks for each share, see Note [Shares].
        nodes: The node of every rank, so that k and v travel once to each node, in two legs; None
            for one leg. See Note [Once per node] in `relayed`.

    Raises:
        ValueError: for counts that no exchange can satisfy.
    """

    @lru_cache(maxsize=4096)
    def in_groups(self, groups: int) -> Geometry:
        """Return the same geometry with another number of head groups."""
        return replace(self, groups=groups)

    @cached_property
    def cuts_tokens(self) -> bool:
        """Return whether the exchange cuts this rank's q along tokens."""
        cut = self.exchange("q", 0, (1,)).sources.cut
        return cut is None or cut[0] != HEADS

    def divides(self, kind: str) -> bool:
        """Return whether, in each group, all `parts` receive equally many heads, and no head twice.

        The local tensor may then have a dimension for the parts (``by_rank`` of `exchange`).

        Args:
            kind: "q", "k" or "v"; "q" also stands for o.
        """
        # With shares, k and v go to all ranks of a part, and q may also be cut along tokens.
        if self.shares > 1 and (kind != "q" or self.cuts_tokens):
            return False
        heads = self.heads if kind == "q" else self.kv_heads
        # Heads are dealt node by node. So successive ranks have successive heads only if each node
        # holds successive ranks.
        return heads % self.parts == 0 and self.places == sorted(self.places)

    @cached_property
    def in_slices(self) -> frozenset[str]:
        """Return the kinds (q, k, v) for which a group's heads are several evenly spaced slices."""
        kinds = [kind for kind in "qkv" if len(self.heads_of(kind, 0)) > 1 and self.divides(kind)]
        return frozenset(kinds)

    @cached_property
    def seq_dim(self) -> int:
        """Return the dimension of the sequence in q, k, v and o."""
        return 1 if self.batch_first else 0

    def shape(self, seq: int, heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of q, k, v or o with ``seq`` tokens and ``heads`` heads."""
        first = (self.batch, seq) if self.batch_first else (seq, self.batch)
        return (*first, heads, head_dim)

    @lru_cache(maxsize=4096)
    def exchange(
        self,
        kinds: str | tuple[str, ...],
        group: int,
        head_dims: tuple[int, ...],
        by_rank: bool = False,
    ) -> Layout:
        """Lay out one exchange of a head group: q, k, v (head scatter) or o (sequence scatter).

        The local tensors hold the heads of `heads_of`. The global tensors hold the heads of
        `sent_range` on this rank.

        Args:
            kinds: The tensors that the exchange moves: some of q, k, v, as "qkv" or ("q", "k",
                "v"); or "o". ("qq" stands for o and do that travel together in a head scatter.)
            group: The head group.
            head_dims: ``d`` of each tensor.
            by_rank: Whether the local tensors have a dimension for the parts,
                ``[.., u, heads, d]``; allowed for kinds for which `divides` is true.
        """
        if set(kinds) == {"o"}:
            queries = "q" * len(kinds)
            return self.exchange(queries, group, head_dims, by_rank).inverse
        # Each rank receives k and v of all tokens, and q of the tokens of its share.
        of_keys = [((0, sum(self.seq_lens)),)] * self.sp_size
        of_query = [self.query_tokens(rank) for rank in range(self.sp_size)]
        ends = []
        for kind, dim in zip(kinds, head_dims):
            after = self.received(kind, group, dim, of_query if kind == "q" else of_keys)
            local, received = between(self.sp_rank, self.sent(kind, group, dim), after)
            if by_rank:
                # A projection can write the parts one after another in memory, so that the tensor
                # is the send buffer.
                local = _by_rank(local, received.shape[HEADS])
            ends.append((local, received))
        return Layout.of(ends)

    def sent(self, kind: str, group: int, head_dim: int) -> list[Held]:
        """Return the ranges of q, k or v of ``group`` that each rank holds before the exchange."""
        heads = self.heads_of(kind, group)
        return [self._held([tokens], heads, head_dim) for tokens in self.local_tokens]

    def received(
        self, kind: str, group: int, head_dim: int, tokens: Sequence[Sequence[Range]]
    ) -> list[Held]:
        """Return the ranges of q, k or v of ``group`` that each rank holds after the exchange.

        Args:
            kind: "q", "k" or "v".
            group: The head group.
            head_dim: ``d``.
            tokens: For each rank, the ranges of the global sequence that it receives.
        """
        held = []
        for rank, of_rank in enumerate(tokens):
            heads = self.sent_range(kind, rank, group)
            held.append(self._held(of_rank, [heads], head_dim))
        return held

    def _held(self, tokens: Sequence[Range], heads: Sequence[Range], head_dim: int) -> Held:
        batch = [(0, self.batch)]
        first = (batch, tokens) if self.batch_first else (tokens, batch)
        return (*first, heads, [(0, head_dim)])


def _by_rank(side: Side, count: int) -> Side:
    """Return ``side`` with its heads split into two dimensions, ``[.., u, count, d]``."""
    shape = (*side.shape[:HEADS], side.shape[HEADS] // count, count, side.shape[-1])
    parts = []
    for blocks in side.parts:
        of_peer = []
        for *first, (start, stop), last in blocks:
            of_peer.append((*first, (start // count, stop // count), (0, count), last))
        parts.append(tuple(of_peer))
    return Side(shape, tuple(parts))
