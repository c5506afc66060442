"""Gives a layer its sp group: streams, a transport, and the agreement of the ranks.

Note [Gate stream]
~~~~~~~~~~~~~~~~~~
An exchange has to begin before the kernel that is to hide it. A kernel that takes every SM
(attention) would otherwise run first and lock the exchange out. So compute has to wait until the
transfer has been launched, but not until it is over, nor until earlier transfers are over. An event
on the transfer stream would come behind the earlier transfers. Hence a gate stream that holds
nothing: at each launch, compute waits for an event on the gate stream, in front of which there is
no transfer.

    compute    | Wq | pack q | wait gate | Wk .. | finish q: wait mark | unpack q |
    gate       |      ^ ready  v launched
    transfer   |      ^ ready  | ... earlier .. | q ................ | mark

Note [Relayout on the compute stream]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Pack and unpack stay in their place in the program, on the compute stream. If another stream packed,
behind the next kernel of the compute stream, the wire would wait for that kernel as well. If
another stream unpacked, the output would take memory from the start on. And on the transfer stream,
an unpack would keep the next exchange from its launch until this exchange has arrived.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..profiling.timeline import Timeline
from .calls import Calls
from .carve_out import carve_out
from .copy_engines import CopyEngine
from .transport import C10d, Named, OneRank, Transport, backend_of

# CUDA reads the variable as it starts: too early for this package to set it.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def one_queue() -> str:
    """Return a warning where all streams of a device share one hardware queue; else empty."""
    if os.environ.get(CONNECTIONS) != "1":
        return ""
    return (
        f"{CONNECTIONS} is 1: an exchange that is launched behind another one holds up what is "
        "computed after it, until the other one has arrived; unset it unless something else needs "
        "it (Megatron's tensor parallelism does)"
    )


class HostStream:
    """A null object in place of streams, where waiting blocks the host (CPU; gloo for any device).

    Program order is the only order.
    """

    # Whether waiting blocks the host. A transfer is then waited for in ``finish``.
    blocks = True

    _here = contextlib.nullcontext()

    def after_compute(self) -> contextlib.nullcontext[None]:
        return self._here

    def mark(self) -> Any:
        pass

    def before_compute(self, mark: Any) -> None:
        pass

    def after_unpack(self, mark: Any) -> None:
        pass

    @contextlib.contextmanager
    def relay(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


class Mark(NamedTuple):
    """A point in the transfer stream.

    Attributes:
        event: Recorded on the transfer stream.
        compute: The stream that allocated the buffers of the transfer.
    """

    event: Any
    compute: Any


class SideStream:
    """The streams of exchanges on an accelerator.

    compute    the caller's current stream: packs and unpacks, see
               Note [Relayout on the compute stream]
    transfer   collectives, one behind the other, which overlap with everything on compute
    gate       holds nothing, see Note [Gate stream]
    relay      stands in for compute between two legs, see Note [Relay stream] in `relayed`

    The compute stream allocates the buffers. They are referenced until ``before_compute``, so that
    their memory returns to the compute stream in order, without ``record_stream``.

    Args:
        backend: ``torch.cuda``, or another accelerator's module of the same form.
        device: The device of the streams.
        stream: Carries the transfers instead of our own stream, which all layers share.
    """

    blocks = False

    def __init__(self, backend: Any, device: Any, stream: Any | None = None):
        self.backend, self.device = backend, device
        transfer, self.gate, self._relay = _streams(backend, device)
        self.transfer = transfer if stream is None else stream
        # Events that nobody needs any more, to be recorded again.
        self.events: list[Any] = []

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run the body on the transfer stream, after what the compute stream holds now.

        The compute stream goes on when that is over, see Note [Gate stream].
        """
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
            # A wait is for the record before the wait, so a later record does not disturb it.
            self.events += ready, launched

    @contextlib.contextmanager
    def relay(self) -> Iterator[Callable[[], None]]:
        """Run the body on the relay stream, behind what the compute stream holds now.

        The body is given a function, which makes the compute stream go on behind what the relay
        stream holds by then.
        """
        compute = self.backend.current_stream(self.device)
        self._order(self._relay, compute)  # guard: relays what is ready
        with self.backend.stream(self._relay):
            yield lambda: self._order(compute, self._relay)

    def mark(self) -> Mark:
        """Mark the end of what the transfer stream holds now; later exchanges come after it."""
        compute = self.backend.current_stream(self.device)
        return Mark(self._recorded(self.transfer), compute)  # guard: marked behind the transfer

    def before_compute(self, mark: Mark) -> None:
        """Order the compute stream after ``mark``, and not after exchanges that started since.

        The current stream waits too, since it reads what was received. It is another stream only
        where the garbage collector calls.
        """
        mark.compute.wait_event(mark.event)  # guard: its own stream waits
        current = self.backend.current_stream(self.device)
        if current != mark.compute:
            current.wait_event(mark.event)
        self.events.append(mark.event)

    def after_unpack(self, mark: Mark) -> None:
        """Order the stream that allocated the buffers of ``mark`` behind what unpacked them.

        That is the current stream, and another one only behind a relay.
        """
        current = self.backend.current_stream(self.device)
        if current != mark.compute:
            self._order(mark.compute, current)

    def _order(self, stream: Any, before: Any) -> None:
        """Let ``stream`` go on behind what ``before`` holds now."""
        event = self._recorded(before)
        stream.wait_event(event)
        self.events.append(event)

    def _recorded(self, stream: Any) -> Any:
        try:
            event = self.events.pop()
        except IndexError:
            event = self.backend.Event()
        stream.record_event(event)  # guard: an event is recorded
        return event


