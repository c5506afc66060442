"""Offloads a tensor to host memory until backward; both copies overlap with compute."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...exchange.streams import HostStream, SideStream, accelerator


@functools.cache
def copy_stream(device: torch.device) -> HostStream | SideStream:
    """Return the stream for copies between ``device`` and the host; not that of exchanges."""
    if device.type == "cpu":
        return HostStream()
    backend = accelerator(device.type)
    # A lower number is a higher priority; the default is 0.
    return SideStream(backend, device, backend.Stream(device, priority=-1))


class OffloadedTensor:
    """Holds a tensor that is copied to host memory, and for backward back to the device.

    Args:
        x: The tensor, on a device. The copy to the host begins at once.

    Attributes:
        host: The copy in host memory, pinned.
        on_device: The tensor on its device: until `free`, and from `prefetch` to `get`. Else None.
        copied: The mark of the last copy in its stream. The compute stream waits for the mark
            before ``on_device`` is read or freed; the host does not wait.
    """

    def __init__(self, x: Tensor):
        self.side, self.device = copy_stream(x.device), x.device
        self.on_device: Tensor | None = x
        self.host = torch.empty_like(x, device="cpu", pin_memory=x.device.type != "cpu")
        self._copy(x, self.host)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Begin a copy to ``target``, which waits for all earlier work on the compute stream."""
        self.copied = self.side.begin()  # guard: copies what is ready
        try:
            target.copy_(source, non_blocking=True)
        finally:
            self.side.end(self.copied)

    def free(self) -> None:
        """Free the device memory, which can be used again after the last copy; the host goes on."""
        if self.on_device is not None:
            self.side.before_compute(self.copied)  # guard: copied, then given back
            self.on_device = None

    def prefetch(self) -> None:
        """Begin the copy back to the device, unless the tensor is there already."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.device)
            self._copy(self.host, self.on_device)

    def get(self) -> Tensor:
        """Return the tensor on its device, ready for the compute stream to read.

        This object then holds only the copy in host memory. So the next `get` copies back again.
        """
        self.prefetch()
        x = self.on_device
        assert x is not None
        self.free()  # guard: arrived, then read
        return x

    def __del__(self) -> None:
        # ``copied`` is missing if the constructor raised.
        if "copied" in vars(self):
            self.free()  # guard: dropped behind its copy
