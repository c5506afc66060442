"""Says which part of a tensor goes to which rank, at both ends of an exchange, as frozen values.

    local    [s/P, b, h, d]   this rank's slice of the sequence, all heads
    global   [s, b, h/P, d]   the whole sequence, this rank's heads

(or ``[b, s/P, h, d]`` and ``[b, s, h/P, d]``, batch first). An exchange turns one into the other.

Both ends have the same form, a `Side`: a tensor cut along one dimension, one part per peer. The
local side is cut along heads, the global side along the sequence. A `Side` covers every case:

    unequal parts       uneven heads, or unequal local sequences
    empty parts         tokens whose queries a rank does not attend with
    overlapping parts   KV heads that several ranks need
    sides swapped       the exchange of the gradient

`Patches` is a side for which one cut is not enough: the local side of q and o where ranks share
query heads, and the tokens of this rank go to several of them; and the global side of k and v that
travel in two legs (`legs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, compress

Range = tuple[int, int]  # [start, stop)

# A block of a tensor: a dimension with a range, for each dimension that is cut.
Block = tuple[tuple[int, int, int], ...]


def chunk_of(length: int, chunk: int, chunks: int) -> Range:
    """Return the tokens of one of ``chunks`` parts of ``length`` tokens; parts may be empty."""
    return length * chunk // chunks, length * (chunk + 1) // chunks


def end_to_end(lengths: Sequence[int]) -> tuple[Range, ...]:
    """Return ranges of these lengths that lie end to end, from 0 on."""
    stops = list(accumulate(lengths))
    return tuple((stop - length, stop) for length, stop in zip(lengths, stops))


@lru_cache(maxsize=4096)
def all_equal(send_sizes: tuple[int, ...], recv_sizes: tuple[int, ...]) -> bool:
    """Return whether this rank sends to and receives from every rank equally many elements.

    All ranks find the same answer, unless ranks share query heads: q may then be even on one rank
    and uneven on another.
    """
    first = send_sizes[0]
    return 0 < first and send_sizes.count(first) == len(send_sizes) and send_sizes == recv_sizes


@dataclass(frozen=True)
class Side:
    """One end of an exchange.

    Attributes:
        shape: Shape of the tensor at this end.
        dim: The dimension along which the tensor is cut.
        parts: For each peer in rank order, the range along ``dim`` that is sent to the peer or
            received from the peer.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Range, ...]

    @cached_property
    def split_sizes(self) -> list[int]:
        """Elements per peer, as ``all_to_all_single`` wants them."""
        return [math.prod(self.part_shape(peer)) for peer in range(len(self.parts))]

    def part_shape(self, peer: int) -> list[int]:
        """Return the shape of a peer's part."""
        shape = list(self.shape)
        start, stop = self.parts[peer]
        shape[self.dim] = stop - start
        return shape

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The starts of the parts that are not empty, and their stops; all, if all are empty."""
        filled = [part for part in self.parts if part[0] < part[1]]
        starts, stops = zip(*filled or self.parts)
        return starts, stops

    def blocks(self, peer: int) -> tuple[Block, ...]:
        """Return the blocks of the tensor that are a peer's part, one after another in the wire."""
        return (((self.dim, *self.parts[peer]),),)


@dataclass(frozen=True)
class Patches(Side):
    """An end of an exchange that is cut along heads and along tokens.

    A peer's part is some tokens of some heads. No two parts hold the same element.

    Attributes:
        parts: For each peer, the heads.
        seq_dim: The dimension of the tokens.
        tokens: For each peer, its tokens in ascending ranges, as they follow one another in the
            wire; none if the peer is sent nothing.
    """

    seq_dim: int
    tokens: tuple[tuple[Range, ...], ...]

    def part_shape(self, peer: int) -> list[int]:
        shape = super().part_shape(peer)
        shape[self.seq_dim] = sum(last - first for first, last in self.tokens[peer])
        return shape

    def blocks(self, peer: int) -> tuple[Block, ...]:
        heads = (self.dim, *self.parts[peer])
        return tuple(((self.seq_dim, *tokens), heads) for tokens in self.tokens[peer])


@dataclass(frozen=True, eq=False)
class Sides:
    """One end of an exchange that moves several tensors.

    Attributes:
        each: The side of every tensor, in the order in which they travel.
        apart: As in `Layout`.
    """

    each: tuple[Side, ...]
    apart: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per peer, of all tensors."""
        of_each = [side.split_sizes for side in self.each]
        return tuple(sum(sizes) for sizes in zip(*of_each))

    @cached_property
    def elements(self) -> int:
        """Elements of all parts of all tensors."""
        return sum(self.sizes)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [side.shape for side in self.each]


@dataclass(frozen=True)
class Layout:
    """An exchange as this rank sees it: the tensor that it sends and the tensor that it receives.

    Attributes:
        source: The tensor that is sent.
        target: The tensor that is received.
        also: Layouts of further tensors in the same transfer. For each token, a peer is sent its
            part of the first tensor, then that of the second, and so on.
        apart: A peer is sent its whole part of the first tensor, then that of the second, and so
            on, since it is not sent the same tokens of each.
    """

    source: Side
    target: Side
    also: tuple[Layout, ...] = ()
    apart: bool = False

    @cached_property
    def each(self) -> tuple[Layout, ...]:
        """The layout of every tensor in the transfer."""
        return self, *self.also

    @cached_property
    def sources(self) -> Sides:
        return Sides(tuple(layout.source for layout in self.each), self.apart)

    @cached_property
    def targets(self) -> Sides:
        return Sides(tuple(layout.target for layout in self.each), self.apart)

    @cached_property
    def is_even(self) -> bool:
        """Return whether equal parts are sent and received, see `all_equal`."""
        return all_equal(self.sources.sizes, self.targets.sizes)

    @cached_property
    def inverse(self) -> Layout:
        """The exchange of the gradient."""
        also = tuple(layout.inverse for layout in self.also)
        return Layout(self.target, self.source, also, self.apart)

    def only(self, wanted: Sequence[bool]) -> Layout:
        """Return the layout of an exchange of only those tensors that are ``wanted``, at least one.

        Args:
            wanted: For each tensor of `each`, whether it is wanted.
        """
        if all(wanted):
            return self
        return joint(list(compress(self.each, wanted)), self.apart)


def joint(layouts: Sequence[Layout], apart: bool) -> Layout:
    """Return the layout of one exchange that moves several tensors; ``apart`` as in `Layout`."""
    return Layout(layouts[0].source, layouts[0].target, tuple(layouts[1:]), apart)
