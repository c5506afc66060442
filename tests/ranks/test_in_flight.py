"""What is in flight: in which order streams wait for each other, how long buffers live, what a failure is called.

Each test names the guard it watches, as in `test_hazards`.
"""

import gc
import weakref
from unittest import mock

import pytest
import torch

from ds_sp_overlap.exchange.channel import Channel, SideStream
from ds_sp_overlap.exchange.exchange import Exchange, _InFlight
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.relayout import ops
from tests.helpers import layers, transports
from tests.helpers.guards import Guard, Watched, must_notice
from tests.helpers.layers import Shape
from tests.helpers.ranks import no_faults, refusal
from tests.helpers.streams import Backend, Stream


class FailingAtLaunch(transports.Silent):
    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        if name.endswith("do0"):
            raise RuntimeError("connection reset by peer")
        return super().launch(send, recv, send_sizes, recv_sizes, group, name)


def launch_that_fails(rank):
    """As of a communicator that was aborted before."""
    shape = Shape()
    attend = layers.block(shape, layers.projections(shape), torch.distributed.group.WORLD, FailingAtLaunch())
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    _, message = refusal(layers.call_block(shape, attend, rank, x.requires_grad_()).backward, dy)
    expected = f"layer do0: the exchange over the sp group (size 2) failed on sp rank {rank}; look for the first error"
    return [] if message.startswith(expected) else [message]


def test_a_launch_that_fails_names_its_exchange():
    no_faults(2, launch_that_fails)


def block_with_streams(shape, streams, **arguments):
    layer = layers.projections(shape)
    attend = layers.block(shape, layer, torch.distributed.group.WORLD, **arguments)
    attend.layer.channel._sides[torch.device("cpu")] = SideStream(streams, torch.device("cpu"))
    return attend


def stream_order(rank):
    """The side stream waits for the compute stream before it packs, and the compute stream for it at finish."""
    found = []
    for groups in (1, 2):
        shape, streams = Shape(config={"head_groups": groups}), Backend()
        attend = block_with_streams(shape, streams)
        x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        y = layers.call_block(shape, attend, rank, x.requires_grad_())
        for way in ("forward", "backward"):
            log, streams.log[:] = list(streams.log), []
            for line in ("side waits for compute", "compute waits for"):
                if (count := sum(entry.startswith(line) for entry in log)) != {1: 4, 2: 6}[groups]:
                    found.append(f"{way}, G = {groups}: {count} times {line}")
            if "compute waits for side" in log:
                found.append(f"{way}, G = {groups}: waits for exchanges that were started later")
            if log[:3] != ["side waits for compute"] * 3 and way == "forward":
                found.append(f"{way}, G = {groups}: {log}")
            y.backward(dy) if way == "forward" else None
    return found


def test_streams_wait_for_each_other_once_an_exchange():
    """Guards: `SideStream.after_compute` and `before_compute`, called where an exchange is launched and finished."""
    no_faults(2, stream_order)


def marked_too_early(rank):
    """What the compute stream waits for is recorded once everything on the side stream is queued, the unpack too."""
    streams, shape = Backend(), Shape(config={"head_groups": 1})
    plain, log = ops.implementation("torch"), []

    def unpack(*args):
        log.append("unpack")
        plain.unpack(*args)

    def record(stream):
        log.append("mark")

    attend = block_with_streams(shape, streams)
    x, _ = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    with mock.patch.object(ops, "implementation", lambda which: plain._replace(unpack=unpack)):
        with mock.patch.object(Stream, "record_event", record), mock.patch.object(Stream, "wait_event", lambda *_: None):
            layers.call_block(shape, attend, rank, x)
    return [] if log == ["unpack", "mark"] * 4 else [str(log)]


def test_a_mark_stands_for_the_unpack_too():
    """Guard: `_InFlight._receive` makes it last."""
    no_faults(2, marked_too_early)


