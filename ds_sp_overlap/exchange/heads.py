"""Decides which heads each rank and each head group attends with, and which of them travel when.

One rule places the heads. Query heads are dealt out in contiguous, balanced ranges, the larger ones
first; with several head groups see Note [Groups first]. A rank receives the KV heads that its query
heads attend to, so KV heads are replicated where there are fewer of them than ranks, or where two
ranks share a KV head. In one head group, and for head counts that divide, this is the split of
DeepSpeed's ``DistributedAttention`` and ``UlyssesSPAttentionHF``.

Note [Groups first]
~~~~~~~~~~~~~~~~~~~
If that sends no KV head more often, heads are dealt to head groups first, and within a group to
ranks. The heads of a group then lie together, and the group's rows of a weight are a view.
Otherwise heads are dealt to ranks first, and the rows of a group lie apart:

    8 heads, 2 ranks, 2 groups
    groups first   rank   0 0 1 1 | 0 0 1 1        ranks first   rank    0 0 0 0 | 1 1 1 1
                   group  0 0 0 0 | 1 1 1 1                      group   0 0 1 1 | 0 0 1 1
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import combinations, product

from .layout import Range, common, joined
from .shares import Shares


class Heads(Shares):
    """Tells the heads of each rank and head group; the base class of `Geometry`.

    Ranges count the heads of the whole layer.
    """

    def __post_init__(self) -> None:
        """Raise ValueError if KV heads don't fit the query heads, or these the head groups."""
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
        """Query heads of the rank that has fewest, since two groups can't share a query head."""
        return self.heads // self.parts

    @cached_property
    def groups_first(self) -> bool:
        """Return whether heads are dealt to groups before ranks, see Note [Groups first].

        Then no two groups of a rank share a KV head.
        """
        return self.kv_heads % (self.parts * self.groups) == 0

    def query_range(self, rank: int, group: int) -> Range:
        """Return the query heads that ``rank`` attends with in ``group``."""
        part, _ = self.places[rank]
        if self.groups_first:
            count = self.heads // (self.parts * self.groups)
            start = (group * self.parts + part) * count
            return start, start + count
        # The first ``larger`` parts have a head more than the others.
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

        The ranges of a rank's groups ascend and are disjoint. The range is empty, its start at its
        stop, where no head is new to the group.
        """
        if kind == "q":
            return self.query_range(rank, group)
        start, stop = self.kv_range(rank, group)
        # A KV head travels only with the first group that needs it. Ranges ascend with the groups,
        # so the group before knows what has travelled.
        if group:
            start = max(start, self.kv_range(rank, group - 1)[1])
        return start, stop

    @lru_cache(maxsize=4096)
    def heads_of(self, kind: str, group: int) -> tuple[Range, ...]:
        """Return the heads of q, k or v that leave a rank with ``group``.

        Each head is named once, in ranges in ascending order, also where several ranks receive it.
        """
        return joined([self.sent_range(kind, rank, group) for rank in range(self.sp_size)])

    @lru_cache(maxsize=4096)
    def rows_of(
        self, kind: str, group: int, first: int | tuple[int, ...], head_dim: int
    ) -> tuple[Range, ...]:
        """Return the rows of a projection's weight that make the heads of `heads_of`.

        Args:
            kind: "q", "k" or "v"; or "o", for which the ranges are columns.
            group: The head group.
            first: The first row of each head (tuple); or that of head 0 (int), if the heads lie end
                to end.
            head_dim: ``d``.
        """
        ranges = self.heads_of("q" if kind == "o" else kind, group)
        rows: list[Range] = []
        for start, stop in ranges:
            if isinstance(first, int):
                rows.append((first + start * head_dim, first + stop * head_dim))
            else:
                rows += [(row, row + head_dim) for row in first[start:stop]]
        return tuple(rows)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Return what travels with each group: "qkv", or "q" if no KV head is new to it."""
        return tuple("qkv" if self.heads_of("k", group) else "q" for group in range(self.groups))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each group, the last group that attends to KV heads that travel with it.

        The last over all ranks; the group itself if no KV head travels with it.
        """
        uses = list(range(self.groups))
        for rank, (sent, group) in product(
            range(self.sp_size), combinations(range(self.groups), 2)
        ):
            # Whether the group attends to a KV head that came with the group ``sent``.
            if common([self.sent_range("k", rank, sent)], [self.kv_range(rank, group)]):
                uses[sent] = max(uses[sent], group)
        return tuple(uses)

    @cached_property
    def kv_is_shared(self) -> bool:
        """Return whether two groups of some rank attend to the same KV head."""
        return self.last_use != tuple(range(self.groups))

    @property
    def most_received(self) -> float:
        """Heads of q and k, each of the whole sequence, that the busiest rank receives.

        In one head group; a share of the queries counts as 1/r of each head. `shares_for` compares
        these numbers: o is as large as q, and v as k.
        """
        counts = []
        for rank in range(self.sp_size):
            queries, keys = self.query_range(rank, 0), self.kv_range(rank, 0)
            counts.append((queries[1] - queries[0]) / self.shares + keys[1] - keys[0])
        return max(counts)

    @lru_cache(maxsize=4096)
    def kv_pieces(self, group: int) -> tuple[tuple[int, int, int], ...]:
        """Return where the KV heads lie that this rank attends to in ``group``.

        Each piece is ``(sent, start, stop)``: heads ``start`` to ``stop`` of the k or v that this
        rank received with group ``sent``, this one or an earlier one. One piece after another, they
        are the heads of `kv_range`.
        """
        pieces = []
        for sent in range(group + 1):
            received = self.sent_range("k", self.sp_rank, sent)
            held = common([received], [self.kv_range(self.sp_rank, group)])
            # The piece that travels with the group itself is named even where this rank gets none
            # of its heads: a rank that left the piece out of its graph would not take part in the
            # exchange of the gradient.
            own = sent == group and "k" in self.kinds[group]
            if held or own:  # guard: read by every rank
                start, stop = held[0] if held else (0, 0)
                pieces.append((sent, start, stop))
        return tuple(pieces)

    @lru_cache(maxsize=4096)
    def kv_expansion(self, group: int) -> tuple[int, ...] | None:
        """Return for each query head of ``group`` on this rank its KV head, counted in `kv_range`.

        `execution.with_kv` repeats KV heads by this index; None where it has nothing to repeat.
        """
        start, stop = self.query_range(self.sp_rank, group)
        first, last = self.kv_range(self.sp_rank, group)
        shared = self.heads // self.kv_heads
        index = tuple(head // shared - first for head in range(start, stop))
        # Local attention by itself assumes that each KV head serves equally many successive query
        # heads.
        count, rest = divmod(stop - start, last - first)
        regular = rest == 0 and index == tuple(head // count for head in range(stop - start))
        return None if regular else index
