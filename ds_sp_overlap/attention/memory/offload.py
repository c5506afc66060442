"""A tensor that waits in host memory for its backward, copied there and back while compute goes on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...exchange.sp_group import HostStream, SideStream


@functools.cache
def copies(device: torch.device) -> HostStream | SideStream:
    """What carries the copies of a device: a stream of their own, beside that of the exchanges."""
    if device.type == "cpu":
        return HostStream()
    backend = torch.get_device_module(device)
    return SideStream(backend, device, backend.Stream(device, priority=-1))


class Away:
    """A tensor in host memory.

    host    the copy there, pinned
    here    on its device: until `leave`, and from `bring` to `get`
    moved   mark of the last copy; whoever gives up or reads ``here`` waits for it, on the compute
            stream and not on the host
    """

    def __init__(self, x: Tensor):
        self.side, self.device = copies(x.device), x.device
        self.here: Tensor | None = x
        self.host = torch.empty_like(x, device="cpu", pin_memory=x.device.type != "cpu")
        self.moved: Any = None
        self._copy(x, self.host)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        try:
            with self.side.after_compute():  # guard: copies what is ready
                target.copy_(source, non_blocking=True)
        finally:
            self.moved = self.side.mark()

    def leave(self) -> None:
        """Give its memory on the device back."""
        if self.here is not None:
            self.side.before_compute(self.moved)  # guard: copied, then given back
            self.here = None

    def bring(self) -> None:
        """Begin its way back."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device)
            self._copy(self.host, self.here)

    def get(self) -> Tensor:
        """Its way back is over; the tensor is the caller's."""
        self.bring()
        x = self.here
        assert x is not None
        self.leave()  # guard: arrived, then read
        return x

    def __del__(self) -> None:
        if "moved" in vars(self):
            self.leave()  # guard: dropped behind its copy
