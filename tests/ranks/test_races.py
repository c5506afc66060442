"""Tests that every access to memory, and every reuse, is ordered between the streams of exchanges, and that each guard is needed.

Runs rank 0 of two on a stand-in for streams (`races`), with a transport that moves no data.
"""

import dataclasses
import functools
import gc
import threading
from unittest import mock

import pytest
import torch

import ds_sp_overlap
from benchmarks.one_gpu import Emulated
from benchmarks.variants import Attention, Layer, Shape
from ds_sp_overlap.exchange.exchange import Exchange
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.relayed import Relayed, legs_of
from ds_sp_overlap.exchange.streams import SideStream
from ds_sp_overlap.relayout import ops
from tests.harness.guards import Watched, notices
from tests.harness.moving import moving
from tests.harness.races import watched
from tests.harness.relayout import REFERENCE
from tests.harness.streams import Backend, Stream, on_streams, order
from tests.harness.uses import Deliberate, RaisesInBackward, non_reentrant, reentrant, second_backward

SIZE = 2
SHAPE = Shape(seq=12, heads=8, head_dim=4, kv_heads=4, batch=2)


def over(wire, size=SIZE):
    """Return a new sp_group, as every layer has that is made without a model; layers share the streams."""
    sp_group = Emulated(size, wire)
    on_streams(sp_group, wire.races.backend)
    return sp_group


def block(wire, **config):
    layer = Layer(SHAPE, 0, SIZE)
    layer.sp_group = over(wire)
    return layer, layer.ours(**config)


def read(*tensors):
    """Change the tensors in place, as an optimizer does."""
    for tensor in tensors:
        tensor.add_(1)


def whole_layer(wire, groups, **config):
    layer, attend = block(wire, head_groups=groups, **config)
    read(*layer.step(attend))


def buffers_written_by_the_gemm(wire):
    with moving("reference", direct=True):
        whole_layer(wire, 2)


def several_layers_accumulate(wire, **config):
    """Run two layers on two batches, and one optimizer step; gradients of the first batch exist while the second runs."""
    made = [block(wire, head_groups=2, **config) for _ in range(2)]
    for _ in range(2):
        x = made[0][0].x.detach().requires_grad_()
        y = made[1][1](made[0][1](x))
        y.backward(made[0][0].dy)
        read(x.grad)
        del x, y
    with torch.no_grad():
        read(*(p.grad for layer, _ in made for p in layer.projections.parameters()))


def used(wire, use, **config):
    layer, attend = block(wire, head_groups=2, **config)
    x = layer.x.detach().requires_grad_()
    use(attend, layer.projections, x, layer.dy)
    read(x.grad)


def no_gradient(wire, **config):
    layer, attend = block(wire, head_groups=2, **config)
    with torch.no_grad():
        read(attend(layer.x))


def drop_in(wire):
    """Run the drop-in in both layouts; change its output and gradients in place as soon as this is allowed."""
    local = Attention()
    for batch_dim in (0, 1):
        attend = ds_sp_overlap.DistributedAttention(
            local, None, gather_idx=1 - batch_dim, config={"head_groups": 2}, heads_alike=True
        )
        attend._attend.layer.sp_group = over(wire)
        shape = (2, 6, 8, 4) if batch_dim == 0 else (6, 2, 8, 4)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in "qkv")
        o = attend(q * 1, k * 1, v * 1, batch_dim)
        read(o)
        o.backward(torch.ones_like(o))
        read(q.grad, k.grad, v.grad)


def broken(q, k, v, in_forward):
    """Attend, but raise in forward or in backward."""
    if in_forward:
        raise Deliberate
    return RaisesInBackward.apply(q)


def abandoned(wire, **config):
    for in_forward in (True, False):
        layer, attend = block(wire, head_groups=2, **config)
        layer.local.forward = functools.partial(broken, in_forward=in_forward)
        with pytest.raises(Deliberate):
            layer.step(attend)
        del layer, attend
        gc.collect()


def run_again(wire, **config):
    """Run attention that runs again in backward, so that backward does not exchange o."""
    layer, attend = block(wire, head_groups=2, **config)
    attend.local_attention = lambda q, k, v: layer.local(q * 2, k, v).exp()
    read(*layer.step(attend))


