"""Compares transformers models under `UlyssesSPAttentionHF`, overlapped, with the model on the whole sequence, and with stock.

The models are in fp64. Roundings (1e-16) of sums in another order, over two layers, give differences below 1e-14. RoPE's tables and
the mean square of a norm are in fp32, but equal on both sides. The tolerance `FP64` is far above these differences;
`test_the_tolerance_catches_a_fault` proves that it is tight enough.
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
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
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
from tests.harness.ranks import assert_error, assert_refused, assert_small, refusal
from tests.harness.reference import relative_error
from tests.harness.whole import adapted

# Equality with the whole sequence, and with stock.


FAMILY = [dict(family=family) for family in ("llama", "mistral", "qwen2", "qwen3", "phi3")]
HEADS = [dict(heads=8, kv_heads=kv_heads) for kv_heads in (8, 2, 1)]
FEW_KV_HEADS = [dict(heads=8, kv_heads=2, **family) for family in FAMILY]
BIASES = [dict(attention_bias=True), dict(family="qwen3", attention_bias=True)]


@pytest.mark.parametrize("size, cases", [(2, FAMILY + HEADS + BIASES), (4, FAMILY[:1] + FEW_KV_HEADS[:: 1 if everything() else 2])])
def test_logits_and_every_gradient_equal_the_whole_sequences_and_stocks(size, cases, rank):
    """With size 4, there are fewer KV heads than ranks. Two head groups need two heads on a rank; else only one is tested."""
    for options in cases:
        assert max(errors_of(rank, options, BOTH[: options.get("heads", 4) // size], size)) < FP64, options


def test_the_tolerance_catches_a_fault(rank):
    tokens = batches(1)[0]
    whole = outcome(tiny(**EXACT), tokens, 0, 1, None)
    with sequence_parallel_model(2, **EXACT) as (model, group), scaled_values(1 + 1e-7):
        ds_sp_overlap.enable(model)
        assert worst(outcome(model, tokens, rank, 2, group), whole) > 10 * FP64


WINDOWS = [
    dict(family="mistral", sliding_window=5),
    dict(family="phi3", sliding_window=20),
    dict(family="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    dict(family="qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    dict(family="starcoder2", sliding_window=5),
]


def test_a_sliding_window_is_that_of_the_whole_sequence_where_stock_has_none():
    """Checks windows shorter and longer than a local sequence of 16; in qwen, only the second of two layers has a window."""
    assert_right_where_stock_is_wrong(WINDOWS)


# The model before `enable` and after `disable`.


@pytest.mark.parametrize("family", ["llama", "phi3", "bitnet"])
def test_enabling_adds_nothing_to_the_state_dict_and_disabling_restores_every_forward(family, rank):
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
        assert unchanged() and found()[0] == before[0] and found() != before
        assert len(overlapped_layers(model)) == len(report.layers) == 2
        ds_sp_overlap.enable(model, {"head_groups": 1})  # a second call replaces the first
        assert len(overlapped_layers(model)) == 2
        ds_sp_overlap.disable(model)
        ds_sp_overlap.disable(model)
        assert unchanged() and found() == before


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


def test_accelerates_context_parallelism_is_refused_by_name(rank):
    with sequence_parallel_model(2) as (model, group):
        _attach_context_parallel_hooks(model)  # as Accelerator.prepare does with cp_size
        kind, message = refusal(ds_sp_overlap.enable, model, {}, group)
        assert kind == "ValueError" and "Accelerate's context parallelism (cp_size)" in message and overlapped_layers(model) == []


# Further arguments that reach attention.


def test_labels_that_trainer_hands_down_are_not_taken_for_something_per_head(rank):
    """Trainer passes labels [b, s/P]. Here b is also the number of query heads of a rank; q must still be sent in two exchanges."""
    assert BATCH == 4 // 2, "batch and query heads of a rank are the same number"
    inputs, launched, launch = cut(batches(1)[0], rank, 2), [], C10d.launch

    def noting(*args):
        launched.append(args[-1].split()[1])
        return launch(*args)

    with sequence_parallel_model(2, layers=1) as (model, _), mock.patch.object(C10d, "launch", noting):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        labels = inputs.pop("labels")
        model(**inputs, labels=labels, shift_labels=labels, use_cache=False)
    assert [name for name in launched if name.startswith("q")] == ["q0", "q1"]


# Accelerate.


def test_accelerates_deepspeed_backend_runs_overlapped_and_trains_like_stock(rank):
    losses, same = (train_with_accelerate(rank, section) for section in (None, {"head_groups": 1}))
    assert losses == same and len(losses) > 2 and losses[-1] != losses[0]


@pytest.mark.parametrize("value", ["auto", None])
def test_accelerate_passes_auto_and_null_on(value, rank):
    """Accelerate fills in every "auto" of the config, and would raise for an "auto" that it doesn't know."""
    losses = train_with_accelerate(rank, dict.fromkeys(ds_sp_overlap.SpOverlapConfig.model_fields, value), steps=1)
    assert len(losses) == 1


