"""Lays out every exchange of a layer: which heads of which tokens each rank sends and receives.

A `Geometry` is a frozen value: no tensors, no torch.distributed. `heads` says which heads a rank
attends with, `shares` with which queries, `legs` how k and v travel once to each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from .heads import Heads
from .layout import Layout, Patches, Range, Side, joint
from .shares import QueryChunks, common, possible_shares


@lru_cache(maxsize=4096)
def shares_for(sp_size: int, heads: int, kv_heads: int) -> int:
    """Return r for "auto", see Note [Shares] in `shares`."""
    # The smallest r with which heads divide by the u = P / r parts; 1 if they divide by the ranks.
    even = next(r for r in possible_shares(sp_size, heads) if heads % (sp_size // r) == 0)
    if even == 1 or heads < sp_size:
        return even
    # Every rank can have a head without sharing. Sharing lets q and o shrink and k and v grow: it
    # must not make the busiest rank receive more.
    alone = Geometry(sp_size, 0, (sp_size,) * sp_size, 1, heads, kv_heads)
    shared = replace(alone, shares=even)
    return even if shared.most_received <= alone.most_received else 1


# Hashed by identity, so that looking one up in a method's cache is fast.
@dataclass(frozen=True, eq=False)
class Geometry(Heads):
    """Heads, tokens and ranks of one call of an attention layer.

    Attributes:
        sp_size: Ranks of the sp group, ``P``.
        sp_rank: This rank, in the sp group.
        seq_lens: Local sequence length of every rank, in tokens.
        batch: ``b``.
        heads: Query heads, ``h``.
        kv_heads: KV heads, ``h_kv``; divides ``heads``.
        groups: Head groups, ``G``; at most the query heads of the rank that has fewest.
        batch_first: Whether tensors are ``[b, s, h, d]`` instead of ``[s, b, h, d]``.
        shares: Ranks that share their query heads, ``r``; divides ``P``. See Note [Shares] in
            `shares`.
        query_chunks: For each share, the tokens whose queries it attends with; None for two chunks
            each, as that note says.
        nodes: The node of every rank, for k and v to travel once to each; None for one leg. See
            Note [Once per node] in `legs`.

    Raises:
        ValueError: for counts that no exchange can satisfy.
    """

    sp_size: int
    sp_rank: int
    seq_lens: tuple[int, ...]
    batch: int
    heads: int
    kv_heads: int
    groups: int = 1
    batch_first: bool = False
    shares: int = 1
    query_chunks: QueryChunks | None = None
    nodes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sp_rank < self.sp_size:
            raise ValueError(
                f"sp rank must be between 0 and {self.sp_size - 1} at sp size {self.sp_size}, "
                f"got {self.sp_rank}"
            )
        if len(self.seq_lens) != self.sp_size:
            raise ValueError(
                f"sequence_lengths: {len(self.seq_lens)} lengths {self.seq_lens} for sp size "
                f"{self.sp_size}; give the local length of every rank of the sp group"
            )
        self.check_heads()

    @lru_cache(maxsize=4096)
    def in_groups(self, groups: int) -> Geometry:
        """Return the same geometry with another number of head groups."""
        return replace(self, groups=groups)

    @cached_property
    def seq_dim(self) -> int:
        """The dimension of the sequence in q, k, v and o."""
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
        """Lay out one exchange, of q, k, v (head scatter) or o (sequence scatter) of a group.

        The local tensors hold the heads of `heads_of`. The global tensors hold the heads of
        `sent_range` on this rank.

        Args:
            kinds: What the exchange moves, as "qkv" or ("q", "k", "v"). Or only "o", once or more
                often: o and do, which travel together in the direction of o's inverse, are laid
                out as two "q".
            group: The head group.
            head_dims: ``d`` of each.
            by_rank: Give the local tensors a dimension for the parts of the ranks,
                ``[.., u, heads, d]``. Only for kinds that `divides` affirms.
        """
        if set(kinds) == {"o"}:
            queries = "q" * len(kinds)
            return self.exchange(queries, group, head_dims, by_rank).inverse
        # For each rank, the tokens that it receives: of k and v all, of q those of its share.
        of_keys: list[tuple[Range, ...]] = [((0, sum(self.seq_lens)),)] * self.sp_size
        of_query = [self.query_tokens(rank) for rank in range(self.sp_size)]
        layouts = []
        for kind, dim in zip(kinds, head_dims):
            room = of_query if kind == "q" else of_keys
            layouts.append(self.lay_out(kind, group, dim, room, by_rank))
        return joint(layouts, apart=self.shares > 1)

    def lay_out(
        self,
        kind: str,
        group: int,
        head_dim: int,
        room: Sequence[tuple[Range, ...]],
        by_rank: bool = False,
    ) -> Layout:
        """Lay out an exchange of q, k or v.

        Args:
            kind: "q", "k" or "v".
            group: The head group.
            head_dim: ``d``.
            room: For each rank, the ranges of tokens that it receives, counted in the whole
                sequence.
            by_rank: As in `exchange`.
        """
        # The heads of the local tensor, in their order.
        heads = [head for start, stop in self.heads_of(kind, group) for head in range(start, stop)]
        first, last = self.local_tokens[self.sp_rank]
        local_len = last - first
        parts: list[Range] = []
        tokens: list[tuple[Range, ...]] = []
        # An empty part begins and ends where the part before it ends: parts lie end to end.
        edge = 0
        for rank in range(self.sp_size):
            begin, end = self.sent_range(kind, rank, group)
            of_rank = common(room[rank], (first, last))
            # Counted from this rank's first token.
            tokens.append(tuple((low - first, high - first) for low, high in of_rank))
            # The rank is sent no head, or none of this rank's tokens. A rank that has no tokens at
            # all keeps the ranges of heads: its parts have no elements anyway.
            if begin == end or (first < last and not of_rank):
                parts.append((edge, edge))
                continue
            edge = heads.index(begin) + end - begin
            parts.append((heads.index(begin), edge))
        start, stop = self.sent_range(kind, self.sp_rank, group)
        shape = self.shape(local_len, len(heads), head_dim)
        if by_rank:
            # A projection can write each part into memory of its own, so that the tensor is the
            # buffer that travels.
            each = stop - start
            shape = (*shape[:2], len(heads) // each, each, head_dim)
            parts = [(begin // each, end // each) for begin, end in parts]
        local = Side(shape, 2, tuple(parts))
        # Some rank is sent only some of this rank's tokens.
        if any(0 < _before(ranges, local_len) < local_len for ranges in tokens):
            local = Patches(shape, 2, tuple(parts), self.seq_dim, tuple(tokens))
        own = room[self.sp_rank]
        # Tokens for which the global tensor has no room leave an empty part.
        received = Side(
            self.shape(_before(own, sum(self.seq_lens)), stop - start, head_dim),
            self.seq_dim,
            tuple((_before(own, low), _before(own, high)) for low, high in self.local_tokens),
        )
        return Layout(local, received)


def _before(ranges: tuple[Range, ...], token: int) -> int:
    """Return how many tokens of ``ranges`` come before ``token``."""
    return sum(min(token, stop) - start for start, stop in ranges if start < token)
