"""Compares transformers models on more ranks than heads, where ranks share query heads, with the whole sequence.

In fp64, on 2, 4 and 8 ranks: logits and every gradient on every rank.
"""

import functools
import importlib.util
import itertools
from unittest import mock

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_sp_overlap
from ds_sp_overlap.integrations.transformers import attention_function
from ds_sp_overlap.integrations.transformers.modules import stock_of
from tests.harness import flash
from tests.harness.cases import full, singles
from tests.harness.clients import train
from tests.harness.families import tiny_model
from tests.harness.guards import Watched, notices
from tests.harness.models import (
    EXACT,
    batches,
    cut,
    document_by_document,
    mean_loss,
    outcome,
    packed,
    sequence_parallel_model,
    tiny,
    train_run,
    with_sinks,
    worst,
)
from tests.harness.ranks import assert_error, assert_refused, assert_small, refusal
from tests.harness.reference import relative_error
from tests.harness.whole import against_whole

FP64 = 1e-12  # measured: below 1e-14, from roundings of 1e-16 over two layers
GPT_OSS = dict(family="gpt_oss", num_local_experts=2, num_experts_per_tok=1, sliding_window=5)
MODELS = {
    "llama": dict(heads=2, kv_heads=1),
    "three heads": dict(heads=3, kv_heads=3),
    "norms of q and k": dict(family="qwen3", heads=2),
    "a window": dict(family="mistral", heads=2, kv_heads=1, sliding_window=5),
    "one projection": dict(family="phi3", heads=3, kv_heads=1),
    "at its attention function": dict(family="bitnet", heads=2, kv_heads=1),
    "sinks": dict(**GPT_OSS, heads=2, kv_heads=1),
}
ROWS = {
    "one document": [[32], [32]],
    "packed": [[10, 22], [3, 13, 1, 15]],
    "short ones": [[1, 1, 2, 1, 3, 2, 5, 1, 8, 8], [4] * 8],
}
SECTIONS = {
    "layer": {},
    "a window of groups": {"window": 1},
    "kept": {"checkpointing": "keep"},
    "all heads everywhere": {"shares": "as many as ranks"},
}
CHECKPOINTING = {"no checkpoints": None, "reentrant": True, "not reentrant": False}


def made(checkpointing=None, **options):
    """Make a model in fp64; gpt_oss uses flash attention."""
    is_flash = options.get("family") == "gpt_oss"
    model = tiny(**EXACT, head_dim=8, implementation="eager" if is_flash else "sdpa", **options)
    if is_flash:
        with_sinks(model, flash.NAME)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.train()
    return model


CASES = [case for case in itertools.product(MODELS, ROWS, SECTIONS, CHECKPOINTING) if case[2:] != ("kept", "reentrant")]
PARTS = [(4, singles(CASES)[part::4]) for part in range(4)]  # a part takes less than a minute
PARTS += [full(2, CASES[part::24]) for part in range(0, 24, 3)] + [full(8, CASES[part::51]) for part in range(0, 51, 17)]


@pytest.mark.parametrize("size, cases", PARTS)
def test_models_on_more_ranks_than_heads_equal_the_whole_sequence(size, cases, rank):
    tokens, group = batches(1)[0], torch.distributed.group.WORLD
    with flash.flash_attention():
        for model, rows, section, checkpointing in cases:
            options, lengths = MODELS[model], ROWS[rows]
            whole = document_by_document(made(**options), tokens, lengths)
            mine = made(CHECKPOINTING[checkpointing], **options)
            shares = {"shares": size} if "shares" in SECTIONS[section] else {}
            report = ds_sp_overlap.enable(mine, {**SECTIONS[section], **shares, "on_unsupported": "error"}, group)
            found = outcome(mine, tokens, rank, size, group, packed(lengths))
            ds_sp_overlap.disable(mine)
            assert worst(found, whole) < FP64, (model, rows, section, checkpointing)
            assert " ranks share query heads" in report.layers[0].got or size == 2 and section != "all heads everywhere"


OTHERS = [
    ("deepseek_v3", dict(num_attention_heads=2, num_key_value_heads=2), [8] * 4, [{}]),
    (
        "olmo_hybrid",
        dict(num_attention_heads=2, num_key_value_heads=1, linear_num_value_heads=4, linear_num_key_heads=4),
        [8] * 4,
        [{}],
    ),
]


@pytest.mark.ranks(4)
def test_latents_travel_expanded_and_delta_nets_with_heads_enough_stand_beside_shares(rank):
    assert_small(against_whole(rank, tiny_model, OTHERS, ""), 1e-10)  # the delta rule adds many more roundings


# Training with DeepSpeed.


