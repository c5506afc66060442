"""Results are unchanged under transports that do their worst (`transports`), and buffers live as long as they must.

Each test names the guard it watches; `test_guards` takes the guards out, one by one, and sees these checks fail.
"""

import gc
import weakref

import dropin
import layers
import pytest
import torch
import transports
from dropin import Case
from layers import Shape
from ranks import on_ranks, refusal
from streams import Backend

from ds_sp_overlap.channel import Channel, SideStream
from ds_sp_overlap.exchange import Exchange, _InFlight
from ds_sp_overlap.layout import Geometry

SHAPES = [
    Shape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=4,
        batch=batch,
        batch_first=batch_first,
        fused=fused,
        bias=fused,
        rotary=batch_first,
        lengths=lengths,
        config={"head_groups": groups},
    )
    for heads, kv_heads, lengths in ((4, 4, (3, 3)), (8, 2, (3, 2)), (6, 3, (1, 1)))
    for batch, batch_first, fused in ((1, True, False), (2, True, True), (2, False, False))
    for groups in (1, 2)
]
CASES = [
    Case(
        heads=heads,
        kv_heads=kv_heads,
        batch=batch,
        batch_first=batch_first,
        rotary_dims=rotary_dims,
        flat=flat,
        lengths=lengths,
        config={"head_groups": groups},
    )
    for heads, kv_heads, lengths in ((4, 4, (3, 3)), (8, 2, (3, 2)), (7, 7, (1, 1)))
    for batch, batch_first, rotary_dims, flat in ((1, True, 8, False), (2, True, 0, True), (2, False, 8, False))
    for groups in (1, 2)
]


def no_faults(size, function, *args):
    for rank, found in enumerate(on_ranks(size, function, *args)):
        assert found == [], f"rank {rank}"


def spoiled(rank, transport, shapes, cases):
    with transports.spoiled_buffers():
        return layers.faults_of_all(rank, shapes, transport) + dropin.faults_of_all(rank, cases, transport)


@pytest.mark.parametrize("transport", [transports.Late, transports.Delayed])
def test_results_do_not_depend_on_when_the_bytes_move(transport):
    """Guards: each half waits before it reads; send buffers are held until then and written by nobody; what was
    received and unpacked is not read again; all of an output is written."""
    no_faults(2, spoiled, transport, SHAPES, CASES)


def test_four_ranks_do_not_depend_on_it_either():
    """The same guards, with replicated KV heads and ranks that delay differently."""
    shapes = [Shape(heads=8, kv_heads=2, head_dim=4, lengths=(2, 1, 2, 3)), Shape(kv_heads=1, lengths=(2,) * 4)]
    cases = [
        Case(heads=9, kv_heads=3, lengths=(2,) * 4, batch_first=False),
        Case(heads=4, kv_heads=2, lengths=(1, 2, 3, 4)),
    ]
    no_faults(4, spoiled, transports.Delayed, shapes, cases)


def spoiled_uses(rank):
    from test_usage import (
        adapted_query_and_output,
        grad_of_input_then_backward,
        reentrant,
        second_backward,
        twice_before_backward,
    )

    found = []
    with transports.spoiled_buffers():
        for use in (twice_before_backward, second_backward, reentrant, grad_of_input_then_backward):
            for change in (None, adapted_query_and_output):
                mover = transports.Late()
                found += (
                    layers.block_faults(rank, Shape(kv_heads=2), use, mover, change=change)
                    + mover.faults
                    + mover.unfinished()
                )
    return found


def test_repeated_calls_and_backwards_do_not_depend_on_it_either():
    """The same guards, where two calls are in flight at once or one is run again."""
    no_faults(2, spoiled_uses)


def late_delivery(rank):
    return spoiled(rank, transports.Late, SHAPES[:2], CASES[:6])


def late_delivery_of_replicas(rank):
    return spoiled(rank, transports.Late, [Shape(kv_heads=1)], [Case(heads=6, kv_heads=3)])


def one_position_a_rank(rank):
    """Local sequences of one token, attention whose output has other strides: sources that travel as they lie."""
    from test_usage import strided_inputs_and_cotangent

    found = []
    for case in (Case(batch=1, lengths=(1, 1)), Case(batch=2, batch_first=False)):
        found += dropin.dropin_faults(rank, case, strided_inputs_and_cotangent)
    return found


def test_what_travels_as_it_lies_is_contiguous():
    """Guard: `_InFlight` makes its source contiguous where that is the send buffer."""
    no_faults(2, one_position_a_rank)


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
                if (count := sum(entry.startswith(line) for entry in log)) != 4 * groups:
                    found.append(f"{way}, G = {groups}: {count} times {line}")
            if log[:3] != ["side waits for compute"] * 3 and way == "forward":
                found.append(f"{way}, G = {groups}: {log}")
            y.backward(dy) if way == "forward" else None
    return found


def test_streams_wait_for_each_other_once_an_exchange():
    """Guards: `SideStream.after_compute` and `before_compute`, called where an exchange is launched and finished."""
    no_faults(2, stream_order)


def abandoned(rank):
    """A call whose attention raises: the compute stream waits for what was started, and nothing stays in flight."""

    def broken(q, k, v):
        raise ArithmeticError("deliberate")

    found = []
    for groups in (1, 2):
        shape, streams = Shape(config={"head_groups": groups}), Backend()
        attend = block_with_streams(shape, streams, local_attention=broken)
        x, _ = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        before = {id(o) for o in in_flight()}
        if refusal(layers.call_block, shape, attend, rank, x) is None:
            found.append("did not raise")
        gc.collect()
        if sum(entry.startswith("compute waits for") for entry in streams.log) != 3 * groups:
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
        exchange.collect_gradient()


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
    wrong_shape = refusal(exchange.start, torch.zeros(3, 1, 4, 9))
    return refusal(exchange.finish, token), wrong_shape


def test_a_half_out_of_place_is_refused():
    for twice, wrong_shape in on_ranks(2, finished_twice):
        assert twice == ("RuntimeError", "layers.7 q: finished without having been started, or finished twice")
        assert wrong_shape == ("ValueError", "layers.7 q: expected a tensor of shape [3, 1, 4, 8], got [3, 1, 4, 9]")
