"""Layers in a chain that are run again in backward: what travels and what is computed then, in which order, and what is held.

That they equal the same layers on the whole sequence is in `test_blocks`.
"""

import dataclasses
import functools
import gc
import re

import pytest
import torch
import torch.nn.functional as F

from benchmarks.variants import Silent, held_bytes
from ds_sp_overlap.chain.recompute_region import RecomputeRegion
from tests.harness import blocks, layers, reference
from tests.harness.blocks import LAYERS, Blocks
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.ranks import no_faults, on_ranks, refusal, soon
from tests.harness.transports import Recording

RERUNS = "all", "but attention"


def flash(q, k, v, dropout=0.0):
    """Of q, k, v [b, s, h, d]: a fused kernel, which keeps a log-sum-exp and reads o."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True).transpose(1, 2)


class Run:
    """A chain on this rank behind its first forward, whose layers compare themselves; ``log`` is of what travels and what attends."""

    def __init__(self, rank, shape, attention=flash, mover=None):
        self.mover = mover or Recording()
        self.log = [] if mover else self.mover.log
        self.model = blocks.Model(shape)

        def attend(q, k, v):
            self.log.append("attend")
            return attention(q, k, v)

        with reference_is(attend):
            blocks.enchain(self.model, shape, rank, torch.distributed.group.WORLD, self.mover)
        self.x, self.dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        with torch.no_grad():
            self.model(self.x)
        self.x.requires_grad_()
        self.log.clear()

    def forward(self):
        return self.model(self.x)


class reference_is:
    """Blocks that are made in the body have this local attention."""

    def __init__(self, attend):
        self.attend, self.before = attend, reference.attention

    def __enter__(self):
        reference.attention = self.attend

    def __exit__(self, *_):
        reference.attention = self.before


def shape_of(recompute, groups=1, chunks=3):
    return Blocks(4, 4, 8, 1, (9, 9), chunks=chunks, recompute=recompute, config={"head_groups": groups})


# What runs.


def backward_of(rank, shape):
    run = Run(rank, shape)
    y = run.forward()
    forward, run.log[:] = list(run.log), []
    y.backward(run.dy)
    return forward, list(run.log)


def wrong_counts(rank, recompute, groups, chunks):
    """What a step launches and computes that it should not, or not as often."""
    forward, backward = backward_of(rank, shape_of(recompute, groups, chunks))
    do = "do" if recompute == "all" else "odo"
    each = LAYERS * groups
    expected = [
        (forward, {">qkv": each * chunks, ">o": each * chunks, "attend": each}),
        (backward, {">qkv": each * chunks, ">" + do: each * chunks, ">dqkv": each * chunks, "attend": each * (recompute == "all")}),
    ]
    found = []
    for log, right in expected:
        got = {}
        for entry in log:
            kind = re.sub(r"\d*\.\d+$", "", entry)
            if not kind.startswith("<"):
                got[kind] = got.get(kind, 0) + 1
        if got != {kind: count for kind, count in right.items() if count}:
            found.append(f"{got}, not {right}")
    return found


@pytest.mark.parametrize("recompute", RERUNS)
@pytest.mark.parametrize("groups,chunks", [(1, 1), (1, 4), (2, 2)])
def test_q_k_and_v_travel_again_and_o_does_not(recompute, groups, chunks):
    """o but beside do, where attention was kept and its backward reads o; then attention is not run again."""
    no_faults(2, wrong_counts, recompute, groups, chunks)


def out_of_order(rank, recompute):
    """Layers that are not run again between the last start of do and its first finish."""
    _, backward = backward_of(rank, shape_of(recompute))
    do, log = "do" if recompute == "all" else "odo", " ".join(backward)
    again = ">qkv.0 >qkv.1 >qkv.2 <qkv.0 <qkv.1 <qkv.2 " + "attend " * (recompute == "all")
    under_do = log.count(f">{do}.2 >{do}.1 >{do}.0 {again}<{do}.2 <{do}.1 <{do}.0 >dqkv.2 >dqkv.1 >dqkv.0")
    first = log.count(f">{do}.2 >{do}.1 >{do}.0")  # nothing else is started between chunks of the last layer
    return [] if (under_do, first) == (1, 1) and log.count(f">{do}.0 {again}<{do}.2") == LAYERS else [log]


@pytest.mark.parametrize("recompute", RERUNS)
def test_a_layer_is_run_again_under_the_exchange_of_do(recompute):
    no_faults(2, out_of_order, recompute)


# What is held.


def held(rank, shape):
    """From forward to backward, in units of the hidden states; without those that are given and returned. Nothing is
    moved: threads that do would let go of a buffer now and then in the middle of another run."""
    run = Run(rank, shape, mover=Silent())
    run.forward()
    return held_bytes(run.forward) / run.x.nbytes - 1


@pytest.mark.parametrize("chunks", [1, 4])
def test_from_forward_to_backward_hidden_states_and_o_are_held(chunks):
    """And a log-sum-exp of 8 bytes a head and token. What a layer's own checkpoint holds are its hidden states."""
    shape, found = Blocks(8, 8, 32, 1, (128, 128), chunks=chunks), {}
    for recompute in ("none", *RERUNS):
        found[recompute] = on_ranks(2, held, dataclasses.replace(shape, recompute=recompute))
    residual_and_o = LAYERS - 1 + LAYERS
    for rank in range(2):
        assert residual_and_o <= found["all"][rank] < residual_and_o + 0.1
        assert residual_and_o + LAYERS / 32 <= found["but attention"][rank] < residual_and_o + LAYERS / 32 + 0.1
        assert found["none"][rank] > 10 * LAYERS


