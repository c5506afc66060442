"""Tests that ranks which call different layers get an error: at first calls, or at most `Calls.EVERY` calls later."""

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
from tests.harness.ranks import assert_error, refusal
from tests.harness.streams import Backend

CASE = Case(heads=2, kv_heads=2, head_dim=2, value_dim=2, batch=1, lengths=(2, 2))


def layers_over(group, names, backend=None, **config):
    """Return ``call(i, ...)``, which calls layer i; the layers have one shape, and the group has no calls yet.

    With ``backend``, exchanges run on the streams of this stand-in.
    """
    attention = [
        ds_sp_overlap.DistributedAttention(dropin.local_attention(CASE), group, gather_idx=1, name=name, config=config)
        for name in names
    ]
    for layer in attention if backend else ():
        layer._attend.layer.sp_group.sides[torch.device("cpu")] = SideStream(backend, torch.device("cpu"))
    qkv = [t[:, :2].contiguous() for t in dropin.whole_inputs(CASE)[:3]]
    return lambda i, *other: attention[i](*(other or qkv), 0)


def refused_at(call, order):
    """Call the layers in ``order``; return (number of the first refused call, `refusal`), or (None, None)."""
    for number, i in enumerate(order, 1):
        if said := refusal(call, i):
            return number, said
    return None, None


def test_another_layer_in_a_first_call_is_refused(rank):
    """Guards the comparison at first calls: it includes the names of layers."""
    call = layers_over(dist.new_group([0, 1]), ["layer.0", "layer.1"])
    number, said = refused_at(call, [0, 1] if rank == 0 else [1, 0])
    for words in ("exchange different things (sp rank 0: ", "layer.0, call 1 over", "layer.1, call 1 over"):
        assert_error(said, words)
    assert number == 1


def test_another_number_of_calls_before_a_first_one_is_refused(rank):
    """Guards the comparison at first calls: it includes the number of calls.

    One rank leaves out a call before it calls a layer for the first time. The exchanges move no data.
    """
    call = layers_over(dist.new_group([0, 1]), ["layer", "layer"])
    call(0)
    with mock.patch.object(ds_sp_overlap.exchange.transport.C10d, "launch", lambda *_: mock.Mock()):
        _, said = refused_at(call, [0, 1] if rank == 0 else [1])
    assert_error(said, "call 3 over")
    assert_error(said, "call 2 over")


@pytest.mark.parametrize("streams", [False, True], ids=["host", "streams"])
@pytest.mark.parametrize("names", [("layer.0", "layer.1", "layer.2"), ("attention",) * 3], ids=["named", "all of one name"])
def test_another_layer_in_a_later_call_is_an_error_on_all_ranks_at_the_same_call(names, streams, rank):
    """Guards `Calls.count`, which compares the names of calls: one rank calls another layer in the fifth call alone."""
    call = layers_over(dist.new_group([0, 1]), names, Backend() if streams else None)
    alike = [0, 1, 2] * Calls.EVERY
    number, said = refused_at(call, [0, 1, 2, 0, 1 + rank, *alike])
    assert number == 2 * Calls.EVERY
    assert_error(said, "called different layers, first in call 5 ", "RuntimeError")
    assert_error(said, f"(sp rank 0: {names[1]} (layer 2); sp rank 1: {names[2]} (layer 3))", "RuntimeError")
    assert refused_at(call, alike) == (None, None)


def test_calls_are_compared_with_those_of_their_own_window(rank):
    call, window = layers_over(dist.new_group([0, 1]), ["a", "b", "c"]), [0, 1, 2, 1] * (Calls.EVERY // 4)
    number, said = refused_at(call, [*window, 0, 1, 2, 0, 1 + rank, *[0, 1, 2] * Calls.EVERY])
    assert number == 3 * Calls.EVERY
    assert_error(said, f"first in call {Calls.EVERY + 5} ", "RuntimeError")


def test_with_check_every_call_is_compared_at_once(rank):
    call = layers_over(dist.new_group([0, 1]), ["layer.0", "layer.1"], check=True)
    number, said = refused_at(call, [0, 1, 0, 1] if rank == 0 else [0, 1, 1, 0])
    assert number == 3
    assert_error(said, "layer.0, call 3")
    assert_error(said, "layer.1, call 3")


def test_calls_that_are_alike_are_never_refused(rank):
    """Includes calls that are recomputed, in evaluation, or raise; and calls of two models in turn."""
    group = dist.new_group([0, 1])
    call, other = layers_over(group, ["layer.0", "layer.1"]), layers_over(group, ["layer.0"])
    qkv = [t[:, :2].clone().requires_grad_() for t in dropin.whole_inputs(CASE)[:3]]
    for _ in range(Calls.EVERY):
        for reentrant in (True, False):
            checkpoint(lambda *qkv: call(1, call(0, *qkv), *qkv[1:]), *qkv, use_reentrant=reentrant).sum().backward()
        with torch.no_grad():
            other(0)
        assert refusal(call, 0, *(t.squeeze(0) for t in qkv))


@pytest.mark.parametrize("collective", ["all_gather_object", "all_reduce"])
def test_a_comparison_that_fails_names_the_layer(collective, rank):
    call = layers_over(dist.new_group([0, 1]), ["layers.7"])
    if collective == "all_reduce":
        call(0)
    with mock.patch.object(dist, collective, side_effect=RuntimeError("connection reset by peer")):
        _, (kind, message) = refused_at(call, [0] * Calls.EVERY)
    assert kind == "RuntimeError" and message.startswith("layers.7") and f"failed on sp rank {rank}; " in message
    assert "look for the first error on the other ranks: connection reset by peer" in message


def test_calls_of_a_capture_are_compared_behind_it(rank):
    """Guards that no calls are compared while a graph is captured.

    One rank calls another layer in the fifth call. The calls after it are captured.
    """
    backend = Backend()
    call = layers_over(dist.new_group([0, 1]), ["layer.0", "layer.1", "layer.2"], backend, head_groups=1)
    with torch.no_grad():
        assert refused_at(call, [0, 1, 2, 0, 1 + rank]) == (None, None)
        with backend.captured():
            assert refused_at(call, [0, 1, 2] * Calls.EVERY) == (None, None)
        number, said = refused_at(call, [0, 1, 2] * Calls.EVERY)
    assert number == 1 + Calls.EVERY
    assert_error(said, "first in call 5 (", "RuntimeError")


# Guards.

LATER = test_another_layer_in_a_later_call_is_an_error_on_all_ranks_at_the_same_call
test_the_suite_notices_without_the_guard = notices(
    Watched(
        "same layer, same call",
        'return f"local sequence {lengths}, batch {geometry.batch}, {types()}"',
        test_another_layer_in_a_first_call_is_refused,
    ),
    Watched("nobody waits in a graph", "if len(self.names) < self.EVERY:", test_calls_of_a_capture_are_compared_behind_it),
    Watched(
        "calls are told by name",
        'self.names.append("")',
        functools.partial(LATER, names=("layer.0", "layer.1", "layer.2"), streams=False),
    ),
)
