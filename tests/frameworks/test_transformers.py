"""transformers models under `UlyssesSPAttentionHF`, overlapped: against the model on the whole sequence, and stock.

The models are in fp64: what remains are roundings (1e-16) over two layers and sums in another order, seen below 1e-14.
RoPE's tables and the mean square in a norm are in fp32, token by token, alike on both sides. So FP64 leaves room for
four more digits; `test_the_tolerance_catches_a_fault` proves that it is tight enough.
"""

import contextlib
import copy
import inspect
import itertools
import re
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_sp_overlap
import ds_sp_overlap.integrations.transformers.layers as integration
from ds_sp_overlap.exchange.transport import C10d
from ds_sp_overlap.integrations.inspect.library import CACHES
from tests.harness import flash
from tests.harness.cases import everything, full
from tests.harness.clients import train_with_accelerate
from tests.harness.listening import listening
from tests.harness.models import (
    BATCH,
    BOTH,
    EXACT,
    FP64,
    assert_right_where_stock_is_wrong,
    batches,
    cut,
    errors_of,
    outcome,
    overlapped_layers,
    scaled_values,
    sequence_parallel_model,
    tiny,
    with_sinks,
    worst,
)  # fmt: skip
from tests.harness.ranks import assert_refused, on_ranks, refusal
from tests.harness.reference import relative_error

# Equality with the whole sequence, and with stock.


