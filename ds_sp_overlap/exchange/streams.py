"""Makes the streams of exchanges, and orders them with the caller's compute stream.

Note [Gate stream]
~~~~~~~~~~~~~~~~~~
An exchange has to begin before the kernel that is to hide it. A kernel that takes every SM
(attention) would otherwise run first and lock the exchange out: on an H100 a block that was
launched after such a kernel waited for 99 % of the kernel's time (benchmarks/contention.py). So
compute has to wait until the transfer has been launched, but not until this transfer or an earlier
transfer is over. An event on the transfer stream would happen only after the earlier transfers. So
there is a gate stream, on which no work runs: at each launch, compute waits for an event on the
gate stream.

    compute    | Wq | pack q | wait gate | Wk .. | finish q: wait mark | unpack q |
    gate       |      ^ ready  v launched
    transfer   |      ^ ready  | ... earlier .. | q ................ | mark

Note [Relayout on the compute stream]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Pack and unpack run on the compute stream, at their place in the program. On another stream, a pack
could run after the next kernel of the compute stream, and the transfer would wait for that kernel.
For an unpack on another stream, the output would need memory from the start of the exchange on. And
an unpack on the transfer stream would delay the next exchange until the unpacked exchange has
arrived.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

# CUDA reads this variable when it starts, which is too early for this package to set it.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def one_queue() -> str:
    """Return a warning if all streams of a device share one hardware queue; else ""."""
    if os.environ.get(CONNECTIONS) != "1":
        return ""
    return (
        f"{CONNECTIONS} is 1: an exchange that is launched behind another one holds up what is "
        "computed after it, until the other one has arrived; unset it unless something else needs "
        "it (Megatron's tensor parallelism does)"
    )


def is_captured() -> bool:
    """Return whether the current stream is being captured in a CUDA graph."""
    # torch can answer only after CUDA is initialised.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_captured(where: str, what: str) -> None:
    """Raise RuntimeError, on this rank, if a CUDA graph is being captured.

    Args:
        where: Name of the layer or of the model.
        what: The end of the message: the operation that no graph can hold, and the remedy.
    """
    if is_captured():  # guard: no graph of what it can't hold
        raise RuntimeError(f"{where}: while a CUDA graph is captured, {what}")


class HostStream:
    """Replaces `SideStream` where waiting blocks the host (CPU tensors, or gloo); does nothing.

    Program order is the only order. The methods are those of `SideStream`.
    """

    # Whether waiting blocks the host; ``finish`` then waits for the transfer.
    blocks = True
    # Whether compute overlaps with an exchange; if not, the launch waits for the transfer.
    overlaps = True

    def begin(self, *_: Any) -> Any:
        pass

    end = before_compute = order = begin

    @contextlib.contextmanager
    def relay(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


# The mark of a transfer: an event, which `SideStream.end` records after the transfer; and the
# stream that allocated the buffers, which was current at the launch.
Mark = tuple[Any, Any]


class SideStream:
    """Holds the streams of exchanges on an accelerator, and orders them.

    compute    the caller's current stream: packs and unpacks, see
               Note [Relayout on the compute stream]
    transfer   runs collectives, one after another, which overlap with everything on compute
    gate       runs no work, see Note [Gate stream]
    relay      packs and unpacks for a transfer in two legs, see Note [Relay stream] in `relayed`

    The compute stream (or the relay stream) allocates the buffers. The buffers are referenced until
    ``before_compute``, so that the allocating stream can reuse their memory in order, without
    ``record_stream``.

    Args:
        backend: An `Accelerator`.
        device: The device of the streams.
        stream: The stream for the transfers; None for our own, which all layers share.
    """

    blocks, overlaps = False, True

    def __init__(self, backend: Any, device: Any, stream: Any | None = None):
        self.backend = backend
        self.index = device.index or 0
        transfer, self.gate, self._relay = _streams(backend, device)
        self.transfer = transfer if stream is None else stream
        # Events for reuse. An event is recorded again before any stream waits for it, so captured
        # and other calls may use the same events.
        self.events: list[Any] = []

    def begin(self) -> Mark:
        """Make the transfer stream current, ordered after the work on the compute stream so far.

        Returns:
            A mark. Pass it to `end`, and later to `before_compute`, once each.
        """
        compute = self.backend.current_stream(self.index)
        event = self.events.pop() if self.events else self.backend.Event()
        # One event serves for the launch and for the mark: a wait refers to the latest record
        # before that wait, so recording the event again does not change earlier waits.
        compute.record_event(event)  # guard: on the stream that made it
        self.transfer.wait_event(event)  # guard: sends what is ready
        self.gate.wait_event(event)
        self.gate.record_event(event)  # guard: behind no other transfer
        self.backend.set_stream(self.transfer)
        return event, compute

    def end(self, mark: Mark) -> None:
        """Record ``mark`` after the work queued since `begin`, and make the compute stream current.

        The compute stream waits for the gate stream only, not for transfers, see
        Note [Gate stream].
        """
        event, compute = mark
        self.backend.set_stream(compute)
        compute.wait_event(event)  # guard: goes on after the launch
        self.transfer.record_event(event)  # guard: marked behind the transfer
        if not self.overlaps:
            compute.wait_event(event)

    @contextlib.contextmanager
    def relay(self) -> Iterator[Callable[[], None]]:
        """Run the body on the relay stream, ordered after the work on the compute stream so far.

        The body gets a function. A call of this function makes the compute stream wait for the work
        that is then on the relay stream (the pack), and not for later work.
        """
        compute = self.backend.current_stream(self.index)
        self.order(self._relay, compute)  # guard: relays what is ready
        self.backend.set_stream(self._relay)
        try:
            yield lambda: self.order(compute, self._relay)
        finally:
            self.backend.set_stream(compute)

    def before_compute(self, mark: Mark) -> Any:
        """Make the compute stream wait for ``mark``, but not for exchanges that started later.

        Returns:
            The current stream.
        """
        event, compute = mark
        compute.wait_event(event)  # guard: its own stream waits
        # After a relay, or in a call by the garbage collector, the current stream is not the stream
        # of the buffers. The current stream waits too, since it reads the received data.
        current = self.backend.current_stream(self.index)
        if current != compute:
            current.wait_event(event)
        self.events.append(event)
        return current

    def order(self, stream: Any, before: Any) -> None:
        """Make ``stream`` wait for the work that is on ``before`` now."""
        event = self.events.pop() if self.events else self.backend.Event()
        before.record_event(event)  # guard: an event is recorded
        stream.wait_event(event)
        self.events.append(event)


class Accelerator:
    """Makes streams and events for one type of device: ``torch.Stream`` and ``torch.Event``.

    The methods of these two classes are written in C. The methods of ``torch.cuda.Stream`` cost the
    host several times as much.

    Args:
        kind: The type of the device, for instance "cuda".
    """

    Stream = staticmethod(torch.Stream)
    # The functions that ``torch.accelerator`` calls; they take the index of a device.
    current_stream = staticmethod(torch._C._accelerator_getStream)
    set_stream = staticmethod(torch._C._accelerator_setStream)

    def __init__(self, kind: str):
        self.Event = functools.partial(torch.Event, kind)


# Returns the shared `Accelerator` of a type of device.
accelerator = functools.cache(Accelerator)


@functools.cache
def _streams(backend: Any, device: Any) -> tuple[Any, ...]:
    """Make the transfer, the gate and the relay stream of a device, once for all sp groups."""
    # Torch has a pool of 32 streams for each priority: if layers had their own streams, some would
    # be the same stream by chance.
    return tuple(backend.Stream(device, priority=-1) for _ in range(3))
