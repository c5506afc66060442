"""The sp group as a layer sees it: the streams that exchanges run on, the transport, the agreement of its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..profiling.timeline import Timeline
from .calls import Calls
from .copy_engines import CopyEngine
from .transport import C10d, Named, OneRank, Transport, backend_of


class HostStream:
    """Null object where there are no streams (CPU): program order is the only order."""

    deferred_unpack = True  # waiting would block the host, so it is put off until ``finish``
    packs_at_once = True  # what was packed has been read

    _here = contextlib.nullcontext()

    def after_compute(self) -> contextlib.nullcontext[None]:
        return self._here

    def mark(self) -> Any:
        pass

    def before_compute(self, mark: Any) -> None:
        pass


class SideStream:
    """The stream that carries exchanges: pack, transfer and unpack of buffers that an exchange owns.

    All of them are allocated by the compute stream and kept referenced until ``before_compute``, so their memory
    returns to the compute stream in order; no ``record_stream``.
    """

    packs_at_once = False

    def __init__(self, backend: Any, device: Any, stream: Any | None = None, deferred_unpack: bool = False):
        self.backend, self.device = backend, device  # torch.cuda, or another accelerator's module of the same form
        self.stream = stream if stream is not None else backend.Stream(device, priority=-1)
        self.deferred_unpack = deferred_unpack

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the body on the side stream, after what the compute stream holds now."""
        self.stream.wait_stream(self.backend.current_stream(self.device))
        with self.backend.stream(self.stream):
            yield

    def mark(self) -> Any:
        """What the side stream holds now; exchanges that are started later come after it."""
        return self.stream.record_event()

    def before_compute(self, mark: Any) -> None:
        """Order the compute stream after ``mark``, and not after what was started since: that is to stay hidden."""
        self.backend.current_stream(self.device).wait_event(mark)


def by_name(name: str, size: int) -> Named:
    """The transport that ``sp_overlap.transport`` names, for an sp group of ``size`` ranks."""
    if size == 1:
        return OneRank()
    if name == "copy_engine":
        return CopyEngine()
    return C10d(own=name == "auto")


class Channel:
    """The sp group with the means to exchange over it: transport and side stream.

    group       process group of the sp ranks; None for one rank
    transport   mover of bytes, or what ``sp_overlap.transport`` calls it; "auto" if None
    stream      a stream to use instead of one of our own (accelerators only)
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
        """The side stream for tensors on ``device``; made once."""
        if device not in self._sides:
            if device.type == "cpu":
                self._sides[device] = HostStream()
            else:
                backend = torch.get_device_module(device)
                blocking = self.size > 1 and backend_of(self.group, device.type) == "gloo"
                self._sides[device] = SideStream(backend, device, self._stream, deferred_unpack=blocking)
        return self._sides[device]

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
        if faults:
            raise ValueError(f"{where}: {mine[1] if alike else '; '.join(faults)}")
        if not alike:
            seen = "; ".join(f"sp rank {rank}: {what}" for rank, (_, what) in enumerate(every))
            raise ValueError(f"{where}: the ranks of the sp group are about to exchange different things ({seen})")
