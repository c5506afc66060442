"""Joins the pieces of a gradient to one tensor, while the pieces are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .slices import Parts, Ranges, cut_ranges, mm_to_slices, put_ranges, tile


class Pieces:
    """Joins pieces along ``dim`` to one tensor.

    The tensor is the sum of the pieces where parts overlap, and zero where there is no piece. Call
    `put` once for each piece, then `whole`.

    Args:
        shape: Of the tensor.
        dim: The dimension of the parts.
        parts: The parts of all pieces, which will come.
        late: Whether to join the pieces at the end only, where other memory is freed meanwhile.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim: int,
        parts: Parts,
        late: bool = False,
    ):
        self.shape, self.dim, self.late = shape, dim, late
        self._once = tile(parts, shape[dim])
        self._whole: Tensor | None = None
        self._waiting: list[tuple[Ranges, Tensor]] = []

    def put(self, part: Ranges, compute: Callable[..., Tensor], *operands: Any) -> None:
        """Put the piece of a part in its place.

        Args:
            part: The part.
            compute: Computes the piece from ``operands``. Writes it to ``out=`` if that is given,
                which avoids a copy where no other piece is put in the same place.
            operands: The first one has the dtype and the device of the tensor.
        """
        if self.late:
            self._waiting.append((part, compute(*operands)))
            return
        if self._whole is None:
            # A single piece is the tensor, without a copy.
            if self._once and part == ((0, self.shape[self.dim]),):
                self._whole = compute(*operands)
                return
            make = (  # guard: zero without a gradient
                operands[0].new_empty if self._once else operands[0].new_zeros
            )
            self._whole = make(*self.shape)
        add = not self._once  # guard: shared rows are summed
        if len(part) == 1 and not add:
            # Also where an empty part follows a part that was the whole tensor.
            compute(*operands, out=cut_ranges(self._whole, self.dim, part))
        elif compute is torch.mm:
            a, b = operands
            # Slices are of columns. Rows are the columns of the transpose, (a b)^T = b^T a^T.
            if self.dim == 0:
                mm_to_slices(b.t(), a.t(), self._whole.t(), part, add=add)
            else:
                mm_to_slices(a, b, self._whole, part, add=add)
        else:
            put_ranges(self._whole, self.dim, part, compute(*operands), add=add)

    def whole(self) -> Tensor | None:
        """Return the tensor, after joining the pieces that waited; None if there was no piece."""
        self.late = False
        # Taken out one by one, so that each piece is freed once it is in place.
        while self._waiting:
            part, piece = self._waiting.pop()
            self.put(part, copied, piece)
        return self._whole


def copied(piece: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy a piece to ``out``; the ``compute`` of `Pieces.put` for pieces that are there."""
    return piece if out is None else out.copy_(piece)
