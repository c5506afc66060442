"""Provides transports for tests: two that make a missing wait fail, and others that log, raise, or change the data.

On one machine, bytes arrive at once, so a missing wait has no effect. `Late` and `Delayed` deliver as late as the contract of
`ds_sp_overlap.exchange.transport.Transport` allows. They fill the receive buffer with NaN at launch, so that a read before the wait
gives NaN.
"""

import contextlib
import functools
import math
import queue
import random
import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from ds_sp_overlap.exchange.copies import blocks_of
from ds_sp_overlap.exchange.in_flight import InFlight
from ds_sp_overlap.relayout import ops


class Armed:
    """Counts how often `spoiled_buffers` did each of these acts (``acted``), and how often it should have (``due``).

    delayed    exchanges that `Late` or `Delayed` delivered
    owned      exchanges whose send buffer belongs to the package, so that no other code may read the buffer
    spoiled    owned send buffers that were filled with NaN on delivery
    poisoned   received buffers that were filled with NaN once they were unpacked
    filled     buffers that held NaN before a pack or unpack wrote to them
    """

    def __init__(self):
        self.acted, self.due = Counter(), Counter()
        self.launching: InFlight | None = None
        self.counting = threading.Lock()

    def owns(self, send):
        """Return whether the package made the memory ``send``, by a copy or by its own GEMM."""
        if self.launching is None:
            raise LookupError("BLIND: an exchange was launched by something else than InFlight; follow the code in transports")
        for source in getattr(self.launching, "sources", ()):  # without sources, pack has copied them
            if source.untyped_storage().data_ptr() == send.untyped_storage().data_ptr():
                # The source is the send buffer. The package computed it if it has a dimension for ranks (5 in all), and no graph.
                return source.dim() == 5 and source.grad_fn is None
        return True

    def blind(self):
        """Return a line that names the missing acts; empty if none is missing."""
        lacking = sorted(what for what, due in self.due.items() if self.acted[what] < due)
        if self.due and not lacking:
            return ""
        return f"BLIND: too few {', '.join(lacking) or 'exchanges'}: acted {dict(self.acted)}, due {dict(self.due)}"


def _packs(in_flight):
    """Return whether the exchange copies its tensors before it sends them."""
    return in_flight.layout.sources.elements > 0 and (in_flight.rope is not None or in_flight.copies.flat is None)


def _makes_memory(in_flight, copies, sides, rope):
    """Return whether pack or unpack allocates its result itself, so that the result can't be filled with NaN before."""
    relayout = ops.implementation(in_flight.sp_group.kernels)
    by_kernel = relayout.pack is not None and sides.cut is not None
    return rope is None and copies and in_flight.dtypes is None and not by_kernel


def _unpacks(in_flight):
    return in_flight.layout.targets.elements > 0 and (in_flight.rope_back is not None or in_flight.copies_back.flat is None)


armed: Armed | None = None  # the counts of the active `spoiled_buffers`; None if none is active


@contextlib.contextmanager
def spoiled_buffers():
    """Fill each buffer with NaN once the package must not read it again; yield the `Armed` that counts.

    Fills send buffers after delivery, receive buffers after unpack, and uninitialised memory. Wraps the methods of `InFlight`,
    since every exchange is an `InFlight`. Raises AssertionError (BLIND) if fewer buffers were filled than the layouts demand.
    """
    global armed
    before, armed = armed, Armed()
    here = armed
    launch, pack, unpack, collect = (getattr(InFlight, name) for name in ("__init__", "_packed", "_unpacked", "finish"))

    @functools.wraps(launch)
    def launching(self, *args, **kwargs):
        here.launching = self
        try:
            launch(self, *args, **kwargs)
        finally:
            here.launching = None
        made = _makes_memory(self, self.copies.is_wire, self.layout.sources, self.rope)
        here.due.update(owned=_packs(self), filled=_packs(self) and not made)

    @functools.wraps(pack)
    def packing(self, new_empty):
        def new(*args):
            wire = new_empty(*args)
            here.acted["filled"] += is_spoiled(wire)
            return wire

        return pack(self, new)

    @functools.wraps(unpack)
    def unpacking(self):
        make = self._new_outs

        def fill(outs):
            sides = zip(self.layout.targets.each, outs)
            places = [place for side, out in sides for peer in range(len(side.parts)) for place in blocks_of(out, side, peer)]
            places = [place for place in places if place.numel()]
            here.acted["filled"] += bool(places) and all(map(is_spoiled, places))
            return outs

        self._new_outs = lambda like: fill(make(like))
        outs = unpack(self)
        del self._new_outs
        here.acted["poisoned"] += spoil(self.recv)
        return outs

    @functools.wraps(collect)
    def collecting(self):
        out = collect(self)
        made = _makes_memory(self, self.copies_back.in_order, self.layout.targets, self.rope_back)
        here.due.update(delayed=1, spoiled=_packs(self), poisoned=_unpacks(self), filled=_unpacks(self) and not made)
        return out

    wrapped = {"__init__": launching, "_packed": packing, "_unpacked": unpacking, "finish": collecting}
    torch.use_deterministic_algorithms(True)  # makes torch.empty return NaN
    try:
        with mock.patch.multiple(InFlight, **wrapped):
            yield here
    finally:
        armed = before
        torch.use_deterministic_algorithms(False)
    assert not here.blind(), here.blind()


