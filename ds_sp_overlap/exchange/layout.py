"""Describes which part of a tensor goes to which rank, at both ends of an exchange.

    local    [s/P, b, h, d]   this rank's slice of the sequence, all heads
    global   [s, b, h/P, d]   the whole sequence, this rank's heads

(or ``[b, s/P, h, d]`` and ``[b, s, h/P, d]``, batch first). An exchange turns one into the other.

One rule lays out every exchange: a rank sends to each peer the elements that the rank holds before
the exchange and the peer holds after the exchange (`between`). Ranges of the whole tensor describe
the part that a rank holds. So uneven heads, unequal sequences, KV heads that several ranks need,
queries that ranks share, and pieces that travel in two legs are all the same case. The exchange of
the gradient has the ends swapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, compress, product

# The dimension of heads in q, k, v and o.
HEADS = 2

Range = tuple[int, int]  # [start, stop)
# The part of a distributed tensor that a rank holds: for each dimension of the whole tensor, ranges
# in ascending order.
Held = tuple[Sequence[Range], ...]
# A block of one rank's tensor: a range for each dimension.
Block = tuple[Range, ...]


def chunk_of(length: int, chunk: int, chunks: int) -> Range:
    """Return the range of chunk ``chunk`` of ``length`` tokens cut into ``chunks`` chunks.

    A chunk is empty if there are fewer tokens than chunks.
    """
    return length * chunk // chunks, length * (chunk + 1) // chunks


def end_to_end(lengths: Sequence[int]) -> tuple[Range, ...]:
    """Return consecutive ranges of the given lengths, the first from 0."""
    stops = list(accumulate(lengths))
    return tuple((stop - length, stop) for length, stop in zip(lengths, stops))


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ``ranges`` in ascending order, without empty ranges; merge adjacent ranges."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return tuple(found)


def total(ranges: Iterable[Range]) -> int:
    """Return the number of elements in all ranges together."""
    return sum(stop - start for start, stop in ranges)


def common(own: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the intersection of ``own`` with ``others``, without empty ranges.

    The returned ranges count the elements of ``own`` from 0, range after range.
    """
    found, before = [], 0
    for start, stop in own:
        for low, high in others:
            first, last = max(start, low), min(stop, high)
            if first < last:
                found.append((before + first - start, before + last - start))
        before += stop - start
    return found


@lru_cache(maxsize=4096)
def all_equal(send_sizes: tuple[int, ...], recv_sizes: tuple[int, ...]) -> bool:
    """Return whether all parts that this rank sends and receives have the same size, above 0.

    All ranks get the same result, unless ranks share query heads: the sizes of q may then be equal
    on one rank and unequal on another. Such ranks can take part in one exchange, since gloo and
    NCCL send and receive a part for each pair of ranks, whether torch is given sizes or not.
    """
    first = send_sizes[0]
    return 0 < first and send_sizes.count(first) == len(send_sizes) and send_sizes == recv_sizes


@dataclass(frozen=True)
class Side:
    """Describes one end of an exchange, for one tensor.

    Attributes:
        shape: Shape of the tensor at this end.
        parts: For each peer in rank order, the blocks of the tensor that are sent to the peer or
            received from the peer. The blocks of a peer have the order of the wire.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Block, ...], ...]

    @cached_property
    def split_sizes(self) -> list[int]:
        """Return the number of elements for each peer, as ``all_to_all_single`` takes them."""
        return [sum(math.prod(shape_of(block)) for block in blocks) for blocks in self.parts]


def shape_of(block: Block) -> tuple[int, ...]:
    """Return the shape of a block."""
    return tuple([stop - start for start, stop in block])


@dataclass(frozen=True, eq=False)
class Sides:
    """Describes one end of an exchange of one or more tensors.

    In the wire, all parts for a peer follow one another, tensor by tensor.

    Attributes:
        each: The side of every tensor, in the order in which they travel.
    """

    each: tuple[Side, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements for each peer, over all tensors."""
        return tuple(map(sum, zip(*[side.split_sizes for side in self.each])))

    @cached_property
    def elements(self) -> int:
        """Return the number of elements of all parts of all tensors."""
        return sum(self.sizes)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [side.shape for side in self.each]

    @cached_property
    def cut(self) -> tuple[int, Sequence[int], Sequence[int]] | None:
        """Return the dimension along which a single tensor is cut, and starts and stops of blocks.

        Returns None for several tensors, or for a tensor that is cut along two dimensions.
        """
        side, *others = self.each
        if others:
            return None
        if not self.elements:
            return HEADS, (0,), (0,)
        ranges = list(zip(*chain(*side.parts)))  # for each dimension, the ranges of all blocks
        cut = [dim for dim, size in enumerate(side.shape) if set(ranges[dim]) != {(0, size)}]
        if len(cut) > 1:
            return None
        # If each block is the whole tensor, any dimension works.
        dim = cut[0] if cut else HEADS
        starts, stops = zip(*ranges[dim])
        return dim, starts, stops


