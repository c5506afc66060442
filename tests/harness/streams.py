"""Stands in for the streams of an accelerator, on the host, and logs which stream waits for which.

A stream's time is the number of its operations. Each stream also has a vector clock, {other stream: time}: all operations of the
other stream up to this time come before the next operation of the clock's stream. `races` reads these clocks.

Each thread has a current stream, as in CUDA. `device_thread` runs backward in a separate thread, as autograd does for a GPU. The
current stream of this thread is the stream on which forward ran. If the caller's stream is another one, backward first waits for
the caller's stream, which in the end waits for backward.
"""

import contextlib
import itertools
import threading
from unittest import mock

import torch

from ds_sp_overlap.exchange.streams import SideStream


class Event:
    """Holds the clock of a stream, and the names of its queued operations, as of the last `record_event`."""

    says = "nothing"
    clock: dict = {}  # empty until recorded: waiting for an event that was never recorded has no effect, as in CUDA
    capture = None  # the capture in which the event was last recorded

    def synchronize(self):
        assert self.capture is None, "the host waits for an event of a capture"


class Stream:
    """A stream; ``queued`` holds the names of its operations, for the log of waits."""

    def __init__(self, backend, name):
        self.backend, self.name, self.queued = backend, name, []
        self.clock = {self: 0}
        self.capture = None  # the capture that the stream takes part in

    def record_event(self, event):
        self.backend.recorded += 1
        event.says, event.clock, event.capture = " ".join(self.queued) or self.name, dict(self.clock), self.capture

    def wait_event(self, event):
        self.backend.log.append(f"{self.name} waits for {event.says}")
        if event.clock:
            self._take_part(event.capture)
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def _take_part(self, capture):
        """Join the graph capture to which an awaited event belongs; raise AssertionError if CUDA would refuse the wait."""
        assert capture is None or capture == self.backend.capture, f"{self.name} waits for an event of a capture that is over"
        assert self.capture in (None, capture), f"{self.name} is captured, and waits for an event that is not"
        if capture is not None:
            self.capture = capture
            self.tick()  # counts as an operation, so the capture must wait for this stream, even if it runs nothing
            self.backend.forked.add(self)

    def tick(self):
        """Advance the clock of this stream by one operation; return its new time."""
        self.clock[self] += 1
        return self.clock[self]

    def is_after(self, stream, time):
        """Return whether the next operation of this stream comes after the operation of ``stream`` at ``time``."""
        return self.clock.get(stream, 0) >= time


class Backend:
    """Stands in for the part of `Accelerator` that `SideStream` uses. The method `stream` is for tests."""

    def __init__(self):
        self.log = []
        self.streams = []  # all streams that `Stream` made
        self.events = self.recorded = 0
        self._of_thread = threading.local()
        self.current = self.compute = Stream(self, "compute")
        self.nodes_run_on = self.compute  # the stream on which forward ran
        self.backwards = 0  # the number of backwards that ran in a separate thread
        self.capture, self.forked, self._captures = None, set(), itertools.count()

    @property
    def current(self):
        return self._of_thread.stream

    @current.setter
    def current(self, stream):
        self._of_thread.stream = stream

    def Stream(self, device, priority):
        assert priority == -1
        self.streams.append(Stream(self, ("transfer", "gate", "relay")[len(self.streams) % 3]))
        return self.streams[-1]

    def Event(self):
        self.events += 1
        return Event()

    def current_stream(self, device):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    @contextlib.contextmanager
    def captured(self):
        """Capture a graph on the current stream while the body runs; yield the set of streams that join the capture.

        Raises AssertionError if CUDA would refuse the capture, or if the current stream does not wait for all of these streams.
        """
        origin, self.capture, self.forked = self.current, next(self._captures), set()
        origin.capture = self.capture
        with (
            mock.patch.object(torch.cuda, "is_initialized", lambda: True),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: self.current.capture is not None),
        ):
            yield self.forked
        unjoined = [stream.name for stream in self.forked if not origin.is_after(stream, stream.clock[stream])]
        for stream in {origin, *self.forked}:
            stream.capture = None
        self.capture = None
        assert not unjoined, f"not joined to {origin.name}: {', '.join(unjoined)}"

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def on_streams(sp_group, backend=None):
    """Run the exchanges of ``sp_group`` on streams, as on an accelerator; return the stand-in."""
    backend, cpu = backend or Backend(), torch.device("cpu")
    sp_group.sides[cpu] = SideStream(backend, cpu)
    return backend


def order(later, earlier):
    """Order the next operation of ``later`` after all operations that are queued on ``earlier`` now."""
    event = Event()
    earlier.record_event(event)
    later.wait_event(event)


@contextlib.contextmanager
def device_thread(backend, *modes):
    """Run each backward in a separate thread; enter ``modes`` in this thread, since a mode acts in one thread only."""
    original, here = torch.autograd.backward, threading.current_thread()

    def backward(*args, **kwargs):
        if threading.current_thread() is not here:  # a backward inside a backward, such as that of a reentrant checkpoint
            return original(*args, **kwargs)
        caller, nodes, raised = backend.current, backend.nodes_run_on, []

        def run():
            backend.current = nodes
            try:
                with contextlib.ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    original(*args, **kwargs)
            except BaseException as error:
                raised.append(error)

        if nodes is not caller:
            order(nodes, caller)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if nodes is not caller:
            order(caller, nodes)
        backend.backwards += 1
        if raised:
            raise raised.pop()

    with mock.patch.object(torch.autograd, "backward", backward):
        yield
