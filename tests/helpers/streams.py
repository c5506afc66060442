"""A stand-in for the stream interface of an accelerator: writes down who waits for whom; everything runs on the host."""

import contextlib


class Event:
    """Remembers what it stands for when it is recorded."""

    says = "nothing"


class Stream:
    """Remembers what was queued on it, so that an event can say what it stands for."""

    def __init__(self, backend, name):
        self.backend, self.name, self.queued = backend, name, []

    def record_event(self, event):
        self.backend.recorded += 1
        event.says = " ".join(self.queued) or self.name

    def wait_event(self, event):
        self.backend.log.append(f"{self.name} waits for {event.says}")


class Backend:
    """The part of torch.cuda that `SideStream` uses."""

    def __init__(self):
        self.log = []
        self.streams = []  # that were asked for
        self.events = self.recorded = 0
        self.current = self.compute = Stream(self, "compute")

    def Stream(self, device, priority):
        assert priority == -1
        self.streams.append(Stream(self, ("transfer", "gate")[len(self.streams) % 2]))
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
