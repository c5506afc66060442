"""Streams need an accelerator, their order does not: a stand-in for its stream interface writes down who waits for whom, on the host.

Each stream has a vector clock: how far along every stream is what it does next is known to come after. `races` asks it.

The current stream is one of each thread, as in CUDA. `device_thread` runs backward in a thread of its own, as autograd does for a
GPU: what is current there is the stream on which forward ran, whoever calls backward, and the two are ordered before and after.
"""

import contextlib
import itertools
import threading
from unittest import mock

import torch

from ds_sp_overlap.exchange.streams import SideStream


class Event:
    """Remembers what it stands for when it is recorded."""

    says = "nothing"
    clock: dict = {}  # one that was never recorded is waited for by nobody, as in CUDA
    capture = None  # in which it was recorded last

    def synchronize(self):
        assert self.capture is None, "the host waits for an event of a capture"


class Stream:
    """Remembers what was queued on it, so that an event can say what it stands for."""

    def __init__(self, backend, name):
        self.backend, self.name, self.queued = backend, name, []
        self.clock = {self: 0}
        self.capture = None  # that it takes part in

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
        """A stream that waits for an event of a capture takes part in it, and waits for no other events from then on."""
        assert capture is None or capture == self.backend.capture, f"{self.name} waits for an event of a capture that is over"
        assert self.capture in (None, capture), f"{self.name} is captured, and waits for an event that is not"
        if capture is not None:
            self.capture = capture
            self.tick()  # so that it must be joined, whether or not it does anything
            self.backend.forked.add(self)

    def tick(self):
        """Advance the clock of this stream by one operation; return its new time."""
        self.clock[self] += 1
        return self.clock[self]

    def is_after(self, stream, time):
        """Return whether what it does next comes after what ``stream`` did at ``time``."""
        return self.clock.get(stream, 0) >= time


class Backend:
    """Stands for the part of `Accelerator` that `SideStream` uses; `stream` for tests."""

    def __init__(self):
        self.log = []
        self.streams = []  # that were asked for
        self.events = self.recorded = 0
        self._of_thread = threading.local()
        self.current = self.compute = Stream(self, "compute")
        self.nodes_run_on = self.compute  # where forward ran
        self.backwards = 0  # that ran in the device's thread
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
        """Capture a graph from the current stream; AssertionError where CUDA would refuse it, or a fork is not joined."""
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
    """Have the exchanges of ``sp_group`` carried by streams, as on an accelerator; their stand-in."""
    backend, cpu = backend or Backend(), torch.device("cpu")
    sp_group.sides[cpu] = SideStream(backend, cpu)
    return backend


def order(later, earlier):
    """Have what ``later`` does next come after what ``earlier`` holds now."""
    event = Event()
    earlier.record_event(event)
    later.wait_event(event)


@contextlib.contextmanager
def device_thread(backend, *modes):
    """Run backward in a thread of its own, under ``modes``, which are of one thread each as well."""
    original, here = torch.autograd.backward, threading.current_thread()

    def backward(*args, **kwargs):
        if threading.current_thread() is not here:  # within a backward, as a reentrant checkpoint's
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