def abandoned(rank):
    """A call whose attention raises: the compute stream waits for what was started, and nothing stays in flight."""

    def broken(q, k, v):
        raise ArithmeticError("deliberate")

    found = []
    for groups in (1, 2):
        shape, streams = Shape(config={"head_groups": groups}), Backend()
        attend = block_with_streams(shape, streams, local_attention=broken, heads_alike=True)
        x, _ = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        before = {id(o) for o in in_flight()}
        if refusal(layers.call_block, shape, attend, rank, x) is None:
            found.append("did not raise")
        gc.collect()
        if sum(entry.startswith("compute waits for") for entry in streams.log) != {1: 3, 2: 4}[groups]:
            found.append(f"G = {groups}: {streams.log}")
        found += [f"still there: {o.name}" for o in in_flight() if id(o) not in before]
    return found


def test_memory_of_an_abandoned_exchange_returns_in_order():
    """Guard: `_InFlight.__del__` orders the compute stream after the side stream."""
    no_faults(2, abandoned)


def test_a_gradient_that_was_not_started_is_named():
    """As where gradients of a layer's inputs are asked for in one backward and those of its weights in another."""
    exchange = Exchange(Channel(None), Geometry(1, 0, (3,), 1, 4, 4).exchange("q", 0, 8), "layers.7", "q")
    with pytest.raises(RuntimeError, match="layers.7 dq: finished without having been started"):
        exchange.finish_gradient()


def held_until_finished(rank):
    """The source of an exchange lives until it is finished, whether it was packed or not; nothing does afterwards.

    Packed on a stream, that is: what the host has packed, it has read.
    """
    found = []
    for batch_first, kind in ((True, "q"), (False, "o")):
        geometry = Geometry(2, rank, (3, 3), 1, 4, 4, 1, batch_first)
        channel = Channel(torch.distributed.group.WORLD)
        channel.side(torch.device("cpu")).packs_at_once = False
        exchange = Exchange(channel, geometry.exchange(kind, 0, 8), "layer", kind)
        with torch.no_grad():
            x = torch.randn(exchange.layout.source.shape)
            source = weakref.ref(x)
            token = exchange.start(x)
            del x
            gc.collect()
            if source() is None:
                found.append(f"{kind}: the source was dropped while the exchange may read it")
            exchange.finish(token)
            gc.collect()
            if source() is not None:
                found.append(f"{kind}: the source is kept after the exchange")
    return found


def test_a_source_lives_until_its_exchange_is_finished_and_no_longer():
    """Guard: `_InFlight.source`; the pack on a side stream, or the transfer, still reads it."""
    no_faults(2, held_until_finished)


def in_flight():
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is _InFlight]


def nothing_stays_in_flight(rank):
    """Between a forward and its backward, and after it, no record of a transfer is alive, graph or no graph."""
    shape = Shape(kv_heads=2)
    layer = layers.projections(shape)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    before = {id(o) for o in in_flight()}
    y = layers.call_block(shape, layers.block(shape, layer, torch.distributed.group.WORLD), rank, x.requires_grad_())
    found = [f"after forward: {o.name}" for o in in_flight() if id(o) not in before]
    y.backward(dy, retain_graph=True)
    return found + [f"after backward: {o.name}" for o in in_flight() if id(o) not in before]


def test_nothing_in_flight_is_reachable_through_a_graph_that_is_kept():
    """Guard: both halves take the transfer off the `Exchange` as they finish it; left there, it would be a cycle
    through the graph that is never freed."""
    no_faults(2, nothing_stays_in_flight)


def graphs_are_freed(rank):
    """Tensors that a call received are gone with its graph: never run backward, run in part, run whole."""
    shape, found = Shape(kv_heads=2), []
    for use in ("no backward", "input only", "backward"):
        received = []

        def attend(q, k, v):
            received.extend(weakref.ref(t) for t in (q, k, v))  # noqa: B023
            return layers.reference.attention(q, k, v)

        layer = layers.projections(shape)
        x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        call = layers.block(shape, layer, torch.distributed.group.WORLD, local_attention=attend)
        y = layers.call_block(shape, call, rank, x.requires_grad_())
        if use == "input only":
            torch.autograd.grad(y, x, dy)
        elif use == "backward":
            y.backward(dy)
        del y
        gc.collect()
        found += [f"{use}: something received is still there" for reference in received if reference() is not None]
    return found


