"""Tests the table of docs/loss_and_gradients.md: which loss gives the gradient of the whole sequence with which ZeRO setting.

This is behaviour of DeepSpeed, which the package must not change: each case runs with the overlap on.
"""

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_grad

from tests.harness import models
from tests.harness.cases import full
from tests.harness.pages import ROOT, read
from tests.harness.ranks import on_ranks

RANKS = 2


def local_share(total, count, group):
    """Return the sum of this rank's token losses, divided by the number of tokens of all ranks."""
    torch.distributed.all_reduce(count, group=group)
    return total / count


def gathered_mean(total, count, group):
    """Return the weighted mean of differentiably gathered losses, as in DeepSpeed's ALST tutorial."""
    losses = torch.distributed.nn.functional.all_gather(total / count, group=group)
    counts = torch.distributed.nn.functional.all_gather(count, group=group)
    return sum(loss * n for loss, n in zip(losses, counts)) / sum(counts)


RECIPES = {"local share": local_share, "gathered mean": gathered_mean}


def gradient(rank, size, recipe, stage, reduce_scatter, told=True):
    """Return the gradient of one MLP weight after one backward by DeepSpeed; ``told``: whether DeepSpeed knows the sp group."""
    model = models.tiny("llama")
    mpu = models.sequence_parallel(model, size) if size > 1 else None
    config = models.ds_config(stage)
    config["zero_optimization"]["reduce_scatter"] = reduce_scatter
    if size > 1:
        config["sp_overlap"] = {"enabled": True}
    with models.forgetting():
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu if told else None)
        inputs = models.cut(models.batches(1)[0], rank % size, size)
        logits = engine(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
        count = (inputs["labels"] != -100).sum()
        engine.backward(total / count if mpu is None else RECIPES[recipe](total, count, mpu.get_sequence_parallel_group()))
        found = safe_get_full_grad(dict(engine.module.named_parameters())["model.layers.1.mlp.down_proj.weight"]).clone()
        engine.destroy()
        return found


@pytest.mark.parametrize(
    "recipe, stage, reduce_scatter, told, factor",
    [
        ("local share", 0, True, True, 1),
        ("local share", 2, True, True, 1),
        ("local share", 3, False, True, 1),
        ("local share", 3, True, True, 1 / RANKS),
        ("gathered mean", 0, True, True, RANKS),
        ("gathered mean", 2, True, True, RANKS),
        ("gathered mean", 3, False, True, RANKS),
        ("gathered mean", 3, True, True, 1),
        ("local share", 0, True, False, 1 / RANKS),
        full("local share", 3, False, False, 1 / RANKS),
        full("local share", 3, True, False, 1 / RANKS),
    ],
)
def test_the_gradient_is_this_multiple_of_the_whole_sequences(recipe, stage, reduce_scatter, told, factor):
    whole = on_ranks(RANKS, gradient, 1, None, 0, True)[0]
    for found in on_ranks(RANKS, gradient, RANKS, recipe, stage, reduce_scatter, told):
        # The tolerance is for fp32 sums in another order; a wrong factor is off by at least a half.
        torch.testing.assert_close(found, factor * whole, rtol=0, atol=1e-5 * whole.abs().max().item())


@pytest.mark.parametrize("counted", [0, 3])
@pytest.mark.ranks(RANKS)
def test_the_documented_share_is_that_of_the_mean_and_zero_without_labels(counted, rank):
    torch.manual_seed(rank)
    logits, labels = torch.randn(1, 4, 8, requires_grad=True), torch.full((1, 4), -100)
    labels[:, :counted] = 3
    names = dict(torch=torch, cross_entropy=torch.nn.functional.cross_entropy, sp_group=None, logits=logits, labels=labels)
    blocks = read(ROOT / "docs" / "loss_and_gradients.md").blocks
    (text,) = (block.text for block in blocks if block.section == "This rank's share" and block.language == "python")
    exec(text, names)
    names["loss"].backward()
    expected = -logits.log_softmax(-1)[0, :counted, 3].sum().item() / (RANKS * counted or 1)
    assert abs(names["loss"].item() - expected) < 1e-6 and (logits.grad.abs().max() > 0) == (counted > 0)