# LoRA and frozen projections.


def with_frozen(targets):
    def prepare(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(target in name for target in targets))
        return model

    return prepare


def reported(rank, prepare, **options):
    """Assert that the model ``prepare(model)`` is right under stock, and with one and two head groups.

    Returns what the reports say about layers: pairs (overlapped parts, reasons why not more).
    """
    errors = errors_of(rank, options, BOTH, prepare=prepare, reports=(reports := []))
    assert_small(errors, FP64)
    return {(layer.got.replace("G = 1", "G = 2"), layer.lacks) for report in reports for layer in report.layers}


ALL = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("targets", [("q_proj",), ("q_proj", "v_proj"), full(("o_proj",)), full(ALL)], ids=",".join)
def test_lora_on_any_projection_equals_stock_and_the_report_says_which_are_called_whole(targets, rank):
    ((got, lacks),) = reported(rank, lambda model: adapted(model, *targets))
    assert got.startswith("all eight exchanges, G = 2")
    inputs = [name for name in ALL[:3] if set(ALL[:3]) & set(targets)]  # if one is called whole, all three are
    whole = inputs + [name for name in targets if name == "o_proj"]
    assert lacks == "called whole: " + ", ".join(f"{name} ({'LoRA' if name in targets else 'Linear'})" for name in whole)
    for name in ALL:
        assert (name in got) == (name not in whole)


@pytest.mark.parametrize("targets", [("k_proj", "v_proj"), ("o_proj",), full(ALL), ("embed", "layers.0")], ids=",".join)
def test_frozen_projections_equal_stock(targets, rank):
    """In the last case, the first layer computes no gradient at all."""
    assert {lacks for _, lacks in reported(rank, with_frozen(targets))} == {""}


def test_lora_on_a_fused_projection_equals_stock(rank):
    said = reported(rank, lambda model: adapted(model, "qkv_proj"), family="phi3")
    assert {lacks for _, lacks in said} == {"called whole: qkv_proj (LoRA)"}


@pytest.mark.parametrize("kind, name", [(PromptTuningConfig, "PROMPT_TUNING"), (PrefixTuningConfig, "PREFIX_TUNING")])
def test_prompts_that_are_learned_are_refused_by_the_name_of_the_method(kind, name, rank):
    model = get_peft_model(tiny(), kind(task_type="CAUSAL_LM", num_virtual_tokens=2))
    error, message = refusal(ds_sp_overlap.enable, model, {}, torch.distributed.group.WORLD)
    assert error == "ValueError" and f"PEFT's {name} puts virtual tokens" in message, message


# Layers whose forward the package does not know; roundings.


STRANGERS = [dict(family="bitnet"), dict(family="cohere", use_qk_norm=True), dict(family="stablelm", qk_layernorm=True)]


def test_what_norms_leave_in_fp32_under_autocast_travels_as_attention_takes_it(rank):
    tokens = batches(1)[0]
    inputs = [{key: x for key, x in cut(tokens, *where).items() if key != "labels"} for where in ((0, 1), (rank, 2))]
    for options in STRANGERS:
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
            assert 0 < relative_error(ours, mine[0]) < 2 * relative_error(mine[1], mine[0]), options  # roundings in another order