def spoil(buffer):
    """Fill ``buffer`` with NaN; return whether it has any elements."""
    with torch.inference_mode(buffer.is_inference()):  # the thread of `Delayed` is not in inference mode
        buffer.fill_(math.nan)
    return buffer.numel() > 0


def is_spoiled(buffer):
    return buffer.numel() > 0 and bool(buffer.isnan().all())


def alias(tensor):
    """Return a new tensor on the memory of ``tensor``; the new tensor does not keep ``tensor`` itself alive."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def move(send, recv, send_sizes, recv_sizes, group):
    if group is None:
        recv.view(-1).copy_(send.view(-1))
    else:
        dist.all_to_all_single(recv.view(-1), send.view(-1), recv_sizes, send_sizes, group=group)


class Transfer:
    """An exchange in flight; `deliver` moves its bytes, and checks that the send buffer is alive and unchanged."""

    def __init__(self, faults, send, recv, send_sizes, recv_sizes, group, name):
        self.faults, self.name = faults, name
        self.held = weakref.ref(send)
        self.send, self.recv = alias(send), alias(recv)
        self.before = self.send.clone()
        self.arguments = send_sizes, recv_sizes, group
        self.armed = armed
        self.owned = armed is not None and send.numel() > 0 and armed.owns(send)
        if armed is not None:
            armed.acted["owned"] += self.owned
        recv.fill_(math.nan)

    def deliver(self):
        if not torch.equal(self.send.view(torch.uint8), self.before.view(torch.uint8)):  # compare bits, since NaN may be sent
            self.faults.append(f"{self.name}: the send buffer was written while it was being read")
        if self.held() is None:
            self.faults.append(f"{self.name}: nobody keeps the send buffer alive")
            self.send.fill_(math.nan)  # another tensor might have reused the memory
        move(self.send, self.recv, *self.arguments)
        spoiled = self.owned and spoil(self.send)
        if self.armed is not None:
            with self.armed.counting:  # several threads may count, one for each `Delayed`
                self.armed.acted.update(delayed=1, spoiled=spoiled)


class Late:
    """Moves the bytes of an exchange only in its wait."""

    def __init__(self):
        self.faults: list[str] = []
        self.transfers: list[Transfer] = []
        self.waited: list[Transfer] = []

    def launch(self, *arguments):
        transfer = Transfer(self.faults, *arguments)
        self.transfers.append(transfer)

        def wait():
            if transfer not in self.waited:
                self.waited.append(transfer)
                transfer.deliver()

        return SimpleNamespace(wait=wait)

    def unfinished(self):
        return [transfer.name for transfer in self.transfers if transfer not in self.waited]


class Delayed:
    """Moves each exchange after a random delay, in a thread, in the order of launches.

    The thread has its own process group, so that its collectives don't mix with the package's comparisons between ranks. All ranks
    of the world must make this object together.
    """

    def __init__(self, seed=0, longest_s=0.003):
        self.faults: list[str] = []
        self.queue: queue.Queue = queue.Queue()
        self.group = dist.new_group() if dist.is_initialized() else None
        rank = 0 if self.group is None else dist.get_rank()
        self.last = threading.Event()  # set once the latest exchange is delivered
        self.last.set()
        self.random, self.longest_s = random.Random(1000 * seed + rank), longest_s
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            transfer, done = self.queue.get()
            time.sleep(self.random.random() * self.longest_s)
            try:
                transfer.deliver()
            except Exception as error:
                transfer.faults.append(repr(error))
            done.set()

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        self.last = done = threading.Event()
        self.queue.put((Transfer(self.faults, send, recv, send_sizes, recv_sizes, group and self.group, name), done))
        return SimpleNamespace(wait=done.wait)

    def settle(self):
        """Wait for all exchanges, even abandoned ones."""
        self.last.wait()


class Recording:
    """Logs ``>q0`` when the exchange q0 is launched, and ``<q0`` in its wait."""

    def __init__(self):
        self.log: list[str] = []

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        what = name.split()[-1]
        self.log.append(">" + what)
        move(send, recv, send_sizes, recv_sizes, group)
        return SimpleNamespace(wait=lambda: self.log.append("<" + what))


class Failing:
    """Raises in the wait of the exchange ``what``, on ``ranks``, as an aborted collective does."""

    def __init__(self, what, ranks=(0, 1)):
        self.what, self.ranks = what, ranks

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        move(send, recv, send_sizes, recv_sizes, group)
        fails = name.split()[-1] == self.what and dist.get_rank(group) in self.ranks

        def wait():
            if fails:
                raise RuntimeError("connection reset by peer")

        return SimpleNamespace(wait=wait)


FAULT = 1e-6


class Corrupting:
    """Adds `FAULT` to one element that rank 1 receives, in one exchange ("q0"), or in the exchanges of all head groups ("q").

    times   the number of changes so far
    """

    def __init__(self, what):
        self.what, self.times = what, 0

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        move(send, recv, send_sizes, recv_sizes, group)
        what = name.split()[-1]
        if self.what in (what, what.rstrip("0123456789")) and dist.get_rank(group) == 1:
            recv.view(-1)[recv.numel() // 2] += FAULT
            self.times += 1
        return self

    def wait(self):
        pass
