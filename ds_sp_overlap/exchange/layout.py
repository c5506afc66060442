"""Both ends of an exchange as frozen values: which part of a tensor goes to which rank, and how many elements that is.

    local    [s/P, b, h, d]   this rank's slice of the sequence, all heads
    global   [s, b, h/P, d]   the whole sequence, this rank's heads

(or ``[b, s/P, h, d]`` and ``[b, s, h/P, d]``, batch first). An exchange turns one into the other. Both ends of it have
the same form, a tensor cut along one dimension with one part per peer: the local side is cut along heads, the global
side along the sequence. That is all a `Side` says, and it covers every case there is: unequal parts are uneven heads
or unequal local sequences, overlapping parts are KV heads that several ranks need, and the gradient's exchange is the
same pair of sides with their roles swapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Range = tuple[int, int]  # [start, stop)
Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and offset in a flat buffer


def chunk_of(length: int, chunk: int, chunks: int) -> Range:
    """The tokens of one of ``chunks`` parts of ``length`` tokens; empty ones come where there are fewer tokens than chunks."""
    return length * chunk // chunks, length * (chunk + 1) // chunks


@dataclass(frozen=True)
class Side:
    """One end of an exchange.

    shape    shape of the tensor at this end
    dim      the dimension it is cut along
    parts    for each peer, the range along ``dim`` that is sent to it or received from it, in rank order
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Range, ...]

    @cached_property
    def split_sizes(self) -> list[int]:
        """Elements per peer, as ``all_to_all_single`` wants them."""
        row = math.prod(self.shape) // max(self.shape[self.dim], 1)
        return [(stop - start) * row for start, stop in self.parts]

    @cached_property
    def elements(self) -> int:
        """Elements of all parts."""
        return sum(self.split_sizes)

    @cached_property
    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Starts and stops of the parts."""
        starts, stops = zip(*self.parts)
        return starts, stops

    @cached_property
    def tiles(self) -> bool:
        """Whether the parts lie end to end and cover the dimension."""
        edges = [0, *(stop for _, stop in self.parts)]
        return edges[-1] == self.shape[self.dim] and all(part[0] == edge for part, edge in zip(self.parts, edges))

    @cached_property
    def covers(self) -> bool:
        """Whether every place of the dimension is in some part. Of the whole sequence a chunk of tokens leaves most out."""
        edge = 0
        for start, stop in sorted(self.parts):
            edge = max(edge, stop) if start <= edge else edge
        return edge == self.shape[self.dim]

    @cached_property
    def spaced(self) -> tuple[int, Range] | None:
        """Where the dimension falls into as many equal pieces as there are peers, each with its peer's part in the same place: the
        length of a piece, and that place."""
        piece, rest = divmod(self.shape[self.dim], len(self.parts))
        places = {(start - peer * piece, stop - peer * piece) for peer, (start, stop) in enumerate(self.parts)}
        start, stop = min(places)
        return (piece, (start, stop)) if rest == 0 and len(places) == 1 and 0 <= start <= stop <= piece else None

    @cached_property
    def tiled(self) -> tuple[int, ...]:
        """Shape of the parts with a dimension for the peers in front of the one that is cut, and h and d in one; empty where they are not
        `spaced`."""
        if self.spaced is None:
            return ()
        _, (start, stop) = self.spaced
        shape = (*self.shape[: self.dim], len(self.parts), stop - start, *self.shape[self.dim + 1 :])
        return (*shape[:3], math.prod(shape[3:]))

    @cached_property
    def is_wire_layout(self) -> bool:
        """Whether a contiguous tensor of this shape already is the buffer that travels, so that nothing is moved."""
        return self.tiles and math.prod(self.shape[: self.dim]) == 1

    @cached_property
    def is_cut_into_slices(self) -> bool:
        """Whether each part is one slice, as in a tensor that has a dimension for the ranks."""
        return self.tiles and all(stop - start == 1 for start, stop in self.parts)


@dataclass(frozen=True, eq=False)
class Sides:
    """The same end of an exchange for every tensor that travels in it."""

    each: tuple[Side, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements per peer, of all tensors together."""
        return [sum(sizes) for sizes in zip(*(side.split_sizes for side in self.each))]

    @cached_property
    def elements(self) -> int:
        return sum(self.sizes)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [side.shape for side in self.each]

    @lru_cache(maxsize=4096)
    def places(self) -> list[Place]:
        """Where the wire has the `Side.tiled` of all tensors side by side, in the order of their memory; behind that, of each. Nothing
        if the parts of one are not evenly spaced."""
        tiles = [side.tiled for side in self.each]
        if not all(tiles):  # guard: a tile for each peer
            return []
        dim, widths = self.each[0].dim, [tile[3] for tile in tiles]
        shape, width = list(tiles[0][:3]), sum(widths)
        peers = shape.pop(dim)
        strides = [shape[1] * width, width, 1]
        strides.insert(dim, shape[0] * strides[0])
        shape.insert(dim, peers)
        starts = [sum(widths[:at]) for at in range(len(widths))]
        return [((*shape, n), tuple(strides), at) for n, at in zip((width, *widths), (0, *starts))]

    @cached_property
    def copied(self) -> list[tuple[Place, bool]]:
        """`places` of tensors that are each one copy of theirs: all of it is held, by one peer; and whether it has the tensor's shape, as
        where strides can say that. Else none."""
        if not all(side.tiles for side in self.each):
            return []
        found = []
        for side, (shape, strides, offset) in zip(self.each, self.places()[1:]):
            peers, tokens = strides[side.dim : side.dim + 2]
            if side.dim < 2 and peers == shape[side.dim + 1] * tokens:  # one after another
                shape, strides = side.shape, (*strides[: side.dim], *strides[side.dim + 1 : 3], side.shape[3], 1)
            found.append(((shape, strides, offset), shape == side.shape))
        return found


@dataclass(frozen=True)
class Layout:
    """An exchange as this rank sees it: the tensor it gives and the tensor it gets.

    also   of other tensors that travel with it: each peer is sent its part of the first, then of the second, and so on
    """

    source: Side
    target: Side
    also: tuple[Layout, ...] = ()

    @cached_property
    def each(self) -> tuple[Layout, ...]:
        """Of every tensor."""
        return self, *self.also

    @cached_property
    def sources(self) -> Sides:
        return Sides(tuple(layout.source for layout in self.each))

    @cached_property
    def targets(self) -> Sides:
        return Sides(tuple(layout.target for layout in self.each))

    @cached_property
    def inverse(self) -> Layout:
        """The exchange of the gradient."""
        return Layout(self.target, self.source, tuple(layout.inverse for layout in self.also))

    def only(self, wanted: Sequence[bool]) -> Layout:
        """The exchange of some of its tensors."""
        if all(wanted):
            return self
        first, *also = (layout for layout, is_wanted in zip(self.each, wanted) if is_wanted)
        return Layout(first.source, first.target, tuple(also))