def of_cases(rank, size, cases):
    """Of each case: the errors of stock, and of one head group and of two where there are two heads."""
    return [errors_of(rank, options, BOTH[: options.get("heads", 4) // size], size) for options in cases]


FAMILY = [dict(family=family) for family in ("llama", "mistral", "qwen2", "qwen3", "phi3")]
HEADS = [dict(heads=8, kv_heads=kv_heads) for kv_heads in (8, 2, 1)]
FEW_KV_HEADS = [dict(heads=8, kv_heads=2, **family) for family in FAMILY]
BIASES = [dict(attention_bias=True), dict(family="qwen3", attention_bias=True)]


@pytest.mark.parametrize("size, cases", [(2, FAMILY + HEADS + BIASES), (4, FAMILY[:1] + FEW_KV_HEADS[:: 1 if everything() else 2])])
def test_logits_and_every_gradient_equal_the_whole_sequences_and_stocks(size, cases):
    """Sizes 2 and 4, so that there are KV heads fewer than ranks; one and two head groups where there are two heads."""
    for figures in on_ranks(size, of_cases, size, cases):
        for case, errors in zip(cases, figures, strict=True):
            assert len(errors) == (3 if case.get("heads", 4) // size > 1 else 2) and max(errors) < FP64, (case, errors)


def with_fault(rank, factor):
    tokens = batches(1)[0]
    whole = outcome(tiny(**EXACT), tokens, 0, 1, None)
    with sequence_parallel_model(2, **EXACT) as (model, group), scaled_values(factor):
        ds_sp_overlap.enable(model)
        return worst(outcome(model, tokens, rank, 2, group), whole)


def test_the_tolerance_catches_a_fault():
    assert all(error > 10 * FP64 for error in on_ranks(2, with_fault, 1 + 1e-7))
    assert all(error < FP64 for error in on_ranks(2, with_fault, 1.0))


WINDOWS = [
    dict(family="mistral", sliding_window=5),
    dict(family="phi3", sliding_window=20),
    dict(family="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    dict(family="qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    dict(family="starcoder2", sliding_window=5),
]


def test_a_sliding_window_is_that_of_the_whole_sequence_where_stock_has_none():
    """Windows shorter and longer than a local sequence of 16; the second of two layers only for qwen."""
    assert_right_where_stock_is_wrong(WINDOWS)


# The model is the same before and after.


def before_and_after(rank, family):
    """What `enable` and `disable` leave of a model."""
    with sequence_parallel_model(2, family=family) as (model, _):
        weights = copy.deepcopy(model.state_dict())

        def unchanged():
            state = model.state_dict()
            return list(state) == list(weights) and all(torch.equal(state[name], x) for name, x in weights.items())

        def found():
            forwards = [(set(vars(module)), module.forward) for module in model.modules()]
            return list(map(id, model.modules())), forwards, ALL_ATTENTION_FUNCTIONS["sdpa"], overlapped_layers(model)

        before = found()
        report = ds_sp_overlap.enable(model)
        while_on = unchanged() and found()[0] == before[0], found() == before, len(overlapped_layers(model)), len(report.layers)
        ds_sp_overlap.enable(model, {"head_groups": 1})  # twice is once
        again = len(overlapped_layers(model))
        ds_sp_overlap.disable(model)
        ds_sp_overlap.disable(model)
        return while_on, again, unchanged() and found() == before


@pytest.mark.parametrize("family", ["llama", "phi3", "bitnet"])
def test_enabling_adds_nothing_to_the_state_dict_and_disabling_restores_every_forward(family):
    for while_on, again, restored in on_ranks(2, before_and_after, family):
        assert while_on == (True, False, 2, 2) and again == 2 and restored


# Packed documents.


ROWS = {
    "the same in every row": [[10, 6, 16], [10, 6, 16]],
    "different from row to row": [[10, 22], [3, 13, 1, 15]],
    "one row is one document": [[32], [7, 25]],
    "cut where the ranks are cut in one row": [[16, 16], [12, 20]],
    "documents of one token": [[1, 1, 30], [30, 1, 1]],
}


@pytest.mark.parametrize("rows", ROWS)
def test_a_packed_document_sees_itself_alone_where_stock_lets_it_see_the_ones_before(rows):
    families = [*FAMILY[1:], dict(family="bitnet"), WINDOWS[0]] if rows == "different from row to row" else []
    assert_right_where_stock_is_wrong([{}, *families], ROWS[rows])


def context_parallel(rank):
    with sequence_parallel_model(2) as (model, group):
        _attach_context_parallel_hooks(model)  # as Accelerator.prepare does with cp_size
        return refusal(ds_sp_overlap.enable, model, {}, group), overlapped_layers(model)


def test_accelerates_context_parallelism_is_refused_by_name():
    for refused, bound in on_ranks(2, context_parallel):
        assert refused[0] == "ValueError" and "Accelerate's context parallelism (cp_size)" in refused[1] and bound == []


# What is handed down to attention besides.


def groups_beside_labels(rank):
    """Exchanges of q in a forward that gets the labels as Trainer passes them, [b, s/P] with b the query heads of a rank."""
    inputs, launched, launch = cut(batches(1)[0], rank, 2), [], C10d.launch

    def noting(*args):
        launched.append(args[-1])
        return launch(*args)

    with sequence_parallel_model(2, layers=1) as (model, _), mock.patch.object(C10d, "launch", noting):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        labels = inputs.pop("labels")
        model(**inputs, labels=labels, shift_labels=labels, use_cache=False)
    return [name.split()[1] for name in launched if name.split()[1].startswith("q")]


def test_labels_that_trainer_hands_down_are_not_taken_for_something_per_head():
    assert BATCH == 4 // 2, "batch and query heads of a rank are the same number"
    for exchanges in on_ranks(2, groups_beside_labels):
        assert len(exchanges) == 2, exchanges


# Accelerate.


def test_accelerates_deepspeed_backend_runs_overlapped_and_trains_like_stock():
    stock, overlapped = (on_ranks(2, train_with_accelerate, section) for section in (None, {"head_groups": 1}))
    for losses, same in zip(stock, overlapped):
        assert losses == same and len(set(losses)) == 4


def with_every_key(rank, value):
    return train_with_accelerate(rank, dict.fromkeys(ds_sp_overlap.SpOverlapConfig.model_fields, value), steps=1)


@pytest.mark.parametrize("value", ["auto", None])
def test_accelerate_passes_auto_and_null_on(value):
    """Accelerate fills in every "auto" of the config, and stops at one it doesn't know."""
    assert [len(losses) for losses in on_ranks(2, with_every_key, value)] == [1, 1]


# LoRA and frozen projections.


def with_lora(targets, seed=4):
    """Adapters on the named projections, none of them zero."""

    def prepare(model):
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        return adapted

    return prepare


def with_frozen(targets):
    def prepare(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(target in name for target in targets))
        return model

    return prepare


def reported(rank, kind, targets, family):
    """Errors of stock, and of one and two head groups; and what the reports say."""
    prepare, reports = {"lora": with_lora, "frozen": with_frozen}[kind](targets), []
    errors = errors_of(rank, dict(family=family), BOTH, prepare=prepare, reports=reports)
    return errors, {(layer.got.replace("G = 1", "G = 2"), layer.lacks) for report in reports for layer in report.layers}


ALL = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "v_proj"), full(("o_proj",)), full(ALL)], ids=",".join)
def test_lora_on_any_projection_equals_stock_and_the_report_says_which_are_called_whole(targets):
    for errors, said in on_ranks(2, reported, "lora", list(targets), "llama"):
        assert max(errors) < FP64, errors
        ((got, lacks),) = said
        assert got.startswith("all eight exchanges, G = 2")
        inputs = [name for name in ALL[:3] if set(ALL[:3]) & set(targets)]  # one of them called whole, all are
        whole = inputs + [name for name in targets if name == "o_proj"]
        assert lacks == "called whole: " + ", ".join(f"{name} ({'LoRA' if name in targets else 'Linear'})" for name in whole)
        for name in ALL:
            assert (name in got) == (name not in whole)


@pytest.mark.parametrize("targets", [("k_proj", "v_proj"), ("o_proj",), full(ALL), ("embed", "layers.0")], ids=",".join)
def test_frozen_projections_equal_stock(targets):
    """The last one leaves the first layer nothing to compute a gradient for."""
    for errors, said in on_ranks(2, reported, "frozen", list(targets), "llama"):
        assert max(errors) < FP64, errors
        assert {lacks for _, lacks in said} == {""}


def test_lora_on_a_fused_projection_equals_stock():
    for errors, said in on_ranks(2, reported, "lora", ["qkv_proj"], "phi3"):
        assert max(errors) < FP64, errors
        assert {lacks for _, lacks in said} == {"called whole: qkv_proj (LoRA)"}


def prompted(rank, kind):
    model = get_peft_model(tiny(), kind(task_type="CAUSAL_LM", num_virtual_tokens=2))
    return refusal(ds_sp_overlap.enable, model, {}, torch.distributed.group.WORLD)


@pytest.mark.parametrize("kind, name", [(PromptTuningConfig, "PROMPT_TUNING"), (PrefixTuningConfig, "PREFIX_TUNING")])
def test_prompts_that_are_learned_are_refused_by_the_name_of_the_method(kind, name):
    for error, message in on_ranks(2, prompted, kind):
        assert error == "ValueError" and f"PEFT's {name} puts virtual tokens" in message, message


# Layers that are not known by what their forward computes; roundings.


STRANGERS = [dict(family="bitnet"), dict(family="cohere", use_qk_norm=True), dict(family="stablelm", qk_layernorm=True)]


def under_autocast(rank, cases):
    """Of each case in bf16 by autocast: the error of the logits at two head groups, and one rank's own, against fp32."""
    tokens, figures = batches(1)[0], []
    inputs = [{key: x for key, x in cut(tokens, *where).items() if key != "labels"} for where in ((0, 1), (rank, 2))]
    for options in cases:
        with sequence_parallel_model(2, **options) as (model, group):
            report = ds_sp_overlap.enable(model, {"head_groups": 2}, group)
            assert "nobody looked whether tokens meet outside attention" in " ".join(str(report).split())
            with torch.autocast("cpu", torch.bfloat16):
                ours = model(**inputs[1], use_cache=False).logits.float()
            ds_sp_overlap.disable(model, stock_too=True)
            exact = model(**inputs[0], use_cache=False).logits
            with torch.autocast("cpu", torch.bfloat16):
                alone = model(**inputs[0], use_cache=False).logits.float()
            mine = [x.chunk(2, 1)[rank] for x in (exact, alone)]
            figures.append((relative_error(ours, mine[0]), relative_error(mine[1], mine[0])))
    return figures


def test_what_norms_leave_in_fp32_under_autocast_travels_as_attention_takes_it():
    for figures in on_ranks(2, under_autocast, STRANGERS):
        for options, (ours, alone) in zip(STRANGERS, figures, strict=True):
            assert 0 < ours < 2 * alone, (options, ours, alone)  # roundings in another order


ROUNDED = [
    dict(family="ernie4_5", head_dim=8),
    dict(family="cohere2"),
    dict(family="olmo2"),
    dict(family="glm4", head_dim=8),
    dict(family="gpt_neox", kv_heads=4),
]


def rounded(rank, cases):
    """Whether the logits in bf16 at one head group are stock's to the bit."""
    same = []
    for options in cases:
        with sequence_parallel_model(2, dtype=torch.bfloat16, **options) as (model, group):
            inputs = {key: x for key, x in cut(batches(1)[0], rank, 2).items() if key != "labels"}
            stock = model(**inputs, use_cache=False).logits
            report = ds_sp_overlap.enable(model, {"head_groups": 1}, group)
            assert "all eight exchanges" in " ".join(str(report).split())
            same.append(torch.equal(model(**inputs, use_cache=False).logits, stock))
    return same


def test_a_rotation_rounds_as_the_familys_own_does():
    for same in on_ranks(2, rounded, ROUNDED):
        assert same == [True] * len(ROUNDED)


FLASH = [
    dict(family="gpt_oss", num_local_experts=2, num_experts_per_tok=1),  # sinks
    dict(family="gemma2", query_pre_attn_scalar=10, attn_logit_softcapping=2.0),
]


def under_flash(rank, size, kv_heads, cases):
    """Errors of each case at one and two head groups, driven whole and at its attention function."""
    tokens, group, errors = batches(1)[0], torch.distributed.group.WORLD, {}

    def made(**options):
        sizes = dict(heads=8, kv_heads=kv_heads, head_dim=8, sliding_window=5)
        return with_sinks(tiny(**EXACT, **sizes, implementation="eager", **options), flash.NAME)

    with flash.flash_attention():
        for options in cases:
            whole, model = outcome(made(**options), tokens, 0, 1, None), made(**options)
            assert all(x.abs().min() > 1e-3 * x.abs().max() for name, x in whole.items() if name.endswith("sinks"))
            for unknown in (False, True):
                for head_groups in (1, 2):
                    reading = mock.patch.object(integration, "Reader", side_effect=integration.Unknown("not known"))
                    with reading if unknown else contextlib.nullcontext():
                        report = ds_sp_overlap.enable(model, {"head_groups": head_groups}, group)
                    assert ("attention function" in " ".join(str(report).split())) == unknown
                    errors[options["family"], unknown, head_groups] = worst(outcome(model, tokens, rank, size, group), whole)
                    ds_sp_overlap.disable(model)
    return errors


@pytest.mark.parametrize("size, kv_heads", [(2, 4), full(4, 2)])
def test_sinks_and_capped_scores_are_those_of_the_ranks_heads(size, kv_heads):
    """Eight query heads; the gradient of each sink comes from the one rank that has its head."""
    for errors in on_ranks(size, under_flash, size, kv_heads, FLASH):
        assert len(errors) == 8 and max(errors.values()) < 1e-6, errors  # both rotate or norm in fp32


# Evaluation and generation.


def evaluations(rank, disable_in_eval, family):
    """Errors of logits in eval mode, with gradients, without, and in inference mode; against the whole sequence."""
    tokens = batches(1)[0]
    whole = tiny(family=family, **EXACT)(input_ids=tokens, use_cache=False).logits.chunk(2, 1)[rank].detach()
    alone = tiny(family=family, **EXACT)(**{k: x for k, x in cut(tokens, rank, 2).items() if k != "labels"}, use_cache=False)
    errors = {}
    with sequence_parallel_model(2, family=family, stock={"disable_in_eval": disable_in_eval}, **EXACT) as (model, _):
        ds_sp_overlap.enable(model)
        modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        for (what, mode), training in itertools.product(modes.items(), (True, False)):
            model.train(training)
            with mode():
                inputs = cut(tokens, rank, 2)
                logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
            expected = alone.logits if disable_in_eval and not training else whole
            errors[what, training] = relative_error(logits.detach(), expected.detach())
    return errors, relative_error(alone.logits.detach(), whole)


@pytest.mark.singles
@pytest.mark.parametrize("family", ["llama", "bitnet"])
@pytest.mark.parametrize("disable_in_eval", [False, True])
def test_evaluation_is_parallel_unless_stock_was_told_to_leave_it_alone(disable_in_eval, family):
    """With ``disable_in_eval`` each rank runs its own batch in eval mode, here its slice."""
    for rank, (errors, apart) in enumerate(on_ranks(2, evaluations, disable_in_eval, family)):
        assert len(errors) == 6
        assert all(error < FP64 for error in errors.values()), errors
        assert apart > 1e-3 or rank == 0, "the two are told apart, but for the first slice, which is causal"


def generating(rank, family):
    """What a step with a filled cache says, and what the first step, which only fills it, gives."""
    tokens = batches(1)[0]
    whole = tiny(family=family, **EXACT)(input_ids=tokens, use_cache=False).logits.chunk(2, 1)[rank].detach()
    with sequence_parallel_model(2, family=family, **EXACT) as (model, _), torch.no_grad():
        ds_sp_overlap.enable(model)
        inputs = cut(tokens, rank, 2)
        del inputs["labels"]
        filled = DynamicCache(config=model.config)
        for layer in range(2):
            filled.update(*torch.zeros(2, BATCH, 2, 3, 8, dtype=torch.float64), layer)
        said = refusal(model, **inputs, past_key_values=filled, use_cache=True)
        takes = inspect.signature(type(model.model).forward).parameters
        for old_or_new in {
            "past_key_values",
            CACHES[0] if CACHES[0] in takes else "past_key_values",
        }:  # from 5.24 on, of the one inside
            for used in (filled, ((torch.zeros(1),),)):  # or a tuple, of which nobody knows how long it is
                again = refusal(model.model, **inputs, **{old_or_new: used})
                assert again[1].split(": ", 1)[1] == said[1].split(": ", 1)[1], old_or_new
        empty = DynamicCache(config=model.config)
        options = {"use_cache": True}, {"use_cache": True, "past_key_values": empty}
        error = max(relative_error(model(**inputs, **each).logits, whole) for each in options)
        assert refusal(model, **inputs, **options[1]) == said, "the cache is of a step before"
        prompt = dict(input_ids=tokens[:1, :8], attention_mask=torch.ones(1, 8, dtype=torch.long), max_new_tokens=2)
        assert refusal(model.generate, **prompt)[1].split(": ", 1)[1] == said[1].split(": ", 1)[1]
        ds_sp_overlap.disable(model)
        return said, error


def test_decoding_from_a_filled_cache_is_refused_and_a_cache_that_is_empty_is_not():
    for said, error in on_ranks(2, generating, "llama"):
        assert said is not None and said[0] == "RuntimeError"
        assert "generation with a KV cache does not work" in said[1] and "ds_sp_overlap.disable(model, stock_too=True)" in said[1]
        assert error < FP64


def generating_after(rank, family):
    """Generation after `disable` alone; after it with stock taken out too, against a model that nobody registered; and gradients after
    it was enabled again, against those before; and those of another model, which stays overlapped."""
    tokens = batches(1)[0]
    prompt = dict(input_ids=tokens[:1, :8], attention_mask=torch.ones(1, 8, dtype=torch.long), max_new_tokens=4, do_sample=False)
    expected = tiny(family=family, **EXACT).generate(**prompt)
    with sequence_parallel_model(2, family=family, **EXACT) as (model, group):
        other = tiny(family=family, seed=1, **EXACT)
        ds_sp_overlap.enable(model)
        ds_sp_overlap.enable(other)
        before, of_other = outcome(model, tokens, rank, 2, group), outcome(other, tokens, rank, 2, group)
        ds_sp_overlap.disable(model)
        alone = refusal(model.generate, **prompt)
        ds_sp_overlap.disable(model, stock_too=True)
        same = torch.equal(model.generate(**prompt), expected)
        left = worst(outcome(other, tokens, rank, 2, group), of_other)
        ds_sp_overlap.enable(model, {}, group)
        again = worst(outcome(model, tokens, rank, 2, group), before)
        ds_sp_overlap.disable(other)
        return alone, same, again, left


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_disable_with_stock_too_leaves_a_model_that_generates(family):
    """After `disable` alone stock's function stays, which is right for training without the overlap, and can't generate."""
    for alone, same, again, left in on_ranks(2, generating_after, family):
        assert alone is not None and alone[0] == "AssertionError"
        assert same and again < FP64 and left < FP64


# Positions that are missing or local.


def positions_said(rank):
    """What is said where position_ids are missing in a layer's call and in the model's, on all ranks and on one."""
    said = {}
    with sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model)
        inputs = cut(batches(1)[0], rank, 2)
        ids, positions = inputs["input_ids"], inputs["position_ids"]
        layer = model.model.layers[0].self_attn
        hidden = torch.zeros(BATCH, 16, 32)
        tables = model.model.rotary_emb(hidden, positions)
        said["layer"] = refusal(layer, hidden, position_embeddings=tables)
        said["model"] = refusal(model, input_ids=ids, use_cache=False)
        said["one rank"] = refusal(model, input_ids=ids, position_ids=positions if rank else None, use_cache=False)
        said["inner model"] = refusal(model.model, input_ids=ids, use_cache=False)
        said["axes"] = refusal(model, input_ids=ids, position_ids=positions[0], use_cache=False)
        said["two axes"] = refusal(model, input_ids=ids, position_ids=positions.expand(2, -1, -1), use_cache=False)
        said["no dims"] = refusal(model, input_ids=ids, position_ids=positions if rank else positions[0, 0], use_cache=False)
        said["no batch"] = refusal(model, input_ids=ids if rank else ids[0], position_ids=positions, use_cache=False)
        said["length"] = refusal(model, input_ids=ids, position_ids=positions[:, : 8 + 8 * rank], use_cache=False)
        said["fine"] = refusal(model, input_ids=ids, position_ids=positions, use_cache=False)
    return said


NEEDED = "sequence parallelism needs position_ids in every forward: those of the whole sequence, cut over the ranks like input_ids"
POSITIONS = {
    "layer": f"model.layers.0.self_attn: {NEEDED}",
    "model": f"LlamaForCausalLM: {NEEDED}",
    "one rank": f"LlamaForCausalLM: sp rank 0: {NEEDED}",
    "inner model": f"model: {NEEDED}",
    "axes": "LlamaForCausalLM: position_ids must be [b, s/P]; or [axes, b, s/P] with 3 axes",
    "two axes": "LlamaForCausalLM: position_ids must be [b, s/P]; or [axes, b, s/P] with 3 axes",
    "no dims": "LlamaForCausalLM: sp rank 0: position_ids must be [b, s/P]",
    "no batch": "LlamaForCausalLM: sp rank 0: position_ids and input_ids differ in batch or length",
    "length": "LlamaForCausalLM: sp rank 0: position_ids and input_ids differ in batch or length",
}


def test_missing_and_misshapen_position_ids_are_refused_on_every_rank():
    assert_refused(2, POSITIONS, positions_said)


def restarting(rank, section):
    """What is said of positions that start anew on every rank, first and after others."""
    with sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, section)
        ids = cut(batches(1)[0], rank, 2)["input_ids"]
        local, whole = torch.arange(16).expand(BATCH, -1), torch.arange(16 * rank, 16 * rank + 16).expand(BATCH, -1)
        return [refusal(model, input_ids=ids, position_ids=positions, use_cache=False) for positions in (local, whole, local)]


