"""Tests a layer in a CUDA graph: calls like earlier calls are captured; calls that no graph can hold are refused with a reason.

A CPU can't capture a graph. A stand-in for streams (`Backend.captured`) refuses what CUDA refuses: waits for events inside a
capture from outside and the reverse, and the end of a capture with a stream that is not joined. `syncs` finds waits of the host.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_sp_overlap
from ds_sp_overlap.attention.runtime import plan
from ds_sp_overlap.exchange.calls import Calls
from ds_sp_overlap.exchange.copy_engines import CopyEngine
from tests.harness import dropin, layers, models
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import on_ranks, refusal
from tests.harness.streams import Backend, Stream, device_thread, on_streams
from tests.harness.syncs import waits

CASE = Case(heads=4, kv_heads=2, head_dim=4, value_dim=4, batch=1, lengths=(4, 4))


def self_attention(rank, **config):
    """Return a function that runs a step of a `SelfAttention`, and the layer."""
    shape = Shape(heads=6, kv_heads=3, config={"head_groups": 1, **config})  # with these heads, k and v are expanded by an index
    modules, attend, x, dy = layers.mine(rank, shape)

    def step(x=x):
        y = layers.call_block(shape, attend, rank, x.requires_grad_())
        return [y, *torch.autograd.grad(y, [x, *modules.parameters()], dy)]

    return step, attend.layer


def drop_in(rank, **config):
    """Return a function that runs a step of a drop-in, and its layer."""
    attend = ds_sp_overlap.DistributedAttention(
        dropin.local_attention(CASE), dist.group.WORLD, gather_idx=1, config={"head_groups": 1, **config}, heads_alike=True
    )
    q, k, v = (t[:, 4 * rank : 4 * rank + 4].contiguous().requires_grad_() for t in dropin.whole_inputs(CASE)[:3])

    def step(q=q):
        o = attend(q, k, v, 0)
        return [o, *torch.autograd.grad(o, [q, k, v], torch.ones_like(o))]

    return step, attend._attend.layer


@pytest.mark.parametrize("make, groups", [(self_attention, 1), (drop_in, 1), (drop_in, 2)])
def test_a_call_of_a_known_kind_is_captured(make, groups, rank):
    """Steps in and after a capture give the same results as before.

    In the capture, the host must not wait, and there must be no collectives except exchanges.
    """
    step, layer = make(rank, head_groups=groups)
    backend = on_streams(layer.sp_group)
    refused = mock.Mock(side_effect=AssertionError("a collective of ours"))
    with device_thread(backend):
        expected = step()
        for _ in range(2):
            exchanges = mock.Mock(wraps=layer.sp_group.transport.launch)
            with (
                backend.captured() as forked,
                waits() as seen,
                mock.patch.object(layer.sp_group.transport, "launch", exchanges),
                mock.patch.multiple(dist, all_gather_object=refused, all_reduce=refused, all_gather=refused),
            ):
                for _ in range(Calls.EVERY):
                    found = step()
            assert not seen, seen
            assert {stream.name for stream in forked} == {"compute", "transfer", "gate"}
            assert exchanges.call_count == Calls.EVERY * (4 + 4 * groups)
            for _ in range(2 * Calls.EVERY):
                again = step()
            assert all(map(torch.equal, expected, found)) and all(map(torch.equal, expected, again))


def test_forward_and_backward_may_be_captured_apart(rank):
    """``make_graphed_callables`` captures forward and backward in this way."""
    shape = Shape(config={"head_groups": 2})
    modules, attend, x, dy = layers.mine(rank, shape)
    backend, found = on_streams(attend.layer.sp_group), []
    with device_thread(backend):
        for capture in (contextlib.nullcontext, backend.captured):
            with capture():
                y = layers.call_block(shape, attend, rank, x.detach().requires_grad_())
            with capture():
                y.backward(dy)
            found.append([y, *(p.grad for p in modules.parameters())])
            modules.zero_grad()
    assert all(map(torch.equal, *found))


# What is refused.


def outcome(rank, config, warm, streams):
    """Capture a forward, after the step that ``warm`` names; return the error."""
    plan.pieces_of.cache_clear()  # a first call must compile again
    config = dict(config)
    transport = CopyEngine() if config.pop("transport", None) else None
    shape = Shape(config={"head_groups": 1, **config})
    modules, attend, x, dy = layers.mine(rank, shape, transport)
    backend = on_streams(attend.layer.sp_group) if streams else Backend()

    def forward():
        return layers.call_block(shape, attend, rank, x.requires_grad_())

    with device_thread(backend):
        if warm == "step":
            expected = forward()
            expected.backward(dy)
        elif warm == "no_grad":
            with torch.no_grad():
                expected = forward()
        with backend.captured():
            kind, message = refusal(forward)
        if warm:  # after the refused capture, the layer still works
            assert torch.equal(forward(), expected)
    return kind, message


FIRST, NO = "the ranks can't be compared (in a layer's first call", "can't work; capture without"
REFUSED = {
    "first call": ({}, None, True, f"layer: while a CUDA graph is captured, {FIRST}"),
    "check": ({"check": True}, "step", True, f"layer: while a CUDA graph is captured, {FIRST}"),
    "kind": ({}, "no_grad", True, "layer: while a CUDA graph is captured, a call is the first of its kind"),
    "trial": ({"head_groups": "auto"}, "no_grad", True, 'sp_overlap.head_groups "auto": while a CUDA graph is captured, G can'),
    "comparison of a trial": ({"head_groups": "auto"}, "step", True, f"sp_overlap: while a CUDA graph is captured, {FIRST}"),
    "window": ({"head_groups": 2, "window": 1}, "step", True, f"captured, sp_overlap.window and checkpointing {NO}"),
    "timeline": ({"timeline": {}}, "step", True, f"layer: while a CUDA graph is captured, sp_overlap.timeline {NO}"),
    "nodes": ({"kv_once_per_node": True}, "step", True, f"captured, sp_overlap.kv_once_per_node {NO}"),
    "copy engines": ({"transport": True}, None, True, f'captured, sp_overlap.transport "copy_engine" {NO}'),
    "gloo": ({}, "step", False, f"layer: while a CUDA graph is captured, exchanges by gloo {NO}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_can_hold_is_refused_by_name(case, tmp_path):
    config, warm, streams, message = REFUSED[case]
    if "timeline" in config:
        config = {"timeline": {"path": str(tmp_path), "steps": [5, 6]}}
    for kind, said in on_ranks(2, outcome, config, warm, streams, timeout_s=60):
        assert kind == "RuntimeError" and message in said, said


def test_a_transformers_model_is_refused_since_positions_are_those_of_one_forward(rank):
    model = models.tiny()
    ds_sp_overlap.enable(model, {"head_groups": 1}, dist.group.WORLD)
    inputs = models.cut(models.batches(1)[0], rank, 2)
    inputs.pop("labels", None)

    def forward():
        return model(**inputs, use_cache=False)

    forward()
    backend, layer = Backend(), model.model.layers[0].self_attn
    original, expected = layer.forward, "while a CUDA graph is captured, positions of all ranks can't be read"
    with backend.captured():
        kind, message = refusal(forward)
    assert kind == "RuntimeError" and message.startswith(f"LlamaForCausalLM: {expected}")

    def captured(*args, **kwargs):
        with backend.captured():
            return original(*args, **kwargs)

    with mock.patch.object(layer, "forward", captured):
        kind, message = refusal(forward)
    assert kind == "RuntimeError" and message.startswith(f"model.layers.0.self_attn: {expected}")


# The instrument.


def wait_behind(backend, side):
    event = backend.Event()
    with backend.captured():
        side.record_event(event)
        backend.compute.record_event(event)
    backend.compute.wait_event(event)


def wait_for_earlier(backend, side):
    event = backend.Event()
    side.record_event(event)
    with backend.captured():
        backend.compute.wait_event(event)


def fork(backend, side):
    event = backend.Event()
    with backend.captured():
        backend.compute.record_event(event)
        side.wait_event(event)


@pytest.mark.parametrize(
    "fault, says",
    [(wait_behind, "a capture that is over"), (wait_for_earlier, "that is not"), (fork, "not joined to compute: side")],
)
def test_the_instrument_sees(fault, says):
    backend = Backend()
    with pytest.raises(AssertionError, match=says):
        fault(backend, Stream(backend, "side"))


# Guards.


test_the_suite_notices_without_the_guard = notices(
    Watched(
        "no graph of what it can't hold",
        "if False:",
        functools.partial(outcome, config={}, warm="no_grad", streams=True),
        raises=True,
        says="a call is the first of its kind",
    )
)