def once_per_node(wire, **config):
    """Run two ranks in one node that need the same KV head, so that its k and v are sent in two legs."""
    layer = Layer(dataclasses.replace(SHAPE, kv_heads=1), 0, SIZE)
    layer.sp_group = over(wire)
    attend = layer.ours(head_groups=2, kv_once_per_node=True, **config)
    for _ in range(2):
        read(*layer.step(attend))
    assert any(stream.name == "relay" and stream.clock[stream] for stream in wire.races.backend.streams)


def exchange(wire, kind):
    """Return an exchange and its layout: of q, which is packed and unpacked, or of o, which is sent without packing."""
    layout = Geometry(SIZE, 0, (3, 3), 2, 4, 4, 1, batch_first=True).exchange(kind, 0, (8,))
    return Exchange(over(wire), layout, "layer", kind), layout


def alone(wire):
    """Run exchanges whose input is kept by the exchange alone; change their outputs in place."""
    for kind in "qo":
        made, layout = exchange(wire, kind)
        token = made.start(torch.randn(layout.sources.shapes[0]))
        torch.randn(100)
        read(made.finish(token))


def two_legs_alone(wire):
    """Send k without packing, and drop it at once; send another k that is packed, and change it at once."""
    geometry = Geometry(4, 0, (3,) * 4, 1, 4, 2, nodes=(0, 0, 1, 1))
    layout, legs = geometry.exchange("k", 0, (8,)), legs_of(geometry, ("k",), 0, (8,))
    for as_it_lies in (True, False):
        k = torch.randn(2, 3, 1, 8).movedim(0, 2) if as_it_lies else torch.randn(layout.sources.shapes[0])
        made = Relayed(legs, over(wire, 4), "layer k", [k])
        if as_it_lies:
            del k
            torch.randn(100)
        else:
            read(k)
        read(*made.finish())


def two_legs_by_kernels(wire):
    """Send k in two legs with kernels, which take flat buffers, so that k is unpacked for the compute stream in any case."""
    legs = legs_of(Geometry(2, 0, (3, 3), 1, 4, 1, nodes=(0, 0)), ("k",), 0, (8,))
    with mock.patch.object(ops, "_TORCH", REFERENCE):
        read(*Relayed(legs, over(wire), "layer k", [torch.randn(3, 1, 1, 8)]).finish())


def elsewhere(wire):
    """Drop an exchange in flight while another stream is current, as the garbage collector may.

    Its memory belongs to the stream on which the exchange was started.
    """
    backend = wire.races.backend
    other = Stream(backend, "other")
    for kind in "qo":
        made, layout = exchange(wire, kind)
        made.start(torch.randn(layout.sources.shapes[0]))
        with backend.stream(other):
            del made


def backward_called_elsewhere(wire, **config):
    """Run forward on a stream of the caller, and call backward on another; the nodes of backward run on the stream of forward."""
    backend = wire.races.backend
    backend.nodes_run_on = own = Stream(backend, "own")
    layer, attend = block(wire, head_groups=2, **config)
    x = layer.x.detach().requires_grad_()
    order(own, backend.compute)
    with backend.stream(own):
        y = attend(x)
    y.backward(layer.dy)
    with backend.stream(own):
        read(x.grad)
        del x, y


IN_USE = reentrant, non_reentrant, second_backward
SCENES = {
    **{f"a layer, G = {groups}": functools.partial(whole_layer, groups=groups) for groups in (1, 2, 4)},
    "send buffers are written by the GEMM": buffers_written_by_the_gemm,
    "wgrad first": functools.partial(whole_layer, groups=2, wgrad=False),
    "several layers accumulate": several_layers_accumulate,
    **{f"used: {use.__name__}": functools.partial(used, use=use) for use in IN_USE},
    "no gradient": no_gradient,
    "drop-in": drop_in,
    "abandoned": abandoned,
    "once per node": once_per_node,
    "once per node, a window of 1": functools.partial(once_per_node, window=1),
    "two legs alone, by kernels": two_legs_by_kernels,
    "alone": alone,
    "two legs alone": two_legs_alone,
    "elsewhere": elsewhere,
    "backward is called elsewhere": backward_called_elsewhere,
    **{
        f"a window of {window}, G = {groups}": functools.partial(whole_layer, groups=groups, window=window)
        for groups, window in ((4, 1), (4, 2), (4, 3), (2, 2), (1, 1))
    },
    **{
        f"a window of {window}: {scene.__name__}": functools.partial(scene, window=window)
        for scene in (several_layers_accumulate, no_gradient, abandoned, run_again)
        for window in (1, 2)
    },
    **{
        f"a window of {window}, used: {use.__name__}": functools.partial(used, use=use, window=window)
        for use in IN_USE
        for window in (1, 2)
    },
}