def test_position_ids_that_count_each_ranks_tokens_are_refused_unless_documents_may_begin_so():
    """Documents that end with every rank by chance, behind a forward in which they did not, are no reason to stop."""
    for first, whole, later in on_ranks(2, restarting, {}):
        assert first[0] == "ValueError" and "position_ids start anew on every rank" in first[1]
        assert 'set sp_overlap.documents to "per_rank"' in first[1]
        assert whole is None and later is None
    assert on_ranks(2, restarting, {"documents": "per_rank"}) == [[None] * 3] * 2


# Nothing to do, and bad input.


def at_size_one(rank):
    """Reports of enabling two models over a group of one, and what was said."""
    groups = [torch.distributed.new_group([r]) for r in range(2)]
    models = [tiny(), tiny(seed=1)]
    with listening() as messages:
        reports = [str(ds_sp_overlap.enable(model, {"head_groups": 2}, groups[rank])) for model in models]
    return reports, messages, [overlapped_layers(model) for model in models]


def test_sp_size_one_is_a_no_op_that_is_said_once():
    for reports, messages, bound in on_ranks(2, at_size_one):
        assert reports == ["sp_overlap: nothing to do at sp size 1"] * 2
        assert len(messages) == 1 and "sequence-parallel size is 1" in messages[0]
        assert bound == [[], []]


