"""Tests that only the ranks of an sp group take part in making its communicator, though the default group is bound to a device.

DeepSpeed binds the default group. torch's own code makes the new group, with gloo on the CPU as a stand-in for NCCL. The stand-in
notes whether torch asks for a split of the default group's communicator. A split waits for every rank of the default group, as
ncclCommSplit does.
"""

import contextlib
import time
import types
import uuid
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_sp_overlap.exchange import transport
from tests.harness.listening import listening
from tests.harness.ranks import refusal

GPU = torch.device("cuda", 0)
TIMEOUT = timedelta(minutes=77)


class Options:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self.config, self.split_from = is_high_priority_stream, types.SimpleNamespace(), None
        self._timeout = timedelta(minutes=10)


class Nccl(dist.ProcessGroupGloo):
    Options = Options
    made = []  # keeps the Python objects alive: torch holds only their C++ parts
    splits = ""  # key in the store; counts the ranks that came to a split
    supports_splitting = True

    def __init__(self, store, rank, size, options):
        super().__init__(store, rank, size, timeout=options._timeout)
        self.asked_for = options
        self.made.append(self)

    def eager_connect_single_device(self, device):
        if self.asked_for.split_from is not None:
            split()


def split(device=None):
    """Stand in for an ncclCommSplit of the default group's communicator: wait for all ranks."""
    world, store = dist.get_world_size(), c10d._get_default_store()
    came, end = store.add(Nccl.splits, 1), time.monotonic() + 3
    while came < world:
        if time.monotonic() > end:
            raise TimeoutError(f"ncclCommSplit hangs: {came} of {world} ranks came")
        time.sleep(0.01)
        came = store.add(Nccl.splits, 0)


@contextlib.contextmanager
def bound_to_a_gpu():
    """Run the body with the default group bound to a device. Collective over all ranks."""
    world = dist.group.WORLD
    parent = types.SimpleNamespace(supports_splitting=True, perform_nocolor_split=split)
    transport._communicators.clear()
    Nccl.made.clear()
    serial, name_of = [uuid.uuid4().hex], c10d._hash_ranks_to_str
    dist.broadcast_object_list(serial)
    Nccl.splits = f"splits {serial[0]}"
    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(dist, "ProcessGroupNCCL", Nccl, create=True),
            mock.patch.object(c10d, "ProcessGroupNCCL", Nccl, create=True),
            mock.patch.object(c10d, "_NCCL_AVAILABLE", True),
            mock.patch.object(c10d, "_get_split_source", lambda group: parent),
            # A new name for each group: else gloo would find keys of an earlier test's group in the store.
            mock.patch.object(c10d, "_hash_ranks_to_str", lambda ranks: name_of(ranks) + serial[0]),
            mock.patch.dict(c10d.Backend.backend_capability, nccl=["cpu", "cuda"]),
            mock.patch.object(transport, "DEVICE", "cpu"),
            mock.patch.object(torch.cuda, "synchronize", lambda: None),
        ):
            stack.enter_context(patch)
        world.bound_device_id = GPU
        try:
            yield
        finally:
            world.bound_device_id = None
            transport._communicators.clear()


def sp_groups(rank):
    """Return the sp group of this rank: ranks 0 and 1, or 2 and 3."""
    return [dist.new_group(ranks, timeout=TIMEOUT) for ranks in ([0, 1], [2, 3])][rank // 2]


@pytest.mark.ranks(4)
def test_the_sp_group_alone_makes_its_communicator_though_the_default_group_is_bound_to_a_device(rank):
    """Ranks 2 and 3 do nothing, so a split would hang."""
    group = sp_groups(rank)
    with bound_to_a_gpu(), listening() as messages:
        if rank > 1:
            return
        own = transport.communicator(group, transport.C10d(), max_ctas=4)
        asked_for = Nccl.made[-1].asked_for
        received = torch.empty(2)
        dist.all_to_all_single(received, torch.tensor([10.0, 11.0]) + rank, group=own)
        settings = asked_for.is_high_priority_stream, asked_for.config.max_ctas, asked_for._timeout, asked_for.split_from
        assert messages == [] and dist.group.WORLD.bound_device_id == GPU
    assert own is not group and dist.get_process_group_ranks(own) == [0, 1]
    assert settings == (True, 4, TIMEOUT, None) and received.tolist() == [10.0 + rank, 11.0 + rank]


@pytest.mark.ranks(4)
def test_an_sp_group_that_keeps_its_own_does_not_hang_another(rank):
    """The second sp group gets no communicator of its own, since its ranks have made different numbers of groups."""
    group = sp_groups(rank)
    if rank == 3:
        dist.new_group([3], use_local_synchronization=True)
    with bound_to_a_gpu(), listening() as messages:
        own = transport.communicator(group, transport.C10d())
        assert (own is group, len(Nccl.made)) == ((False, 1) if rank < 2 else (True, 0))
    assert ["have made" in message for message in messages] == [True] * (rank > 1)


def test_the_default_group_stays_bound_where_the_making_fails(rank):
    group = dist.new_group([0, 1])
    with bound_to_a_gpu(), mock.patch.object(dist, "new_group", side_effect=RuntimeError("out of memory")):
        assert refusal(transport.communicator, group, transport.C10d()) == ("RuntimeError", "out of memory")
        assert dist.group.WORLD.bound_device_id == GPU


@pytest.mark.ranks(4)
def test_the_stand_in_hangs_where_nccl_would(rank):
    """If the default group is bound, torch makes even a group of few members by a split, which waits for all ranks."""
    with bound_to_a_gpu():
        if rank < 2:
            said = refusal(dist.new_group, [0, 1], backend="nccl", pg_options=Options(), use_local_synchronization=True)
            assert said == ("TimeoutError", "ncclCommSplit hangs: 2 of 4 ranks came")


class Counted:
    """Stands in for a communicator of NCCL; ``alive`` counts those that are not shut down."""

    alive = 0

    def __init__(self, *asked_for):
        Counted.alive += 1

    def shutdown(self):
        Counted.alive -= 1


def test_communicators_are_given_back_by_all_ranks_together_before_the_next_is_made(rank):
    alive, late, Counted.alive = [], None, 0
    with bound_to_a_gpu(), mock.patch.object(transport, "_make_connected", Counted):
        for engine in range(5):
            group = dist.new_group([0, 1])
            layers = [transport.C10d(own=True), transport.C10d(own=True)]
            assert len({id(transport.communicator(group, layer, max_ctas=4)) for layer in layers}) == 1
            transport.communicator(group, layers[0], max_ctas=8)
            late = layers if (rank, engine) == (1, 1) else late
            if engine == 3:
                late = None
            layers[0].circle = layers  # a reference cycle, as between the layers of a model
            del layers
            alive.append(Counted.alive)
    assert alive == [2, 2, 4, 4, 2]