def faults(scene, asynchronous):
    gc.freeze()  # leave older objects out of garbage collection, which took most of the time
    try:
        with watched(asynchronous) as (races, wire):
            scene(wire)
            gc.collect()
    finally:
        gc.unfreeze()
    return races.faults


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in the stream", "asynchronous"])
@pytest.mark.parametrize("scene", SCENES)
def test_every_access_and_every_reuse_is_ordered(scene, asynchronous):
    assert faults(SCENES[scene], asynchronous) == []


# The detector itself.


def test_backward_runs_in_the_thread_of_the_device_where_a_wait_that_is_missing_is_seen(monkeypatch):
    """Plants a fault: only the caller's thread waits. So forward is ordered, and backward is not."""
    here, before_compute = threading.current_thread(), SideStream.before_compute

    def forgetful(side, mark):
        if threading.current_thread() is here:
            return before_compute(side, mark)
        return mark[1]

    with watched(False) as (races, wire):
        whole_layer(wire, 2)
    assert races.backend.backwards == 1 and races.faults == []
    monkeypatch.setattr(SideStream, "before_compute", forgetful)
    assert faults(SCENES["no gradient"], False) == []
    found = faults(SCENES["a layer, G = 2"], False)
    assert any(fault.startswith("race: ") for fault in found), found


def test_a_stream_that_is_not_asked_for_each_time_is_seen_where_another_one_is_current(monkeypatch):
    """Plants a fault: the current stream is always the compute stream, as if it had been asked for only once."""
    monkeypatch.setattr(Backend, "current_stream", lambda self, device: self.compute)
    assert faults(SCENES["a layer, G = 2"], False) == []
    assert faults(SCENES["backward is called elsewhere"], False)


def test_one_that_sees_nothing_says_so():
    with pytest.raises(AssertionError, match="BLIND: nothing of compute, transfer, freed was seen"):
        faults(lambda wire: None, False)


# Guards: every wait, reference and event that the order depends on.


def check(scene, asynchronous=False):
    return functools.partial(faults, SCENES[scene], asynchronous)


LAYER = "a layer, G = 2"

test_the_suite_notices_without_the_guard = notices(
    # Waits.
    Watched("sends what is ready", "pass", check(LAYER), 0),
    Watched("waits on its stream", "pass", check(LAYER, True), 0),
    Watched("compute waits for it", "current = mark[1]", check(LAYER), 0),
    Watched("its own stream waits", "pass", check(LAYER), 0),
    Watched("memory returns in order", "pass", check("abandoned"), 0),
    Watched("its own stream waits", "self.backend.current_stream(self.index).wait_event(event)", check("elsewhere"), 0),
    Watched(
        "waits before it unpacks", "if not self.outs:\n    self.outs = self._unpacked()\nif self.side.blocks:", check(LAYER), 0
    ),
    Watched("relays what is ready", "pass", check("once per node"), 0),
    Watched("packed, then changed", "pass", check("two legs alone"), 0),
    Watched("memory returns once it was read", "pass", check("once per node"), 0),
    Watched("outputs of its own stream", "elsewhere = False", check("once per node"), 0),
    # References.
    Watched("kept until it travelled", "pass", check("two legs alone"), 0),
    Watched("what is sent is kept", "side.end(mark)\nself.send, self.sources = None, ()", check("alone"), 0),
    # Events.
    Watched("marked behind the transfer", "pass", check(LAYER), 0),
    Watched("on the stream that made it", "self.gate.record_event(event)", check(LAYER), 0),
    Watched("an event is recorded", "pass", check("once per node"), 0),
    Watched(
        "marked behind the transfer", "self.transfer.record_event(event)\nself.events.append(event)", check("once per node"), 0
    ),
)