def test_a_graph_that_is_dropped_is_freed():
    no_faults(2, graphs_are_freed)


def finished_twice(rank):
    geometry = Geometry(2, rank, (3, 3), 1, 4, 4)
    exchange = Exchange(Channel(torch.distributed.group.WORLD), geometry.exchange("q", 0, 8), "layers.7", "q")
    token = exchange.start(torch.zeros(3, 1, 4, 8))
    exchange.finish(token)
    seen = refusal(exchange.finish, token), refusal(exchange.start, torch.zeros(3, 1, 4, 9))
    expected = (
        ("RuntimeError", "layers.7 q: finished without having been started, or finished twice"),
        ("ValueError", "layers.7 q: expected a tensor of shape [3, 1, 4, 8], got [3, 1, 4, 9]"),
    )
    return [] if seen == expected else [str(seen)]


def test_a_half_out_of_place_is_refused():
    no_faults(2, finished_twice)


# Guards.

WATCHED = {
    "the source is kept until the exchange is finished": Watched(
        Guard("exchange.exchange:_InFlight.launch", "if self.side.packs_at_once:", "if True:"), held_until_finished
    ),
    "memory of an abandoned exchange returns in order": Watched(
        Guard("exchange.exchange:_InFlight.__del__", "self.side.before_compute(self.side.mark())", "pass"), abandoned
    ),
    "the compute stream waits at finish": Watched(
        Guard("exchange.exchange:_InFlight.finish", "self.side.before_compute(self.received)", "pass"), stream_order
    ),
    "the side stream waits at launch": Watched(
        Guard(
            "exchange.channel:SideStream.after_compute", "self.stream.wait_stream(self.backend.current_stream(self.device))", "pass"
        ),
        stream_order,
    ),
    "the compute stream waits for one exchange, not for later ones": Watched(
        Guard("exchange.channel:SideStream.before_compute", ".wait_event(mark)", ".wait_stream(self.stream)"),
        stream_order,
    ),
    "a mark stands for the unpack too": Watched(
        Guard(
            "exchange.exchange:_InFlight._receive",
            'if self.unpacks:\n        self._unpack()\n    self.track.mark("done")\n    self.received = self.side.mark()',
            'self.received = self.side.mark()\n    if self.unpacks:\n        self._unpack()\n    self.track.mark("done")',
        ),
        marked_too_early,
    ),
    "a finished transfer waits for nothing when it is freed": Watched(
        Guard("exchange.exchange:_InFlight.finish", "self.handle = None", "pass"), stream_order
    ),
    "a finished transfer is let go": Watched(
        Guard(
            "exchange.exchange:Exchange.finish_forward",
            "in_flight, self.forward = self.forward, None",
            "in_flight = self.forward",
        ),
        nothing_stays_in_flight,
    ),
    "a gradient's finished transfer is let go": Watched(
        Guard(
            "exchange.exchange:Exchange.finish_gradient",
            "in_flight, self.gradient = self.gradient, None",
            "in_flight = self.gradient",
        ),
        nothing_stays_in_flight,
    ),
    "a half out of place is refused": Watched(
        Guard("exchange.exchange:_InFlight.launch", "if given.shape != each.source.shape:", "if False:"), finished_twice
    ),
    "a launch that fails names its exchange": Watched(
        Guard("exchange.exchange:_InFlight.launch", "except RuntimeError as error:", "except LookupError as error:"),
        launch_that_fails,
    ),
}


@pytest.mark.parametrize("name", WATCHED)
def test_the_suite_notices_without_the_guard_that(name):
    must_notice(WATCHED[name])
