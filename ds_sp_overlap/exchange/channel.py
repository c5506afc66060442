"""The sp group as a layer sees it: the streams that exchanges run on, the transport, the agreement of its ranks."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..profiling.timeline import Timeline
from .calls import Calls
from .copy_engines import CopyEngine
from .transport import C10d, Named, OneRank, Transport, backend_of

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # read by CUDA as it starts: too early for this package to set it


def one_queue() -> str:
    """What to say where all streams of a device share one hardware queue; else empty."""
    if os.environ.get(CONNECTIONS) != "1":
        return ""
    return (
        f"{CONNECTIONS} is 1: an exchange that is launched behind another one holds up what is computed after it, until the other "
        "one has arrived; unset it unless something else needs it (Megatron's tensor parallelism does)"
    )


class HostStream:
    """Null object where waiting blocks the host (CPU, and gloo for any device): program order is the only order."""

    blocks = True  # so a transfer is not waited for before ``finish``

    _here = contextlib.nullcontext()

    def after_compute(self) -> contextlib.nullcontext[None]:
        return self._here

    def mark(self) -> Any:
        pass

    def before_compute(self, mark: Any) -> None:
        pass


class Mark(NamedTuple):
    """
    event     what the transfer stream held
    compute   the stream whose memory that works on
    """

    event: Any
    compute: Any


class SideStream:
    """The streams of exchanges on an accelerator.

    compute    pack and unpack, in their place in the program. Packed on another stream, behind the next kernel of this one, the
               wire would wait for that kernel as well. Unpacked on another stream, the output would take memory from the start on.
    transfer   collectives, which overlap with all that compute does. One follows another with nothing between them: an unpack
               here would keep the next one from its launch until this one has arrived.
    gate       nothing at all, so that no transfer is in front of it. Compute waits for it at each launch. So a kernel that takes
               every SM (attention) does not run before an exchange that was started in front of it, and lock it out.

    Buffers are allocated by the compute stream and kept referenced until ``before_compute``, so their memory returns to the
    compute stream in order; no ``record_stream``.
    """

    blocks = False

    def __init__(self, backend: Any, device: Any, stream: Any | None = None):
        self.backend, self.device = backend, device  # torch.cuda, or another accelerator's module of the same form
        transfer, self.gate = _streams(backend, device)
        self.transfer = transfer if stream is None else stream
        self.events: list[Any] = []  # to be recorded again

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the body on the transfer stream, after what the compute stream holds now, which goes on when that is over."""
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
            self.events += ready, launched  # a wait is for what was recorded before it

    def mark(self) -> Mark:
        """What the transfer stream holds now; exchanges that are started later come after it."""
        return Mark(self._recorded(self.transfer), self.backend.current_stream(self.device))  # guard: marked behind the transfer

    def before_compute(self, mark: Mark) -> None:
        """Order the compute stream after ``mark``, and not after what was started since: that is to stay hidden.

        So too the current stream, which reads what was received. The garbage collector may call from yet another one; let it wait.
        """
        mark.compute.wait_event(mark.event)  # guard: its own stream waits
        if (current := self.backend.current_stream(self.device)) != mark.compute:
            current.wait_event(mark.event)
        self.events.append(mark.event)

    def _recorded(self, stream: Any) -> Any:
        try:
            event = self.events.pop()
        except IndexError:
            event = self.backend.Event()
        stream.record_event(event)  # guard: an event is recorded
        return event


@functools.cache
def _streams(backend: Any, device: Any) -> tuple[Any, Any]:
    """Transfer and gate, one pair for each device: torch has 32 streams, and a layer that made its own would share one by chance."""
    return backend.Stream(device, priority=-1), backend.Stream(device, priority=-1)


def by_name(name: str, size: int) -> Named:
    """The transport that ``sp_overlap.transport`` names, for an sp group of ``size`` ranks."""
    if size == 1:
        return OneRank()
    if name == "copy_engine":
        return CopyEngine()
    return C10d(own=name == "auto")


class Channel:
    """The sp group with the means to exchange over it: transport and streams.

    group       process group of the sp ranks; None for one rank
    transport   mover of bytes, or what ``sp_overlap.transport`` calls it; "auto" if None
    stream      to carry the transfers instead of ours, which all layers share (accelerators only)
    kernels     which pack and unpack: ``sp_overlap.kernels``
    """

    def __init__(self, group: Any, transport: Transport | str | None = None, stream: Any | None = None, kernels: str = "auto"):
        self.group, self.kernels = group, kernels
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("sequence_process_group: this process is not a member of it; pass the group that it belongs to")
        self._unprepared: Named | None = None
        if transport is None or isinstance(transport, str):
            transport = self._unprepared = by_name(transport or "auto", self.size)
        self.transport: Transport = transport
        self.timeline: Timeline | None = None
        self.calls = Calls.of(group)
        self._stream = stream
        self._sides: dict[torch.device, HostStream | SideStream] = {}

    def side(self, device: torch.device) -> HostStream | SideStream:
        """What carries exchanges of tensors on ``device``; made once."""
        if (side := self._sides.get(device)) is None:
            if device.type == "cpu" or self.size > 1 and backend_of(self.group, device.type) == "gloo":
                side = HostStream()
            else:
                side = SideStream(torch.get_device_module(device), device, self._stream)
            self._sides[device] = side
        return side

    @property
    def ranks(self) -> list[int]:
        """The ranks of the world that are in the group."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def holds_first_rank(self) -> bool:
        """Whether it is the sp group of the process that reports."""
        return self.ranks[0] == 0

    def prepare(self) -> None:
        """Make what the transport needs. Collective the first time, once the ranks have agreed; raises its ValueError."""
        if self._unprepared is not None:
            self._unprepared.prepare(self)
            self._unprepared = None

    def failed(self, where: str, what: str, error: Exception) -> RuntimeError:
        """What to raise for a collective that failed."""
        return RuntimeError(
            f"{where}: {what} over the sp group (size {self.size}) failed on sp rank {self.rank}; "
            f"look for the first error on the other ranks: {error}"
        )

    def gather(self, what: Any, where: str = "sp_overlap") -> list[Any]:
        """``what`` of every rank, in rank order. Collective; pickles, so it is for the first step and for checks."""
        every = [what] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(every, what, group=self.group)
            except Exception as error:  # of any kind: what another rank sent need not be an object
                raise self.failed(where, "the comparison of the ranks", error) from error
        return every

    def agree(self, where: str, describe: Callable[[], Any]) -> None:
        """Compare ``describe()`` over the ranks; what it raises on one of them is raised on every one.

        Collective. Raises ValueError, on all ranks alike.
        """
        mine: tuple[bool, Any]
        try:
            mine = (True, describe())
        except Exception as error:  # of any kind: the other ranks wait for this one
            mine = (False, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        every = self.gather(mine, where)
        alike = all(other == every[0] for other in every)
        faults = [f"sp rank {rank}: {what}" for rank, (fine, what) in enumerate(every) if not fine]
        if faults:  # guard: one rank's fault is everybody's
            raise ValueError(f"{where}: {mine[1] if alike else '; '.join(faults)}")
        if not alike:  # guard: ranks exchange the same
            seen = "; ".join(f"sp rank {rank}: {what}" for rank, (_, what) in enumerate(every))
            raise ValueError(
                f"{where}: the ranks of the sp group are about to exchange different things ({seen}); give every rank the same model, "
                "config, batch and dtype, and its share of one sequence"
            )
