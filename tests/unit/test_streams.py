"""Tests the order of streams in exchanges, with a stand-in for an accelerator that logs which stream waits for which."""

import contextlib
import gc
from unittest import mock

import pytest
import torch

import ds_sp_overlap.exchange.in_flight as in_flight
from ds_sp_overlap.attention.runtime.execution import Call
from ds_sp_overlap.attention.runtime.walk import Walk
from ds_sp_overlap.exchange import sp_group as sp_group_module
from ds_sp_overlap.exchange.exchange import Exchange
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.layout import Layout, Side
from ds_sp_overlap.exchange.sp_group import SPGroup
from ds_sp_overlap.exchange.streams import CONNECTIONS, HostStream, SideStream
from ds_sp_overlap.exchange.transport import OneRank
from ds_sp_overlap.integrations.layers import FoundLayer
from ds_sp_overlap.integrations.registry import Report
from ds_sp_overlap.schedule import by_head_groups
from ds_sp_overlap.tools import doctor
from tests.harness.guards import Watched, notices
from tests.harness.relayout import REFERENCE
from tests.harness.streams import Backend, Stream, on_streams


class LoggingTransport(OneRank):
    def __init__(self, backend):
        self.backend = backend

    def launch(self, *args):
        self.backend.log.append(f"launch on {self.backend.current.name}")
        self.backend.current.queued.append(args[-1].removeprefix("layer "))
        return super().launch(*args)

    def wait(self):
        self.backend.log.append(f"wait on {self.backend.current.name}")


@contextlib.contextmanager
def logging_backend():
    """Yield a stand-in whose log also contains packs and unpacks."""
    backend = Backend()

    def logged(name):
        def move(*args):
            backend.log.append(f"{name} on {backend.current.name}")
            return getattr(REFERENCE, name)(*args)

        return move

    with mock.patch.object(in_flight.ops, "_TORCH", REFERENCE._replace(pack=logged("pack"), unpack=logged("unpack"))):
        yield backend


@pytest.fixture
def backend():
    with logging_backend() as backend:
        yield backend


def q_exchange(backend):
    """Make an exchange that packs and unpacks as between two ranks; on one rank, so the received bytes are the sent bytes."""
    sp_group = SPGroup(None, LoggingTransport(backend))
    on_streams(sp_group, backend)
    parts = [(((0, 2), (0, 3), half, (0, 8)),) for half in ((0, 2), (2, 4))]
    halves = Side((2, 3, 4, 8), tuple(parts))
    return Exchange(sp_group, Layout.of([(halves, halves)]), "layer", "q")


LAUNCHED = [
    "pack on compute",
    "transfer waits for compute",
    "gate waits for compute",
    "launch on transfer",
    "wait on transfer",
    "compute waits for gate",
]


def test_the_transfer_runs_on_a_stream_of_its_own_between_pack_and_unpack(backend):
    q = q_exchange(backend)
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    token = q.start(x)
    assert backend.log == LAUNCHED
    backend.log.clear()
    y = q.finish(token)
    assert backend.log == ["compute waits for q", "unpack on compute"]
    backend.log.clear()
    y.backward(torch.ones_like(y))
    assert backend.log == [*LAUNCHED, "compute waits for q dq", "unpack on compute"]
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones_like(x))


def test_what_is_computed_after_a_launch_is_queued_behind_it(backend):
    """Guards `SideStream.end`: compute waits for the gate stream, which has no transfers, so not for transfers under way."""
    q, k = q_exchange(backend), q_exchange(backend)
    k.sp_group = q.sp_group
    q.start(torch.randn(2, 3, 4, 8))
    backend.log.clear()
    k.start(torch.randn(2, 3, 4, 8))
    assert backend.log[-1] == "compute waits for gate"
    gate = backend.streams[1]
    assert gate.name == "gate" and gate.queued == []


def test_all_layers_share_one_set_of_streams(backend):
    """Guards `streams._streams`: torch has only 32 streams, and would give the same stream to different layers."""
    sides = [q_exchange(backend).sp_group.streams(torch.device("cpu")) for _ in range(3)]
    assert [stream.name for stream in backend.streams] == ["transfer", "gate", "relay"]
    assert {side.transfer for side in sides} == {backend.streams[0]} and {side.gate for side in sides} == {backend.streams[1]}


