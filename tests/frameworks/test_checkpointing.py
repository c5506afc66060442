"""Tests saving attention over gradient checkpointing of transformers models, and its refusal where attention can't be saved."""

import contextlib
import functools
from dataclasses import dataclass, field
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import modeling_utils

import ds_sp_overlap
from ds_sp_overlap.attention.memory.offload import OffloadedTensor
from ds_sp_overlap.attention.memory.recompute import Attended
from ds_sp_overlap.exchange.in_flight import InFlight
from ds_sp_overlap.integrations.sequence.masks import Masks
from tests.harness import layers, megatron_layers
from tests.harness.cases import full, since_transformers
from tests.harness.families import tiny_model
from tests.harness.flash import NAME, flash_attention
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.models import EXACT, FP64, batches, cut, outcome, sequence_parallel_model, tiny, train_run, worst
from tests.harness.ranks import assert_error, refusal

WIDE = dict(heads=8, kv_heads=2, head_dim=8)
KEEP = {"head_groups": 4, "window": 2, "checkpointing": "keep"}
NON_REENTRANT = {"use_reentrant": False}


@dataclass
class Counts:
    exchanges: int = 0
    attended: int = 0  # how often backward ran attention again
    offloaded: int = field(default=0, compare=False)  # tensors copied to the host


def counted(kind, name):
    """Return a patch that counts the calls of a method."""
    return mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name))


@contextlib.contextmanager
def counting():
    """Yield `Counts`, which are filled when the body ends."""
    counts, calls = Counts(), ((InFlight, "__init__"), (Attended, "_recompute"), (OffloadedTensor, "__init__"))
    with contextlib.ExitStack() as stack:
        counters = [stack.enter_context(counted(*call)) for call in calls]
        yield counts
    counts.exchanges, counts.attended, counts.offloaded = [counter.call_count for counter in counters]


def exact(rank, implementation, more, section, how):
    """Assert that a checkpointed model is right; return its `Counts` in a step, and the report.

    how   checkpointing is enabled "before" or "after" the overlap; "" for no checkpointing
    """
    tokens = batches(1)[0]
    expected = outcome(tiny(**WIDE, **EXACT, **more).train(), tokens, 0, 1, None)
    with flash_attention():
        model = tiny(**WIDE, **EXACT, **more).train()
        model.config._attn_implementation = implementation
        if how == "before":
            model.gradient_checkpointing_enable(NON_REENTRANT)
        group = torch.distributed.group.WORLD
        report = ds_sp_overlap.enable(model, section, group)
        if how == "after":
            model.gradient_checkpointing_enable(NON_REENTRANT)
        outcome(model, tokens, rank, 2, group)
        with counting() as counted:
            assert worst(outcome(model, tokens, rank, 2, group), expected) < FP64
        functions = [layer._gradient_checkpointing_func for layer in model.model.layers] if how else []
        assert all("context_fn" not in function.keywords for function in functions)
        ds_sp_overlap.disable(model)
        assert not how or worst(outcome(model, tokens, 0, 1, None), expected) < FP64
    return counted, " ".join(str(report).split())


@pytest.mark.parametrize(
    "more, said", [({}, "G = 4, 2 at a time"), ({"head_groups": "auto", "policy": {"warmup_steps": 16}}, "half at a time")], ids=str
)
def test_the_report_says_that_kept_attention_sets_a_window(more, said, rank):
    _, report = exact(rank, "sdpa", {}, {"head_groups": 4, "checkpointing": "keep", **more}, "before")
    assert said in report and "recomputed in backward, kept over checkpoints" in report


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("checkpointing", ["keep", "offload"])
def test_a_checkpointed_model_exchanges_no_more_than_one_that_is_not(how, checkpointing, rank):
    section = {**KEEP, "checkpointing": checkpointing}
    stored, _ = exact(rank, "sdpa", {}, section, "")
    recomputed, _ = exact(rank, "sdpa", {}, {**KEEP, "checkpointing": "recompute"}, how)
    kept, report = exact(rank, "sdpa", {}, section, how)
    assert kept == stored and recomputed.exchanges > stored.exchanges
    assert (kept.offloaded > 0) == (checkpointing == "offload")
    assert kept.attended == 0, "sdpa's fused kernel keeps a log-sum-exp, with q, k and v as they were received"
    assert "2 at a time, recomputed in backward, kept over checkpoints" in report


@pytest.mark.parametrize(
    "name, more", [("sdpa", dict(family="qwen3")), ("sdpa", dict(family="mistral", sliding_window=5)), (NAME, {})], ids=str
)
def test_norms_and_windows_and_flash_attention_are_kept_too(name, more, rank):
    """Expects the same exchanges as without checkpoints.

    In backward, attention runs again, without an exchange: sdpa gets the window as a mask, and the stand-in for flash attention
    repeats k and v.
    """
    (kept, _), (stored, _) = (exact(rank, name, more, KEEP, how) for how in ("before", ""))
    assert kept == stored


# Training.


def prepared(model):
    model.gradient_checkpointing_enable(NON_REENTRANT)
    return model.train()


