"""Tells which tensors that autograd saves are views of q, k, v or o, and gives them back.

See Note [Saved tensors by name] in `recompute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

# The most bytes that are saved beside q, k, v and o, as a share of the bytes of o. A log-sum-exp
# has 4 bytes per head and token.
MAX_SAVED = 0.5


def storage_of(x: Tensor) -> int:
    """Return what tells the storage of ``x`` from others; views of one tensor share it."""
    return x.untyped_storage().data_ptr()


class _View(NamedTuple):
    """A tensor that autograd saves.

    Attributes:
        source: "q", "k" or "v", of which the tensor is a view; "o0" for the first range of o, and
            so on; or its place among the tensors that are saved.
        size: Of the view.
        strides: Of the view.
        offset: Of the view, from the first element of its source.
    """

    source: str | int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass
class SavedViews:
    """Stands in the graph for saved tensors, see Note [Saved tensors by name].

    Attributes:
        views: The saved tensors.
        tensors: Each source with its tensor, while a backward runs.
    """

    views: list[_View] = field(default_factory=list)
    tensors: dict[str | int, Tensor] = field(default_factory=dict)

    def unpack(self, index: int) -> Tensor:
        """Return a saved tensor to autograd, by the number that ``pack`` returned for it."""
        source, size, strides, offset = self.views[index]
        x = self.tensors[source]
        if isinstance(source, int):
            return x
        return x.as_strided(size, strides, x.storage_offset() + offset)


def note_views(
    views: SavedViews,
    saved: list[Tensor],
    kinds: dict[int, str],
    free: set[int],
    pieces: Sequence[Tensor],
    starts: dict[str, int],
) -> list[Tensor] | None:
    """Note for each saved tensor the view of q, k, v or o that it is.

    Args:
        views: Takes the views.
        saved: The saved tensors.
        kinds: For each storage of q, k and v, its name.
        free: Storages that live on anyhow, so that saving them costs nothing.
        pieces: The output, in successive ranges of tokens.
        starts: The storage offset of each of q, k and v.

    Returns:
        The tensors that are to be saved, which are no such views; None if they are too large.
    """
    beside: list[Tensor] = []
    size, dtype = 0, pieces[0].dtype
    # Not by the storage alone: attention may cut o out of a larger tensor.
    places = [(storage_of(x), x.numel(), int(x.storage_offset())) for x in pieces]
    names = {place: f"o{index}" for index, place in enumerate(places)}
    starts |= {name: start for (*_, start), name in names.items()}
    for x in saved:
        place = storage_of(x), x.numel(), int(x.storage_offset())
        source: str | int | None = kinds.get(place[0]) or names.get(place)
        if source is None or x.dtype != dtype:
            source = len(beside)
            beside.append(x.detach())
            size += 0 if storage_of(x) in free else x.numel() * x.element_size()
        start = starts[source] if isinstance(source, str) else 0
        views.views.append(_View(source, x.shape, x.stride(), place[2] - start))
    return beside if size <= MAX_SAVED * sum(x.nbytes for x in pieces) else None
