"""An accelerator's stream interface that writes down who waits for whom; everything runs on the host."""

import contextlib


class Stream:
    """Remembers what was queued on it, so that an event can say what it stands for."""

    def __init__(self, backend, name):
        self.backend, self.name, self.queued = backend, name, []

    def wait_stream(self, other):
        self.backend.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        return list(self.queued)

    def wait_event(self, event):
        self.backend.log.append(f"{self.name} waits for {' '.join(event)}")


class Backend:
    """The part of torch.cuda that a side stream uses."""

    def __init__(self):
        self.log = []
        self.current = self.compute = Stream(self, "compute")

    def Stream(self, device, priority):
        return Stream(self, "side")

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before