@dataclass(frozen=True, eq=False)
class Layout:
    """Describes an exchange on this rank: the tensors that are sent, and the tensors received.

    Attributes:
        sources: The end that is sent.
        targets: The end that is received; as many tensors as ``sources``.
    """

    sources: Sides
    targets: Sides

    @classmethod
    def of(cls, ends: Iterable[tuple[Side, Side]]) -> Layout:
        """Return the layout of one exchange, given both ends of each tensor."""
        sources, targets = zip(*ends)
        return cls(Sides(sources), Sides(targets))

    @cached_property
    def each(self) -> list[tuple[Side, Side]]:
        """Return both ends of every tensor."""
        return list(zip(self.sources.each, self.targets.each))

    @cached_property
    def inverse(self) -> Layout:
        """Return the layout of the exchange of the gradients."""
        return Layout(self.targets, self.sources)

    def only(self, wanted: Sequence[bool]) -> Layout:
        """Return the layout of an exchange of some of the tensors.

        Args:
            wanted: For each tensor, whether it is exchanged; at least one must be.
        """
        return self if all(wanted) else Layout.of(compress(self.each, wanted))


def between(rank: int, before: Sequence[Held], after: Sequence[Held]) -> tuple[Side, Side]:
    """Return both ends of the exchange of a tensor, on ``rank``.

    Args:
        rank: This rank, in the sp group.
        before: The part that each rank holds before the exchange.
        after: The part that each rank holds after the exchange.
    """
    return _side(before[rank], after), _side(after[rank], before)


def _side(own: Held, peers: Sequence[Held]) -> Side:
    """Return the end where this rank holds ``own``; at the other end, the ranks hold ``peers``."""
    # Both ends list the blocks of a part in the same order: the order of the whole tensor.
    parts = [tuple(product(*map(common, own, peer))) for peer in peers]
    return Side(tuple(map(total, own)), tuple(parts))


@lru_cache(maxsize=4096)
def tail_layout(rank: int, lengths: tuple[int, ...], reach: int, batch: int, width: int) -> Layout:
    """Lay out the exchange in which each rank receives the last tokens before its own.

    Args:
        rank: This rank, in the sp group.
        lengths: Local sequence length of every rank, in tokens.
        reach: The number of tokens before its own that a rank needs.
        batch: ``b``.
        width: Elements of a token.

    Returns:
        The layout. This rank sends its last ``reach`` tokens [b, n, width], or all if it has fewer;
        the last rank sends none. This rank receives the ``reach`` tokens before its first token, or
        all if there are fewer.
    """
    before: list[Held] = []
    after = []
    batches, widths = [(0, batch)], [(0, width)]
    for start, stop in end_to_end(lengths):
        sent = min(reach, stop - start) if len(before) < len(lengths) - 1 else 0
        before.append((batches, [(stop - sent, stop)], widths))
        after.append((batches, [(max(0, start - reach), start)], widths))
    return Layout.of([between(rank, before, after)])
