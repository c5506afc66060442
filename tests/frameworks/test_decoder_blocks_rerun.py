"""transformers' gradient checkpointing over a chain of decoder layers: against the model on the whole sequence, in fp64, on every rank."""

import collections
import contextlib
import functools
import itertools
from unittest import mock

import pytest

import ds_sp_overlap
from ds_sp_overlap.chain.chain import Chain
from ds_sp_overlap.exchange.in_flight import InFlight
from ds_sp_overlap.integrations.transformers import driven
from tests.harness.cases import full
from tests.harness.models import EXACT, FP64, batches, outcome, sequence_parallel_model, tiny, train_run, worst
from tests.harness.ranks import on_ranks

LAYERS = 3
FAMILIES = [
    dict(family="llama", kv_heads=4),
    dict(family="llama", heads=8, kv_heads=2, attention_bias=True, mlp_bias=True),
    dict(family="qwen3", kv_heads=2),
]


class Counts(collections.Counter):
    """Of what ran: exchanges by what they move, "attention" of a head group, and "chained", layers whose q, k and v were there."""

    @contextlib.contextmanager
    def counting(self):
        launch, attend, run = InFlight.launch, driven.local_attention, Chain.run

        def launched(flight, *args):
            self[flight.name.split()[1].split(".")[0]] += 1
            return launch(flight, *args)

        def attended(*args, **options):
            self["attention"] += 1
            return attend(*args, **options)

        def ran(chain, layer, *args, **options):
            self["chained"] += chain.ahead is layer
            self["recompute"] += options["recompute"] != "none"
            return run(chain, layer, *args, **options)

        with (
            mock.patch.object(InFlight, "launch", launched),
            mock.patch.object(driven, "local_attention", attended),
            mock.patch.object(Chain, "run", ran),
        ):
            yield


def checkpointed(model, **options):
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    return model