ROUNDED = [
    dict(family="ernie4_5", head_dim=8),
    dict(family="cohere2"),
    dict(family="olmo2"),
    dict(family="glm4", head_dim=8),
    dict(family="gpt_neox", kv_heads=4),
]


def test_a_rotation_rounds_as_the_familys_own_does(rank):
    for options in ROUNDED:
        with sequence_parallel_model(2, dtype=torch.bfloat16, **options) as (model, group):
            inputs = {key: x for key, x in cut(batches(1)[0], rank, 2).items() if key != "labels"}
            stock = model(**inputs, use_cache=False).logits
            report = ds_sp_overlap.enable(model, {"head_groups": 1}, group)
            assert "all eight exchanges" in " ".join(str(report).split())
            assert torch.equal(model(**inputs, use_cache=False).logits, stock), options


FLASH = [
    dict(family="gpt_oss", num_local_experts=2, num_experts_per_tok=1),  # sinks
    dict(family="gemma2", query_pre_attn_scalar=10, attn_logit_softcapping=2.0),
]


@pytest.mark.parametrize("size, kv_heads", [(2, 4), full(4, 2)])
def test_sinks_and_capped_scores_are_those_of_the_ranks_heads(size, kv_heads, rank):
    """With eight query heads, each sink gets its gradient on the rank that has the sink's head."""
    tokens, group = batches(1)[0], torch.distributed.group.WORLD

    def made(**options):
        sizes = dict(heads=8, kv_heads=kv_heads, head_dim=8, sliding_window=5)
        return with_sinks(tiny(**EXACT, **sizes, implementation="eager", **options), flash.NAME)

    with flash.flash_attention():
        for options in FLASH:
            whole, model = outcome(made(**options), tokens, 0, 1, None), made(**options)
            assert all(x.abs().min() > 1e-3 * x.abs().max() for name, x in whole.items() if name.endswith("sinks"))
            for unknown, head_groups in itertools.product((False, True), (1, 2)):
                reading = mock.patch.object(integration, "Reader", side_effect=integration.Unknown("not known"))
                with reading if unknown else contextlib.nullcontext():
                    report = ds_sp_overlap.enable(model, {"head_groups": head_groups}, group)
                assert ("attention function" in " ".join(str(report).split())) == unknown
                error = worst(outcome(model, tokens, rank, size, group), whole)
                assert error < 1e-6, (options, unknown, head_groups)  # both families rotate or normalise in fp32
                ds_sp_overlap.disable(model)


# Evaluation and generation.


@pytest.mark.singles
@pytest.mark.parametrize("family", ["llama", "bitnet"])
@pytest.mark.parametrize("disable_in_eval", [False, True])
def test_evaluation_is_parallel_unless_stock_was_told_to_leave_it_alone(disable_in_eval, family, rank):
    """With ``disable_in_eval``, each rank runs its own batch in eval mode; in this test, the batch is the rank's slice."""
    tokens, stock = batches(1)[0], {"disable_in_eval": disable_in_eval}
    inputs = {key: x for key, x in cut(tokens, rank, 2).items() if key != "labels"}
    whole = tiny(family=family, **EXACT)(input_ids=tokens, use_cache=False).logits.chunk(2, 1)[rank].detach()
    alone = tiny(family=family, **EXACT)(**inputs, use_cache=False).logits.detach()
    assert relative_error(alone, whole) > 1e-3 or rank == 0, "the two are told apart, but for the first slice, which is causal"
    with sequence_parallel_model(2, family=family, stock=stock, **EXACT) as (model, _):
        ds_sp_overlap.enable(model)
        for mode, training in itertools.product((torch.enable_grad, torch.no_grad, torch.inference_mode), (True, False)):
            with mode():
                logits = model.train(training)(**inputs, use_cache=False).logits.detach()
            assert relative_error(logits, alone if disable_in_eval and not training else whole) < FP64, (mode, training)