def test_a_stream_that_the_user_gives_carries_the_transfers(backend):
    mine = Stream(backend, "mine")
    q = q_exchange(backend)
    q.sp_group.sides[torch.device("cpu")] = SideStream(backend, torch.device("cpu"), mine)
    q.finish(q.start(torch.randn(2, 3, 4, 8)))
    assert "launch on mine" in backend.log and "launch on transfer" not in backend.log and mine.queued == ["q"]


def test_events_are_recorded_again(backend):
    """Guards `SideStream.begin`: an exchange records the same event three times, and the next exchange uses it again."""
    q = q_exchange(backend)
    for _ in range(5):
        q.finish(q.start(torch.randn(2, 3, 4, 8)))
    assert (backend.events, backend.recorded) == (1, 15)


def test_where_waiting_blocks_the_host_there_is_no_stream(monkeypatch):
    monkeypatch.setattr(sp_group_module, "backend_of", lambda group, device: "gloo")
    sp_group = SPGroup(None, OneRank(), stream=object())
    sp_group.size = 2
    assert isinstance(sp_group.streams(torch.device("cuda", 0)), HostStream)


@pytest.mark.parametrize("value,says", [("1", "1: an exchange"), ("8", "8"), (None, "not set")])
def test_doctor_and_report_say_where_all_streams_share_a_queue(monkeypatch, value, says):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if value is not None:
        monkeypatch.setenv(CONNECTIONS, value)
    rows = dict(line.split(maxsplit=1) for line in doctor.versions().splitlines() if line.startswith("CUDA_DEVICE"))
    assert says in rows[CONNECTIONS]
    report = str(Report([FoundLayer("layers.0", torch.nn.Identity(), "q, k, v, o", bind=lambda: None)], 2))
    assert (CONNECTIONS in report) == (value == "1")


class Ticking(OneRank):
    """A transport that notes (stream, time) of each launch; with ``error``, a launch raises this error."""

    def __init__(self, backend, error=None):
        self.backend, self.error, self.moved = backend, error, []

    def launch(self, *arguments):
        self.moved.append((self.backend.current, self.backend.current.tick()))
        if self.error is not None:
            raise self.error("interrupted")
        return super().launch(*arguments)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_memory_returns_in_order_where_a_launch_is_interrupted_behind_its_transfer(backend, error):
    """Guards `InFlight`: it records the end of its transfer even if the launch raises."""
    q = q_exchange(backend)
    q.sp_group.transport = Ticking(backend, error)
    with pytest.raises(error):
        q.launch(torch.randn(2, 3, 4, 8))
    gc.collect()
    assert backend.compute.is_after(*q.sp_group.transport.moved[0])


def test_an_exchange_is_waited_for_without_those_that_were_started_after_it(backend):
    """Guards `SideStream.end`: if attention waited for the whole side stream, head groups could not hide exchanges."""
    compute_waits = []
    sp_group = SPGroup(None, LoggingTransport(backend))
    on_streams(sp_group, backend)
    geometry = Geometry(sp_size=1, sp_rank=0, seq_lens=(3,), batch=2, heads=4, kv_heads=4, groups=2, batch_first=True)
    x = torch.randn(2, 3, 2, 8)
    call = Call(sp_group, geometry, by_head_groups(geometry.kinds), "layer", x)

    def attend(group, q, k, v):
        compute_waits.extend(line for line in backend.log if line.startswith("compute") and "gate" not in line)
        backend.log.clear()
        return q + k + v

    walk = Walk(call, attend, lambda kind, group: x)
    walk.run("inputs", "attention")
    before_attention = [f"compute waits for {sent}" for sent in ("q0", "q0 k0", "q0 k0 v0", "q0 k0 v0 qkv1")]
    assert compute_waits == before_attention


# Guards.


def in_order():
    for test in (
        test_the_transfer_runs_on_a_stream_of_its_own_between_pack_and_unpack,
        test_what_is_computed_after_a_launch_is_queued_behind_it,
    ):
        with logging_backend() as backend:
            test(backend)
    return []


test_the_suite_notices_without_the_guard = notices(
    Watched("goes on after the launch", "pass", in_order),
    Watched("behind no other transfer", "self.transfer.record_event(event)", in_order),
    Watched("freed, waits for nothing", "pass", in_order),
)
