"""Holds an sp group with its transport and streams, and lets its ranks compare values."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..relayout import build, ops
from ..warn import by_rank, warn_once
from .calls import Calls
from .copy_engines import CopyEngine
from .modes import outside_modes
from .streams import HostStream, SideStream, accelerator, refuse_captured
from .transport import C10d, Named, OneRank, Transport, backend_of, gather


def by_name(name: str, size: int, settings: dict[str, int] | None = None) -> Named:
    """Return the transport that ``sp_overlap.transport`` names; `SPGroup.prepare` prepares it.

    Args:
        name: A value of ``sp_overlap.transport``.
        size: ``P``.
        settings: Fields of NCCL's configuration, see `C10d`.
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
    """Holds the sp group, its transport and its streams.

    Args:
        group: Process group of the sp ranks; None for one rank.
        transport: A mover of bytes, or a value of ``sp_overlap.transport``; None for "auto".
        stream: The stream for the transfers, on accelerators; None for our own stream.
        kernels: Which kernels pack and unpack, a value of ``sp_overlap.kernels``.
        settings: Fields of NCCL's configuration, see `C10d`.
        overlaps: Whether compute overlaps with exchanges; if False, compute waits for each exchange
            at once.

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
        overlaps: bool = True,
    ):
        self.group, self.kernels = group, kernels
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                "sequence_process_group: this process is not a member of it; "
                "pass the group that it belongs to"
            )
        # The transport, if it was made here and `prepare` has not run yet; else None.
        self._unprepared: Named | None = None
        if transport is None or isinstance(transport, str):
            transport = self._unprepared = by_name(transport or "auto", self.size, settings)
        self.transport = transport
        # The node of every rank; None until `find_nodes` is called.
        self.nodes: tuple[int, ...] | None = None
        self.calls = Calls.of(group)
        self._stream = stream
        self._overlaps = overlaps
        # The streams that `streams` has made so far, by device.
        self.sides: dict[torch.device, HostStream | SideStream] = {}

    def streams(self, device: torch.device) -> HostStream | SideStream:
        """Return the streams for exchanges of tensors on ``device``; they are made once."""
        side = self.sides.get(device)
        if side is None:
            # gloo can also carry tensors of a GPU; it then blocks the host too.
            waits_on_host = device.type == "cpu" or (
                self.size > 1 and backend_of(self.group, device.type) == "gloo"
            )
            if waits_on_host:
                side = HostStream()
            else:
                side = SideStream(accelerator(device.type), device, self._stream)
            side.overlaps = self._overlaps
            self.sides[device] = side
        return side

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the world that are in the group."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    @outside_modes()
    def prepare(self) -> None:
        """Choose the kernels and prepare the transport; later calls do nothing. Collective.

        ``enable`` and each layer's first call run this after the ranks have agreed (`agree`).

        Raises:
            ValueError: on all ranks alike, if the transport can't work.
        """
        if self.kernels == "auto":
            self.kernels = self._choose_kernels()
        if self._unprepared is not None:
            self._unprepared.prepare(self)
            self._unprepared = None

    def _choose_kernels(self) -> str:
        """Return "compiled" if NCCL carries the group and all ranks have the kernels, else "torch".

        Collective if NCCL carries the group. A rank that has nvcc but no library builds one.
        """
        if self.size == 1:
            on_gpu = torch.cuda.is_available()
        else:
            on_gpu = backend_of(self.group, "cuda") == "nccl"
        if not on_gpu:
            return "torch"
        lacks = self.gather(ops.lacks_compiled(build=build.nvcc() is not None))
        missing = [f"sp rank {rank}: {reason}" for rank, reason in enumerate(lacks) if reason]
        if not missing:
            return "compiled"
        warn_once(
            "sp_overlap: PyTorch's copies pack and unpack, and rotate apart from that, "
            f"in place of the compiled kernels ({missing[0]})"
        )
        return "torch"

    def refuse_destroyed(self, where: str) -> None:
        """Raise RuntimeError, on this rank, if the process group was destroyed.

        Layers and the model call this in each forward, since the transport may outlive the group.
        ``where`` names the layer or the model.
        """
        try:
            if self.group is not None:
                dist.get_rank(self.group)
        except ValueError as error:  # guard: a group that is there
            raise RuntimeError(
                f"{where}: the process group of the sp ranks was destroyed ({error}); make the "
                "layer, or call ds_sp_overlap.enable, over a group that is there"
            ) from error

    def find_nodes(self) -> None:
        """Set `nodes`, the node of every rank, from the ranks' host names.

        Collective in the first call; later calls do nothing.
        """
        if self.nodes is None:
            hosts = self.gather(hostname())
            # A node's number is the first rank on it.
            self.nodes = tuple(hosts.index(host) for host in hosts)

    def failed(self, where: str, what: str, error: Exception) -> RuntimeError:
        """Return the exception to raise for a collective that failed with ``error``.

        Args:
            where: Name of the layer or the exchange.
            what: A description of the collective.
            error: The exception that the collective raised.
        """
        return RuntimeError(
            f"{where}: {what} over the sp group (size {self.size}) failed on sp rank {self.rank}; "
            f"look for the first error on the other ranks: {error}"
        )

    @outside_modes()
    def gather(self, what: Any, where: str = "sp_overlap") -> list[Any]:
        """Gather ``what`` of all ranks, in rank order; slow, since values are pickled. Collective.

        Raises:
            RuntimeError: on each rank on which the collective fails; or if a CUDA graph is being
                captured.
        """
        refuse_captured(
            where,
            "the ranks can't be compared (in a layer's first call, in each one with "
            'sp_overlap.check, for head_groups "auto" until it has chosen); run such steps before',
        )
        if self.size == 1:
            return [what]
        try:
            return gather(what, self.group)
        except Exception as error:
            # Catch all exceptions: unpickling the bytes of another collective may raise any.
            raise self.failed(where, "the comparison of the ranks", error) from error

    @outside_modes()
    def agree(self, where: str, describe: Callable[[], Any]) -> None:
        """Check that ``describe()`` returns the same on all ranks. Collective.

        Ranks call this before they launch anything that depends on the result. If ``describe``
        raises on one rank, all ranks raise ValueError.

        Args:
            where: Name of the layer, or of the package, for errors.
            describe: A function that returns the value to compare.

        Raises:
            ValueError: on all ranks alike, if some rank raised, or if the ranks differ.
        """
        try:
            answer = True, describe()
        except ValueError as error:
            answer = False, str(error)
        except Exception as error:
            # Catch all exceptions, since the other ranks wait for this rank in `gather`.
            answer = False, f"{type(error).__name__}: {error}"
        answers = self.gather(answer, where)
        # All ranks compare the same answers, so either all raise or none.
        alike = all(other == answers[0] for other in answers)
        if not all(fine for fine, _ in answers):  # guard: one rank's fault is everybody's
            # One line is enough if all ranks have the same fault.
            faults = by_rank("" if fine else text or "error" for fine, text in answers)
            raise ValueError(f"{where}: {answer[1] if alike else faults}")
        if not alike:  # guard: ranks exchange the same
            raise ValueError(
                f"{where}: the ranks of the sp group are about to exchange different things "
                f"({by_rank(str(text) for _, text in answers)}); give every rank the same model, "
                "config, batch and dtype, and its share of one sequence"
            )
