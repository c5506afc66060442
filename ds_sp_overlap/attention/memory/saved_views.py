"""Replaces views of q, k, v and o that autograd saves by names.

See Note [Saved tensors by name] in `recompute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# The limit on the bytes that attention may save beside q, k, v and o, as a share of the bytes of o.
# Above the limit, nothing is saved. A log-sum-exp has 4 bytes per head and token.
MAX_SAVED = 0.5


def storage_of(x: Tensor) -> int:
    """Return the address of the storage of ``x``, which all views of a tensor share."""
    return x.untyped_storage().data_ptr()


class _View(NamedTuple):
    """Describes a tensor that autograd saves, as a view of another tensor, its source.

    Attributes:
        source: The name of the source: "q", "k" or "v"; "o0" for the first range of o, "o1" for the
            second and so on. For any other source, its index in the result of `SavedViews.settle`.
        size: The shape of the view.
        strides: The strides of the view, in elements.
        offset: The distance from the first element of the source to that of the view, in elements.
    """

    source: str | int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class SavedViews:
    """Provides the hooks of Note [Saved tensors by name] in `recompute`.

    Args:
        heads: q, k and v.
        free: Tensors that stay in memory in any case, so that to save them costs nothing.
        seq_dim: The dimension of the sequence in q, k, v and o.

    Attributes:
        saved: The tensors that autograd saves, until `settle`; empty if these are too large.
        views: The description of each saved tensor.
        tensors: The tensor of each source, while backward runs.
    """

    def __init__(self, heads: Sequence[Tensor], free: Sequence[Tensor], seq_dim: int):
        self._seq_dim = seq_dim
        # For q, k and v, by the address of the storage: the name, and the storage offset.
        self._sources: dict[int, tuple[str, int]] = {}
        for kind, x in zip("qkv", heads):
            self._sources[storage_of(x)] = kind, int(x.storage_offset())
        self._strides = [x.stride() for x in heads]
        self._free = set(map(storage_of, free))
        q, _, v = heads
        # The bytes that may still be saved: a share of MAX_SAVED of o, and o itself, whose storage
        # is not known yet.
        self._bytes_left = (1 + MAX_SAVED) * q.nbytes / q.shape[-1] * v.shape[-1]
        self.saved: list[Tensor] = []
        self.views: list[_View] = []
        self.tensors: dict[str | int, Tensor] = {}

    def pack(self, x: Tensor) -> int:
        """Collect a tensor for autograd to save; return an index, which the graph holds instead."""
        self.saved.append(x)
        if storage_of(x) not in self._sources and storage_of(x) not in self._free:
            self._bytes_left -= x.nbytes
        if self._bytes_left < 0:
            # Backward will recompute attention, so free the tensors at once.
            self.saved.clear()
        return len(self.saved) - 1

    def unpack(self, index: int) -> Tensor:
        """Return the saved tensor for which `pack` returned ``index``."""
        source, size, strides, offset = self.views[index]
        x = self.tensors[source]
        if isinstance(source, int):
            return x
        return x.as_strided(size, strides, x.storage_offset() + offset)

    def settle(self, pieces: Sequence[Tensor]) -> list[Tensor] | None:
        """Describe each saved tensor, if possible as a view of q, k, v or o.

        Args:
            pieces: The pieces of o, for successive ranges of tokens.

        Returns:
            The other tensors, which must be saved for backward; None if these are too large.
        """
        if self._bytes_left < 0:
            return None
        beside: list[Tensor] = []
        size, names = 0, {}
        # Length and strides of each range of o.
        self._lengths = [x.shape[self._seq_dim] for x in pieces]
        self._strides_of_o = [x.stride() for x in pieces]
        # A storage alone doesn't identify o, since attention may cut o out of a larger tensor.
        for index, x in enumerate(pieces):
            names[storage_of(x), x.numel(), x.storage_offset()] = f"o{index}"
        for x in self.saved:
            place = storage_of(x), x.numel(), int(x.storage_offset())
            source: str | int | None
            source, start = self._sources.get(place[0], (names.get(place), place[2]))
            if source is None or x.dtype != pieces[0].dtype:
                source = len(beside)
                beside.append(x.detach())
                size += 0 if storage_of(x) in self._free else x.nbytes
            self.views.append(_View(source, x.shape, x.stride(), place[2] - start))
        return beside if size <= MAX_SAVED * sum(x.nbytes for x in pieces) else None

    @property
    def read_o(self) -> bool:
        """Return whether backward reads o."""
        return any(str(view.source).startswith("o") for view in self.views)

    def put(
        self, heads: Sequence[Tensor], o: Tensor | None, beside: Sequence[Tensor], do: Tensor
    ) -> bool:
        """Set the tensors of all sources for one backward.

        Args:
            heads: q, k and v.
            o: The output; None if backward does not read o.
            beside: The tensors that `settle` returned.
            do: The gradient of o.

        Returns:
            Whether the tensors fit the graph. q, k and v must have the strides that they had in
            forward, since the graph holds views. If backward reads o, ``o`` must be a tensor with
            the dtype of ``do``.
        """
        if self._strides != [x.stride() for x in heads]:
            return False
        if self.read_o:
            if o is None or o.dtype != do.dtype:
                return False
            ranges = o.split(self._lengths, self._seq_dim)
            for index, (piece, strides) in enumerate(zip(ranges, self._strides_of_o)):
                # The graph holds views of o, so o must have the strides that it had in forward.
                if piece.stride() != strides:
                    piece = o.new_empty_strided(piece.shape, strides).copy_(piece)
                self.tensors[f"o{index}"] = piece
        self.tensors.update(zip("qkv", heads))
        self.tensors.update(enumerate(beside))
        return True