def test_decoding_from_a_filled_cache_is_refused_and_a_cache_that_is_empty_is_not(rank):
    tokens = batches(1)[0]
    whole = tiny(**EXACT)(input_ids=tokens, use_cache=False).logits.chunk(2, 1)[rank].detach()
    with sequence_parallel_model(2, **EXACT) as (model, _), torch.no_grad():
        ds_sp_overlap.enable(model)
        inputs = cut(tokens, rank, 2)
        del inputs["labels"]
        filled = DynamicCache(config=model.config)
        for layer in range(2):
            filled.update(*torch.zeros(2, BATCH, 2, 3, 8, dtype=torch.float64), layer)
        said = refusal(model, **inputs, past_key_values=filled, use_cache=True)
        assert said[0] == "RuntimeError" and "generation with a KV cache does not work" in said[1]
        assert "ds_sp_overlap.disable(model, stock_too=True)" in said[1]
        takes = inspect.signature(type(model.model).forward).parameters
        for old_or_new in {"past_key_values", *CACHES[:1]} & takes.keys():  # the argument's name in the inner model, since 5.24
            for used in (filled, ((torch.zeros(1),),)):  # a cache, or a tuple of unknown length
                again = refusal(model.model, **inputs, **{old_or_new: used})
                assert again[1].split(": ", 1)[1] == said[1].split(": ", 1)[1], old_or_new
        empty = DynamicCache(config=model.config)
        options = {"use_cache": True}, {"use_cache": True, "past_key_values": empty}
        assert max(relative_error(model(**inputs, **each).logits, whole) for each in options) < FP64
        assert refusal(model, **inputs, **options[1]) == said, "the cache is of a step before"
        prompt = dict(input_ids=tokens[:1, :8], attention_mask=torch.ones(1, 8, dtype=torch.long), max_new_tokens=2)
        assert refusal(model.generate, **prompt)[1].split(": ", 1)[1] == said[1].split(": ", 1)[1]
        ds_sp_overlap.disable(model)


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_disable_with_stock_too_leaves_a_model_that_generates(family, rank):
    """After `disable` without ``stock_too``, stock's attention function stays: it can train, but it can't generate."""
    tokens = batches(1)[0]
    prompt = dict(input_ids=tokens[:1, :8], attention_mask=torch.ones(1, 8, dtype=torch.long), max_new_tokens=4, do_sample=False)
    expected = tiny(family=family, **EXACT).generate(**prompt)
    with sequence_parallel_model(2, family=family, **EXACT) as (model, group):
        other = tiny(family=family, seed=1, **EXACT)
        ds_sp_overlap.enable(model)
        ds_sp_overlap.enable(other)
        before, of_other = outcome(model, tokens, rank, 2, group), outcome(other, tokens, rank, 2, group)
        ds_sp_overlap.disable(model)
        assert refusal(model.generate, **prompt)[0] == "AssertionError"
        ds_sp_overlap.disable(model, stock_too=True)
        assert torch.equal(model.generate(**prompt), expected)
        assert worst(outcome(other, tokens, rank, 2, group), of_other) < FP64
        ds_sp_overlap.enable(model, {}, group)
        assert worst(outcome(model, tokens, rank, 2, group), before) < FP64
        ds_sp_overlap.disable(other)


# Missing positions, and positions that count local tokens.


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


def test_missing_and_misshapen_position_ids_are_refused_on_every_rank(rank):
    with sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model)
        inputs = cut(batches(1)[0], rank, 2)
        ids, positions = inputs["input_ids"], inputs["position_ids"]
        given = {
            "model": (ids, None),
            "one rank": (ids, positions if rank else None),
            "axes": (ids, positions[0]),
            "two axes": (ids, positions.expand(2, -1, -1)),
            "no dims": (ids, positions if rank else positions[0, 0]),
            "no batch": (ids if rank else ids[0], positions),
            "length": (ids, positions[:, : 8 + 8 * rank]),
            "fine": (ids, positions),
        }
        said = {name: refusal(model, input_ids=x, position_ids=at, use_cache=False) for name, (x, at) in given.items()}
        said["inner model"] = refusal(model.model, input_ids=ids, use_cache=False)
        hidden = torch.zeros(BATCH, 16, 32)
        tables = model.model.rotary_emb(hidden, positions)
        said["layer"] = refusal(model.model.layers[0].self_attn, hidden, position_embeddings=tables)
    assert_refused(said, POSITIONS)


