"""Tests, with real processes (`faulty_training`), what happens if a rank dies, raises, hangs, or differs from the others.

All other ranks must end within the timeout of the process group, with an error that names the layer and the exchange, and without
child processes.
"""

import os
import shutil
import signal
import subprocess
import time

import deepspeed
import pytest
import torch

from benchmarks.wire import Wire
from tests.harness import models
from tests.harness.cases import everything, full
from tests.harness.faulty_training import MARGIN_S, STEPS, TIMEOUT_S, Fault, attention_raises, run
from tests.harness.ranks import on_ranks

TWO = {"head_groups": 2}


def fails(outcome, names, sp_rank, size=2, what="the exchange"):
    """Assert that a rank ended in time, without child processes, by a failure of ``what`` that is named with one of ``names``."""
    assert outcome is not None, "it did not end"
    assert outcome.status == 1 and not outcome.left, outcome
    assert outcome.after_s < TIMEOUT_S + MARGIN_S
    kind, message = outcome.error
    found, failure = message.split(": ", 1)
    assert kind == "RuntimeError" and found in names, outcome
    assert failure.startswith(
        f"{what} over the sp group (size {size}) failed on sp rank {sp_rank}; look for the first error on the other ranks: "
    )
    return True


# {name: (fault, exchanges that may be in flight when it acts)}. Exchanges launched earlier have had a second to arrive.
STRUCK = {
    "killed in forward": (Fault("killed", "k0", more={"config": TWO}), "q0 k0"),
    "killed in backward": (Fault("killed", "dk0", step=2, more={"config": TWO}), "dqkv1 dv0 dk0"),
    "killed between layers": (Fault("killed", "q", more={"config": {"head_groups": 1}}), "q"),
    "killed, one of four": (Fault("killed", "o1", ranks=4, more={"config": TWO, "heads": 8, "kv_heads": 8}), "v0 qkv1 o0 o1"),
    "raises in attention": (Fault("raises", "attention", more={"config": TWO}), "q0 k0 v0 qkv1 o0"),
    "raises in backward": (Fault("raises", "do0", more={"config": TWO}), "do1 do0"),
    "stuck in forward": (Fault("stuck", "o0", more={"config": TWO}), "qkv1 o0"),
    "stuck in backward": (Fault("stuck", "dv0", layer=0, more={"config": TWO}), "dqkv1 dv0"),
    "stuck, one of three": (Fault("stuck", "qkv1", ranks=3, more={"config": TWO, "heads": 6, "kv_heads": 6}), "q0 k0 v0 qkv1"),
}
LAST = {
    "killed": lambda outcome: outcome.status == -signal.SIGKILL and not outcome.left,
    "raises": lambda outcome: outcome.status == 1 and outcome.error == ("ArithmeticError", "planted"),
    "stuck": lambda outcome: outcome is None,
}
# {name: arguments that differ on the last rank}.
OTHERS = {
    "head groups": {"config": {"head_groups": 1}},
    "head groups by timing": {"config": {}},
    "check": {"config": {**TWO, "check": True}},
    "timeline": {"config": {**TWO, "timeline": {"path": "/tmp"}}},
    "dtype": {"dtype": "float64"},
    "heads": {"heads": 8, "kv_heads": 8, "head_dim": 4},
    "tokens": {"tokens": 8},
}
if not everything():
    STRUCK = {name: STRUCK[name] for name in ("killed in backward", "raises in attention", "stuck in backward")}
    OTHERS = {name: OTHERS[name] for name in ("head groups", "dtype", "tokens")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all trainings at the same time, since each takes as long as a timeout."""
    others = {**OTHERS, "order": {"order": (1, 0)}, "number": {"count": 3}}
    others = {name: Fault(other=other, more={"config": TWO}) for name, other in others.items()}
    return run(tmp_path_factory.mktemp("faults"), {**{name: fault for name, (fault, _) in STRUCK.items()}, **others})


@pytest.mark.parametrize("name", STRUCK)
def test_a_rank_that_is_lost_ends_the_others_by_an_error_that_names_layer_and_exchange(outcomes, name):
    fault, under_way = STRUCK[name]
    *others, last = outcomes[name]
    for rank, outcome in enumerate(others):
        assert fails(outcome, [f"layers.{fault.layer} {what}" for what in under_way.split()], rank, fault.ranks)
        assert len(outcome.losses) == fault.step
    assert LAST[fault.how](last), last


@pytest.mark.parametrize("name", OTHERS)
def test_a_rank_of_another_kind_is_refused_on_all_ranks_alike_before_anything_is_exchanged(outcomes, name):
    first, last = outcomes[name]
    kind, message = first.error
    assert first.error == last.error and first.status == last.status == 1
    assert kind == "ValueError"
    assert message.startswith("layers.0: the ranks of the sp group are about to exchange different things (sp rank 0: ")
    assert not first.losses and not first.left and not last.left


def test_a_rank_that_calls_its_layers_in_another_order_is_refused_by_their_names(outcomes):
    for rank, outcome in enumerate(outcomes["order"]):
        kind, message = outcome.error
        assert kind == "ValueError" and outcome.status == 1 and not outcome.losses and not outcome.left
        assert message.startswith(f"layers.{rank}: the ranks of the sp group are about to exchange different things (sp rank 0: ")
        assert "layers.0, call 1 over the sp group" in message and "layers.1, call 1 over the sp group" in message


def test_a_rank_with_more_layers_ends_all_by_the_layer_that_they_do_not_share(outcomes):
    first, last = outcomes["number"]
    assert fails(first, ["layers.1 do1"], 0) and fails(last, ["layers.2"], 1, what="the comparison of the ranks")


# A whole training.


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Train models through deepspeed.initialize, with checkpoints; then resume the training whose rank was killed."""
    folder = tmp_path_factory.mktemp("trainings")
    checkpoints = {"folder": str(folder / "checkpoints")}
    found = run(folder / "first", {
        "whole": Fault(train="llama"),
        "killed": Fault("killed", "dk0", step=3, train="llama", more=checkpoints),
        "stuck": Fault("stuck", "o1", train="llama"),
    })  # fmt: skip
    return {**found, **run(folder, {"resumed": Fault(train="llama", more={**checkpoints, "resume": True})})}


@pytest.mark.parametrize("name, step, under_way", [("killed", 3, "do0 dv0 dk0"), ("stuck", 1, "o0 o1")])
def test_a_training_ends_by_the_name_of_the_exchange(trainings, name, step, under_way):
    other, last = trainings[name]
    assert fails(other, [f"model.layers.1.self_attn {what}" for what in under_way.split()], 0)
    assert other.losses == trainings["whole"][0].losses[:step]
    assert LAST[name](last), last


def test_a_training_that_was_killed_goes_on_from_its_last_checkpoint_to_the_same_curve(trainings):
    for whole, resumed in zip(trainings["whole"], trainings["resumed"], strict=True):
        assert whole.status == resumed.status == 0
        assert len(whole.losses) == STEPS and resumed.losses == whole.losses[2:]


def curve(rank, stage, backward):
    """Train with an exception in two of the steps; return losses and parameters. ``backward`` None: without exceptions."""
    model, losses = models.tiny(initializer_range=0.2), []
    with models.engine_of(model, models.ds_config(stage, sp_overlap={"head_groups": 2})) as (engine, group):
        for at, tokens in enumerate(models.batches(STEPS).unflatten(0, (STEPS, 1))):
            if backward is not None and at in (1, 2):
                with attention_raises(at, backward):  # in another layer each time
                    models.step(engine, tokens, rank, 2, group)
                engine.zero_grad()
            losses.append(models.step(engine, tokens, rank, 2, group))
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return losses, [p.detach().clone() for p in model.parameters()]


def goes_on(rank, stage, backward):
    (losses, parameters), (expected_losses, expected) = curve(rank, stage, backward), curve(rank, stage, None)
    return losses == expected_losses and all(map(torch.equal, parameters, expected))


@pytest.mark.parametrize("stage, backward", [full(0, False), (0, True), full(2, False), (3, False)])
def test_after_an_exception_on_all_ranks_training_goes_on_as_if_nothing_had_been(stage, backward):
    assert on_ranks(2, goes_on, stage, backward) == [True, True]


# A link.


@pytest.fixture
def wire():
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root and the commands ip and tc")
    before = signal.getsignal(signal.SIGTERM)
    try:
        wire = Wire(2).__enter__()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error}")
    yield wire
    wire.__exit__()
    signal.signal(signal.SIGTERM, before)


def test_a_link_that_is_cut_in_an_exchange_ends_both_ranks_by_its_name(tmp_path, wire):
    cuts = []

    def cut(job):
        """Cut the link of the last rank in the middle of an exchange, which takes a second."""
        if not cuts and job.met():
            wire.limit(2)
            job.go()
            time.sleep(0.3)
            cuts.append(subprocess.run(["ip", "-n", wire.bridge, "link", "set", "port1", "down"], check=True))

    long = {"config": TWO, "head_dim": 128, "tokens": 256}
    first, last = run(tmp_path, {"cut": Fault("waits", "o0", more=long)}, wire.spaces, cut)["cut"]
    # A slower rank may still wait for qkv1, and a faster rank may already have received o0.
    names = ["layers.1 qkv1", "layers.1 o0", "layers.1 o1"]
    assert fails(first, names, 0) and fails(last, names, 1)
    assert cuts