def trained(rank, size, stage, checkpointing, section, options):
    """Train; return the error of the gradients and of the loss in the first step.

    Every ``size`` ranks are a replica; gradients are averaged over replicas.
    """

    def prepare(model):
        if CHECKPOINTING[checkpointing] is not None:
            model.gradient_checkpointing_enable({"use_reentrant": CHECKPOINTING[checkpointing]})
        return model.train()

    options = dict(initializer_range=0.2, **options)
    run = train_run(rank, size, section, stage=stage, steps=2, prepare=prepare, **options)
    replicas, losses = torch.distributed.get_world_size() // size, []
    whole = tiny(**options)
    for replica in range(replicas):
        tokens = batches(2, seq=32 * (1 + replica), seed=5 + replica)[0]
        losses.append(mean_loss(whole, cut(tokens, 0, 1), None))
        (losses[-1] / replicas).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    error = max(relative_error(run.gradients[name], x) for name, x in expected.items())
    return error, abs(run.losses[0] / losses[rank // size].item() - 1)


@pytest.mark.parametrize(
    "stage, checkpointing", [(3, "not reentrant"), *(full(stage, way) for stage in range(3) for way in CHECKPOINTING)]
)
@pytest.mark.ranks(4)
def test_training_has_the_gradients_of_the_whole_sequence(stage, checkpointing, rank):
    """In fp32: sums in another order differ by 1e-6, and a mistake gives more than 1e-3. Stock is registered with two heads."""
    assert_small(trained(rank, 4, stage, checkpointing, {"head_groups": 1}, dict(heads=2, kv_heads=1)), 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.ranks(4)
def test_replicas_choose_together_and_average(stage, rank):
    """Checks two replicas of two ranks, with one head; the sequences of the second replica are twice as long."""
    options = dict(heads=1, kv_heads=1, hidden_size=16, head_dim=8)
    assert_small(trained(rank, 2, stage, "no checkpoints", {}, options), 1e-5)


# Numbers of heads that stock refuses.


REFUSED = {
    (4, 2, 1): "Attention head count 2 is not divisible by SP size 4",
    (2, 3, 3): "Attention head count 3 is not divisible by SP size 2",
    (2, 6, 3): "KV attention head count 3 is not divisible by SP size 2 or vice versa",
}


@pytest.mark.parametrize("size, heads, kv_heads", REFUSED)
def test_stock_is_registered_for_heads_that_it_refuses_and_says_so_where_nothing_is_overlapped(size, heads, kv_heads, rank):
    options, tokens = dict(heads=heads, kv_heads=kv_heads, **EXACT), batches(1)[0]
    whole = outcome(tiny(**options), tokens, 0, 1, None)
    with sequence_parallel_model(size, **options) as (model, group):
        before = refusal(outcome, model, tokens, rank, size, group)
        for section in ({}, {"head_groups": 1, "check": True}):
            ds_sp_overlap.enable(model, section)
            assert worst(outcome(model, tokens, rank, size, group), whole) < FP64
        ds_sp_overlap.disable(model)
        after = refusal(outcome, model, tokens, rank, size, group)
    for kind, message in (before, after):
        assert kind == "ValueError" and REFUSED[size, heads, kv_heads] in message and 'add "sp_overlap": {}' in message
    with sequence_parallel_model(size, implementation="flex_attention", **options) as (model, group):
        kind, message = refusal(ds_sp_overlap.enable, model, {}, group)  # here, DeepSpeed's exchanges would remain
    del ALL_ATTENTION_FUNCTIONS["flex_attention"]
    assert kind == "ValueError" and f"(LlamaAttention): {REFUSED[size, heads, kv_heads]}" in message


def test_other_refusals_of_stock_are_as_ever(rank):
    with sequence_parallel_model(2, heads=3, kv_heads=3) as (model, group):
        stock = stock_of(ALL_ATTENTION_FUNCTIONS["sdpa"])
    kinds = dict(
        attn=None, batch_size=1, attn_head_count=4, attn_head_size=8, num_hidden_layers=1, process_group=stock.process_group
    )
    assert (stock.attn_head_count, stock.global_kv_head_count) == (3, 3)
    assert refusal(type(stock), **kinds, kv_head_count=0)[0] == "ZeroDivisionError"


needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")


@pytest.mark.parametrize("client", ["Trainer", pytest.param("SFTTrainer", marks=[pytest.mark.full, needs_trl])])
def test_a_trainer_trains_with_fewer_heads_than_ranks_or_says_what_to_add(client, tmp_path, rank):
    options = dict(heads=1, kv_heads=1, hidden_size=16, head_dim=8, initializer_range=0.2)
    training = functools.partial(train, rank, client, model=functools.partial(tiny, **options))
    assert len(set(training({}, str(tmp_path / "on")).losses)) == 4
    assert_error(refusal(training, None, str(tmp_path / "off")), "Attention head count 1 is not divisible by SP size 2")


# Refusals.


SAID = {
    "delta net": "its delta rule needs all queries at once; use sp size 2 or less",
    "latents": "latent attention needs all queries at once",
    "ALiBi": "transformer.h.0.self_attention (BloomAttention, and 1 more) mixes tokens",
    "copy engines": '2 query heads are fewer than 4 ranks, so that 2 ranks would share query heads; but sp_overlap.transport "copy_engine"',
    "a 4-D mask": "not a 4-D mask",
    **dict.fromkeys(
        ("a bias", "a bias, bitnet"), "layers.0.self_attn: attention with position_bias (a mask for each head) can't be split"
    ),
    "my_flash": "2 query heads are fewer than 4 ranks, so that 2 ranks would share query heads; but model.layers.0.self_attn: "
    '"my_flash" is not known to take the last queries alone',
    "my_flash, asked": "sp_overlap.shares is 2, so that",
    "eager": 'attention "eager" needs a mask of the whole sequence',
    "top left": "flash-attn >= 2.1",
}


@pytest.mark.ranks(4)
def test_layers_that_cant_share_heads_are_refused_by_name_on_every_rank(rank):
    world = torch.distributed.group.WORLD
    delta_nets = dict(num_attention_heads=4, num_key_value_heads=4, linear_num_value_heads=2, linear_num_key_heads=2)
    latents = dict(num_attention_heads=8, num_key_value_heads=8)
    said = {
        "delta net": refusal(ds_sp_overlap.enable, tiny_model("olmo_hybrid", **delta_nets), {}, world),
        "latents": refusal(ds_sp_overlap.enable, tiny_model("deepseek_v3", **latents), {"shares": 2}, world),
        "ALiBi": refusal(ds_sp_overlap.enable, tiny_model("bloom", n_head=2), {}, world),
        "copy engines": refusal(ds_sp_overlap.enable, tiny(heads=2, kv_heads=1), {"transport": "copy_engine"}, world),
    }
    bias = dict(position_bias=torch.zeros(1))
    given = {"a 4-D mask": dict(attention_mask=torch.ones(2, 1, 8, 32, dtype=torch.bool)), "a bias": bias, "a bias, bitnet": bias}
    for what, argument in given.items():
        model, inputs = tiny("bitnet" if "bitnet" in what else "llama", heads=2, kv_heads=1), cut(batches(1)[0], rank, 4)
        ds_sp_overlap.enable(model, {}, world)
        said[what] = refusal(model, input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], **argument)
        ds_sp_overlap.disable(model)
    ALL_ATTENTION_FUNCTIONS["my_flash"] = lambda *args, **options: None
    for name, heads, section in (("my_flash", 2, {}), ("my_flash, asked", 4, {"shares": 2}), ("eager", 2, {})):
        model = tiny(heads=heads, kv_heads=1)
        model.config._attn_implementation = name.split(",")[0]
        said[name] = refusal(ds_sp_overlap.enable, model, section, world)
    with mock.patch.object(attention_function, "_aligns_top_left", lambda: True), flash.flash_attention():
        for name, heads in (("top left", 2), ("enough heads", 4)):
            model = tiny(heads=heads, kv_heads=1)
            model.config._attn_implementation = flash.NAME
            said[name] = refusal(ds_sp_overlap.enable, model, {}, world)
        ds_sp_overlap.disable(model)
    assert_refused(said, SAID)


def test_ranks_share_heads_under_autocast_with_weights_in_fp32(rank):
    """q and k are fp32, as RoPE's tables are, and v is bf16. Compares the errors of one rank, and of two that share heads."""
    tokens, group, errors = batches(1)[0], torch.distributed.group.WORLD, []
    whole = outcome(tiny(initializer_range=0.2), tokens, 0, 1, None)
    for size in (1, 2):
        model = tiny(initializer_range=0.2)
        if size > 1:
            ds_sp_overlap.enable(model, {"shares": 2}, group)
        with torch.autocast("cpu", torch.bfloat16):
            found = outcome(model, tokens, rank * (size > 1), size, group if size > 1 else None)
        ds_sp_overlap.disable(model)
        errors.append(worst(found, whole))
    alone, shared = errors
    assert 1e-4 < shared < 2 * alone


def unregistered(rank):
    with sequence_parallel_model(2, heads=3, kv_heads=3, **EXACT) as (model, group):
        return refusal(outcome, model, batches(1)[0], rank, 2, group)


test_the_suite_notices_without_the_guard = notices(
    Watched("no exchange of heads that don't divide", "if False:", unregistered, says="sp_overlap"),
    Watched("one dtype under autocast", "pass", test_ranks_share_heads_under_autocast_with_weights_in_fp32, raises=True),
)
