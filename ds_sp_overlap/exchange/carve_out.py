"""Leaves SMs to exchanges: matrix products that are launched meanwhile take fewer SMs.

A product spreads over all SMs of a GPU. Where the blocks of an exchange hold some of them, the last
blocks of the product wait for a second wave (PyTorch issue 143988). cuBLASLt can be told how many
SMs a product may take when the product is launched. torch passes one number on, for the whole
process (``_set_sm_carveout_experimental``).

The forward of flash-attn 3 is persistent as well: its blocks take the SMs that an exchange gives
back, so that the next exchange, though launched, begins when attention is over. The same number
reaches it as ``sm_margin`` (`bind_arguments`), and keeps as many SMs for exchanges. Without
a margin each attention hides one exchange. On a simulated GPU (``plan --gpu``) two head groups,
with which "auto" begins, are the fastest with a margin and without; a test checks this.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch


class CarveOut:
    """The SMs that products leave free while any exchange is under way.

    torch has one such number for the process. While exchanges are under way, it is the largest
    ``sms`` of theirs; after the last, it is again what it was before the first.

    Args:
        sms: How many SMs to leave free.
    """

    # Shared by all objects: ``sms`` of each exchange that is under way.
    _under_way: ClassVar[list[int]] = []
    # torch's number before the first of them; None if nobody had set one.
    _before: ClassVar[int | None] = None

    def __init__(self, sms: int):
        self.sms = sms

    def begin(self) -> None:
        """Note that an exchange was launched (`SideStream.mark`); set the number if it rises."""
        if not self._under_way:
            CarveOut._before = torch._C._get_sm_carveout_experimental()
        if self.sms > max(self._under_way, default=0):
            torch._C._set_sm_carveout_experimental(self.sms)
        self._under_way.append(self.sms)

    def end(self) -> None:
        """Note that an exchange was finished, or abandoned; lower the number or restore it.

        `SideStream.before_compute` calls this once for each `begin`.
        """
        self._under_way.remove(self.sms)
        most = max(self._under_way, default=0)
        if self.sms > most:
            torch._C._set_sm_carveout_experimental(most or self._before)  # guard: given back


@functools.cache
def carve_out(sms: int) -> CarveOut | None:
    """Return the process's one carve-out of ``sms`` SMs; None for 0.

    Raises:
        ValueError: if this torch cannot leave SMs free.
    """
    if not sms:
        return None
    if not hasattr(torch._C, "_set_sm_carveout_experimental"):
        raise ValueError(
            f"sp_overlap.sm_carveout: {sms}, but torch {torch.__version__} has no SM carve-out; "
            "leave out the key"
        )
    return CarveOut(sms)
