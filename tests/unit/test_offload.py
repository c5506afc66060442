"""Tests the order of copies to host memory and back: a copy must end before memory is freed, and before its result is read."""

import contextlib
import gc
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sp_overlap.attention.memory import offload
from ds_sp_overlap.attention.memory.checkpoint_cache import CheckpointCache, CheckpointPass
from ds_sp_overlap.attention.memory.offload import OffloadedTensor
from ds_sp_overlap.exchange.streams import SideStream
from tests.harness.guards import Watched, notices
from tests.harness.streams import Backend


class Copies(TorchDispatchMode):
    """Counts each copy as an operation of the current stream; ``times`` lists (stream, time) of all copies."""

    def __init__(self, backend):
        super().__init__()
        self.backend, self.times = backend, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.times.append((self.backend.current, self.backend.current.tick()))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def on_streams():
    """Run the body with offload on the stand-in for streams; yield the `Copies`."""
    backend = Backend()
    side = SideStream(backend, torch.device("cpu"))
    nobody = staticmethod(lambda: None)
    with mock.patch.object(offload, "copy_stream", lambda device: side), mock.patch.object(CheckpointCache, "_most_recent", nobody):
        with Copies(backend) as copies:
            yield copies


@pytest.fixture
def copies():
    with on_streams() as copies:
        yield copies


def is_over(copies, index=-1):
    """Return whether the next operation of the compute stream comes after a copy."""
    return copies.backend.compute.is_after(*copies.times[index])


def test_what_leaves_is_copied_behind_what_made_it_and_given_back_behind_the_copy(copies):
    x = torch.randn(3, 4)
    made = copies.backend.compute.tick()
    away = OffloadedTensor(x)
    stream, _ = copies.times[-1]
    assert stream.name == "transfer" and stream.is_after(copies.backend.compute, made)
    assert not is_over(copies)  # compute goes on during the copy
    away.free()
    assert away.on_device is None and is_over(copies)
    assert torch.equal(away.host, x) and away.host.data_ptr() != x.data_ptr()


def test_what_comes_back_is_copied_into_memory_that_is_free_and_read_behind_the_copy(copies):
    x = torch.randn(3, 4)
    away = OffloadedTensor(x)
    away.free()
    freed = copies.backend.compute.tick()  # the last use of the memory that the copy will write
    away.prefetch()
    stream, _ = copies.times[-1]
    assert stream.is_after(copies.backend.compute, freed) and not is_over(copies)
    count = len(copies.times)
    got = away.get()
    assert is_over(copies) and len(copies.times) == count
    assert torch.equal(got, x) and away.on_device is None
    assert torch.equal(away.get(), x)  # a second backward


def test_what_is_still_here_is_not_brought_back(copies):
    x = torch.randn(3)
    away = OffloadedTensor(x)
    assert away.get() is x and len(copies.times) == 1 and is_over(copies)


@pytest.mark.parametrize("brought", [False, True])
def test_memory_of_what_is_dropped_returns_behind_its_copy(copies, brought):
    away = OffloadedTensor(torch.randn(3))
    if brought:
        away.free()
        away.prefetch()
    assert not is_over(copies)
    del away
    gc.collect()
    assert is_over(copies)


def test_a_checkpoint_that_is_computed_again_has_the_one_before_it_brought(copies):
    tensors = {name: [torch.randn(4), torch.randn(2, 2).t()] for name in "abc"}
    shared = torch.randn(5)
    caches = {name: CheckpointCache() for name in "abc"}

    def here(name):
        return [x.on_device is not None for x in caches[name].offloaded()]

    for name, checkpoint in caches.items():
        for x in tensors[name]:
            CheckpointPass(checkpoint, is_recompute=False).put(
                name, ({"o": x, "mask": shared[1:]}, "rest"), offload=True, shared=[shared]
            )
    assert [here(name) for name in "abc"] == [[False, False], [False, False], [False, True]]
    for name, before in zip("cba", "ba "):
        checkpoint = CheckpointPass(caches[name], is_recompute=True)
        for number, x in enumerate(tensors[name]):
            got, rest = checkpoint.take(name)
            assert torch.equal(got["o"], x) and got["o"].stride() == x.stride() and rest == "rest"
            assert got["mask"].data_ptr() == shared[1:].data_ptr()
            if before != " ":
                assert here(before) == [True, True]
        assert here(name) == [False, False]
    assert len(copies.times) == 6 + 5  # of six tensors, one was still on the device, and needs no copy back


def passed(check, *args):
    """Return a check for `Watched` that runs a test of this file."""

    def run():
        with on_streams() as copies:
            check(copies, *args)
        return []

    return run


LEAVES = passed(test_what_leaves_is_copied_behind_what_made_it_and_given_back_behind_the_copy)
COMES_BACK = passed(test_what_comes_back_is_copied_into_memory_that_is_free_and_read_behind_the_copy)
IS_DROPPED = passed(test_memory_of_what_is_dropped_returns_behind_its_copy, True)
test_the_suite_notices_without_the_guard = notices(
    Watched("copies what is ready", "self.copied = self.side.begin()\nself.side.backend.set_stream(self.copied[1])", LEAVES),
    Watched("copied, then given back", "pass", LEAVES),
    Watched("arrived, then read", "pass", COMES_BACK),
    Watched("dropped behind its copy", "pass", IS_DROPPED),
)
