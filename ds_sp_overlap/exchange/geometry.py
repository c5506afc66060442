"""Decides which heads of which tokens each rank holds, and lays out every exchange of a layer.

A `Geometry` is a frozen value: no tensors, no torch.distributed.

One rule places the heads. Query heads are dealt out in contiguous, balanced ranges, the larger ones
first. A rank receives the KV heads that its query heads attend to, so KV heads are replicated where
there are fewer of them than ranks, or where two ranks share a KV head. For head counts that divide,
this is the split of DeepSpeed's ``DistributedAttention`` and ``UlyssesSPAttentionHF``.

Note [Groups first]
~~~~~~~~~~~~~~~~~~~
Heads are dealt to head groups first and to ranks within a group, where no KV head is then sent more
often. The heads of a group then lie together, and the group's rows of a weight are a view.
Otherwise heads are dealt to ranks first, and the rows of a group lie apart:

    8 heads, 2 ranks, 2 groups
    groups first   rank   0 0 1 1 | 0 0 1 1        ranks first   rank    0 0 0 0 | 1 1 1 1
                   group  0 0 0 0 | 1 1 1 1                      group   0 0 1 1 | 0 0 1 1

Note [Shares]
~~~~~~~~~~~~~
Where there are more ranks than heads, or heads do not divide by the ranks, r ranks share their
query heads: P = u r, and heads are dealt to u *parts* of r successive ranks instead of to P ranks.
Each of the r ranks attends with the same heads, over all keys, with its *share* of the queries. So
k and v travel to all ranks of a part, as everywhere where ranks need the same KV heads. q and o are
cut along heads and along tokens. Unless tokens are given, the sequence is cut into 2r chunks, and
share j takes chunks j and 2r - 1 - j, which makes causal attention equally long for all:

    8 chunks, r = 4    share   0 1 2 3 3 2 1 0

If u is even and all ranks hold equally many tokens, each rank's tokens lie in one chunk. The rank
then sends all of its tokens to the one rank of each part whose share they belong to: q is cut along
heads alone, as without shares.

Note [Once per node]
~~~~~~~~~~~~~~~~~~~~
Where several ranks of a node need the same KV heads, k and v would travel to each of them, over the
network too. With ``nodes``, they travel in two legs. In the first, these *siblings*, m of them,
receive a *piece* each: sibling i the tokens of the ranks i, i + m, i + 2m, .. In the second,
siblings give each other their pieces, inside the node. Gradients go the same way back: siblings sum
those of a piece, and send the sum to the ranks that hold its tokens. The pieces interleave the
ranks so that each sibling receives as much over the network as the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from .layout import Layout, Patches, Range, Side, chunk_of

# For each share, ranges of tokens in ascending order.
QueryChunks = tuple[tuple[Range, ...], ...]


def possible_shares(sp_size: int, heads: int) -> list[int]:
    """Return the numbers of shares by which every rank has a query head, in ascending order."""
    return [r for r in range(1, sp_size + 1) if sp_size % r == 0 and sp_size // r <= heads]


@lru_cache(maxsize=4096)
def shares_for(sp_size: int, heads: int, kv_heads: int) -> int:
    """Return r for "auto", see Note [Shares].

    The smallest r by which heads divide evenly. 1 where that is possible, and where k and v would
    grow by more than q and o shrink, in elements that the busiest rank receives.
    """
    even = next(
        r for r in range(1, sp_size + 1) if sp_size % r == 0 and heads % (sp_size // r) == 0
    )
    if even == 1 or heads < sp_size:
        return even
    lengths = (sp_size,) * sp_size
    alone, shared = (Geometry(sp_size, 0, lengths, 1, heads, kv_heads, shares=r) for r in (1, even))
    return even if shared.most_received <= alone.most_received else 1


@dataclass(frozen=True)
class Geometry:
    """Heads, tokens and ranks of one call of an attention layer.

    Attributes:
        sp_size: Ranks of the sp group, ``P``.
        sp_rank: This rank.
        seq_lens: Local sequence length of every rank, in tokens.
        batch: ``b``.
        heads: Query heads, ``h``.
        kv_heads: KV heads, ``h_kv``; divides ``heads``.
        groups: Head groups, ``G``; at most the query heads of the rank that has fewest.
        batch_first: Whether tensors are ``[b, s, h, d]`` instead of ``[s, b, h, d]``.
        shares: Ranks that share their query heads, ``r``; divides ``P``. See Note [Shares].
        query_chunks: For each share, the tokens whose queries it attends with; None for two chunks
            each, as Note [Shares] says.
        nodes: The node of every rank, for k and v to travel once to each; None for one leg. See
            Note [Once per node].

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
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            divisors = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"KV heads must divide the query heads, got {self.heads} query and "
                f"{self.kv_heads} KV heads; take {', '.join(divisors)} KV heads"
            )
        if self.shares not in (possible := possible_shares(self.sp_size, self.heads)):
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
        self._check_tokens()
        if not 1 <= self.groups <= self.max_groups:
            raise ValueError(
                f"sp_overlap.head_groups must be between 1 and {self.max_groups} for "
                f"{self.heads} heads at sp size {self.sp_size}, got {self.groups}"
            )

    def _check_tokens(self) -> None:
        """Raise ValueError if a share has no token, or if shares don't hold each token once."""
        seq = sum(self.seq_lens)
        if self.query_chunks is None:
            if 0 < seq < self.shares:
                raise ValueError(
                    f"sp_overlap.shares: {seq} tokens leave a share of {self.shares} without a "
                    "query; give longer sequences, or fewer shares"
                )
            return
        # Ranges of one share that ascend, and that lie end to end with those of the others.
        ranges = sorted(tokens for share in self.query_chunks for tokens in share)
        stops = [0, *(stop for _, stop in ranges)]
        if (
            len(self.query_chunks) != self.shares
            or not all(self.query_chunks)
            or any(list(share) != sorted(share) for share in self.query_chunks)
            or any(start >= stop for start, stop in ranges)
            or [start for start, _ in ranges] != stops[:-1]
            or stops[-1] != seq
        ):
            raise ValueError(
                f"query_chunks: {self.query_chunks} must give each of {self.shares} shares some of "
                f"{seq} tokens in ascending ranges, and each token to one share"
            )

    @cached_property
    def _hash(self) -> int:
        counts = (self.sp_size, self.sp_rank, self.batch, self.heads, self.kv_heads, self.groups)
        return hash((counts, self.seq_lens, self.shares))

    def __hash__(self) -> int:
        # A call asks for the hash many times: every cached method below looks it up.
        return self._hash

    @property
    def parts(self) -> int:
        """Parts that heads are dealt to, ``u``: groups of ranks with the same heads."""
        return self.sp_size // self.shares

    @property
    def max_groups(self) -> int:
        """Query heads of the rank that has fewest; two groups can't share a head."""
        return self.heads // self.parts

    @property
    def seq_dim(self) -> int:
        """The dimension of the sequence in q, k, v and o."""
        return 1 if self.batch_first else 0

    # Which heads. Ranges count the heads of the whole model.

    @cached_property
    def groups_first(self) -> bool:
        """Whether heads are dealt to groups before ranks, see Note [Groups first].

        Then no two groups of a rank share a KV head.
        """
        return self.kv_heads % (self.parts * self.groups) == 0

    def _turn(self, rank: int) -> int:
        """Return when ``rank`` is dealt heads: node after node, where nodes count."""
        return rank if self.nodes is None else self._turns[rank]

    @cached_property
    def _turns(self) -> list[int]:
        assert self.nodes is not None
        nodes = self.nodes
        order = sorted(range(self.sp_size), key=lambda rank: (nodes[rank], rank))
        return [order.index(rank) for rank in range(self.sp_size)]

    def query_range(self, rank: int, group: int) -> Range:
        """Return the query heads that ``rank`` attends with in ``group``."""
        part = self._turn(rank) // self.shares
        if self.groups_first:
            count = self.heads // (self.parts * self.groups)
            start = (group * self.parts + part) * count
            return start, start + count
        small, larger = divmod(self.heads, self.parts)
        start = part * small + min(part, larger)
        count = small + (part < larger)
        return start + count * group // self.groups, start + count * (group + 1) // self.groups

    def kv_range(self, rank: int, group: int) -> Range:
        """Return the KV heads that the query heads of ``group`` on ``rank`` attend to."""
        start, stop = self.query_range(rank, group)
        shared = self.heads // self.kv_heads
        return start // shared, (stop - 1) // shared + 1

    @cached_property
    def kv_is_shared(self) -> bool:
        """Whether two groups of some rank attend to the same KV head."""
        for rank in range(self.sp_size):
            for group in range(1, self.groups):
                if self.kv_range(rank, group)[0] < self.kv_range(rank, group - 1)[1]:
                    return True
        return False

    def sent_range(self, kind: str, rank: int, group: int) -> Range:
        """Return the heads of q, k or v that travel to ``rank`` with ``group``.

        A KV head travels only with the first group that needs it. The range is empty, with its stop
        at or before its start, where no head is new to the group.
        """
        if kind == "q":
            return self.query_range(rank, group)
        start, stop = self.kv_range(rank, group)
        if group:
            start = max(start, self.kv_range(rank, group - 1)[1])
        return start, stop

    @lru_cache(maxsize=4096)
    def heads_of(self, kind: str, group: int) -> tuple[Range, ...]:
        """Return the heads of q, k or v that leave a rank with ``group``.

        Each head is named once, in ranges in ascending order, also where several ranks receive it.
        """
        ranges: list[Range] = []
        sent = [self.sent_range(kind, rank, group) for rank in range(self.sp_size)]
        for start, stop in sorted(sent):
            if start >= stop:
                continue
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            else:
                ranges.append((start, stop))
        return tuple(ranges)

    @lru_cache(maxsize=4096)
    def divides(self, kind: str) -> bool:
        """Return whether this rank sends equally many heads to each part, evenly spaced.

        And no head twice: k and v of a part go to each of its ranks. Not so either where q is cut
        along tokens as well.
        """
        if self.shares > 1 and (kind != "q" or self.cuts_tokens):
            return False
        for group in range(self.groups):
            ranks = range(0, self.sp_size, self.shares)
            ranges = [self.sent_range(kind, rank, group) for rank in ranks]
            counts = {max(stop - start, 0) for start, stop in ranges}
            steps = {after[0] - before[0] for before, after in zip(ranges, ranges[1:])}
            if len(counts) > 1 or len(steps) > 1 or any(step < max(counts) for step in steps):
                return False
        return True

    @lru_cache(maxsize=4096)
    def elements_of(
        self, kind: str, group: int, first: int | tuple[int, ...], head_dim: int
    ) -> tuple[Range, ...]:
        """Return the rows of a projection's weight that make the heads of `heads_of`.

        Args:
            kind: "q", "k" or "v"; or "o", for which the ranges are columns.
            group: The head group.
            first: The first row of each head; or that of head 0, if the heads lie end to end.
            head_dim: ``d``.
        """
        ranges = self.heads_of("q" if kind == "o" else kind, group)
        if isinstance(first, int):
            return tuple(
                (first + start * head_dim, first + stop * head_dim) for start, stop in ranges
            )
        heads = [head for start, stop in ranges for head in range(start, stop)]
        return tuple((first[head], first[head] + head_dim) for head in heads)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """`kinds_of` every group."""
        return tuple(self.kinds_of(group) for group in range(self.groups))

    def kinds_of(self, group: int) -> str:
        """Return which of q, k and v travel with ``group``: "qkv", or "q" if no KV head is new."""
        return "qkv" if self.heads_of("k", group) else "q"

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each group, the last group that attends to KV heads that travel with it.

        The last over all ranks; the group itself if no KV head travels with it.
        """
        uses = list(range(self.groups))
        for rank in range(self.sp_size):
            for group in range(self.groups):
                start, stop = self.kv_range(rank, group)
                for sent in range(group):
                    first, end = self.sent_range("k", rank, sent)
                    if max(first, start) < min(end, stop):
                        uses[sent] = max(uses[sent], group)
        return tuple(uses)

    # Which tokens. Ranges count the tokens of the whole sequence.

    @lru_cache(maxsize=4096)
    def query_tokens(self, rank: int) -> tuple[Range, ...]:
        """Return the tokens whose queries ``rank`` attends with, in ascending ranges."""
        return self._tokens_of_share(self._turn(rank) % self.shares)

    def _tokens_of_share(self, share: int) -> tuple[Range, ...]:
        seq, shares = sum(self.seq_lens), self.shares
        if self.query_chunks is not None:
            return self.query_chunks[share]
        start, middle = chunk_of(seq, share, 2 * shares)
        back, stop = chunk_of(seq, 2 * shares - 1 - share, 2 * shares)
        chunks = [(start, stop)] if middle == back else [(start, middle), (back, stop)]
        return tuple(chunk for chunk in chunks if chunk[0] < chunk[1]) or ((0, 0),)

    @cached_property
    def own_queries(self) -> tuple[Range, ...]:
        """`query_tokens` of this rank."""
        return self.query_tokens(self.sp_rank)

    @cached_property
    def local_tokens(self) -> tuple[Range, ...]:
        """The tokens of every rank's local sequence."""
        ends = [sum(self.seq_lens[: rank + 1]) for rank in range(self.sp_size)]
        return tuple((end - length, end) for end, length in zip(ends, self.seq_lens))

    @cached_property
    def cuts_tokens(self) -> bool:
        """Whether this rank's q is cut along tokens as well as along heads."""
        own = self.local_tokens[self.sp_rank]
        shares = range(self.shares)
        return sum(bool(_common(self._tokens_of_share(share), own)) for share in shares) > 1

    @cached_property
    def first_of_part(self) -> int:
        """The rank that attends with the heads of this rank and the first share of the queries."""
        turn = self._turn(self.sp_rank)
        first = turn - turn % self.shares
        return next(rank for rank in range(self.sp_size) if self._turn(rank) == first)

    @property
    def most_received(self) -> float:
        """Most heads of the whole sequence that a rank receives as q and k."""
        counts = []
        for rank in range(self.sp_size):
            queries, keys = self.query_range(rank, 0), self.kv_range(rank, 0)
            counts.append((queries[1] - queries[0]) / self.shares + keys[1] - keys[0])
        return max(counts)

    # What an exchange moves.

    @lru_cache(maxsize=4096)
    def exchange(self, kind: str, group: int, head_dim: int, by_rank: bool = False) -> Layout:
        """Lay out the exchange of q, k, v (head scatter) or o (sequence scatter) of one group.

        The local tensor holds the heads of `heads_of`. The global tensor holds the heads of
        `sent_range` on this rank.

        Args:
            kind: "q", "k", "v" or "o".
            group: The head group.
            head_dim: ``d``.
            by_rank: Give the local tensor a dimension for the parts of the ranks,
                ``[.., u, heads, d]``. Strides can then say that the heads of each part lie
                together, so that the tensor is the buffer that travels. Only for kinds that
                `divides` affirms.
        """
        if kind == "o":
            return self.exchange("q", group, head_dim, by_rank).inverse
        return self._lay_out(kind, group, head_dim, self.local_tokens, by_rank=by_rank)

    def _lay_out(
        self,
        kind: str,
        group: int,
        head_dim: int,
        sent: tuple[Range, ...],
        by_rank: bool = False,
        in_pieces: bool = False,
    ) -> Layout:
        """Lay out an exchange of q, k or v: every rank receives some tokens of some heads.

        Args:
            kind: "q", "k" or "v".
            group: The head group.
            head_dim: ``d``.
            sent: The tokens that every rank sends: its local sequence, or a chunk of it.
            by_rank: As in `exchange`.
            in_pieces: Whether this is the first of the two legs of Note [Once per node].
        """
        # Where each head lies in the local tensor.
        place: dict[int, int] = {}
        for start, stop in self.heads_of(kind, group):
            for head in range(start, stop):
                place[head] = len(place)
        first, last = sent[self.sp_rank]
        parts: list[Range] = []
        tokens: list[tuple[Range, ...]] = []
        # An empty part stands where the part before it ends, so that parts can be tiles.
        edge = 0
        for rank in range(self.sp_size):
            begin, end = self.sent_range(kind, rank, group)
            common = _common(self._wanted(kind, group, rank, sent, in_pieces), (first, last))
            tokens.append(tuple((low - first, high - first) for low, high in common))
            if begin >= end or first < last and not common:
                parts.append((edge, edge))
                continue
            edge = place[begin] + end - begin
            parts.append((place[begin], edge))
        shape = self._shape(last - first, len(place), head_dim)
        if by_rank:
            start, stop = self.sent_range(kind, self.sp_rank, group)
            each = stop - start
            shape = (*shape[:2], len(place) // each, each, head_dim)
            parts = [(begin // each, end // each) for begin, end in parts]
        local = Side(shape, 2, tuple(parts))
        if any(0 < _before(ranges, last - first) < last - first for ranges in tokens):
            local = Patches(shape, 2, tuple(parts), self.seq_dim, tuple(tokens))
        own = self._wanted(kind, group, self.sp_rank, sent, in_pieces)
        start, stop = self.sent_range(kind, self.sp_rank, group)
        received = Side(
            self._shape(_before(own, sum(self.seq_lens)), max(stop - start, 0), head_dim),
            self.seq_dim,
            tuple((_before(own, low), _before(own, high)) for low, high in sent),
        )
        return Layout(local, received)

    def _wanted(
        self, kind: str, group: int, rank: int, sent: tuple[Range, ...], in_pieces: bool
    ) -> tuple[Range, ...]:
        """Return the tokens of q, k or v that ``rank`` receives; arguments as in `_lay_out`."""
        if kind == "q" and self.shares > 1:
            return self.query_tokens(rank)
        if kind != "q" and in_pieces:
            siblings = self.siblings(kind, group, rank)
            return sent[siblings.index(rank) :: len(siblings)]
        return ((0, sum(self.seq_lens)),)

    @lru_cache(maxsize=4096)
    def siblings(self, kind: str, group: int, rank: int) -> tuple[int, ...]:
        """Return the ranks of the node of ``rank`` that are sent the same heads of k or v."""
        heads = self.sent_range(kind, rank, group)
        if self.nodes is None or heads[0] >= heads[1]:
            return (rank,)
        node = self.nodes[rank]
        return tuple(
            other
            for other in range(self.sp_size)
            if self.nodes[other] == node and self.sent_range(kind, other, group) == heads
        )

    @lru_cache(maxsize=4096)
    def legs(
        self,
        kinds: tuple[str, ...],
        group: int,
        head_dims: tuple[int, ...],
        chunk: int = 0,
        chunks: int = 1,
    ) -> tuple[Layout, Layout] | None:
        """Lay out the two legs of k and v of an exchange, see Note [Once per node].

        Args:
            kinds: What the exchange moves, as in `chunk_exchange`.
            group: The head group.
            head_dims: ``d`` of each.
            chunk: As in `chunk_exchange`.
            chunks: As in `chunk_exchange`.

        Returns:
            The first leg and the second; None where no rank has siblings, and there is one leg.
        """
        relayed = [(kind, dim) for kind, dim in zip(kinds, head_dims) if kind in ("k", "v")]
        if not any(
            len(self.siblings(kind, group, rank)) > 1
            for kind, _ in relayed
            for rank in range(self.sp_size)
        ):
            return None
        sent = self._chunk_tokens(chunk, chunks)
        first = [self._lay_out(kind, group, dim, sent, in_pieces=True) for kind, dim in relayed]
        second = [
            self._spread(kind, group, layout.target.shape, sent)
            for (kind, _), layout in zip(relayed, first)
        ]
        return _joint(first, apart=True), _joint(second, apart=True)

    def _spread(
        self, kind: str, group: int, piece: tuple[int, ...], sent: tuple[Range, ...]
    ) -> Layout:
        """Lay out the second leg: this rank's piece, of shape ``piece``, to its siblings."""
        siblings = self.siblings(kind, group, self.sp_rank)
        length, heads, head_dim = piece[self.seq_dim], piece[2], piece[3]
        parts, heads_of, tokens = [], [], []
        for rank in range(self.sp_size):
            is_sibling = rank in siblings
            parts.append((0, length if is_sibling else 0))
            heads_of.append((0, heads if is_sibling else 0))
            wanted = self._wanted(kind, group, rank, sent, in_pieces=True)
            tokens.append(wanted if is_sibling else ())
        whole = self._shape(sum(self.seq_lens), heads, head_dim)
        return Layout(
            Side(piece, self.seq_dim, tuple(parts)),
            Patches(whole, 2, tuple(heads_of), self.seq_dim, tuple(tokens)),
        )

    def _chunk_tokens(self, chunk: int, chunks: int) -> tuple[Range, ...]:
        """Return the tokens of the whole sequence that are in a chunk, for every rank."""
        ranges = [chunk_of(length, chunk, chunks) for length in self.seq_lens]
        return tuple(
            (first + start, first + stop)
            for (first, _), (start, stop) in zip(self.local_tokens, ranges)
        )

    @lru_cache(maxsize=4096)
    def joint_exchange(
        self, kinds: str | tuple[str, ...], group: int, head_dims: tuple[int, ...]
    ) -> Layout:
        """Lay out one exchange that moves several of q, k and v of a group, for instance "qkv"."""
        layouts = [self.exchange(kind, group, dim) for kind, dim in zip(kinds, head_dims)]
        return _joint(layouts, apart=self.shares > 1)

    @lru_cache(maxsize=4096)
    def chunk_exchange(
        self,
        kinds: str | tuple[str, ...],
        group: int,
        head_dims: tuple[int, ...],
        chunk: int,
        chunks: int,
    ) -> Layout:
        """Lay out the exchange of one of ``chunks`` parts of every rank's tokens.

        The local tensor holds the tokens of the chunk alone. The global tensor holds all tokens;
        the exchange leaves those of other chunks out. Otherwise as `joint_exchange`, or "o".
        """
        if tuple(kinds) == ("o",):
            return self.chunk_exchange(("q",), group, head_dims, chunk, chunks).inverse
        sent = self._chunk_tokens(chunk, chunks)
        layouts = [self._lay_out(kind, group, dim, sent) for kind, dim in zip(kinds, head_dims)]
        return _joint(layouts, apart=self.shares > 1)

    def _shape(self, seq: int, heads: int, head_dim: int) -> tuple[int, ...]:
        first = (self.batch, seq) if self.batch_first else (seq, self.batch)
        return (*first, heads, head_dim)

    # How this rank's attention finds its KV heads.

    @lru_cache(maxsize=4096)
    def kv_pieces(self, group: int) -> tuple[tuple[int, int, int], ...]:
        """Return ``(group, start, stop)`` of the received pieces that hold the heads of `kv_range`.

        ``start`` and ``stop`` count the heads of what travelled with that group. The heads of the
        pieces, one piece after another, are those of `kv_range`.

        The piece that travels with ``group`` itself is always named, even where this rank gets none
        of its heads: a rank that left the piece out of its graph would not take part in the
        exchange of its gradient.
        """
        need_start, need_stop = self.kv_range(self.sp_rank, group)
        pieces = []
        for sent in range(group + 1):
            start, stop = self.sent_range("k", self.sp_rank, sent)
            low, high = max(start, need_start), min(stop, need_stop)
            own = sent == group and "k" in self.kinds_of(group)
            if low < high or own:  # guard: read by every rank
                first = max(low - start, 0)
                pieces.append((sent, first, high - start if low < high else first))
        return tuple(pieces)

    @lru_cache(maxsize=4096)
    def kv_expansion(self, group: int) -> tuple[int, ...] | None:
        """Return for each query head of the group its KV head among `kv_range`.

        None where a regular ratio of query heads to KV heads says the same.
        """
        start, stop = self.query_range(self.sp_rank, group)
        first, last = self.kv_range(self.sp_rank, group)
        shared = self.heads // self.kv_heads
        index = tuple(head // shared - first for head in range(start, stop))
        count, rest = divmod(stop - start, last - first)
        regular = rest == 0 and index == tuple(head // count for head in range(stop - start))
        return None if regular else index


def _joint(layouts: list[Layout], apart: bool) -> Layout:
    """Return the layout of one exchange that moves several tensors."""
    return replace(layouts[0], also=tuple(layouts[1:]), apart=apart)


def _common(ranges: tuple[Range, ...], other: Range) -> list[Range]:
    """Return what ``ranges`` have in common with another range."""
    common = [(max(start, other[0]), min(stop, other[1])) for start, stop in ranges]
    return [(start, stop) for start, stop in common if start < stop]


def _before(ranges: tuple[Range, ...], token: int) -> int:
    """Return how many tokens of ``ranges`` come before ``token``."""
    return sum(min(max(token - start, 0), stop - start) for start, stop in ranges)
