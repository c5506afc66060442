"""Chooses the heads that a rank attends with in a head group, and the group that KV heads join.

Query heads are dealt out in contiguous, balanced ranges, the larger ranges first; for several head
groups see Note [Groups first]. A rank receives the KV heads that its query heads attend to, so KV
heads are replicated where there are fewer KV heads than ranks, or where two ranks share a KV head.
With one head group, and head counts that divide by the sp size, heads are split as by DeepSpeed's
``DistributedAttention`` and ``UlyssesSPAttentionHF``.

Note [Groups first]
~~~~~~~~~~~~~~~~~~~
Heads are dealt to head groups first, and within a group to ranks. The heads of a group then lie
together, and the group's rows of a weight are a view. But if this would send some KV head to more
ranks, heads are dealt to ranks first, and the rows of a group lie apart:

    8 heads, 2 ranks, 2 groups
    groups first   rank   0 0 1 1 | 0 0 1 1        ranks first   rank    0 0 0 0 | 1 1 1 1
                   group  0 0 0 0 | 1 1 1 1                      group   0 0 1 1 | 0 0 1 1
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import product

from .layout import Range, common, joined, total
from .shares import Shares


class Heads(Shares):
    """Computes the heads of each rank and head group; the base class of `Geometry`.

    Ranges index all heads of the layer.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for a number of KV heads or head groups that doesn't fit the heads."""
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            divisors = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"KV heads must divide the query heads, got {self.heads} query and "
                f"{self.kv_heads} KV heads; take {', '.join(divisors)} KV heads"
            )
        super().__post_init__()
        if not 1 <= self.groups <= self.max_groups:
            raise ValueError(
                f"sp_overlap.head_groups must be between 1 and {self.max_groups} for "
                f"{self.heads} heads at sp size {self.sp_size}, got {self.groups}"
            )

    @property
    def max_groups(self) -> int:
        """Return the largest number of head groups: the fewest query heads that a rank has."""
        return self.heads // self.parts

    @cached_property
    def groups_first(self) -> bool:
        """Return whether heads are dealt to groups before ranks, see Note [Groups first].

        If so, no two groups of a rank share a KV head.
        """
        return self.kv_heads % (self.parts * self.groups) == 0

    def query_range(self, rank: int, group: int) -> Range:
        """Return the query heads that ``rank`` attends with in ``group``."""
        part, _ = self.places[rank]
        if self.groups_first:
            count = self.heads // (self.parts * self.groups)
            start = (group * self.parts + part) * count
            return start, start + count
        # The first ``larger`` parts have one head more than the others.
        small, larger = divmod(self.heads, self.parts)
        start = part * small + min(part, larger)
        count = small + (part < larger)
        return start + count * group // self.groups, start + count * (group + 1) // self.groups

    def kv_range(self, rank: int, group: int) -> Range:
        """Return the KV heads that the query heads of ``group`` on ``rank`` attend to."""
        start, stop = self.query_range(rank, group)
        shared = self.heads // self.kv_heads
        return start // shared, (stop - 1) // shared + 1

    def sent_range(self, kind: str, rank: int, group: int) -> Range:
        """Return the heads of q, k or v that travel to ``rank`` with ``group``.

        The ranges of a rank's groups ascend and are disjoint. If the rank needs no new head for the
        group, the range is empty: start equals stop.
        """
        if kind == "q":
            return self.query_range(rank, group)
        start, stop = self.kv_range(rank, group)
        # A KV head travels only with the first group that needs it. Since ranges ascend with the
        # groups, all heads up to the end of the previous group's range have travelled.
        if group:
            start = max(start, self.kv_range(rank, group - 1)[1])
        return start, stop

    @lru_cache(maxsize=4096)
    def heads_of(self, kind: str, group: int) -> tuple[Range, ...]:
        """Return the heads of q, k or v that a rank sends with ``group``, in ascending ranges.

        A head that several ranks receive is listed once.
        """
        return joined([self.sent_range(kind, rank, group) for rank in range(self.sp_size)])

    @lru_cache(maxsize=4096)
    def rows_of(
        self, kind: str, group: int, first: int | tuple[int, ...], head_dim: int
    ) -> tuple[Range, ...]:
        """Return the rows of a projection's weight that project the heads of `heads_of`.

        Args:
            kind: "q", "k" or "v"; or "o", for which the ranges are columns.
            group: The head group.
            first: The first row of each head (a tuple); or the first row of head 0 (an int), if the
                rows of all heads are consecutive.
            head_dim: ``d``.
        """
        ranges = self.heads_of("q" if kind == "o" else kind, group)
        rows = []
        for start, stop in ranges:
            if isinstance(first, int):
                rows.append((first + start * head_dim, first + stop * head_dim))
            else:
                rows += [(row, row + head_dim) for row in first[start:stop]]
        return tuple(rows)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that travel with each group: "qkv", or "q" if no KV head travels."""
        return tuple("qkv" if self.heads_of("k", group) else "q" for group in range(self.groups))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """Return, for each group g, the last group that attends to KV heads received with g.

        This is the last such group over all ranks, and g itself if no later group attends to them.
        """
        uses = list(range(self.groups))
        for group, rank in product(range(self.groups), range(self.sp_size)):
            for sent, *_ in self.kv_pieces(group, rank):
                uses[sent] = group
        return tuple(uses)

    @cached_property
    def kv_is_shared(self) -> bool:
        """Return whether two groups of some rank attend to the same KV head."""
        return self.last_use != tuple(range(self.groups))

    @property
    def most_received(self) -> float:
        """Return the largest number of heads of q and k that a rank receives in one head group.

        A head of q counts as 1/r with r shares. `shares_for` compares these numbers. The numbers
        stand for o and v too, since o is as large as q, and v is as large as k.
        """
        counts = []
        for rank in range(self.sp_size):
            queries, keys = self.query_range(rank, 0), self.kv_range(rank, 0)
            counts.append(total([queries]) / self.shares + total([keys]))
        return max(counts)

    @lru_cache(maxsize=4096)
    def kv_pieces(self, group: int, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Return, as pieces, where ``rank`` finds the KV heads that it attends to in ``group``.

        Each piece is ``(sent, start, stop)``: heads ``start`` to ``stop`` of the k or v that the
        rank received with the group ``sent``. ``sent`` is ``group`` or an earlier group. The
        pieces, joined, are the heads of `kv_range`.
        """
        pieces = []
        for sent in range(group + 1):
            received = self.sent_range("k", rank, sent)
            held = common([received], [self.kv_range(rank, group)])
            # The k that travels with the group itself is a piece even if the rank receives no head
            # of this k. Otherwise k would not be in the rank's graph, and the rank would not join
            # the exchange of dk.
            own = sent == group and "k" in self.kinds[group]
            if held or own:  # guard: read by every rank
                start, stop = held[0] if held else (0, 0)
                pieces.append((sent, start, stop))
        return tuple(pieces)

    @lru_cache(maxsize=4096)
    def kv_expansion(self, group: int) -> tuple[int, ...] | None:
        """Return the index by which `execution.with_kv` repeats KV heads; None for no repeat.

        For each query head of ``group`` on this rank, the index has the query head's KV head,
        counted from the start of `kv_range`.
        """
        start, stop = self.query_range(self.sp_rank, group)
        first, _ = self.kv_range(self.sp_rank, group)
        shared = self.heads // self.kv_heads
        index = tuple(head // shared - first for head in range(start, stop))
        # Local attention assumes that each KV head serves equally many successive query heads.
        return None if len(set(map(index.count, index))) == 1 else index
