"""Models whose layers hold few head groups (``"window"``): equal to the whole sequence in fp64; under ZeRO, and waiting for no device."""

import functools

import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.attention.runtime import plan
from tests.harness.cases import everything, full
from tests.harness.models import (
    EXACT,
    FP64,
    batches,
    document_by_document,
    outcome,
    overlapped_layers,
    packed,
    sequence_parallel_model,
    tiny,
    train_run,
    worst,
)
from tests.harness.ranks import on_ranks

MODELS = [dict(), dict(heads=8, kv_heads=2), dict(heads=8, kv_heads=8), dict(family="qwen3", heads=8, kv_heads=4)]
MODELS += [dict(family="phi3"), dict(family="qwen2"), dict(family="qwen3", attention_bias=True)]
SECTIONS = [{"head_groups": 2, "window": 1}, {"head_groups": 2, "window": 2}]
DOCUMENTS = [[10, 22], [3, 13, 1, 15]]


def padding(rows, seq):
    return (torch.arange(seq) < torch.tensor([seq - 5 * row for row in range(rows)])[:, None]).long()


def errors_of(rank, cases, how):
    """Of each case and section the error, and how many layers ran a windowed backward."""
    figures, tokens = [], batches(1)[0]
    ran, backward = [], plan._Window.backward
    plan._Window.backward = staticmethod(lambda ctx, dy: ran.append(ctx.call.where) or backward(ctx, dy))
    try:
        for options in cases:
            mask = padding(*tokens.shape) if how == "padded" else None
            positions = packed(DOCUMENTS) if how == "packed" else None
            alone = tiny(**EXACT, **options)
            expected = (
                document_by_document(alone, tokens, DOCUMENTS) if how == "packed" else outcome(alone, tokens, 0, 1, None, mask=mask)
            )
            for section in SECTIONS:
                with sequence_parallel_model(2, **EXACT, **options) as (model, group):
                    ds_sp_overlap.enable(model, {**section, "on_unsupported": "error"})
                    if how == "checkpointed":
                        model.gradient_checkpointing_enable({"use_reentrant": False})
                        model.train()
                    ran.clear()
                    found = outcome(model, tokens, rank, 2, group, positions, mask)
                    figures.append((worst(found, expected), len(set(ran)) - len(overlapped_layers(model))))
    finally:
        plan._Window.backward = staticmethod(backward)
    return figures


@pytest.mark.parametrize("how", ["plain", "packed", "padded", "checkpointed"])
def test_logits_and_every_gradient_equal_the_whole_sequences(how):
    for figures in on_ranks(2, errors_of, MODELS[:: 1 if everything() else 2] if how == "plain" else MODELS[1:4:2], how):
        for error, missing in figures:
            assert error < FP64 and missing == 0, figures


# Two head groups add each output row's products in another order: see test_deepspeed.
FP32 = {"gradients": 1e-5, "losses": 1e-6, "norms": 2e-6}


ACCUMULATIONS = (1, 4) if everything() else (2,)


def compared_with_stock(rank, stage):
    train = functools.partial(train_run, rank, 2, stage=stage, initializer_range=0.2)
    stock = {accumulation: train(None, accumulation=accumulation) for accumulation in ACCUMULATIONS}
    return [
        (section, accumulation, train(section, accumulation=accumulation).distance(stock[accumulation]))
        for section in SECTIONS[: 2 if everything() else 1]
        for accumulation in ACCUMULATIONS
    ]


@pytest.mark.parametrize("stage", [full(0), full(1), full(2), 3])
def test_training_in_fp32_is_stocks(stage):
    for figures in on_ranks(2, compared_with_stock, stage):
        for section, accumulation, off in figures:
            assert all(off[what] <= FP32[what] for what in FP32), (section, accumulation, off)