class Peculiar(torch.nn.Module):
    """An MLP: no attention in it."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)


def bad_input(rank):
    """What `enable` says to each fault, behind which it leaves nothing."""
    world = torch.distributed.group.WORLD
    faults = {
        "no group, no transformers": (Peculiar(), {}, None),
        "no attention": (Peculiar(), {}, world),
        "meta": (tiny().to("meta"), {}, world),
        "one rank wrong": (tiny(), {"head_groups": 2 + rank}, world),
        "layers differ": (tiny(layers=2 + rank), {}, world),
    }
    said = {}
    for fault, (model, section, group) in faults.items():
        before = [set(vars(module)) for module in model.modules()]
        said[fault] = refusal(ds_sp_overlap.enable, model, section, group)
        assert [set(vars(module)) for module in model.modules()] == before and not overlapped_layers(model), f"{fault}: changed"
    return said


BAD = {
    "no group, no transformers": "no DistributedAttention in Peculiar that was made with one; give its Distributed",
    "no attention": "no attention layer found in Peculiar",
    "meta": "model.layers.0.self_attn is on the meta device (2 of 2 layers); load the weights first",
    "one rank wrong": "sp rank 1: sp_overlap.head_groups must be between 1 and 2 for 4 heads at sp size 2, got 3",
    "layers differ": "the ranks of the sp group are about to exchange different things",
}


def test_bad_input_is_a_clear_error_on_every_rank_and_changes_nothing():
    assert_refused(2, BAD, bad_input)


def way_of_the_first_exchange(rank):
    """Modules of the package from a layer's forward to the transport, outermost first."""
    package, ways, launch = Path(ds_sp_overlap.__file__).parent, [], C10d.launch

    def recorded(self, *args):
        files = [Path(frame.filename) for frame in traceback.extract_stack()] + [Path(inspect.getfile(C10d))]
        inside = [file.relative_to(package).with_suffix("") for file in files if file.is_relative_to(package)]
        ways.append([module for module, _ in itertools.groupby(".".join(file.parts) for file in inside)])
        return launch(self, *args)

    with sequence_parallel_model(2) as (model, _), mock.patch.object(C10d, "launch", recorded):
        ds_sp_overlap.enable(model, {"head_groups": 1})
        inputs = cut(batches(1)[0], rank, 2)
        inputs.pop("labels")
        model(**inputs, use_cache=False)
    rebound = max(at for at, module in enumerate(ways[0]) if module == "integrations.rebinding")  # of models around the layer too
    return ways[0][rebound:]


def test_the_way_of_a_query_to_the_wire_enters_no_file_twice_and_is_the_one_that_the_package_describes():
    described = ds_sp_overlap.__doc__.split("The way of a query")[1].split("\n\n")[0]
    for way in on_ranks(2, way_of_the_first_exchange):
        assert way == re.findall(r"``([a-z]+\.[a-z_.]+)``", described)
        assert len(way) == len(set(way)) <= 10