@pytest.mark.parametrize("section", [{}, {"documents": "per_rank"}], ids=str)
def test_position_ids_that_count_each_ranks_tokens_are_refused_unless_documents_may_begin_so(section, rank):
    """If documents end with every rank by chance, after a forward in which they did not, nothing is refused."""
    with sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, section)
        ids = cut(batches(1)[0], rank, 2)["input_ids"]
        local, whole = torch.arange(16).expand(BATCH, -1), torch.arange(16 * rank, 16 * rank + 16).expand(BATCH, -1)
        first, *later = (refusal(model, input_ids=ids, position_ids=at, use_cache=False) for at in (local, whole, local))
    assert later == [None, None]
    if section:
        assert first is None
    else:
        assert_error(first, "position_ids start anew on every rank")
        assert_error(first, 'set sp_overlap.documents to "per_rank"')


# Models without attention, and bad input.


def test_sp_size_one_is_a_no_op_that_is_said_once(rank):
    groups = [torch.distributed.new_group([r]) for r in range(2)]
    models = [tiny(), tiny(seed=1)]
    with listening() as messages:
        reports = [str(ds_sp_overlap.enable(model, {"head_groups": 2}, groups[rank])) for model in models]
    assert reports == ["sp_overlap: nothing to do at sp size 1"] * 2
    assert len(messages) == 1 and "sequence-parallel size is 1" in messages[0]
    assert [overlapped_layers(model) for model in models] == [[], []]


class Peculiar(torch.nn.Module):
    """A model without attention."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)


BAD = {
    "no group, no transformers": "no DistributedAttention in Peculiar that was made with one; give its Distributed",
    "no attention": "no attention layer found in Peculiar",
    "meta": "model.layers.0.self_attn is on the meta device (2 of 2 layers); load the weights first",
    "one rank wrong": "sp rank 1: sp_overlap.head_groups must be between 1 and 2 for 4 heads at sp size 2, got 3",
    "layers differ": "the ranks of the sp group are about to exchange different things",
}


def test_bad_input_is_a_clear_error_on_every_rank_and_changes_nothing(rank):
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
    assert_refused(said, BAD)


def test_the_way_of_a_query_to_the_wire_is_short_and_the_one_that_the_package_describes(rank):
    """Compares the package's modules on the stack at the first exchange, outermost first, with the package's docstring."""
    package, ways, launch = Path(ds_sp_overlap.__file__).parent, [], C10d.launch

    def recorded(self, *args):
        files = [Path(frame.filename) for frame in traceback.extract_stack()] + [Path(inspect.getfile(C10d))]
        inside = [file.relative_to(package).with_suffix("") for file in files if file.is_relative_to(package)]
        ways.append([module for module, _ in itertools.groupby(".".join(file.parts) for file in inside)])
        return launch(self, *args)

    with sequence_parallel_model(2) as (model, _), mock.patch.object(C10d, "launch", recorded):
        ds_sp_overlap.enable(model, {"head_groups": 1})
        inputs = cut(batches(1)[0], rank, 2)
        model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False)
    rebound = max(at for at, module in enumerate(ways[0]) if module == "integrations.rebinding")  # models are rebound, too
    way = ways[0][rebound:]
    described = ds_sp_overlap.__doc__.split("The way of a query")[1].split("\n\n")[0]
    assert way == re.findall(r"``([a-z]+\.[a-z_.]+)``", described)
    way.remove("attention.self_attention")  # `attention.layer` calls it again
    assert len(way) == len(set(way)) <= 10, "it enters no other file twice"
