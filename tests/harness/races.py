"""Detects races between streams, on the host. It finds two kinds of faults:

    race     two accesses to one storage, at least one of them a write, on two streams, neither of which has waited for the other
    reuse    a storage is freed before the stream that allocated it has waited for all accesses; a caching allocator would give the
             memory at once to the next operation of that stream

On a GPU, a race shows once in a thousand runs; on a CPU, never. Here everything runs on the host in program order, with the
stand-in for streams (`streams`). For each operation that torch dispatches, the detector notes the current stream, the storages
that the operation reads and the storages that it writes. An event carries the vector clock of its stream, and orders the streams
that wait for the event. ``torch.cuda._sanitizer`` works in the same way, but does not check freed memory.
"""

import contextlib
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.streams import Backend, Event, Stream, device_thread, order


class Access(NamedTuple):
    what: str
    stream: Stream
    time: int

    def __str__(self):
        return f"{self.what} on {self.stream.name}"


class Memory:
    """The accesses to a storage: the last write, and the last read on each stream since this write."""

    def __init__(self, owner, made_by):
        self.owner, self.made_by = owner, made_by
        self.write: Access | None = None
        self.reads: dict[Stream, Access] = {}

    @property
    def accesses(self):
        return [*([self.write] if self.write else []), *self.reads.values()]


class Races(TorchDispatchMode):
    """Notes all operations of the body; ``faults`` are the races and reuses found."""

    def __init__(self, backend):
        super().__init__()
        self.backend, self.faults = backend, []
        self.memory: dict[int, Memory] = {}
        self.seen: Counter = Counter()  # number of operations by stream name; under "freed", number of freed storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = _storages((args, kwargs))
        returned = func(*args, **kwargs)
        made = _storages(returned)
        written = _storages([value for argument, value in _arguments(func, args, kwargs) if _is_written(argument)])
        if name.startswith("set_") or not written and given.keys() & made.keys():  # a view
            return returned
        fills = "empty" not in name  # new_empty writes nothing
        reads = {} if name.startswith("new_") or name.endswith("_like") or not fills else given
        for storage in made.keys() - given.keys():
            self._allocated(made[storage], name)
        self.operate(name, reads.values(), [*written.values(), *(made.values() if fills else ())])
        return returned

    def operate(self, what, reads, writes):
        """Note an operation on the current stream that reads and writes these storages."""
        stream = self.backend.current
        self.seen[stream.name] += 1
        access = Access(what, stream, stream.tick())
        written = [self._of(storage) for storage in writes]
        for memory in [self._of(storage) for storage in reads]:
            if memory not in written:
                self._check(memory, access, "reads", [memory.write] if memory.write else [])
                memory.reads[stream] = access
        for memory in written:
            self._check(memory, access, "writes", memory.accesses)
            memory.write, memory.reads = access, {}

    def _check(self, memory, access, how, earlier):
        for other in earlier:
            if not access.stream.is_after(other.stream, other.time):
                self._found(f"race: {access} {how} what {other} may still use, made by {memory.made_by}")

    def _of(self, storage):
        if storage._cdata not in self.memory:  # allocated before the detector was on
            self._allocated(storage, "the caller", self.backend.compute)
        return self.memory[storage._cdata]

    def _allocated(self, storage, made_by, owner=None):
        self.memory[storage._cdata] = Memory(owner or self.backend.current, made_by)
        weakref.finalize(storage, self._freed, storage._cdata).atexit = False

    def _freed(self, key):
        memory = self.memory.pop(key)
        self.seen["freed"] += 1
        for access in memory.accesses:
            if not memory.owner.is_after(access.stream, access.time):
                self._found(
                    f"reuse: {memory.owner.name} gets the memory back that {access} may still use, made by {memory.made_by}"
                )

    def _found(self, fault):
        if fault not in self.faults:
            self.faults.append(fault)


def _storages(values):
    """Return {address: storage} for all tensors in ``values``; leave out empty storages."""
    found = (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return {storage._cdata: storage for storage in found if storage.nbytes()}


def _arguments(func, args, kwargs):
    arguments = func._schema.arguments
    return [*zip(arguments, args), *((argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs)]


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


class Wire:
    """A transport that moves no data: it only reads the send buffer and writes the receive buffer, on the current stream.

    asynchronous   use a separate stream, as c10d does with ``async_op=True``; ``wait`` orders the current stream after the transfer
    """

    def __init__(self, races, asynchronous):
        self.races, self.launched = races, 0
        self.stream = Stream(races.backend, "wire") if asynchronous else None

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        backend = self.races.backend
        on = self.stream or backend.current
        self.launched += 1
        if on is not backend.current:
            order(on, backend.current)
        with backend.stream(on):
            self.races.operate(name, *(_storages([buffer]).values() for buffer in (send, recv)))
            recv.zero_()
        arrived = Event()
        on.record_event(arrived)
        return SimpleNamespace(wait=lambda: backend.current.wait_event(arrived))


@contextlib.contextmanager
def watched(asynchronous):
    """Run the body under the detector; yield the detector and a `Wire`.

    Raises AssertionError (BLIND) if the detector saw too few operations to find faults.
    """
    races = Races(Backend())
    wire = Wire(races, asynchronous)
    with races, device_thread(races.backend, races):
        yield races, wire
    on = "wire" if asynchronous else "transfer"
    blind = [what for what in ("compute", on, "freed") if not races.seen[what]]
    assert not blind, f"BLIND: nothing of {', '.join(blind)} was seen: {dict(races.seen)}"
    assert wire.launched and races.seen[on] == 2 * wire.launched, f"BLIND: {wire.launched} exchanges, {dict(races.seen)}"
    assert races.backend.recorded >= 3 * wire.launched, f"BLIND: {races.backend.recorded} events"
