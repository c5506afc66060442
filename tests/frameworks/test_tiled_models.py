"""Tests models whose norms and MLPs run in tiles (``"tiles"``), against the whole sequence in fp64; training; and the report.

test_fsdp2.py tests tiles under FSDP2.
"""

import contextlib
import functools
import warnings

import peft
import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.integrations import tiles
from tests.harness.cases import full
from tests.harness.models import EXACT, FP64, batches, outcome, sequence_parallel_model, tiny, train_run, worst

SECTION = {"head_groups": 2, "tiles": 5}  # a rank has 16 tokens
GPT2 = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MODELS = {
    "llama": {},
    "qwen3": dict(family="qwen3"),
    "gemma3_text": dict(family="gemma3_text", head_dim=8),
    "olmo2": dict(family="olmo2"),
    "gpt2": dict(family="gpt2", kv_heads=4, **GPT2),
    "phi": dict(family="phi"),
    "mixtral": dict(family="mixtral", head_dim=8, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
}

IN_FP32 = ("gemma3_text", "olmo2")


@contextlib.contextmanager
def counting():
    """Yield a list that collects the class name of each module that runs in tiles."""
    ran, run = [], tiles.run_in_tiles
    tiles.run_in_tiles = lambda module, x, tokens: ran.append(type(module).__name__) or run(module, x, tokens)
    try:
        yield ran
    finally:
        tiles.run_in_tiles = run


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient_equal_the_whole_sequences(name, rank):
    """The tolerance is larger for norms that compute in fp32, since they round a tile differently than the whole."""
    options, tokens = {**EXACT, **MODELS[name]}, batches(1)[0]
    expected = outcome(tiny(**options), tokens, 0, 1, None)
    for reentrant in (None, False, True) if name in ("llama", "gpt2") else (False,):
        with sequence_parallel_model(2, **options) as (model, group), counting() as ran:
            report = str(ds_sp_overlap.enable(model, SECTION))
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
                model.train()
            assert worst(outcome(model, tokens, rank, 2, group), expected) < (1e-6 if name in IN_FP32 else FP64)
            assert len(ran) > 4 and "in tiles: " in report
            assert ("is a mixture of experts (2)" in report) == (name == "mixtral")
            ds_sp_overlap.disable(model)
            assert not any("forward" in vars(module) for module in model.modules()), "disabled"


FP32 = {"gradients": 1e-5, "losses": 1e-6, "norms": 2e-6}


def lora(model):
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False))
    model.enable_input_require_grads()
    return model


def checkpointed(model, reentrant, prepare=None):
    model = model if prepare is None else prepare(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


@pytest.mark.parametrize(
    "stage, reentrant, adapters",
    [full(1, False, False), full(2, True, False), (3, False, False), full(3, True, False), (3, False, True)],
)
def test_training_under_zero_is_as_without_tiles(stage, reentrant, adapters, rank):
    prepare = lora if adapters else None
    if reentrant is not None:
        prepare = functools.partial(checkpointed, reentrant=reentrant, prepare=prepare)
    train = functools.partial(train_run, rank, 2, stage=stage, accumulation=2, steps=3, prepare=prepare, initializer_range=0.2)
    stock = train({"head_groups": 1})
    with counting() as ran:
        off = train({"head_groups": 1, "tiles": 5}).distance(stock)
    assert set(ran) == {"LlamaMLP", "LlamaRMSNorm"}
    assert all(off[what] <= FP32[what] for what in FP32), off


def test_what_is_hooked_runs_whole_and_is_said(rank):
    tokens = batches(1)[0]
    with sequence_parallel_model(2, **EXACT) as (model, group), counting() as ran:
        report = str(ds_sp_overlap.enable(model, {**SECTION, "tiles": "auto"}))
        assert "  in tiles: LlamaMLP (2), LlamaRMSNorm (5)\n" in report and "whole" not in report
        mlp = model.model.layers[0].mlp
        handle = mlp.up_proj.register_forward_hook(lambda module, args, y: y * 2)
        outcome(model, tokens, rank, 2, group)
        assert ran.count("LlamaMLP") == 1
        handle.remove()
        ran.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            outcome(torch.compile(model, backend="eager"), tokens, rank, 2, group)
        assert not [each for each in said if "ds_sp_overlap" in str(each.message)], said
        assert ran.count("LlamaMLP") == 2
        handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, y: y)
        hooked = str(ds_sp_overlap.enable(model, SECTION))
        handle.remove()
    assert "in tiles: LlamaMLP (1), LlamaRMSNorm (5)" in hooked
    assert "whole, not in tiles: LlamaMLP: up_proj has a hook, or a forward of its own (1)" in hooked


def auto_of(m, inner, tokens):
    mlp = torch.nn.Sequential(torch.nn.Linear(m, inner), torch.nn.ReLU(), torch.nn.Linear(inner, m))
    norm = torch.nn.LayerNorm(m)
    x = torch.empty(1, tokens, m)
    return [tiles._TiledModule("x", module, "auto", ()).tokens_for(x) for module in (norm, mlp)]


def test_auto_keeps_temporaries_of_a_tile_below_half_of_the_input():
    assert auto_of(8, 32, 2800) == [100, 58]  # 14 * 100 and 3 * 8 * 58 are about half of 2800
    assert auto_of(8, 32, 3) == [1, 1] and auto_of(8, 32, 0) == [1, 1]