def against_whole(rank, size, cases, chunks, checkpointing, reentrant):
    tokens, figures = batches(1)[0], {}
    for case, options in enumerate(cases):
        options = {**EXACT, "layers": LAYERS, **options}
        whole = outcome(tiny(**options), tokens, 0, 1, None)
        with sequence_parallel_model(size, **options) as (model, group):
            checkpointed(model, use_reentrant=reentrant)
            for count, groups in itertools.product(chunks, range(1, min(model.config.num_attention_heads // size, 2) + 1)):
                section = dict(scope="block", on_unsupported="error", checkpointing=checkpointing, token_chunks=count)
                ds_sp_overlap.enable(model, {**section, "head_groups": groups})
                errors, counts = [worst(outcome(model, tokens, rank, size, group), whole)], Counts()
                with counts.counting():
                    errors.append(worst(outcome(model, tokens, rank, size, group), whole))
                ds_sp_overlap.disable(model)
                figures[case, count, groups] = max(errors), dict(counts)
    return figures


def expected_counts(case, count, groups, checkpointing):
    """Of a step: q, k and v travel once in forward and once when run again, o once by itself."""
    of_each, again = LAYERS * count, checkpointing == "recompute"
    shared = groups == 2 and case.get("kv_heads", 4) == 2  # k and v of both groups travel with the first
    suffixes = [""] if groups == 1 else ["0", "1"]
    qkv = ["q" + at if shared and at == "1" else "qkv" + at for at in suffixes]
    return {
        "chained": LAYERS - 1,
        "recompute": LAYERS,
        "attention": LAYERS * groups * (1 + again),
        **{of: 2 * of_each for of in qkv},
        **{"d" + of: of_each for of in qkv},
        **{"o" + at: of_each for at in suffixes},
        **{("do" if again else "odo") + at: of_each for at in suffixes},
    }


@pytest.mark.singles
@pytest.mark.parametrize("checkpointing, reentrant", [("recompute", False), ("recompute", True), ("keep", False)])
@pytest.mark.parametrize("size, cases, chunks", [(2, FAMILIES, (2,)), full(2, FAMILIES, (1, 4)), (4, FAMILIES[1:2], (3,))])
def test_logits_and_every_gradient_equal_the_whole_sequences(size, cases, chunks, checkpointing, reentrant):
    for figures in on_ranks(size, against_whole, size, cases, chunks, checkpointing, reentrant):
        assert len(figures) == sum(min(case.get("heads", 4) // size, 2) for case in cases) * len(chunks)
        for (case, count, groups), (error, counts) in figures.items():
            assert error < FP64, (case, count, groups)
            assert counts == expected_counts(cases[case], count, groups, checkpointing)


# The switch.


def switched(rank):
    """Layers that run again, by what the switch says and who asks: of a forward with it, without it, in evaluation, without gradients,
    on every other layer only, and after `disable`."""
    found = {}
    with sequence_parallel_model(2, **EXACT, layers=LAYERS) as (model, group):
        tokens = batches(1)[0]
        ds_sp_overlap.enable(model, {"scope": "block"})
        outcome(model, tokens, rank, 2, group)

        def counted(name):
            counts = Counts()
            with counts.counting():
                outcome(model, tokens, rank, 2, group)
            found[name] = counts["recompute"], counts["chained"], counts["attention"]

        checkpointed(model)
        counted("on")
        model.eval()
        counted("in evaluation")
        model.train()
        layers = model.model.layers
        layers[1].gradient_checkpointing = False
        counted("on for some")
        layers[1].gradient_checkpointing = True
        functions = [layer._gradient_checkpointing_func for layer in layers]
        model.gradient_checkpointing_disable()
        counted("off")
        checkpointed(model)
        ds_sp_overlap.disable(model)
        found["left"] = (
            [layer.gradient_checkpointing for layer in layers],
            all(layer._gradient_checkpointing_func.func is function.func for layer, function in zip(layers, functions)),
        )
    return found


def test_the_users_switch_is_honoured_and_left_as_it_is():
    for found in on_ranks(2, switched):
        groups = 2
        assert found == {
            "on": (LAYERS, LAYERS - 1, 2 * LAYERS * groups),
            "in evaluation": (0, LAYERS - 1, LAYERS * groups),
            "on for some": (2, 0, (LAYERS + 2) * groups),
            "off": (0, LAYERS - 1, LAYERS * groups),
            "left": ([True] * LAYERS, True),
        }


# DeepSpeed.

FP32 = {"gradients": 1e-5, "losses": 1e-6, "norms": 2e-6}  # as in test_deepspeed.py, where they are shown to be tight


def trained(rank, stage, checkpointing, options):
    """How far training under gradient checkpointing is from stock's, and layers that ran again in its last step."""
    zero = dict(stage=stage)
    if stage == 3:
        zero.update(stage3_param_persistence_threshold=0)
    train = functools.partial(
        train_run, rank, 2, stage=stage, steps=3, layers=LAYERS, initializer_range=0.2, prepare=checkpointed,
        more_config={"zero_optimization": zero}, **options,
    )  # fmt: skip
    stock, counts = train(None), Counts()
    with counts.counting():
        mine = train({"scope": "block", "token_chunks": 2, "checkpointing": checkpointing})
    return mine.distance(stock), counts["recompute"], counts["chained"]


@pytest.mark.singles
@pytest.mark.parametrize("checkpointing, options", [("recompute", dict(accumulation=2)), ("keep", dict(heads=8))])
@pytest.mark.parametrize("stage", [full(1), 2, 3])
def test_training_with_deepspeed_equals_stock(stage, checkpointing, options):
    forwards = 3 * options.get("accumulation", 1)
    for off, recompute, chained in on_ranks(2, trained, stage, checkpointing, options):
        assert all(off[what] <= FP32[what] for what in FP32), off
        assert recompute == LAYERS * forwards and chained == (LAYERS - 1) * (forwards - 1)  # the first compares its layers
