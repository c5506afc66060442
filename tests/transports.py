"""Transports that do their worst within the contract of `ds_sp_overlap.transport.Transport`, and one that writes down.

All fill the receive buffer with NaN at launch: whoever reads before waiting computes NaN.
"""

import contextlib
import math
import queue
import random
import threading
import time
import weakref

import torch
import torch.distributed as dist

import ds_sp_overlap.ops

packed: set[int] = set()  # addresses of send buffers that are in flight and belong to the package


@contextlib.contextmanager
def spoiled_buffers():
    """Let the transports know which send buffers are the package's own, and spoil received ones once unpacked.

    Uninitialised memory is NaN too.
    """
    pack, unpack = ds_sp_overlap.ops.pack, ds_sp_overlap.ops.unpack

    def packing(x, dim, starts, stops, out):
        packed.add(out.untyped_storage().data_ptr())
        pack(x, dim, starts, stops, out)

    def unpacking(wire, dim, starts, stops, out):
        unpack(wire, dim, starts, stops, out)
        wire.fill_(math.nan)

    ds_sp_overlap.ops.pack, ds_sp_overlap.ops.unpack = packing, unpacking
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        ds_sp_overlap.ops.pack, ds_sp_overlap.ops.unpack = pack, unpack
        packed.clear()


def alias(tensor):
    """Another tensor on the same memory that doesn't keep ``tensor`` alive."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def move(send, recv, send_sizes, recv_sizes, group):
    if group is None:
        recv.copy_(send)
    else:
        dist.all_to_all_single(recv, send, recv_sizes, send_sizes, group=group)


class Transfer:
    """One exchange: what is watched on it while it is under way."""

    def __init__(self, faults, send, recv, send_sizes, recv_sizes, group, name):
        self.faults, self.name = faults, name
        self.held = weakref.ref(send)
        self.send, self.recv = alias(send), alias(recv)
        self.before = self.send.clone()
        self.arguments = send_sizes, recv_sizes, group
        address = send.untyped_storage().data_ptr()
        self.owned = address in packed and send.numel() > 0
        packed.discard(address)
        recv.fill_(math.nan)

    def deliver(self):
        if not torch.equal(self.send, self.before):
            self.faults.append(f"{self.name}: the send buffer was written while it was being read")
        if self.held() is None:
            self.faults.append(f"{self.name}: nobody keeps the send buffer alive")
            self.send.fill_(math.nan)  # as whoever is given the memory next would
        move(self.send, self.recv, *self.arguments)
        if self.owned:
            self.send.fill_(math.nan)


class Late:
    """Moves nothing before it is waited for. Spoils send buffers nobody holds on to, and owned ones after delivery."""

    def __init__(self):
        self.faults: list[str] = []
        self.transfers: list[Transfer] = []
        self.waited: list[Transfer] = []

    def launch(self, *arguments):
        transfer = Transfer(self.faults, *arguments)
        self.transfers.append(transfer)
        transport = self

        class Handle:
            def wait(self):
                if transfer not in transport.waited:
                    transport.waited.append(transfer)
                    transfer.deliver()

        return Handle()

    def unfinished(self):
        return [transfer.name for transfer in self.transfers if transfer not in self.waited]


class Delayed:
    """Moves each exchange after a random time of its own, in a thread, in the order of launches."""

    def __init__(self, seed=0, longest_s=0.003):
        self.faults: list[str] = []
        self.queue: queue.Queue = queue.Queue()
        rank = dist.get_rank() if dist.is_initialized() else 0
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

    def launch(self, *arguments):
        done = threading.Event()
        self.queue.put((Transfer(self.faults, *arguments), done))

        class Handle:
            wait = staticmethod(done.wait)

        return Handle()


class Recording:
    """Writes down ``>q0`` when an exchange is launched and ``<q0`` when it has been waited for."""

    def __init__(self):
        self.log: list[str] = []

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        what = name.split()[-1]
        self.log.append(">" + what)
        move(send, recv, send_sizes, recv_sizes, group)
        transport = self

        class Handle:
            def wait(self):
                transport.log.append("<" + what)

        return Handle()


class Failing:
    """Its wait raises for one exchange, on the ranks given, as a collective that is aborted does."""

    def __init__(self, what, ranks=(0, 1)):
        self.what, self.ranks = what, ranks

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        move(send, recv, send_sizes, recv_sizes, group)
        fails = name.split()[-1] == self.what and dist.get_rank(group) in self.ranks

        class Handle:
            def wait(self):
                if fails:
                    raise RuntimeError("connection reset by peer")

        return Handle()


class Corrupting:
    """Changes one element that one rank receives in one exchange."""

    def __init__(self, what, rank=1):
        self.what, self.rank = what, rank

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        move(send, recv, send_sizes, recv_sizes, group)
        if name.split()[-1] == self.what and dist.get_rank(group) == self.rank:
            recv.view(-1)[recv.numel() // 2] += 1e-6

        class Handle:
            def wait(self):
                pass

        return Handle()


class Silent:
    """Moves nothing at all, so that ranks which don't fit together don't hang either."""

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        recv.zero_()
        return self

    def wait(self):
        pass
