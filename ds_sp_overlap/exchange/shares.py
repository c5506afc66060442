"""Decides which ranks share their query heads, and which queries each of them attends with.

Note [Shares]
~~~~~~~~~~~~~
Where there are more ranks than heads, or heads do not divide by the ranks, r ranks share their
query heads: P = u r, and heads are dealt to u *parts* of r successive ranks instead of to P ranks.
Each of the r ranks attends with the same heads, over all keys, with its *share* of the queries. So
k and v travel to all ranks of a part, as always when several ranks need the same KV heads. q and o
are cut along heads and along tokens. Unless ``query_chunks`` is given, the sequence is cut into 2r
chunks, and share j takes chunks j and 2r - 1 - j, so that causal attention takes equally long on
all ranks:

    8 chunks, r = 4    share   0 1 2 3 3 2 1 0

If u is even and all ranks hold equally many tokens, each rank's tokens lie in one chunk, and so in
one share. In each part, the rank then sends all of its tokens to the one rank with this share: q is
cut along heads alone, as without shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from .layout import Range, chunk_of, end_to_end, joined, total

# For each share, ranges of tokens in ascending order.
QueryChunks = tuple[tuple[Range, ...], ...]


def possible_shares(sp_size: int, heads: int) -> list[int]:
    """Return all r, ascending, that divide P and leave a query head for each of the P / r parts."""
    return [r for r in range(1, sp_size + 1) if sp_size % r == 0 and sp_size // r <= heads]


# Instances are hashed by identity, so that lookups in the caches of methods are fast.
@dataclass(frozen=True, eq=False)
class Shares:
    """Computes the part and the share of each rank, and the tokens of each share.

    The base class of `Geometry`, which describes the attributes. Ranges index the tokens of the
    global sequence.
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
        """Check lengths, shares and chunks.

        Raises:
            ValueError: for a number of local lengths other than the sp size; for shares that don't
                divide the sp size or leave a part without a head; for fewer tokens than shares; or
                for ``query_chunks`` that omit or repeat a token, or leave a share without a token.
        """
        if len(self.seq_lens) != self.sp_size:
            raise ValueError(
                f"sequence_lengths: {len(self.seq_lens)} lengths {self.seq_lens} for sp size "
                f"{self.sp_size}; give the local length of every rank of the sp group"
            )
        possible = possible_shares(self.sp_size, self.heads)
        if self.shares not in possible:
            listed = ", ".join(map(str, possible))
            if self.shares == 1:
                raise ValueError(
                    f"head scatter of query: {self.heads} heads leave a rank of sp size "
                    f"{self.sp_size} with no head to attend with; use sp size {self.heads} or "
                    f"less, or sp_overlap.shares {listed}"
                )
            raise ValueError(
                f"sp_overlap.shares must divide sp size {self.sp_size} and leave each of "
                f"{self.heads} heads to a part of the ranks, got {self.shares}; take {listed}"
            )
        seq = sum(self.seq_lens)
        if self.query_chunks is None:
            if 0 < seq < self.shares:
                raise ValueError(
                    f"sp_overlap.shares: {seq} tokens leave a share of {self.shares} without a "
                    "query; give longer sequences, or fewer shares"
                )
            return
        ranges = sorted(chain(*self.query_chunks))
        is_filled = len(self.query_chunks) == self.shares and all(self.query_chunks)
        ascend = all(list(share) == sorted(share) for share in self.query_chunks)
        are_filled = all(start < stop for start, stop in ranges)
        are_all = joined(ranges) == ((0, seq),) and total(ranges) == seq
        if not (is_filled and ascend and are_filled and are_all):
            raise ValueError(
                f"query_chunks: {self.query_chunks} must give each of {self.shares} shares some of "
                f"{seq} tokens in ascending ranges, and each token to one share"
            )

    @property
    def parts(self) -> int:
        """Return ``u``, the number of parts: the ranks of a part have the same heads."""
        return self.sp_size // self.shares

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Return the part and the share of each rank."""
        # If nodes are known, heads are dealt node by node, so that the ranks of a part, which need
        # the same KV heads, are mostly on one node.
        nodes = self.nodes or (0,) * self.sp_size
        order = sorted(range(self.sp_size), key=nodes.__getitem__)
        return [divmod(order.index(rank), self.shares) for rank in range(self.sp_size)]

    def query_tokens(self, rank: int) -> tuple[Range, ...]:
        """Return the tokens whose queries ``rank`` attends with, in ascending ranges."""
        return self._tokens_of_shares[self.places[rank][1]]

    @cached_property
    def _tokens_of_shares(self) -> QueryChunks:
        """Return, for each share, the tokens whose queries belong to it, see Note [Shares]."""
        if self.query_chunks is not None:
            return self.query_chunks
        seq, chunks = sum(self.seq_lens), 2 * self.shares
        of_shares = []
        for share in range(self.shares):
            both = [chunk_of(seq, chunk, chunks) for chunk in (share, chunks - 1 - share)]
            # With few tokens and r >= 4, both chunks of a share may be empty. The share then has
            # one empty range, since every rank needs a range.
            of_shares.append(joined(both) or ((0, 0),))
        return tuple(of_shares)

    @cached_property
    def own_queries(self) -> tuple[Range, ...]:
        """Return `query_tokens` of this rank."""
        return self.query_tokens(self.sp_rank)

    @cached_property
    def local_tokens(self) -> tuple[Range, ...]:
        """Return for each rank the range of its local sequence."""
        return end_to_end(self.seq_lens)
