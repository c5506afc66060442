"""Streams need an accelerator, their order does not: a stand-in for its stream interface writes down who waits for whom, on the host.

Each stream has a vector clock: how far along every stream is what it does next is known to come after. `races` asks it.
"""

import contextlib


class Event:
    """Remembers what it stands for when it is recorded."""

    says = "nothing"
    clock: dict = {}  # one that was never recorded is waited for by nobody, as in CUDA


class Stream:
    """Remembers what was queued on it, so that an event can say what it stands for."""

    def __init__(self, backend, name):
        self.backend, self.name, self.queued = backend, name, []
        self.clock = {self: 0}

    def record_event(self, event):
        self.backend.recorded += 1
        event.says, event.clock = " ".join(self.queued) or self.name, dict(self.clock)

    def wait_event(self, event):
        self.backend.log.append(f"{self.name} waits for {event.says}")
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def tick(self):
        """Something is done on it; the time of that."""
        self.clock[self] += 1
        return self.clock[self]

    def is_after(self, stream, time):
        """Whether what it does next comes after what ``stream`` did at ``time``."""
        return self.clock.get(stream, 0) >= time


class Backend:
    """The part of torch.cuda that `SideStream` uses."""

    def __init__(self):
        self.log = []
        self.streams = []  # that were asked for
        self.events = self.recorded = 0
        self.current = self.compute = Stream(self, "compute")

    def Stream(self, device, priority):
        assert priority == -1
        self.streams.append(Stream(self, ("transfer", "gate", "relay")[len(self.streams) % 3]))
        return self.streams[-1]

    def Event(self):
        self.events += 1
        return Event()

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
