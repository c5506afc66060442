"""Makes the streams of exchanges, and orders them with the caller's compute stream.

Note [Gate stream]
~~~~~~~~~~~~~~~~~~
An exchange has to begin before the kernel that is to hide it. A kernel that takes every SM
(attention) would otherwise run first and lock the exchange out: on an H100 a block that was launched
behind such a kernel waited for 99 % of it (benchmarks/contention.py). So compute has to wait until the
transfer has been launched, but not until it is over, nor until earlier transfers are over. An event
on the transfer stream would come behind the earlier transfers. Hence a gate stream that holds
nothing: at each launch, compute waits for an event on the gate stream, in front of which there is
no transfer.

    compute    | Wq | pack q | wait gate | Wk .. | finish q: wait mark | unpack q |
    gate       |      ^ ready  v launched
    transfer   |      ^ ready  | ... earlier .. | q ................ | mark

Note [Relayout on the compute stream]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Pack and unpack stay in their place in the program, on the compute stream. If another stream packed,
behind the next kernel of the compute stream, the wire would wait for that kernel as well. If
another stream unpacked, the output would take memory from the start on. And on the transfer stream,
an unpack would keep the next exchange from its launch until this exchange has arrived.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

# CUDA reads the variable as it starts: too early for this package to set it.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def one_queue() -> str:
    """Return a warning where all streams of a device share one hardware queue; else ""."""
    if os.environ.get(CONNECTIONS) != "1":
        return ""
    return (
        f"{CONNECTIONS} is 1: an exchange that is launched behind another one holds up what is "
        "computed after it, until the other one has arrived; unset it unless something else needs "
        "it (Megatron's tensor parallelism does)"
    )


def is_captured() -> bool:
    """Return whether the current stream is captured as a CUDA graph."""
    # Before CUDA is initialised, torch can't say.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_captured(where: str, what: str) -> None:
    """Raise RuntimeError, on this rank, while a CUDA graph is captured.

    Args:
        where: Name of the layer or of the model.
        what: What no graph can hold, and what to do, in words.
    """
    if is_captured():  # guard: no graph of what it can't hold
        raise RuntimeError(f"{where}: while a CUDA graph is captured, {what}")


class HostStream:
    """A null object in place of `SideStream`, where waiting blocks the host (CPU; gloo anywhere).

    Program order is the only order. Methods are those of `SideStream`, and do nothing.
    """

    # Whether waiting blocks the host. A transfer is then waited for in ``finish``.
    blocks = True
    # Whether anything is computed during an exchange, which is waited for at once otherwise.
    overlaps = True

    def begin(self, *_: Any) -> Any:
        pass

    end = before_compute = after_unpack = begin

    @contextlib.contextmanager
    def relay(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


# A launch on the transfer stream: an event that is recorded behind the launch, from `SideStream.end`
# on; and the stream that allocated the buffers of the transfer, which was current at the launch.
Mark = tuple[Any, Any]


class SideStream:
    """The streams of exchanges on an accelerator.

    compute    the caller's current stream: packs and unpacks, see
               Note [Relayout on the compute stream]
    transfer   collectives, one behind the other, which overlap with everything on compute
    gate       holds nothing, see Note [Gate stream]
    relay      stands in for compute between two legs, see Note [Relay stream] in `relayed`

    The compute stream (or relay in its place) allocates the buffers. They are referenced until
    ``before_compute``, so that their memory returns to that stream in order, without
    ``record_stream``.

    Args:
        backend: An `Accelerator`.
        device: The device of the streams.
        stream: Carries the transfers instead of our own stream, which all layers share.
    """

    blocks, overlaps = False, True

    def __init__(self, backend: Any, device: Any, stream: Any | None = None):
        self.backend = backend
        self.index = device.index or 0
        transfer, self.gate, self._relay = _streams(backend, device)
        self.transfer = transfer if stream is None else stream
        # Events that nobody needs any more. Each is recorded again before anybody waits for it, so
        # that an event of a captured call may serve another call, and the other way round.
        self.events: list[Any] = []

    def begin(self) -> Mark:
        """Make the transfer stream current, behind what the compute stream holds now.

        Returns:
            A mark for `end`, which must be called, and then for `before_compute`, each once.
        """
        compute = self.backend.current_stream(self.index)
        event = self.events.pop() if self.events else self.backend.Event()
        # One event serves the launch and the mark: a wait is for the record before the wait, so
        # that a later record does not disturb it.
        compute.record_event(event)  # guard: on the stream that made it
        self.transfer.wait_event(event)  # guard: sends what is ready
        self.gate.wait_event(event)
        self.gate.record_event(event)  # guard: behind no other transfer
        self.backend.set_stream(self.transfer)
        return event, compute

    def end(self, mark: Mark) -> None:
        """Put ``mark`` behind what was queued since `begin`, and make the compute stream current.

        The compute stream goes on behind the gate stream alone, and not behind transfers, see
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
        """Run the body on the relay stream, behind what the compute stream holds now.

        The body is given a function. When the body calls it, the compute stream is made to wait for
        what the relay stream holds by then (the pack), and for nothing later.
        """
        compute = self.backend.current_stream(self.index)
        self._order(self._relay, compute)  # guard: relays what is ready
        self.backend.set_stream(self._relay)
        try:
            yield lambda: self._order(compute, self._relay)
        finally:
            self.backend.set_stream(compute)

    def before_compute(self, mark: Mark) -> Any:
        """Order the compute stream after ``mark``, and not after exchanges that started since.

        Returns:
            The current stream, for `after_unpack`.
        """
        event, compute = mark
        compute.wait_event(event)  # guard: its own stream waits
        # The current stream waits too, since it reads what was received. It is another one than
        # that of the buffers behind a relay, and where the garbage collector calls.
        current = self.backend.current_stream(self.index)
        if current != compute:
            current.wait_event(event)
        self.events.append(event)
        return current

    def after_unpack(self, mark: Mark, current: Any) -> None:
        """Order the stream that allocated the buffers of ``mark`` behind the unpack.

        Args:
            mark: The mark of the transfer.
            current: The stream that unpacked, another one than that of the buffers.
        """
        self._order(mark[1], current)

    def _order(self, stream: Any, before: Any) -> None:
        """Let ``stream`` go on behind what ``before`` holds now."""
        event = self.events.pop() if self.events else self.backend.Event()
        before.record_event(event)  # guard: an event is recorded
        stream.wait_event(event)
        self.events.append(event)


class Accelerator:
    """The streams and events of a type of device, of the classes that torch has for all types.

    Their methods are written in C; those of ``torch.cuda`` cost the host several times as much.

    Args:
        kind: The type of the device, for instance "cuda".
    """

    Stream = staticmethod(torch.Stream)
    # What ``torch.accelerator`` calls, for the index of a device.
    current_stream = staticmethod(torch._C._accelerator_getStream)
    set_stream = staticmethod(torch._C._accelerator_setStream)

    def __init__(self, kind: str):
        self.Event = functools.partial(torch.Event, kind)


# Returns the one object for a type of device.
accelerator = functools.cache(Accelerator)


@functools.cache
def _streams(backend: Any, device: Any) -> tuple[Any, ...]:
    """Make the transfer, the gate and the relay stream of a device, once for all sp groups."""
    # Torch hands out 32 streams of a priority in turn: layers with streams of their own would share
    # some by chance.
    return tuple(backend.Stream(device, priority=-1) for _ in range(3))
