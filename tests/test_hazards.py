"""Results are unchanged under transports that do their worst (`transports`), and buffers live as long as they must.

Each test names the guard it watches; `test_guards` takes the guards out, one by one, and sees these checks fail.
"""

import contextlib
import gc
import weakref
from collections import Counter
from unittest import mock

import dropin
import layers
import pytest
import torch
import transports
from dropin import Case
from guards import Guard, removed
from layers import Shape
from ranks import on_ranks, refusal
from streams import Backend, Stream
from test_send_buffers import OPERATORS, always, counted, kinds

from ds_sp_overlap.exchange.channel import Channel, SideStream
from ds_sp_overlap.exchange.exchange import Exchange, _InFlight
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.relayout import ops

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


PLANTED = {  # each of them computes what it should, as long as nobody spoils the buffer that it has no right to read
    "a send buffer read after delivery": Guard(
        "exchange.exchange:_InFlight._receive",
        'self.track.mark("unpacking")',
        "sent, got = (side.split_sizes for side in (self.layout.source, self.layout.target))\n    "
        "self.recv.split(got)[self.channel.rank].copy_(self.send.split(sent)[self.channel.rank])",  # which needn't travel
    ),
    "a received buffer read after its unpack": Guard(
        "exchange.exchange:_InFlight.finish", 'self.track.mark("go")', "self.unpacks and self._unpack()"
    ),
    "a received buffer unpacked twice": Guard(
        "exchange.exchange:_InFlight._receive", "self._unpack()", "[self._unpack() for _ in '12']"
    ),
}


@contextlib.contextmanager
def moving(kernels, direct):
    """Run with an implementation of pack and unpack, which rotates in them unless it is "torch"; with send buffers written by
    the projections' GEMM if ``direct``."""
    seen = Counter()
    with contextlib.ExitStack() as stack:
        if kernels != "torch":
            stack.enter_context(counted(seen, True, OPERATORS[kernels]))
        if direct:
            stack.enter_context(always)
        yield seen


def spoiled(rank, transport, shapes, cases):
    """What shapes and cases get wrong while buffers are spoiled."""
    with transports.spoiled_buffers():
        return layers.faults_of_all(rank, shapes, transport) + dropin.faults_of_all(rank, cases, transport)


def spoiled_with_control(rank, transport, shapes, cases, kernels="torch", direct=False):
    """The same; BLIND, where a reader of a released buffer, planted in the same run, isn't seen."""
    control = [Shape(lengths=(3,) * torch.distributed.get_world_size())]
    with moving(kernels, direct):
        found = spoiled(rank, transport, shapes, cases)
        for what, guard in PLANTED.items():
            with removed(guard):
                if not spoiled(rank, transport, control, []):
                    found.append(f"BLIND: {what} was not seen")
    return found


@pytest.mark.parametrize("transport", [transports.Late, transports.Delayed])
def test_results_do_not_depend_on_when_the_bytes_move(transport):
    """Guards: each half waits before it reads; send buffers are held until then and written by nobody; what was
    received and unpacked is not read again; all of an output is written."""
    no_faults(2, spoiled_with_control, transport, SHAPES, CASES)


@kinds
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("transport", [transports.Late, transports.Delayed])
def test_nor_where_kernels_rotate_and_the_gemm_writes_the_send_buffers(transport, direct, kind):
    no_faults(2, spoiled_with_control, transport, SHAPES[:12], CASES[:6], kind, direct)


def counts(rank, what, direct, kernels):
    """What the fixture did in one forward and backward, and which operators moved its data."""
    run = layers.faults_of_all if isinstance(what, Shape) else dropin.faults_of_all
    with moving(kernels, direct) as operators, transports.spoiled_buffers() as armed:
        assert run(rank, [what], transports.Late) == []
    return armed.acted, set(operators)