@functools.cache
def _streams(backend: Any, device: Any) -> tuple[Any, ...]:
    """Make the transfer, the gate and the relay stream of a device.

    Torch has 32 streams in all, so that layers with streams of their own would share some by
    chance.
    """
    return tuple(backend.Stream(device, priority=-1) for _ in range(3))


def by_name(name: str, size: int, settings: dict[str, int] | None = None) -> Named:
    """Return the transport that ``sp_overlap.transport`` names, for an sp group of ``size``.

    Args:
        name: The name.
        size: P.
        settings: As for `C10d`.
    """
    if size == 1:
        return OneRank()
    if name == "copy_engine":
        return CopyEngine(settings)
    return C10d(own=name == "auto", settings=settings)


def hostname() -> str:
    """Return the name of the host, the same for all ranks of a node."""
    return socket.gethostname()


class SPGroup:
    """The sp group, with its transport and streams.

    Args:
        group: Process group of the sp ranks; None for one rank.
        transport: A mover of bytes, or a value of ``sp_overlap.transport``; None for "auto".
        stream: Carries the transfers instead of our own stream (accelerators only).
        kernels: Which kernels pack and unpack, a value of ``sp_overlap.kernels``.
        settings: As for `C10d`.
        sm_carveout: How many SMs products leave free while an exchange is under way on a GPU.

    Raises:
        ValueError: if this process is not in ``group``.
    """

    def __init__(
        self,
        group: Any,
        transport: Transport | str | None = None,
        stream: Any | None = None,
        kernels: str = "auto",
        settings: dict[str, int] | None = None,
        sm_carveout: int = 0,
    ):
        self.group, self.kernels = group, kernels
        self.carve_out = carve_out(sm_carveout)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                "sequence_process_group: this process is not a member of it; "
                "pass the group that it belongs to"
            )
        self._unprepared: Named | None = None
        if transport is None or isinstance(transport, str):
            transport = self._unprepared = by_name(transport or "auto", self.size, settings)
        self.transport: Transport = transport
        # The node of every rank, once it is known (`find_nodes`).
        self.nodes: tuple[int, ...] | None = None
        self.timeline: Timeline | None = None
        self.calls = Calls.of(group)
        self._stream = stream
        self._sides: dict[torch.device, HostStream | SideStream] = {}

    def streams(self, device: torch.device) -> HostStream | SideStream:
        """Return the streams for exchanges of tensors on ``device``; they are made once."""
        side = self._sides.get(device)
        if side is None:
            waits_on_host = device.type == "cpu"
            if not waits_on_host and self.size > 1:
                waits_on_host = backend_of(self.group, device.type) == "gloo"
            if waits_on_host:
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
        """Whether rank 0 of the world, which reports, is in the group."""
        return self.ranks[0] == 0

    def prepare(self) -> None:
        """Prepare the transport, the first time.

        Collective then, after the ranks have agreed.

        Raises:
            ValueError: on all ranks alike, where the transport can't work.
        """
        if self._unprepared is not None:
            self._unprepared.prepare(self)
            self._unprepared = None

    def find_nodes(self) -> None:
        """Learn the node of every rank by the names of their hosts, the first time.

        Collective then.
        """
        if self.nodes is None:
            hosts = self.gather(hostname())
            self.nodes = tuple(hosts.index(host) for host in hosts)

    def failed(self, where: str, what: str, error: Exception) -> RuntimeError:
        """Return the exception to raise for a collective, ``what``, that failed."""
        return RuntimeError(
            f"{where}: {what} over the sp group (size {self.size}) failed on sp rank {self.rank}; "
            f"look for the first error on the other ranks: {error}"
        )

    def gather(self, what: Any, where: str = "sp_overlap") -> list[Any]:
        """Return ``what`` of every rank, in rank order.

        Collective. Pickles, so that it is for the first step and for checks.
        """
        every = [what] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(every, what, group=self.group)
            except Exception as error:
                # Of any kind: the bytes of another collective need not be a pickle.
                raise self.failed(where, "the comparison of the ranks", error) from error
        return every

    def agree(self, where: str, describe: Callable[[], Any]) -> None:
        """Compare ``describe()`` over the ranks.

        Collective. An exception of ``describe`` on one rank is raised on every rank.

        Raises:
            ValueError: on all ranks alike, if some rank raised, or if the ranks differ.
        """
        is_fine = True
        answer: Any
        try:
            answer = describe()
        except Exception as error:
            # Of any kind: the other ranks wait for this one.
            is_fine, answer = False, str(error)
            if not isinstance(error, ValueError):
                answer = f"{type(error).__name__}: {error}"
        answers = self.gather((is_fine, answer), where)
        alike = all(other == answers[0] for other in answers)
        lines = [f"sp rank {rank}: {of_rank}" for rank, (_, of_rank) in enumerate(answers)]
        faults = [line for line, (fine, _) in zip(lines, answers) if not fine]
        if faults:  # guard: one rank's fault is everybody's
            raise ValueError(f"{where}: {answer if alike else '; '.join(faults)}")
        if not alike:  # guard: ranks exchange the same
            raise ValueError(
                f"{where}: the ranks of the sp group are about to exchange different things "
                f"({'; '.join(lines)}); give every rank the same model, config, batch and dtype, "
                "and its share of one sequence"
            )
