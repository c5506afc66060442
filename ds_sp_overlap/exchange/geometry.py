"""Which heads of which tokens each rank holds, and what an exchange moves, as a frozen value; no tensors, no torch.distributed.

Which heads go where is one rule: query heads are dealt out in contiguous, balanced ranges, the larger
ones first, and a rank receives the KV heads that its query heads attend to. Replication of KV heads (fewer KV heads
than ranks, or a KV group that two ranks share) falls out of that rule. For head counts that divide it is the split of
DeepSpeed's ``DistributedAttention`` and ``UlyssesSPAttentionHF``.

Head groups are dealt out before ranks, where no KV head is then sent more often: the heads of a group lie together, and its rows
of a weight are a view. Else each rank's range is cut into groups, and a group's rows lie apart:

    8 heads, 2 ranks, 2 groups   0 0 1 1 | 0 0 1 1    or    0 0 0 0 | 1 1 1 1   the rank of each head
                                 group 0 | group 1          0 0 1 1   0 0 1 1   its group
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from .layout import Layout, Range, Side, chunk_of


@dataclass(frozen=True)
class Geometry:
    """Who holds what in one call of an attention layer.

    sp_size      ranks of the sp group, ``P``
    sp_rank      this rank
    seq_lens     local sequence length of every rank, in tokens
    batch        ``b``
    heads        query heads, ``h``
    kv_heads     KV heads, ``h_kv``; divides ``heads``
    groups       head groups, ``G``; at most the query heads of the rank that has fewest
    batch_first  ``[b, s, h, d]`` instead of ``[s, b, h, d]``

    Raises ValueError for counts that no exchange can satisfy.
    """

    sp_size: int
    sp_rank: int
    seq_lens: tuple[int, ...]
    batch: int
    heads: int
    kv_heads: int
    groups: int = 1
    batch_first: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.sp_rank < self.sp_size:
            raise ValueError(f"sp rank must be between 0 and {self.sp_size - 1} at sp size {self.sp_size}, got {self.sp_rank}")
        if len(self.seq_lens) != self.sp_size:
            raise ValueError(
                f"sequence_lengths: {len(self.seq_lens)} lengths {self.seq_lens} for sp size {self.sp_size}; "
                "give the local length of every rank of the sp group"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            fit = ", ".join(str(heads) for heads in range(1, self.heads + 1) if self.heads % heads == 0)
            raise ValueError(
                f"KV heads must divide the query heads, got {self.heads} query and {self.kv_heads} KV heads; take {fit} KV heads"
            )
        if self.heads < self.sp_size:
            raise ValueError(
                f"head scatter of query: {self.heads} heads leave a rank of sp size {self.sp_size} with no head to attend "
                f"with; use sp size {self.heads} or less"
            )
        if not 1 <= self.groups <= self.max_groups:
            raise ValueError(
                f"sp_overlap.head_groups must be between 1 and {self.max_groups} for {self.heads} heads at sp size "
                f"{self.sp_size}, got {self.groups}"
            )

    @cached_property
    def _hash(self) -> int:
        return hash((self.sp_size, self.sp_rank, self.seq_lens, self.batch, self.heads, self.kv_heads, self.groups))

    def __hash__(self) -> int:  # asked for many times a call
        return self._hash

    @property
    def max_groups(self) -> int:
        """Query heads of the rank that has fewest; a head can't be shared by two groups."""
        return self.heads // self.sp_size

    @property
    def seq_dim(self) -> int:
        return 1 if self.batch_first else 0

    # Which heads. Ranges are in heads of the whole model.

    @cached_property
    def groups_first(self) -> bool:
        """Whether the heads of a group lie together: those of no two groups of a rank then share a KV head."""
        return self.kv_heads % (self.sp_size * self.groups) == 0

    def query_range(self, rank: int, group: int) -> Range:
        """Query heads that ``rank`` attends with in one group."""
        if self.groups_first:
            count = self.heads // (self.sp_size * self.groups)
            start = (group * self.sp_size + rank) * count
            return start, start + count
        small, larger = divmod(self.heads, self.sp_size)
        start = rank * small + min(rank, larger)
        count = small + (rank < larger)
        return start + count * group // self.groups, start + count * (group + 1) // self.groups

    def kv_range(self, rank: int, group: int) -> Range:
        """KV heads that the query heads of ``group`` on ``rank`` attend to."""
        start, stop = self.query_range(rank, group)
        shared = self.heads // self.kv_heads
        return start // shared, (stop - 1) // shared + 1

    @cached_property
    def kv_is_shared(self) -> bool:
        """Whether two groups attend to one KV head, on whatever rank."""
        pairs = ((rank, group) for rank in range(self.sp_size) for group in range(1, self.groups))
        return any(self.kv_range(rank, group)[0] < self.kv_range(rank, group - 1)[1] for rank, group in pairs)

    def sent_range(self, kind: str, rank: int, group: int) -> Range:
        """Heads of q, k or v that travel to ``rank`` with ``group``; a KV head only with the first group that needs it."""
        if kind == "q":
            return self.query_range(rank, group)
        start, stop = self.kv_range(rank, group)
        return (max(start, self.kv_range(rank, group - 1)[1]) if group else start), stop

    @lru_cache(maxsize=4096)
    def heads_of(self, kind: str, group: int) -> tuple[Range, ...]:
        """Heads of q, k or v that leave a rank with ``group``, each once, as ranges in ascending order."""
        ranges: list[Range] = []
        for start, stop in sorted(self.sent_range(kind, rank, group) for rank in range(self.sp_size)):
            if start >= stop:
                continue
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            else:
                ranges.append((start, stop))
        return tuple(ranges)

    @lru_cache(maxsize=4096)
    def divides(self, kind: str) -> bool:
        """Whether every rank is sent as many heads as every other, none of them twice, from places evenly spaced."""
        for group in range(self.groups):
            ranges = [self.sent_range(kind, rank, group) for rank in range(self.sp_size)]
            counts = {max(stop - start, 0) for start, stop in ranges}
            steps = {after[0] - before[0] for before, after in zip(ranges, ranges[1:])}
            if len(counts) > 1 or len(steps) > 1 or any(step < max(counts) for step in steps):
                return False
        return True

    @lru_cache(maxsize=4096)
    def elements_of(self, kind: str, group: int, first: int | tuple[int, ...], head_dim: int) -> tuple[Range, ...]:
        """Rows of a projection for the heads of `heads_of`; for o, columns.

        first   the first row of head 0, behind which the others follow, or that of each head
        """
        heads = self.heads_of("q" if kind == "o" else kind, group)
        if isinstance(first, int):
            return tuple((first + start * head_dim, first + stop * head_dim) for start, stop in heads)
        return tuple((first[head], first[head] + head_dim) for start, stop in heads for head in range(start, stop))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """`kinds_of` every group."""
        return tuple(self.kinds_of(group) for group in range(self.groups))

    def kinds_of(self, group: int) -> str:
        """Which of q, k, v travel with ``group``; no KV head is new to a group that shares all of them."""
        return "qkv" if self.heads_of("k", group) else "q"

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each group, the last one that attends to KV heads that travel with it, on whatever rank; itself if none do."""
        uses = list(range(self.groups))
        for rank in range(self.sp_size):
            for group in range(self.groups):
                start, stop = self.kv_range(rank, group)
                for sent in range(group):
                    first, end = self.sent_range("k", rank, sent)
                    if max(first, start) < min(end, stop):
                        uses[sent] = max(uses[sent], group)
        return tuple(uses)

    # What an exchange does.

    @lru_cache(maxsize=4096)
    def exchange(self, kind: str, group: int, head_dim: int, by_rank: bool = False) -> Layout:
        """Layout of the exchange of one group of q, k, v (head scatter) or o (sequence scatter).

        The local tensor holds the heads of `heads_of`, the global one those of `sent_range` on this rank.

        by_rank   the local tensor has a dimension for the ranks, ``[.., P, heads, d]``, so that its strides can say that
                  each rank's heads lie together: then it is the buffer that travels (for kinds that `divides` affirms)
        """
        if kind == "o":
            return self.exchange("q", group, head_dim, by_rank).inverse
        first: dict[int, int] = {}  # where each head lies in the local tensor
        for start, stop in self.heads_of(kind, group):
            first.update(zip(range(start, stop), range(len(first), len(first) + stop - start)))
        parts = []
        for rank in range(self.sp_size):
            start, stop = self.sent_range(kind, rank, group)
            at = first[start] if start < stop else 0
            parts.append((at, at + max(stop - start, 0)))
        start, stop = self.sent_range(kind, self.sp_rank, group)
        ends = [sum(self.seq_lens[: rank + 1]) for rank in range(self.sp_size)]
        local = Side(self._shape(self.seq_lens[self.sp_rank], len(first), head_dim), 2, tuple(parts))
        whole = Side(
            self._shape(ends[-1], max(stop - start, 0), head_dim),
            self.seq_dim,
            tuple((end - length, end) for end, length in zip(ends, self.seq_lens)),
        )
        if by_rank:
            shape = (*local.shape[:2], self.sp_size, len(first) // self.sp_size, head_dim)
            local = Side(shape, 2, tuple((rank, rank + 1) for rank in range(self.sp_size)))
        return Layout(source=local, target=whole)

    @lru_cache(maxsize=4096)
    def together(self, kinds: str, group: int, head_dims: tuple[int, ...]) -> Layout:
        """One exchange for several of q, k, v of a group."""
        first, *also = (self.exchange(kind, group, head_dim) for kind, head_dim in zip(kinds, head_dims))
        return replace(first, also=tuple(also))

    @lru_cache(maxsize=4096)
    def of_chunk(self, kinds: str, group: int, head_dims: tuple[int, ...], chunk: int, chunks: int) -> Layout:
        """`together`, or o, for one of ``chunks`` parts of every rank's tokens: the local tensor has these tokens alone, the global one
        all, of which those of other chunks are left out."""
        if kinds == "o":
            return self.of_chunk("q", group, head_dims, chunk, chunks).inverse
        before = [sum(self.seq_lens[:rank]) for rank in range(self.sp_size)]
        ranges = [chunk_of(length, chunk, chunks) for length in self.seq_lens]
        mine, places = ranges[self.sp_rank], tuple((at + start, at + stop) for at, (start, stop) in zip(before, ranges))

        def part(layout: Layout) -> Layout:
            *_, heads, head_dim = layout.source.shape
            local = replace(layout.source, shape=self._shape(mine[1] - mine[0], heads, head_dim))
            return Layout(local, replace(layout.target, parts=places))

        first, *also = map(part, self.together(kinds, group, head_dims).each)
        return replace(first, also=tuple(also))

    def _shape(self, seq: int, heads: int, head_dim: int) -> tuple[int, ...]:
        return (self.batch, seq, heads, head_dim) if self.batch_first else (seq, self.batch, heads, head_dim)

    # How this rank's attention finds its KV heads.

    @lru_cache(maxsize=4096)
    def kv_pieces(self, group: int) -> tuple[tuple[int, int, int], ...]:
        """``(group, start, stop)`` of the received pieces whose heads, one after another, are those of `kv_range`.

        The piece that travels with ``group`` itself is always named, even where this rank gets none of it: a rank that
        left it out of its graph would not take part in the exchange of its gradient.
        """
        need_start, need_stop = self.kv_range(self.sp_rank, group)
        pieces = []
        for sent in range(group + 1):
            start, stop = self.sent_range("k", self.sp_rank, sent)
            low, high = max(start, need_start), min(stop, need_stop)
            if low < high or (sent == group and "k" in self.kinds_of(group)):  # guard: read by every rank
                pieces.append((sent, max(low - start, 0), max(high - start, 0) if low < high else max(low - start, 0)))
        return tuple(pieces)

    @lru_cache(maxsize=4096)
    def kv_expansion(self, group: int) -> tuple[int, ...] | None:
        """For each query head of the group, its KV head among `kv_range`; None where a regular GQA ratio says the same."""
        start, stop = self.query_range(self.sp_rank, group)
        first, last = self.kv_range(self.sp_rank, group)
        shared = self.heads // self.kv_heads
        index = tuple(head // shared - first for head in range(start, stop))
        count, rest = divmod(stop - start, last - first)
        regular = rest == 0 and index == tuple(head // count for head in range(stop - start))
        return None if regular else index