def still_held(rank, recompute):
    """What is held of a step that is over, whose output is still there, and of forwards without backward."""
    run = Run(rank, shape_of(recompute, groups=2))
    gc.collect()
    gc.disable()
    try:
        y = run.forward()
        y.backward(run.dy)
        held = {"a step": something_stays()}
        run.forward()
        held["a forward"] = something_stays()
        run.model.chain()
        run.model.layers[0](run.x)
        run.model.chain()  # its chain goes, which has started the next layer
        held["an early exit"] = something_stays()
        del y
        return [f"{what} is held" for what, stays in held.items() if stays]
    finally:
        gc.enable()


def something_stays():
    return not soon(lambda: not any(isinstance(x, RecomputeRegion) for x in gc.get_objects()))


@pytest.mark.parametrize("recompute", RERUNS)
def test_a_step_that_is_over_holds_nothing(recompute):
    """A loop that keeps its loss until the next one holds the graph of the last step."""
    no_faults(2, still_held, recompute)


# Dropout, and what is refused.


def with_dropout(rank, recompute):
    """Gradients of a chain whose attention drops out, once by itself and once run again, with the same random numbers."""
    found = []
    for each in ("none", recompute):
        run = Run(rank, shape_of(each), functools.partial(flash_by_hand, dropout=0.4))
        torch.manual_seed(7)
        y = run.forward()
        torch.rand(3)  # between forward and backward somebody draws
        y.backward(run.dy)
        found.append([run.x.grad, *(p.grad for p in run.model.parameters())])
    return [f"{worst}" for one, other in zip(*found) if (worst := (one - other).abs().max().item()) > 1e-12 * one.abs().max()]


def flash_by_hand(q, k, v, dropout):
    return F.dropout(flash(q, k, v), dropout)


@pytest.mark.parametrize("recompute", RERUNS)
def test_what_drops_out_is_the_same_when_run_again(recompute):
    no_faults(2, with_dropout, recompute)


def changed_in_place(rank):
    run, seen = Run(rank, shape_of("all")), []
    run.model.layers[0].register_forward_hook(lambda module, given, out: seen.append(out))
    y = run.forward()
    with torch.no_grad():
        seen[0].mul_(2)
    return refusal(y.backward, run.dy)


def test_hidden_states_that_were_changed_before_backward_are_refused():
    for kind, message in on_ranks(2, changed_in_place):
        assert kind == "RuntimeError" and "were changed in place before backward could use them" in message


# Guards.


def unrefused(rank):
    return [] if changed_in_place(rank) else ["changed hidden states are used"]


WATCHED = [
    Watched(Guard("once in a backward", without="if False:"), functools.partial(wrong_counts, recompute="all", groups=2, chunks=2)),
    Watched(Guard("the same random numbers", without="pass"), functools.partial(with_dropout, recompute="all")),
    Watched(Guard("run again, then waits for do", without="pass"), functools.partial(out_of_order, recompute="all")),
    Watched(Guard("held, and not changed", without="if False:"), unrefused),
]  # fmt: skip


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
