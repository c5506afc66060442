"""The side stream's order, on a stand-in for an accelerator's stream interface that writes down what it is asked."""

import pytest
import torch

import ds_sp_overlap.exchange.exchange as exchange
from ds_sp_overlap.attention.execution import Call, attend_groups, start_inputs
from ds_sp_overlap.exchange.channel import Channel, SideStream
from ds_sp_overlap.exchange.exchange import Exchange
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.transport import OneRank
from ds_sp_overlap.profiling.timeline import Timeline
from ds_sp_overlap.schedule import by_head_groups
from tests.helpers.streams import Backend


class LoggingTransport(OneRank):
    def __init__(self, backend):
        self.backend = backend

    def launch(self, *args):
        self.backend.log.append(f"launch on {self.backend.current.name}")
        self.backend.current.queued.append(args[-1].removeprefix("layer "))
        return super().launch(*args)

    def wait(self):
        self.backend.log.append(f"wait on {self.backend.current.name}")


@pytest.fixture
def backend(monkeypatch):
    backend = Backend()
    plain = exchange.ops.implementation("torch")

    def logged(name):
        def move(*args):
            backend.log.append(f"{name} on {backend.current.name}")
            return getattr(plain, name)(*args)

        return move

    monkeypatch.setattr(exchange.ops, "_TORCH", plain._replace(pack=logged("pack"), unpack=logged("unpack")))
    return backend


def q_exchange(backend, deferred_unpack):
    """An exchange that packs and unpacks: two ranks' worth of heads on one rank can't, so batch first with b = 2."""
    channel = Channel(None, LoggingTransport(backend))
    channel._sides[torch.device("cpu")] = SideStream(backend, torch.device("cpu"), deferred_unpack=deferred_unpack)
    layout = Geometry(sp_size=1, sp_rank=0, seq_lens=(3,), batch=2, heads=4, kv_heads=4, batch_first=True).exchange("q", 0, 8)
    return Exchange(channel, layout, "layer", "q")


LAUNCHED = ["side waits for compute", "pack on side", "launch on side"]
RECEIVED = ["wait on side", "unpack on side"]


def test_pack_transfer_and_unpack_run_on_the_side_stream_between_compute_and_compute(backend):
    q = q_exchange(backend, deferred_unpack=False)
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    token = q.start(x)
    assert backend.log == LAUNCHED + RECEIVED  # nothing of it makes the compute stream wait
    backend.log.clear()
    y = q.finish(token)
    assert backend.log == ["compute waits for q"]
    backend.log.clear()
    y.backward(torch.ones_like(y))
    assert backend.log == [*LAUNCHED, *RECEIVED, "compute waits for q dq"]
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones_like(x))


def test_where_waiting_blocks_the_host_it_is_put_off_until_finish(backend):
    q = q_exchange(backend, deferred_unpack=True)
    token = q.start(torch.randn(2, 3, 4, 8))
    assert backend.log == LAUNCHED
    backend.log.clear()
    q.finish(token)
    assert backend.log == ["side waits for compute", *RECEIVED, "compute waits for q"]


def test_an_abandoned_exchange_orders_the_compute_stream_after_its_transfer(backend):
    q = q_exchange(backend, deferred_unpack=False)
    q.start(torch.randn(2, 3, 4, 8))
    backend.log.clear()
    del q
    assert backend.log == ["compute waits for q"]


def test_an_exchange_is_waited_for_without_those_that_were_started_after_it(backend):
    """Guard: `SideStream.mark`; waiting for the whole side stream would leave nothing for head groups to hide."""
    compute_waits = []
    channel = Channel(None, LoggingTransport(backend))
    channel._sides[torch.device("cpu")] = SideStream(backend, torch.device("cpu"))
    geometry = Geometry(sp_size=1, sp_rank=0, seq_lens=(3,), batch=2, heads=4, kv_heads=4, groups=2, batch_first=True)
    call = Call(channel, geometry, by_head_groups(geometry.kinds), "layer")

    def attend(q, k, v):
        compute_waits.extend(line for line in backend.log if line.startswith("compute"))
        backend.log.clear()
        return q + k + v

    x = torch.randn(2, 3, 2, 8)
    attend_groups(call, start_inputs(call, lambda kind, group: x), attend)
    before_attention = [f"compute waits for {sent}" for sent in ("q0", "q0 k0", "q0 k0 v0", "q0 k0 v0 qkv1")]
    assert compute_waits == before_attention


def test_buffers_are_allocated_by_the_compute_stream(backend, monkeypatch):
    """Guard: memory that an exchange gives back is reused in the order of the compute stream, without record_stream."""
    allocated_on = []
    original = torch.Tensor.new_empty

    def new_empty(self, *args, **kwargs):
        allocated_on.append(backend.current.name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    q = q_exchange(backend, deferred_unpack=False)
    q.finish(q.start(torch.randn(2, 3, 4, 8)))
    assert len(allocated_on) >= 3  # send, recv, out
    assert set(allocated_on) == {"compute"}


class StreamClock:
    """Writes down on which stream each mark was made."""

    def __init__(self, backend):
        self.backend = backend

    def mark(self):
        return self.backend.current.name


def test_on_an_accelerator_marks_are_made_on_the_stream_they_speak_of_and_nothing_more_is_waited_for(backend):
    """On a stand-in for the stream interface; ``arrived`` is not followed on the host there."""
    lines = Timeline("nowhere", (0, 0), rank=1, size=1)
    lines.clock = StreamClock(backend)
    q = q_exchange(backend, deferred_unpack=False)
    q.channel.timeline = lines
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    q.finish(q.start(x)).sum().backward()
    assert backend.log == [*LAUNCHED, *RECEIVED, "compute waits for q"] + [*LAUNCHED, *RECEIVED, "compute waits for q dq"]
    side, compute = ("started", "packed", "unpacking", "done"), ("issued", "launched", "wait", "go")
    expected = {**dict.fromkeys(side, "side"), **dict.fromkeys(compute, "compute")}
    assert [(track.what, track.at) for track in lines.tracks] == [("q", expected), ("dq", expected)]
    lines.tracks.clear()
    lines.close()
