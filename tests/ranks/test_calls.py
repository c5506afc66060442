"""Ranks that call other layers, or in another order, are told so: at first calls, and `Calls.EVERY` calls later."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ds_sp_overlap
from ds_sp_overlap.exchange.calls import Calls
from ds_sp_overlap.exchange.streams import SideStream
from tests.harness import dropin
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices
from tests.harness.ranks import on_ranks, refusal
from tests.harness.streams import Backend

CASE = Case(heads=2, kv_heads=2, head_dim=2, value_dim=2, batch=1, lengths=(2, 2))


def layers_over(group, names, backend=None, **config):
    """``call(i, ...)`` of layer i, all of one shape, over a group with no calls yet; on the streams of a backend, if one is given."""
    attention = [
        ds_sp_overlap.DistributedAttention(dropin.local_attention(CASE), group, gather_idx=1, name=name, config=config)
        for name in names
    ]
    for layer in attention if backend else ():
        layer._attend.layer.sp_group.sides[torch.device("cpu")] = SideStream(backend, torch.device("cpu"))
    qkv = [t[:, :2].contiguous() for t in dropin.whole_inputs(CASE)[:3]]
    return lambda i, *other: attention[i](*(other or qkv), 0)


def refused_at(call, order):
    """``(number of the call, kind, message)`` of the first refusal in a sequence of calls; None if there is none."""
    for number, i in enumerate(order, 1):
        if refused := refusal(call, i):
            return number, *refused
    return None


def first_calls(rank):
    call = layers_over(dist.new_group([0, 1]), ["layer.0", "layer.1"])
    return refused_at(call, [0, 1] if rank == 0 else [1, 0])


def test_another_layer_in_a_first_call_is_refused():
    """Guard: names are part of what first calls compare."""
    for refused in on_ranks(2, first_calls, timeout_s=60):
        assert refused[:2] == (1, "ValueError") and "exchange different things (sp rank 0: " in refused[2]
        assert "layer.0, call 1 over" in refused[2] and "layer.1, call 1 over" in refused[2]


def missed_call(rank):
    """One rank leaves a call out before it calls a layer for the first time; the exchanges move nothing."""
    call = layers_over(dist.new_group([0, 1]), ["layer", "layer"])
    call(0)
    with mock.patch.object(ds_sp_overlap.exchange.transport.C10d, "launch", lambda *_: mock.Mock()):
        return refused_at(call, [0, 1] if rank == 0 else [1])


def test_another_number_of_calls_before_a_first_one_is_refused():
    """Guard: so is the number of calls."""
    refused = on_ranks(2, missed_call, timeout_s=60)
    for _, kind, message in refused:
        assert kind == "ValueError" and "call 3 over" in message and "call 2 over" in message


def later_calls(rank, names, streams=False):
    """Refusals where the fifth call is of another layer on one rank; then of calls that are alike again."""
    call = layers_over(dist.new_group([0, 1]), names, Backend() if streams else None)
    alike = [0, 1, 2] * Calls.EVERY
    return refused_at(call, [0, 1, 2, 0, 1 + rank, *alike]), refused_at(call, alike)


@pytest.mark.parametrize("streams", [False, True], ids=["host", "streams"])
@pytest.mark.parametrize("names", [("layer.0", "layer.1", "layer.2"), ("attention",) * 3], ids=["named", "all of one name"])
def test_another_layer_in_a_later_call_is_an_error_on_all_ranks_at_the_same_call(names, streams):
    """Guard: `Calls.count` compares the names of calls."""
    for refused, afterwards in on_ranks(2, later_calls, names, streams, timeout_s=60):
        number, kind, message = refused
        assert (number, kind) == (2 * Calls.EVERY, "RuntimeError")
        assert "called different layers, first in call 5 " in message
        assert f"(sp rank 0: {names[1]} (layer 2); sp rank 1: {names[2]} (layer 3))" in message
        assert afterwards is None


def differ_in_the_second_window(rank):
    call, window = layers_over(dist.new_group([0, 1]), ["a", "b", "c"]), [0, 1, 2, 1] * (Calls.EVERY // 4)
    return refused_at(call, [*window, 0, 1, 2, 0, 1 + rank, *[0, 1, 2] * Calls.EVERY])


def test_calls_are_compared_with_those_of_their_own_window():
    for number, kind, message in on_ranks(2, differ_in_the_second_window, timeout_s=60):
        assert (number, kind) == (3 * Calls.EVERY, "RuntimeError") and f"first in call {Calls.EVERY + 5} " in message


def checked_calls(rank):
    call = layers_over(dist.new_group([0, 1]), ["layer.0", "layer.1"], check=True)
    return refused_at(call, [0, 1, 0, 1] if rank == 0 else [0, 1, 1, 0])


def test_with_check_every_call_is_compared_at_once():
    for refused in on_ranks(2, checked_calls, timeout_s=60):
        assert refused[:2] == (3, "ValueError") and "layer.0, call 3" in refused[2] and "layer.1, call 3" in refused[2]


def alike(rank):
    """Refusals of calls that are alike, however they come: recomputed, evaluated, raising, of two models in turn."""
    group = dist.new_group([0, 1])
    call, other = layers_over(group, ["layer.0", "layer.1"]), layers_over(group, ["layer.0"])
    qkv = [t[:, :2].clone().requires_grad_() for t in dropin.whole_inputs(CASE)[:3]]
    for _ in range(Calls.EVERY):
        for reentrant in (True, False):
            checkpoint(lambda *qkv: call(1, call(0, *qkv), *qkv[1:]), *qkv, use_reentrant=reentrant).sum().backward()
        with torch.no_grad():
            other(0)
        assert refusal(call, 0, *(t.squeeze(0) for t in qkv))
    return []


def test_calls_that_are_alike_are_never_refused():
    assert on_ranks(2, alike, timeout_s=120) == [[], []]


def failing(rank, collective):
    """What calls raise when a collective of ours fails."""
    call = layers_over(dist.new_group([0, 1]), ["layers.7"])
    if collective == "all_reduce":
        call(0)
    with mock.patch.object(dist, collective, side_effect=RuntimeError("connection reset by peer")):
        return refused_at(call, [0] * Calls.EVERY)


@pytest.mark.parametrize("collective", ["all_gather_object", "all_reduce"])
def test_a_comparison_that_fails_names_the_layer(collective):
    for rank, refused in enumerate(on_ranks(2, failing, collective, timeout_s=60)):
        assert refused[1] == "RuntimeError" and refused[2].startswith("layers.7") and f"failed on sp rank {rank}; " in refused[2]
        assert "look for the first error on the other ranks: connection reset by peer" in refused[2]


def captured_calls(rank):
    """As `later_calls`, where those that follow the fifth are captured."""
    backend = Backend()
    call = layers_over(dist.new_group([0, 1]), ["layer.0", "layer.1", "layer.2"], backend, head_groups=1)
    with torch.no_grad():
        assert refused_at(call, [0, 1, 2, 0, 1 + rank]) is None
        with backend.captured():
            assert refused_at(call, [0, 1, 2] * Calls.EVERY) is None
        return refused_at(call, [0, 1, 2] * Calls.EVERY)


def test_calls_of_a_capture_are_compared_behind_it():
    """Guard: nothing is compared while a graph is captured."""
    for number, kind, message in on_ranks(2, captured_calls, timeout_s=60):
        assert (number, kind) == (1 + Calls.EVERY, "RuntimeError") and "first in call 5 (" in message


# Guards.

WATCHED = [
    Watched(
        "same layer, same call",
        'return f"local sequence {lengths}, batch {geometry.batch}, {types()}"',
        first_calls,
        says="layer.1, call 1 over",
    ),
    Watched("nobody waits in a graph", "if len(self.names) < self.EVERY:", captured_calls, says="first in call 5 ("),
    Watched(
        "calls are told by name",
        'self.names.append("")',
        functools.partial(later_calls, names=("layer.0", "layer.1", "layer.2")),
        says=f"(({2 * Calls.EVERY}, 'RuntimeError'",
    ),
]


test_the_suite_notices_without_the_guard = notices(WATCHED)
