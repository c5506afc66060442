"""How the bytes of an exchange move between ranks.

A transport launches one all-to-all of flat buffers and returns a handle; tests put their own in its place. What
``sp_overlap.transport`` can ask for:

    auto          `C10d` over a communicator of our own where the sp group is NCCL's, else over the sp group
    c10d          `C10d` over the sp group as it was given
    copy_engine   `copy_engines.CopyEngine`: no SM moves a byte
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, all_to_all_single

from ..say import say

MAX_CTAS = 16  # SMs that a communicator of our own may take; NCCL's send and receive takes up to 32. Not yet measured


class Handle(Protocol):
    def wait(self) -> None:
        """Order what follows after the transfer: the host (gloo) or the current stream (NCCL)."""


class Transport(Protocol):
    def launch(self, send: Tensor, recv: Tensor, send_sizes: list[int], recv_sizes: list[int], group: Any, name: str) -> Handle:
        """Send ``send_sizes[p]`` elements of ``send`` to rank ``p``, fill ``recv`` likewise, and return at once.

        send   flat; read until the handle has been waited for, never written
        recv   flat; undefined until then
        name   for logs and errors, for instance ``layers.7 dv``

        Collective: every rank of the group launches the same exchanges in the same order.
        """


class Named(Transport, Protocol):
    """A transport that ``sp_overlap.transport`` names."""

    def prepare(self, channel: Any) -> None:
        """Make what it needs on the sp group of ``channel``. Collective, once, after the ranks have agreed.

        Raises ValueError, on all ranks alike, where it can't work.
        """


def backend_of(group: Any, device: str) -> str | None:
    """The backend that carries what ``group`` sends from ``device``: a group may have one for each (cpu:gloo,cuda:nccl)."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(",")).get(device)


class Done:
    """Handle of what needs no waiting: the stream that it was launched on holds it."""

    def wait(self) -> None:
        pass


DONE = Done()


class C10d:
    """``all_to_all_single`` of torch.distributed.

    own   what lies on a GPU goes over a communicator of our own: high priority, at most `MAX_CTAS` blocks, and no queue
          behind what others do in the sp group
    """

    def __init__(self, own: bool = False):
        self.own = own
        self.group: Any = None  # of what lies on a GPU; None: the sp group
        self.on_stream = False  # NCCL carries that, from torch 2.8 on in the current stream itself if not asynchronous

    def prepare(self, channel: Any) -> None:
        self.on_stream = channel.group is not None and backend_of(channel.group, "cuda") == "nccl"
        if self.own and self.on_stream:
            self.group = communicator(channel.group, max_ctas=MAX_CTAS)

    def launch(self, send: Tensor, recv: Tensor, send_sizes: Any, recv_sizes: Any, group: Any, name: str) -> Handle:
        on_stream = self.on_stream and send.is_cuda
        if on_stream and self.group is not None:
            group = self.group
        if all_equal(send_sizes, recv_sizes):
            send_sizes = recv_sizes = ()  # which costs the host half as much
        if log is not None and log.keeper.enabled:
            return log.all_to_all(recv, send, recv_sizes or None, send_sizes or None, group, name) or DONE
        if dist.all_to_all_single is not all_to_all_single or send.is_complex():  # somebody put his own there; or as real numbers
            work = dist.all_to_all_single(recv, send, recv_sizes or None, send_sizes or None, group=group, async_op=not on_stream)
        else:  # what that would ask the group for, without its checks: less than half of the host's time
            work = group.alltoall_base(recv, send, recv_sizes, send_sizes, _SYNC if on_stream else _ASYNC)
            if on_stream and work is not None:
                work.wait()
                work = None
        return work or DONE


_ASYNC, _SYNC = AllToAllOptions(), AllToAllOptions()
_ASYNC.asyncOp, _SYNC.asyncOp = True, False


class Log(NamedTuple):
    """
    keeper       while it is ``enabled``, exchanges go through
    all_to_all   ``recv, send, recv_sizes, send_sizes, group, name``, which returns a handle, or None if nothing is to be waited for
    """

    keeper: Any
    all_to_all: Callable[..., Handle | None]


log: Log | None = None  # an integration gives its framework's, if that keeps one of collectives


def all_equal(send_sizes: list[int], recv_sizes: list[int]) -> bool:
    """Whether all ranks send one another equally much; of an exchange of a `Geometry` every rank says the same."""
    return 0 < send_sizes[0] and send_sizes.count(send_sizes[0]) == len(send_sizes) and send_sizes == recv_sizes


class OneRank:
    """The transport of an sp group of one: what is sent is what is received."""

    def prepare(self, channel: Any) -> None:
        pass

    def launch(self, send: Tensor, recv: Tensor, send_sizes: list[int], recv_sizes: list[int], group: Any, name: str) -> Handle:
        recv.copy_(send)
        return self

    def wait(self) -> None:
        pass


_communicators: dict[tuple, tuple[Any, Any]] = {}  # by group name and settings: the group it was made for, and it


def _groups_made() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def communicator(group: Any, **settings: int) -> Any:
    """An NCCL communicator of our own over the ranks of ``group``, at high priority; one for all layers that ask alike.

    settings   of NCCL's configuration, for instance ``max_ctas`` or ``cta_policy``

    Collective over the group alone: its members need nobody else to make it. Where torch can't make one, ``group``; so too
    where the members have made different numbers of groups, from which torch derives the name that they meet under.
    """
    key = (group.group_name, *sorted(settings.items()))
    made_for, made = _communicators.get(key, (None, None))
    if made_for is group:
        return made
    ranks, made = dist.get_process_group_ranks(group), group
    counts = [0] * len(ranks)
    dist.all_gather_object(counts, _groups_made(), group=group)
    if len(set(counts)) > 1:
        say(f"sp_overlap: the ranks of the sp group have made {counts} process groups; it is used as it is")
    elif ranks != sorted(ranks):  # the new group would number them in ascending order
        say(f"sp_overlap: the sp group's ranks {ranks} are not ascending; it is used as it is")
    else:
        try:
            made = _made(group, ranks, settings)
        except NotImplementedError as error:
            say(f"sp_overlap: no communicator of our own ({error}); the sp group is used as it is")
    _communicators[key] = group, made
    return made


def _made(group: Any, ranks: list[int], settings: dict[str, int]) -> Any:
    """Make the communicator, and connect its ranks by one all-to-all.

    Nothing else is under way on this rank's device meanwhile. NCCL allocates while it connects, which may wait for a kernel
    that runs, and that kernel for a rank that is already waiting here.
    """
    device = _device()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = group._get_backend(torch.device("cuda")).options._timeout  # not torch's default
    for setting, value in settings.items():
        setattr(options.config, setting, value)
    torch.cuda.synchronize(device)
    with _unbound():
        made = dist.new_group(
            ranks,
            timeout=options._timeout,
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc="sp_overlap",
        )
    first = torch.zeros(len(ranks), device=device)
    dist.all_to_all_single(torch.empty_like(first), first, group=made)
    torch.cuda.synchronize(device)
    return made


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """Run the body with the default group bound to no device.

    While it is bound (DeepSpeed passes ``device_id``), torch makes every group at once, by an ncclCommSplit of the default
    group's communicator. That waits for all of its ranks, with ``use_local_synchronization`` too.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device
