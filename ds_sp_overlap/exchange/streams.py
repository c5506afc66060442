"""Makes the streams of exchanges, and orders them with the caller's compute stream.

Note [Gate stream]
~~~~~~~~~~~~~~~~~~
An exchange has to begin before the kernel that is to hide it. A kernel that takes every SM
(attention) would otherwise run first and lock the exchange out. So compute has to wait until the
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
from typing import Any, NamedTuple

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


class HostStream:
    """A null object in place of `SideStream`, where waiting blocks the host (CPU; gloo anywhere).

    Program order is the only order. Methods are those of `SideStream`, and do nothing; `mark`
    returns None.
    """

    # Whether waiting blocks the host. A transfer is then waited for in ``finish``.
    blocks = True

    _here = contextlib.nullcontext()

    def after_compute(self) -> contextlib.nullcontext[None]:
        return self._here

    def mark(self) -> Any:
        pass

    def before_compute(self, mark: Any) -> None:
        pass

    def after_unpack(self, mark: Any) -> None:
        pass

    @contextlib.contextmanager
    def relay(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


class Mark(NamedTuple):
    """A point in the transfer stream.

    Attributes:
        event: Recorded on the transfer stream.
        compute: The stream that allocated the buffers of the transfer: the one that was current at
            the launch.
    """

    event: Any
    compute: Any


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
        backend: ``torch.cuda``, or another accelerator's module of the same form.
        device: The device of the streams.
        stream: Carries the transfers instead of our own stream, which all layers share.
    """

    blocks = False

    def __init__(self, backend: Any, device: Any, stream: Any | None = None):
        self.backend, self.device = backend, device
        transfer, self.gate, self._relay = _streams(backend, device)
        self.transfer = transfer if stream is None else stream
        # Events that nobody needs any more, to be recorded again.
        self.events: list[Any] = []

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the body on the transfer stream, after what the compute stream holds now.

        Behind the body, the compute stream waits for the gate stream alone, and not for transfers,
        see Note [Gate stream].
        """
        compute = self.backend.current_stream(self.device)
        ready = self._recorded(compute)  # guard: on the stream that made it
        self.transfer.wait_event(ready)  # guard: sends what is ready
        self.gate.wait_event(ready)
        launched = self._recorded(self.gate)  # guard: behind no other transfer
        try:
            with self.backend.stream(self.transfer):
                yield
        finally:
            compute.wait_event(launched)  # guard: goes on after the launch
            # A wait is for the record before the wait, so a later record does not disturb it.
            self.events += ready, launched

    @contextlib.contextmanager
    def relay(self) -> Iterator[Callable[[], None]]:
        """Run the body on the relay stream, behind what the compute stream holds now.

        The body is given a function. When the body calls it, the compute stream is made to wait for
        what the relay stream holds by then (the pack), and for nothing later.
        """
        compute = self.backend.current_stream(self.device)
        self._order(self._relay, compute)  # guard: relays what is ready
        with self.backend.stream(self._relay):
            yield lambda: self._order(compute, self._relay)

    def mark(self) -> Mark:
        """Mark the end of an exchange that was just launched; later exchanges come after the mark.

        Each mark is given to `before_compute`, once.
        """
        compute = self.backend.current_stream(self.device)
        return Mark(self._recorded(self.transfer), compute)  # guard: marked behind the transfer

    def event(self) -> Any:
        """Return an event behind what the transfer stream holds now, for the host to wait for."""
        return self._recorded(self.transfer)

    def before_compute(self, mark: Mark) -> None:
        """Order the compute stream after ``mark``, and not after exchanges that started since."""
        mark.compute.wait_event(mark.event)  # guard: its own stream waits
        # The current stream waits too, since it reads what was received. It is another one than
        # that of the buffers behind a relay, and where the garbage collector calls.
        current = self.backend.current_stream(self.device)
        if current != mark.compute:
            current.wait_event(mark.event)
        self.events.append(mark.event)

    def after_unpack(self, mark: Mark) -> None:
        """Order the stream that allocated the buffers of ``mark`` behind the unpack."""
        # The unpack ran on the current stream, which is another one only behind a relay.
        current = self.backend.current_stream(self.device)
        if current != mark.compute:
            self._order(mark.compute, current)

    def _order(self, stream: Any, before: Any) -> None:
        """Let ``stream`` go on behind what ``before`` holds now."""
        event = self._recorded(before)
        stream.wait_event(event)
        self.events.append(event)

    def _recorded(self, stream: Any) -> Any:
        """Return an event recorded on ``stream`` now, one of `events` if there are any."""
        try:
            event = self.events.pop()
        except IndexError:
            event = self.backend.Event()
        stream.record_event(event)  # guard: an event is recorded
        return event


@functools.cache
def _streams(backend: Any, device: Any) -> tuple[Any, ...]:
    """Make the transfer, the gate and the relay stream of a device, once for all sp groups."""
    # Torch hands out 32 streams of a priority in turn: layers with streams of their own would share
    # some by chance.
    return tuple(backend.Stream(device, priority=-1) for _ in range(3))
