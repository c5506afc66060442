"""Compares the functions of docs/recipes.md on two ranks, in fp64, with the same functions on the whole sequence."""

import logging

import deepspeed
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import ds_sp_overlap
from tests.harness.cases import full
from tests.harness.listening import listening
from tests.harness.models import (
    EXACT,
    batches,
    cut,
    ds_config,
    engine_of,
    outcome,
    sequence_parallel_model,
    tiny,
    with_images,
    worst,
)
from tests.harness.pages import ROOT, read
from tests.harness.ranks import on_ranks
from tests.harness.reference import relative_error


def recipes(size):
    """Run the code of the page; return the names that it defines. With ``size`` 1, its sums over ranks do nothing."""
    names = {}
    for block in read(ROOT / "docs" / "recipes.md").blocks:
        if "test_recipes" in block.said[1] and block.section != "QLoRA":
            exec(block.text, names)
    if size == 1:
        names["whole"] = lambda mine, sp_group: mine
    return names


def sliced(tokens, which, size):
    """Return a rank's slice of a batch; labels of prompts are removed before the batch is cut."""
    batch = cut(tokens, 0, 1)
    batch["labels"][:, :9] = -100
    return {key: value.chunk(size, 1)[which] for key, value in batch.items()}


def dpo(names, which, size, group):
    policy, reference = tiny(**EXACT), tiny("qwen3", seed=1, **EXACT)
    for model in (policy, reference)[: 2 * (size > 1)]:
        ds_sp_overlap.enable(model, {"head_groups": 2}, group)
    chosen, rejected = (sliced(tokens, which, size) for tokens in batches(2))
    return policy, names["dpo_loss"](policy, reference, chosen, rejected, group)


def reward(names, which, size, group):
    config = tiny(**EXACT).config
    config.num_labels = 1
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64)
    if size > 1:
        ds_sp_overlap.enable(model, {"head_groups": 2}, group)
    tokens, last = batches(1)[0], torch.zeros(2, 32, dtype=torch.bool)
    last[0, 31] = last[1, 11] = True
    inputs = sliced(tokens, which, size)
    scores = names["row_scores"](model, inputs["input_ids"], inputs["position_ids"], last.chunk(size, 1)[which], group)
    return model, -torch.nn.functional.logsigmoid(scores[0] - scores[1]).sum()


def images(names, which, size, group):
    model = with_images("qwen2_vl")
    model.config.image_token_id = 63
    if size > 1:
        got = {layer.got for layer in ds_sp_overlap.enable(model, {"head_groups": 2}, group).layers}
        assert any(each.startswith("all eight exchanges, G = 2") for each in got), got
    tokens = batches(1)[0].clamp(max=62)
    tokens[:, 8:12] = 63
    torch.manual_seed(1)
    pixels, weight = torch.randn(32, 1176, dtype=torch.float64), torch.randn(2, 32, 64, dtype=torch.float64)
    # The first axis counts tokens, the others place images.
    positions = torch.arange(32).expand(3, 2, 32) + torch.randint(0, 9, (3, 2, 32)) * torch.tensor([0, 1, 1])[:, None, None]
    positions[0, :, 8:12] = 8  # all tokens of an image have one position on the first axis
    embeddings = names["embed"](model, tokens, pixels, torch.tensor([[1, 4, 4]] * 2))
    logits = names["logits_of_slice"](model, embeddings, positions, which, size)
    return model, names["whole"]((logits * weight.chunk(size, 1)[which]).sum(), group)


def tiles(names, which, size, group):
    model = tiny(**EXACT)
    if size > 1:
        names["tile"](model)
        ds_sp_overlap.enable(model, {"head_groups": 2}, group)
    inputs = sliced(batches(1)[0], which, size)
    return model, names["log_probability"](model, inputs, group).sum()


def custom(names, which, size, group):
    model = tiny(implementation="my_attention", **EXACT)
    if size > 1:
        got = ds_sp_overlap.enable(model, {"head_groups": 2}, group).layers[0].got
        assert "all eight exchanges, G = 2" in got, got
    return model, names["log_probability"](model, sliced(batches(1)[0], which, size), group).sum()


RECIPES = {"dpo": dpo, "reward": reward, "images": images, "tiles": tiles, "custom": custom}
# Image positions and norms are in fp32 on both sides, with sums in different orders.
TOLERANCE = {"images": 1e-5}


def loss_and_gradients(which, place, size, group):
    model, loss = RECIPES[which](recipes(size), place, size, group)
    loss.backward()
    ds_sp_overlap.disable(model)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("which", ["dpo", full("reward"), "images", full("tiles"), full("custom")])
def test_a_recipe_gives_the_loss_and_the_gradients_of_the_whole_sequence(which, rank):
    expected, right = loss_and_gradients(which, 0, 1, None)
    with sequence_parallel_model(2) as (_, group):
        loss, gradients = loss_and_gradients(which, rank, 2, group)
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
    assert max(relative_error(loss, expected), worst(gradients, right)) < TOLERANCE.get(which, 1e-10)


def quantised(folder, storage):
    """Run the QLoRA recipe of the page on a tiny model; return the model, with nonzero adapters, computing in fp32."""
    (block,) = (block for block in read(ROOT / "docs" / "recipes.md").blocks if block.section == "QLoRA")
    text = block.text.replace("Qwen/Qwen3-0.6B", str(folder)).replace("quantization_config", "dtype='float32', quantization_config")
    options = f'bnb_4bit_quant_storage="{storage}", bnb_4bit_compute_dtype="float32"'
    names = {}
    torch.manual_seed(0)
    exec(text.replace('bnb_4bit_compute_dtype="bfloat16"', options), names)
    for name, parameter in names["model"].named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return names["model"]


def with_four_bits(rank, folder, storage, stage):
    """Return the largest error of a gradient, and the report of the start-up."""
    tokens = batches(1)[0]
    right = outcome(quantised(folder, storage), tokens, 0, 1, None)
    right.pop("logits")
    model = quantised(folder, storage)
    config = ds_config(stage, sp_overlap={"head_groups": 2, "check": True})
    with listening(logging.INFO) as said, engine_of(model, config) as (engine, _):
        inputs = cut(tokens, rank, 2)
        logits = engine(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
        engine.backward(loss)
        learning = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
        found = {name: deepspeed.utils.safe_get_full_grad(p).float() for name, p in learning}
    return worst(found, right), said


@pytest.mark.parametrize("storage, stage", [("uint8", 1), ("float32", 3)])
def test_qlora_gives_the_gradients_of_the_whole_sequence(tmp_path, storage, stage):
    pytest.importorskip("bitsandbytes")
    tiny(heads=8, kv_heads=4, intermediate_size=128, initializer_range=0.2).save_pretrained(tmp_path)
    (error, said), (other, _) = on_ranks(2, with_four_bits, tmp_path, storage, stage)
    assert max(error, other) < 1e-5
    report = " ".join(said[0].split())
    assert "called whole: q_proj (LoRA), k_proj (LoRA), v_proj (LoRA), o_proj (LoRA)" in report
