"""Moves the bytes of an exchange between ranks.

A transport launches one all-to-all of buffers and returns a handle. Tests pass their own transport.
The values of ``sp_overlap.transport``:

    auto          `C10d` over a communicator of our own if NCCL carries the sp group; otherwise over
                  the sp group
    c10d          `C10d` over the sp group as it was given
    copy_engine   `copy_engines.CopyEngine`: copy engines of the GPUs move the bytes, not SMs

Note [Two communicators]
~~~~~~~~~~~~~~~~~~~~~~~~
Collectives of one NCCL communicator run in the order of their launch. An exchange would therefore
wait for the framework's earlier collectives in the sp group (a gather of weights, a reduction of
gradients). So exchanges have a communicator of their own: at high priority, and with few blocks,
since each block takes an SM from the kernels that hide the exchange
(Note [Blocks of a communicator]).

Two communicators hang if the GPUs of two ranks begin their kernels in different orders. NCCL begins
kernels in the host's order if `LAUNCH_ORDER` is set before NCCL's first launch (`launch_order`).

Ranks make the communicator at their first call, while other ranks may have collectives in flight.
Two deadlocks are possible. First, NCCL allocates memory while it connects, and the allocation may
wait for a running kernel. A running collective may itself wait for a rank that is already
connecting. So the device must be idle (`_make_connected`). Second, if the default group is bound to
a device (DeepSpeed passes ``device_id``), torch splits the communicator of the default group at
once, and the split waits for all ranks of the world. So the default group is unbound while our
communicator is made.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, all_to_all_single

from ..launch_order import LAUNCH_ORDER
from ..warn import say, warn_once
from .layout import all_equal

# Note [Blocks of a communicator]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Each block of NCCL's kernels takes an SM from the kernels that hide the exchange. So our
# communicator takes only as many blocks as its slowest link needs. Inside a node, over NVLink, this
# is 16 (NCCL's send and receive would take up to 32). If the sp group spans nodes, the slowest link
# is the network card. NCCL counts on 14 GB/s for each block (P2P_PER_CHANNEL_NET_BW in its
# src/graph/paths.cc), so 4 blocks fill a card of 400 Gbit/s = 50 GB/s for each GPU; this is not
# measured. Beside 16 blocks, products on an H100 took 1.03 to 1.12 times as long, and attention
# 1.04 times (benchmarks/results/h100/contention.csv). ``sp_overlap.max_ctas`` overrides 16 and 4.
MAX_CTAS = 16
NETWORK_CTAS = 4

# The kind of device of NCCL's tensors.
DEVICE = "cuda"
# The number of elements that go to each rank, or come from each rank.
Sizes = tuple[int, ...]


class Handle(Protocol):
    """Defines the interface of a transfer in flight."""

    def wait(self) -> None:
        """Make the host (gloo) or the current stream (NCCL) wait for the transfer.

        With a `SideStream`, this call follows the launch at once, in the same stream.

        Raises:
            RuntimeError: if the transfer fails; the caller adds the name of the exchange.
        """


class Transport(Protocol):
    """Defines the interface of a mover of bytes between ranks."""

    def launch(
        self,
        send: Tensor,
        recv: Tensor,
        send_sizes: Sizes,
        recv_sizes: Sizes,
        group: Any,
        name: str,
        /,
    ) -> Handle:
        """Launch an all-to-all and return at once.

        Collective: every rank of the group launches the same exchanges in the same order.

        Args:
            send: The tensor to send: contiguous, of any shape; the ranks' parts follow one another
                in memory. Read until the wait of the handle, never written.
            recv: The tensor to receive into, laid out as ``send``. Undefined until the wait of the
                handle.
            send_sizes: Elements of ``send`` for each rank; a size may be 0.
            recv_sizes: Elements of ``recv`` from each rank.
            group: The sp group.
            name: Name for logs and errors, for instance ``layers.7 dv``.

        Raises:
            RuntimeError: if the launch fails; the caller adds the name of the exchange.
        """


class Named(Transport, Protocol):
    """Defines the interface of a transport that the config names; prepared before use."""

    def prepare(self, sp_group: Any) -> None:
        """Set up the transport for ``sp_group``, for instance its communicator.

        Collective. Called once, after the ranks have agreed.

        Raises:
            ValueError: on all ranks alike, if the transport can't work.
        """


def backend_of(group: Any, device: str) -> str | None:
    """Return the backend of ``group`` for tensors on ``device``; None if there is none.

    Args:
        group: A process group; may have a backend for each type of device (cpu:gloo,cuda:nccl).
        device: A type of device: "cpu" or "cuda".
    """
    return _backends_of(group).get(device)


def _backends_of(group: Any) -> dict[str, str]:
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


class Done:
    """Stands for a transfer on the current stream, so that nothing needs to wait for it."""

    def wait(self) -> None:
        pass


DONE = Done()


class C10d:
    """Moves bytes by ``all_to_all_single`` of torch.distributed.

    Args:
        own: Whether NCCL exchanges use a communicator of our own, see Note [Two communicators].
        settings: Fields of NCCL's configuration for our own communicator. For the default of
            ``max_ctas``, see Note [Blocks of a communicator].
    """

    def __init__(self, own: bool = False, settings: dict[str, int] | None = None):
        self.own = own
        self.settings = dict(settings or {})
        # The group for tensors on a GPU; None for the sp group.
        self.group: Any = None
        # Whether NCCL carries tensors on a GPU. Its collectives then run with ``async_op=False``:
        # from torch 2.8 on, they run in the current stream itself, and the host does not wait.
        self.on_stream = False
        # Whether to flatten buffers: only gloo and NCCL are known to take other shapes.
        self.flattens = True

    def prepare(self, sp_group: Any) -> None:
        backends = _backends_of(sp_group.group)
        self.on_stream = backends.get("cuda") == "nccl"
        self.flattens = not {"gloo", "nccl"}.issuperset(backends.values())
        if self.own and self.on_stream:
            if "max_ctas" not in self.settings:
                sp_group.find_nodes()  # collective: ``settings`` are the same on all ranks
                blocks = MAX_CTAS if len(set(sp_group.nodes)) == 1 else NETWORK_CTAS
                self.settings["max_ctas"] = max(blocks, self.settings.get("min_ctas", 0))
            self.group = communicator(sp_group.group, self, **self.settings)
            if LAUNCH_ORDER not in os.environ:
                warn_once(
                    f"sp_overlap: {LAUNCH_ORDER} is not set, and this process had an NCCL group "
                    "before it imported ds_sp_overlap, so that the import could not set it: two "
                    "NCCL communicators at once may hang. Import ds_sp_overlap first, or start "
                    f"every rank with {LAUNCH_ORDER}=1"
                )

    def launch(
        self, send: Tensor, recv: Tensor, send_sizes: Any, recv_sizes: Any, group: Any, name: str
    ) -> Handle:
        on_stream = self.on_stream and send.is_cuda
        if on_stream and self.group is not None:
            group = self.group
        ranks, is_even = len(send_sizes), all_equal(send_sizes, recv_sizes)
        if is_even:
            # Without sizes, torch splits evenly, and the host needs half the time.
            send_sizes = recv_sizes = ()
        # A user may have replaced torch's function. The user's function may need flat buffers.
        is_replaced = dist.all_to_all_single is not all_to_all_single
        # torch splits along the first dimension, which must then hold the parts.
        is_flat = not is_even or self.flattens or is_replaced
        send = send.view(-1) if is_flat or send.size(0) % ranks else send
        recv = recv.view(-1) if is_flat or recv.size(0) % ranks else recv
        sizes = recv_sizes or None, send_sizes or None
        if log is not None and log.keeper.enabled:
            work = log.all_to_all(recv, send, *sizes, group, name)
        elif is_replaced or send.is_complex():
            # Call the user's function, or torch's, which sends complex numbers as pairs.
            work = dist.all_to_all_single(recv, send, *sizes, group=group, async_op=not on_stream)
        else:
            # Make the call that torch's function makes, without its checks. This takes less than
            # half of the host's time.
            options = _SYNC if on_stream else _ASYNC
            work = group.alltoall_base(recv, send, recv_sizes, send_sizes, options)
            if on_stream and work is not None:
                work.wait()
                work = None
        return work or DONE


_ASYNC, _SYNC = AllToAllOptions(), AllToAllOptions()
_ASYNC.asyncOp, _SYNC.asyncOp = True, False


class Log(NamedTuple):
    """Passes exchanges to a framework's log of collectives.

    Attributes:
        keeper: The log; exchanges are logged while ``keeper.enabled``.
        all_to_all: Runs and logs an exchange. Takes ``recv, send, recv_sizes, send_sizes, group,
            name``; returns a handle, or None if nothing needs to wait.
    """

    keeper: Any
    all_to_all: Callable[..., Handle | None]


# The log of the framework, which its integration sets; None for no log.
log: Log | None = None


class OneRank(Done):
    """Moves the bytes of an sp group of one rank: copies ``send`` to ``recv``."""

    def prepare(self, sp_group: Any) -> None:
        pass

    def launch(self, send: Tensor, recv: Tensor, *_: Any) -> Handle:
        recv.view(-1).copy_(send.view(-1))
        return self


class _Made(NamedTuple):
    """Records a communicator of our own.

    Attributes:
        made_for: The sp group. A later group may have the same name, but is another object.
        own: The communicator; or the sp group itself, if none could be made.
        ranks: The ranks of the world that are in the sp group.
        users: The transports that use the communicator.
    """

    made_for: Any
    own: Any
    ranks: list[int]
    users: weakref.WeakSet[Any]


# The communicators, by group name and settings.
_communicators: dict[tuple, _Made] = {}


def _groups_made() -> int:
    """Return how many groups this rank has made; torch names the next group by this number."""
    return len(dist.distributed_c10d._world.pg_names)


def gather(what: Any, group: Any = None) -> list[Any]:
    """Gather ``what`` from every rank of ``group``, or of the world, in rank order. Collective."""
    every = [what] * dist.get_world_size(group)
    dist.all_gather_object(every, what, group=group)
    return every


def communicator(group: Any, user: Any, **settings: int) -> Any:
    """Return an NCCL communicator of our own over the ranks of ``group``, at high priority.

    Layers with the same group and settings share a communicator. See Note [Two communicators], and
    for its destruction Note [Given back].

    Collective over ``group``; other ranks take no part.

    Args:
        group: The sp group.
        user: The transport that will use the communicator.
        settings: Fields of NCCL's configuration, for instance ``max_ctas`` or ``cta_policy``.

    Returns:
        The communicator; or ``group`` itself, with a line in the log, if none can be made.
    """
    key = (group.group_name, *sorted(settings.items()))
    made = _communicators.get(key)
    if made is None or made.made_for is not group:
        ranks = dist.get_process_group_ranks(group)
        _give_back(group, ranks)
        own = _make(group, ranks, settings)
        made = _communicators[key] = _Made(group, own, ranks, weakref.WeakSet())
    made.users.add(user)
    return made.own


def _give_back(group: Any, ranks: list[int]) -> None:
    """Destroy communicators over ``ranks`` that no transport uses on any rank. Collective.

    Note [Given back]
    ~~~~~~~~~~~~~~~~~
    Communicators hold GPU memory: a process that made 17 engines, one after another, ran out of
    memory. Destroying a communicator is a collective. A finalizer can't do this, since each rank's
    garbage collector runs at its own time. So the ranks together destroy unused communicators
    before they make the next one.
    """
    gc.collect()  # frees transports that only reference cycles hold
    unused = []
    for key, made in _communicators.items():
        if made.ranks == ranks and not made.users and made.own is not made.made_for:
            unused.append(key)
    every = gather(unused, group)
    for key in unused:
        if all(key in of_rank for of_rank in every):
            torch.cuda.synchronize()
            # The communicator's name stays taken: torch names the next group by the number of
            # groups made.
            _communicators.pop(key).own.shutdown()


def _make(group: Any, ranks: list[int], settings: dict[str, int]) -> Any:
    """Make a communicator; if none can be made, log why and return ``group``.

    The arguments are those of `_make_connected`. Collective.
    """
    # Ranks find each other by the name of the new group, which torch derives from the number of
    # groups that a rank has made.
    counts = gather(_groups_made(), group)
    if len(set(counts)) > 1:
        reason = f"its ranks have made {counts} process groups"
    elif ranks != sorted(ranks):
        # The new group would order its ranks ascending, unlike the sp group.
        reason = f"its ranks {ranks} are not ascending"
    else:
        try:
            return _make_connected(group, ranks, settings)
        except NotImplementedError as error:
            reason = str(error)
    say(f"sp_overlap: no communicator of our own beside the sp group ({reason}); it is used as is")
    return group


def _make_connected(group: Any, ranks: list[int], settings: dict[str, int]) -> Any:
    """Make a communicator and connect its ranks by one all-to-all. Collective.

    The host waits for the device before and after, see Note [Two communicators].

    Args:
        group: The sp group, whose timeout the communicator takes.
        ranks: The ranks of the world that are in ``group``.
        settings: Fields of NCCL's configuration for the communicator.

    Raises:
        NotImplementedError: if this torch can't make such a group.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # Use the timeout of the sp group instead of torch's default.
    options._timeout = group._get_backend(torch.device("cuda")).options._timeout
    for setting, value in settings.items():
        setattr(options.config, setting, value)
    torch.cuda.synchronize()
    # If the default group is bound to a device, torch makes every group by an ncclCommSplit of
    # that group's communicator. The split waits for all ranks of the world, even with
    # ``use_local_synchronization``. See Note [Two communicators].
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        own = dist.new_group(
            ranks,
            timeout=options._timeout,
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc="sp_overlap",
        )
    finally:
        world.bound_device_id = bound
    first = torch.zeros(len(ranks), device=DEVICE)
    dist.all_to_all_single(torch.empty_like(first), first, group=own)
    torch.cuda.synchronize()
    return own