@pytest.mark.parametrize("stage", [full(0), full(1), full(2), 3])
def test_training_is_that_without_checkpointing(stage, rank):
    run = functools.partial(train_run, rank, 2, stage=stage, accumulation=2, steps=2, **WIDE)
    runs, exchanges = [], []
    for section, prepare in ((KEEP, None), (KEEP, prepared), ({**KEEP, "checkpointing": "recompute"}, prepared)):
        with counting() as counted:
            runs.append(run(section, prepare=prepare))
        exchanges.append(counted.exchanges)
    stored, *others = runs
    assert [other.equals(stored) for other in others] == [True, True]
    assert exchanges[0] == exchanges[1] < exchanges[2]


class Caller(nn.Module):
    """A user's module that calls a layer between its own projections."""

    def __init__(self):
        super().__init__()
        self.core = DistributedAttention(nn.Identity(), torch.distributed.group.WORLD)


REPORTED = {
    "latent attention": lambda: tiny_model("youtu"),
    "delta rule": lambda: tiny_model("qwen3_5_text"),
    "attention function": lambda: tiny("bitnet"),
    "one another": Caller,
}


@pytest.mark.parametrize("what", REPORTED)
def test_the_report_says_which_layers_have_no_window(what, rank):
    for key, value in ((None, None), ("window", 1), ("checkpointing", "keep")):
        section = {"head_groups": 1, **({key: value} if key else {})}
        layers = ds_sp_overlap.enable(REPORTED[what](), section, torch.distributed.group.WORLD).layers
        assert any(what in layer.got for layer in layers)
        for layer in layers:
            lacks = f"so sp_overlap.{key} can't be had" if key else "can't be had"
            assert (lacks in layer.lacks) == (key is not None and "recomputed in backward" not in layer.got), layer


# A window without saved attention.


@pytest.mark.parametrize("how", ["", "before", "after"])
def test_a_window_alone_takes_the_most_groups_keeps_attention_and_runs_in_tiles(how, rank):
    stored, _ = exact(rank, "sdpa", {}, {"head_groups": 4, "window": 1}, "")
    kept, report = exact(rank, "sdpa", {}, {"window": 1}, how)
    assert kept == stored and kept.attended == 0
    assert "G = 4, 1 at a time, recomputed in backward, kept over checkpoints that can" in report
    assert "in tiles: LlamaMLP (2), LlamaRMSNorm (5)" in report


def test_what_the_section_says_beside_a_window_is_done(rank):
    said = {"window": 1, "head_groups": 2, "tiles": None, "checkpointing": "recompute"}
    (stored, _), (repeated, report) = (exact(rank, "sdpa", {}, said, how) for how in ("", "before"))
    assert repeated.exchanges > stored.exchanges
    assert "G = 2, 1 at a time, recomputed in backward, q_proj" in report and "in tiles" not in report


@pytest.mark.parametrize(
    "way", ["reentrant", "deepspeed", *(pytest.param(way, marks=since_transformers("5.24")) for way in ("offload", "every second"))]
)
def test_a_window_alone_goes_with_every_kind_of_checkpoint(way, rank):
    tokens = batches(1)[0]
    expected = outcome(tiny(**WIDE, **EXACT).train(), tokens, 0, 1, None)
    with sequence_parallel_model(2, **WIDE, **EXACT) as (model, group), listening() as messages:
        model.train()
        ds_sp_overlap.enable(model, {"window": 1})
        options = {"offload": {"offload": True}, "every second": {"every_n_layers": 2}}.get(way, {})
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"}, **options)
        model.enable_input_require_grads()
        if way == "deepspeed":
            for layer in model.model.layers:
                layer._gradient_checkpointing_func = deepspeed.checkpointing.non_reentrant_checkpoint
        to_host = mock.patch.object(modeling_utils, "save_on_cpu", lambda **_: save_on_cpu())  # pinned memory needs a GPU
        with to_host, counting() as counts:
            error = worst(outcome(model, tokens, rank, 2, group), expected)
    kept = way in ("offload", "every second")
    assert error < FP64 and (counts.offloaded > 0) == (way == "offload")
    assert any("attention is computed again in backward: " in message for message in messages) != kept, messages


# Refusals.


def own_context():
    return contextlib.nullcontext(), contextlib.nullcontext()


def test_checkpointing_that_attention_cannot_be_kept_over_is_refused_on_all_ranks(rank):
    tokens = batches(1)[0]
    with sequence_parallel_model(2, **WIDE) as (model, group):
        model.train()
        ds_sp_overlap.enable(model, KEEP)
        for way, words in (
            ({"use_reentrant": True}, "with use_reentrant=True"),
            ({"use_reentrant": False, "context_fn": own_context}, "with a context_fn of its own"),
            (NON_REENTRANT, "by deepspeed.runtime.activation_checkpointing.checkpointing.checkpoint"),
        ):
            model.gradient_checkpointing_enable(way)
            for layer in model.model.layers if way == NON_REENTRANT else ():
                layer._gradient_checkpointing_func = deepspeed.checkpointing.checkpoint
            with counting() as counted:
                said = refusal(outcome, model, tokens, rank, 2, group)
            for each in (words, 'gradient_checkpointing_kwargs={"use_reentrant": False}', "layers.0 (LlamaDecoderLayer)"):
                assert_error(said, each)
            assert counted.exchanges == 0
        model.eval()
        model(**{key: x for key, x in cut(tokens, rank, 2).items() if key != "labels"}, use_cache=False)  # without checkpoints
        model.train()
        model.gradient_checkpointing_enable(NON_REENTRANT)
        outcome(model, tokens, rank, 2, group)