@pytest.mark.parametrize(
    "what,direct,owned,packed,unpacked",
    [
        (Case(batch=2), False, 16, 16, 16),
        # With one batch element q, k, v and do arrive as they are used, o and dq, dk, dv leave as they are given; but this
        # attention's dk isn't contiguous, and the copy that travels is the package's own.
        (Case(batch=1), False, 10, 8, 8),
        (Shape(batch=1), False, 10, 8, 8),
        (Shape(batch=1), True, 10, 0, 8),
        (Shape(batch=2), True, 16, 8, 16),
        (Shape(batch=1, lengths=(1, 1)), False, 2, 0, 0),
    ],
    ids=str,
)
def test_every_buffer_that_may_be_reused_is_spoiled(what, direct, owned, packed, unpacked):
    """Of sixteen exchanges of two head groups."""
    for acted, _ in on_ranks(2, counts, what, direct, "torch"):
        assert acted == Counter(delayed=16, owned=owned, spoiled=owned, filled=packed + unpacked, poisoned=unpacked)


@kinds
def test_and_so_with_kernels_that_rotate(kind):
    """q and k are packed though a GEMM could write their send buffers, v and do are not."""
    for acted, operators in on_ranks(2, counts, Shape(batch=1), True, kind):
        assert acted == Counter(delayed=16, owned=10, spoiled=10, filled=4 + 8, poisoned=8)
        assert operators == {"rotate_pack", "unpack_rotate_back", "unpack"}


INERT = {  # ways in which the fixture may cease to act, and what it says then
    "no transport of ours": (contextlib.nullcontext, None, "delayed, owned, spoiled"),
    "owned buffers aren't recognised": (
        lambda: mock.patch.object(transports.Armed, "owns", lambda *_: False), transports.Late, "owned, spoiled",
    ),
    "nothing is spoiled": (
        lambda: mock.patch.object(transports, "spoil", lambda buffer: False), transports.Late, "poisoned, spoiled",
    ),
    "memory isn't filled": (
        lambda: mock.patch.object(torch, "use_deterministic_algorithms"), transports.Late, "filled",
    ),
    "nothing is exchanged": (
        lambda: mock.patch.object(layers, "faults_of_all", lambda *_: []), transports.Late, "exchanges",
    ),
}  # fmt: skip


def inert(rank, how):
    change, transport, _ = INERT[how]

    def run():
        with change(), transports.spoiled_buffers():
            layers.faults_of_all(rank, [Shape()], transport)

    return refusal(run)


@pytest.mark.parametrize("how", INERT)
def test_a_fixture_that_does_not_act_is_blind(how):
    for kind, message in on_ranks(2, inert, how):
        assert kind == "AssertionError" and message.startswith(f"BLIND: too few {INERT[how][2]}: acted"), message


def blind(rank):
    with mock.patch.object(transports, "spoil", lambda buffer: buffer.numel() > 0):  # says that it acted
        return spoiled_with_control(rank, transports.Late, SHAPES[:1], [])


def test_readers_of_released_buffers_are_seen_by_nobody_who_does_not_spoil_them():
    """The control of the control: they compute what they should."""
    for found in on_ranks(2, blind):
        assert found == [f"BLIND: {what} was not seen" for what in PLANTED]


def test_four_ranks_do_not_depend_on_it_either():
    """The same guards, with replicated KV heads and ranks that delay differently."""
    shapes = [Shape(heads=8, kv_heads=2, head_dim=4, lengths=(2, 1, 2, 3)), Shape(kv_heads=1, lengths=(2,) * 4)]
    cases = [
        Case(heads=9, kv_heads=3, lengths=(2,) * 4, batch_first=False),
        Case(heads=4, kv_heads=2, lengths=(1, 2, 3, 4)),
    ]
    no_faults(4, spoiled_with_control, transports.Delayed, shapes, cases)


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
                found += layers.block_faults(rank, Shape(kv_heads=2), use, mover, change=change) + mover.faults + mover.unfinished()
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


def rotated_as_it_lies(rank):
    """One token a rank and one batch element: everything could travel as it lies, but for what is rotated on its way."""
    with moving("reference", direct=False):
        return layers.faults_of_all(rank, [Shape(batch=1, lengths=(1, 1))])


def test_what_is_rotated_on_its_way_is_packed_and_unpacked_though_it_could_travel_as_it_lies():
    """Guard: `_InFlight` asks for that before it asks how its source lies."""
    no_faults(2, rotated_as_it_lies)


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
                if (count := sum(entry.startswith(line) for entry in log)) != 4 * groups:
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
