"""A race between streams shows once in a thousand runs on a GPU, and never on a CPU: a detector on the stand-in for streams, by which every
two accesses to memory, and every reuse of it, must be ordered.

Everything runs on the host, in program order. What a device might do instead is computed: each operation that torch dispatches is
noted with the stream that is current, the storages that it reads and those that it writes; an event carries the vector clock of its
stream (`streams`), and whoever waits for it comes after. So does ``torch.cuda._sanitizer``, which says nothing of freed memory.

    a race     two accesses to one storage, one of them a write, and neither stream has waited for the other
    a reuse    a storage that is freed while an access to it is not known to come before what its stream does next: a caching
               allocator gives it away at once, in the order of the stream that allocated it
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
    """A storage; of those reads that came after the last write the last one on each stream."""

    def __init__(self, owner, made_by):
        self.owner, self.made_by = owner, made_by
        self.write: Access | None = None
        self.reads: dict[Stream, Access] = {}

    @property
    def accesses(self):
        return [*([self.write] if self.write else []), *self.reads.values()]


class Races(TorchDispatchMode):
    """Notes what is done while it is on; ``faults`` are the races and reuses that it found."""

    def __init__(self, backend):
        super().__init__()
        self.backend, self.faults = backend, []
        self.memory: dict[int, Memory] = {}
        self.seen: Counter = Counter()  # operations by stream, and what was freed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = _storages((args, kwargs))
        returned = func(*args, **kwargs)
        made = _storages(returned)
        written = _storages([value for argument, value in _arguments(func, args, kwargs) if _is_written(argument)])
        if name.startswith("set_") or not written and given.keys() & made.keys():  # a view
            return returned
        fills = "empty" not in name  # not so: new_empty
        reads = {} if name.startswith("new_") or name.endswith("_like") or not fills else given
        for storage in made.keys() - given.keys():
            self._allocated(made[storage], name)
        self.operate(name, reads.values(), [*written.values(), *(made.values() if fills else ())])
        return returned

    def operate(self, what, reads, writes):
        """Note an operation on the current stream, on storages."""
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
        if storage._cdata not in self.memory:  # it was there before
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
    """Return the storages of all tensors in ``values`` that hold anything, by address."""
    found = (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return {storage._cdata: storage for storage in found if storage.nbytes()}


def _arguments(func, args, kwargs):
    arguments = func._schema.arguments
    return [*zip(arguments, args), *((argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs)]


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


class Wire:
    """A transport that moves nothing: it reads what is sent and writes what is received, on the stream that is current.

    asynchronous   on a stream of its own, as c10d does if asked for it; what its handle's wait is called on comes after
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
    """Yields the detector and a transport; AssertionError, BLIND, if they saw less than there must be."""
    races = Races(Backend())
    wire = Wire(races, asynchronous)
    with races, device_thread(races.backend, races):
        yield races, wire
    on = "wire" if asynchronous else "transfer"
    blind = [what for what in ("compute", on, "freed") if not races.seen[what]]
    assert not blind, f"BLIND: nothing of {', '.join(blind)} was seen: {dict(races.seen)}"
    assert wire.launched and races.seen[on] == 2 * wire.launched, f"BLIND: {wire.launched} exchanges, {dict(races.seen)}"
    assert races.backend.recorded >= 3 * wire.launched, f"BLIND: {races.backend.recorded} events"
