"""What becomes of an overlapped model: copied, saved, wrapped, given adapters, thrown away."""

import copy
import gc
import io
import weakref

import dropin
import layers
import models
import pytest
import reference
import torch
from dropin import Case
from layers import Shape
from peft import LoraConfig, get_peft_model
from ranks import on_ranks, refusal

import ds_sp_overlap


def loss_of(model, rank, size):
    inputs = models.cut(models.batches(1)[0], rank, size)
    return models.mean_loss(model, inputs, torch.distributed.group.WORLD)


def copies(rank, how):
    with models.sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        expected = loss_of(model, rank, 2).item()
        if how == "deepcopy":
            other = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # a copy that drives the original's projections would notice
        found = [loss_of(other, rank, 2).item() - expected]  # stock, which is registered
        report = ds_sp_overlap.enable(other, {"head_groups": 2})
        found.append(loss_of(other, rank, 2).item() - expected)
        ds_sp_overlap.disable(other)
        stale = [name for name, module in other.named_modules() if "forward" in vars(module)]
        ds_sp_overlap.disable(model)
        return found, [layer.got for layer in report.layers], stale


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_an_overlapped_model_is_a_model_of_its_own_and_can_be_overlapped_itself(how):
    for differences, got, stale in on_ranks(2, copies, how):
        assert differences == pytest.approx([0, 0], abs=1e-5)  # fp32 sums in another order; a zeroed model is off by 0.1
        assert all("all eight" in layer for layer in got) and len(got) == 2
        assert stale == []


def adapters(rank, when):
    """Loss, and how many LoRA parameters get a gradient, with the adapter put in before or after ``enable``."""
    with models.sequence_parallel_model(2) as (model, _):
        lora = LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False)
        if when == "after":
            ds_sp_overlap.enable(model, {"head_groups": 2})
        torch.manual_seed(3)
        model = get_peft_model(model, lora)
        if when == "before":
            ds_sp_overlap.enable(model, {"head_groups": 2})
        loss = loss_of(model, rank, 2)
        loss.backward()
        trained = [p.grad is not None and p.grad.abs().sum().item() > 0 for n, p in model.named_parameters() if "lora" in n]
        ds_sp_overlap.disable(model)
        return loss.item(), sum(trained), len(trained)


def test_an_adapter_that_is_put_in_after_enable_is_trained_like_one_put_in_before():
    before, after = on_ranks(2, adapters, "before"), on_ranks(2, adapters, "after")
    assert before == after
    assert all(trained == every == 8 for _, trained, every in after)


def wrapped(rank):
    with models.sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        layer, calls = model.model.layers[0].self_attn, []
        inner = layer.forward
        layer.forward = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
        expected = loss_of(model, rank, 2).item()
        ds_sp_overlap.disable(model)
        return loss_of(model, rank, 2).item() - expected, len(calls)


def test_a_wrapper_that_somebody_put_over_ours_outlives_disable():
    for difference, calls in on_ranks(2, wrapped):
        assert abs(difference) < 1e-5  # as above
        assert calls == 2


def thrown_away(rank):
    model = models.tiny()
    ds_sp_overlap.enable(model, {"head_groups": 2}, torch.distributed.group.WORLD)
    layer = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    return layer() is None


def test_an_overlapped_model_dies_with_its_last_reference():
    """Guard: undo is given the module instead of holding it."""
    assert on_ranks(2, thrown_away) == [True, True]


def compiled(rank):
    with models.sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        gradients = []
        for run in (model, torch.compile(model, backend="eager")):
            model.zero_grad()
            loss_of(run, rank, 2).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        ds_sp_overlap.disable(model)
        return all(torch.equal(*pair) for pair in zip(*gradients))


def test_a_compiled_model_runs_its_attention_layers_as_they_are():
    assert on_ranks(2, compiled) == [True, True]


def switched_off(rank):
    with models.sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        ds_sp_overlap.enable(model, {"enabled": False})
        return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_enabled_false_switches_an_overlapped_model_off():
    assert on_ranks(2, switched_off) == [[], []]


def gradients_differ(rank):
    shape = Shape()
    layer = layers.projections(shape).requires_grad_(False)
    x = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0]).requires_grad_(rank == 0)
    return refusal(lambda: layers.call_block(shape, layers.block(shape, layer, torch.distributed.group.WORLD), rank, x))


def test_ranks_that_disagree_about_gradients_are_refused_before_they_hang_in_backward():
    for kind, message in on_ranks(2, gradients_differ):
        assert kind == "ValueError"
        assert "about to exchange different things" in message and "[True, True, True]" in message


class Named:
    def __call__(self, q, k, v, num_kv_heads):
        assert num_kv_heads == 7
        return reference.attention(q, k, v)


def keyword_of_the_local_attention(rank):
    case = Case()
    q, k, v = (dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3])
    return dropin.module(case, local=Named())(q, k, v, 0, num_kv_heads=7).shape == q.shape


def test_keywords_of_the_local_attention_are_its_own():
    assert on_ranks(2, keyword_of_the_local_attention) == [True, True]