def test_checkpoints_of_a_model_beside_it_do_not_stop_a_model(rank):
    tokens, group = batches(1)[0], torch.distributed.group.WORLD
    kept, refused = tiny(**EXACT).train(), tiny(**EXACT).train()
    whole = outcome(kept, tokens, 0, 1, None)
    kept.gradient_checkpointing_enable(NON_REENTRANT)
    refused.gradient_checkpointing_enable({"use_reentrant": True})
    ds_sp_overlap.enable(torch.nn.ModuleList([kept, refused]), {"head_groups": 2, "checkpointing": "keep"}, group)
    assert worst(outcome(kept, tokens, rank, 2, group), whole) < FP64
    kind, message = refusal(outcome, refused, tokens, rank, 2, group)
    assert kind == "ValueError" and "with use_reentrant=True" in message


@pytest.mark.parametrize("way", ["checkpoint", "non_reentrant_checkpoint"])
def test_checkpointing_of_deepspeed_is_refused_before_it_exchanges_again(way, rank):
    deepspeed.checkpointing.configure(None, partition_activations=False)
    function = getattr(deepspeed.checkpointing, way)
    shape = Shape(heads=8, kv_heads=2, rope=False, config=KEEP)
    attend = layers.block(shape, layers.projections(shape), torch.distributed.group.WORLD)
    x = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0]).requires_grad_()
    y = function(lambda x: attend(x).sin(), x)
    with counting() as counted:
        kind, message = refusal(y.sum().backward)
    assert kind == "RuntimeError" and counted.exchanges == 0
    assert "DeepSpeed's and Megatron's checkpointing has none" in message and '"recompute"' in message


# Megatron-DeepSpeed.


def keeping(call, layer, x, dy):
    body = functools.partial(checkpoint, use_reentrant=False, context_fn=ds_sp_overlap.keep_attention)
    return layers.backward(lambda x: body(lambda x: call(x.tanh()).sin(), x), layer, x, dy)


def test_a_layer_of_megatron_is_kept_by_a_checkpoint_with_our_context(rank):
    exchanges = []
    for checkpointing in ("keep", "recompute"):
        shape = megatron_layers.Shape("core", 8, 2, config={**KEEP, "checkpointing": checkpointing})
        with counting() as counted:
            assert megatron_layers.layer_faults(rank, shape, keeping) == []
        exchanges.append(counted.exchanges)
    kept, recomputed = exchanges
    assert kept < recomputed


def on_one_rank(rank, later, kinds):
    """Run a forward in which ranks checkpoint differently, in the first or ``later`` in the second step; return the refusal.

    kinds   use_reentrant of each rank; None for no checkpoint
    """
    inputs = cut(batches(1)[0], rank, 2)
    del inputs["labels"]

    def step():
        model(**inputs, use_cache=False).logits.sum().backward()

    with sequence_parallel_model(2, **EXACT) as (model, group):
        ds_sp_overlap.enable(model.train(), {"head_groups": 2}, group)
        if later:
            step()
        if kinds[rank] is not None:
            model.gradient_checkpointing_enable({"use_reentrant": kinds[rank]})
        return refusal(step)


SAID = {None: "nothing", False: "model and 2 more", True: "model (with use_reentrant=True) and 2 more"}


@pytest.mark.parametrize("kinds", [(False, None), full((True, None)), (True, False)], ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_checkpoints_on_one_rank_alone_or_of_another_kind_are_refused_on_all(later, kinds, rank):
    said = "; ".join(f"sp rank {rank}: {SAID[of_rank]}" for rank, of_rank in enumerate(kinds))
    assert_error(on_one_rank(rank, later, kinds), f"({said})")


def test_a_checkpoint_around_a_layer_of_ones_own_on_one_rank_alone_is_refused_on_all(rank):
    shape = Shape(config={"head_groups": 2})
    attend = layers.block(shape, layers.projections(shape), torch.distributed.group.WORLD)
    x = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0])
    call = functools.partial(layers.call_block, shape, attend, rank)
    kind, message = refusal(lambda: call(x) if rank else checkpoint(call, x, use_reentrant=False))
    assert kind == "ValueError" and "in an activation checkpoint" in message and "in no activation checkpoint" in message


# Guards.


def checkpointed_alone(rank):
    """Return a fault if a rank goes on although only one rank has checkpoints; it must not reach an exchange."""
    with mock.patch.object(Masks, "for_layers", side_effect=NotImplementedError("went on")):
        kind, message = on_one_rank(rank, later=False, kinds=(False, None))
    return [message] if "went on" in message else []


test_the_suite_notices_without_the_guard = notices(Watched("recomputed on all ranks", "if False:", checkpointed_alone))
