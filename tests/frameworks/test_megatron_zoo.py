"""Forks of Megatron-DeepSpeed that nearly look the same: each is right or refused by name, none is wrong in silence.

On 2 gloo ranks in fp64, output and every gradient, against the fork itself on the whole sequence.
"""

from unittest import mock

import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.integrations.inspect import decoder_layer
from ds_sp_overlap.integrations.inspect.accounting import Accounting, Unknown
from ds_sp_overlap.integrations.inspect.attention import Read
from ds_sp_overlap.integrations.megatron import traced_globals as megatron_globals
from ds_sp_overlap.integrations.megatron.reading import FUSED, AttentionReader, AttentionReading
from tests.harness import megatron_layers, megatron_zoo
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.megatron_models import Model
from tests.harness.megatron_zoo import ATTENTIONS, BLOCK, LAYERS, activated, capped, judged, made, step
from tests.harness.ranks import no_faults, on_ranks, refusal

GROUPS = {"head_groups": 2}


def attentions(rank, classes, section):
    found = {}
    for attention in classes:
        shape = Model(layers=1, **ATTENTIONS[attention].get("shape", {}))
        found[attention.__name__] = judged(rank, section, shape, attention)
    return found


def test_an_attention_of_a_fork_is_right_and_what_is_not_known_of_it_is_named():
    expected = {attention.__name__: ([], {fork["lacks"]}) for attention, fork in ATTENTIONS.items()}
    for found in on_ranks(2, attentions, list(ATTENTIONS), GROUPS):
        assert {name: each[:2] for name, each in found.items()} == expected


def layers(rank, classes):
    return {layer.__name__: judged(rank, BLOCK, Model(layers=2), layer=layer) for layer in classes}


def test_a_layer_of_a_fork_is_right_and_what_is_not_known_of_it_is_named():
    said = {layer: f"no block: {layer.__name__}: {reason}" if reason else "" for layer, reason in LAYERS.items()}
    expected = {layer.__name__: ([], {lacks}) for layer, lacks in said.items()}
    for found in on_ranks(2, layers, list(LAYERS)):
        assert {name: each[:2] for name, each in found.items()} == expected


def known_by_its_source(rank):
    """What is said of a layer whose function of a module is one that is known, and of one that is decorated."""
    utils, found = megatron_zoo.core.utils, []
    source = megatron_globals.digest(utils, *megatron_globals.PARTS)
    decorated = megatron_zoo.timed(utils.make_viewless_tensor)
    for function in (utils.make_viewless_tensor, decorated):
        with mock.patch.object(megatron_globals, "KNOWN", {source}), mock.patch.object(utils, function.__name__, function):
            model = made(Model(layers=1), layer=megatron_zoo.ViewlessLayer)
            found.append(ds_sp_overlap.enable(model, BLOCK).layers[0].lacks)
    return [] if found == ["", f"no block: ViewlessLayer: {LAYERS[megatron_zoo.ViewlessLayer]}"] else found


def test_a_function_of_a_module_is_known_by_its_source():
    no_faults(2, known_by_its_source)


def scripted_body(x):
    return capped(x)


def test_a_scripted_function_is_named():
    x = torch.ones(2)
    with pytest.raises(Unknown, match="uses the global capped"), Accounting():
        scripted_body(x)


# The second witness: what is read amiss is refused in the first call.


def refused(rank, section, change=None, **classes):
    """What a step says, with large weights; behind one of small weights and a ``change``, if there is one."""
    shape = Model(layers=1)
    model = made(shape, **classes)
    x, dy, mask, tables = megatron_layers.inputs(shape)
    cut = lambda t: t.chunk(2)[rank].contiguous()  # noqa: E731
    ds_sp_overlap.enable(model, section)
    if change is not None:
        step(model, cut(x), cut(dy), mask, tables)
        change()
    activated(model)
    return refusal(step, model, cut(x), cut(dy), mask, tables)


def read_amiss(rank):
    known = Read(AttentionReading(FUSED), [], [], {})
    with mock.patch.object(AttentionReader, "read", lambda *args: known):
        return refused(rank, GROUPS, attention=megatron_zoo.Clamped)


def layer_read_amiss(rank):
    sums = mock.patch.object(decoder_layer, "SUMS", (*decoder_layer.SUMS, "clamp"))
    with sums, mock.patch.object(decoder_layer._Run, "_check", lambda *args: None):
        return refused(rank, BLOCK, layer=megatron_zoo.ClampedLayer)


AMISS = [(read_amiss, "layers.0.self_attention: Clamped"), (layer_read_amiss, "layers.0: ClampedLayer")]


@pytest.mark.parametrize("amiss, what", AMISS, ids=["attention", "layer"])
def test_what_is_read_amiss_is_refused_in_the_first_call(amiss, what):
    for kind, message in on_ranks(2, amiss):
        assert kind == "RuntimeError", message
        assert f"{what} computes something else than what was read" in message


# What is changed afterwards.


class Patched(megatron_layers.ParallelAttention):
    pass


def patch_forward():
    Patched.forward = megatron_zoo.capping(megatron_layers.ParallelAttention.forward)


def patch_method():
    Patched.heads_of = megatron_zoo.Clamped.heads_of


def patched(rank, patch):
    try:
        return refused(rank, GROUPS, patch, attention=Patched)
    finally:
        for name in {"forward", "heads_of"} & vars(Patched).keys():
            delattr(Patched, name)


@pytest.mark.parametrize("patch, seen", [(patch_forward, "__class__.forward"), (patch_method, "heads_of.__func__")])
def test_a_class_that_is_patched_afterwards_is_refused_by_name(patch, seen):
    for kind, message in on_ranks(2, patched, patch):
        assert kind == "RuntimeError" and f"computes something else since {seen}" in message, message


# Guards.


def _of_forks(rank, attentions=(), layers=()):
    """What is wrong with forks, or was not said of them."""
    found = []
    for attention in attentions:
        faults, lacks, _ = judged(rank, GROUPS, Model(layers=1), attention)
        found += faults + [f"{attention.__name__}: {lacks}"] * (lacks != {ATTENTIONS[attention]["lacks"]})
    for layer in layers:
        found += judged(rank, BLOCK, Model(layers=1), layer=layer)[0]
    return found


def forked_exchange(rank):
    return _of_forks(rank, attentions=[megatron_zoo.ForkedExchange])


def clamped(rank):
    return _of_forks(rank, attentions=[megatron_zoo.Clamped])


def hooked_exchange(rank):
    return _of_forks(rank, attentions=[megatron_zoo.HookedExchange])


def spare_parameter(rank):
    return _of_forks(rank, attentions=[megatron_zoo.Unused])


def constant_added(rank):
    return _of_forks(rank, layers=[megatron_zoo.AddingLayer])


def function_of_a_module(rank):
    return _of_forks(rank, layers=[megatron_zoo.ViewlessLayer])


WATCHED = [
    Watched(Guard("a fork's exchange stays its own", without="return False"), forked_exchange),
    Watched(Guard("known by its source, or read", without="if True:"), clamped),
    Watched(Guard("what a decorator does is in no digest", without="pass"), known_by_its_source),
    Watched(
        Guard("a call of dist_attn that is hooked is made", without="pass"),
        hooked_exchange,
        raises=True,  # each call looks again
    ),
    Watched(Guard("all that a layer learns is known", without="pass"), spare_parameter),
    Watched(Guard("a zero adds nothing", without="pass"), constant_added),
    Watched(Guard("only a function of a module that is known", without="pass"), function_of_a_module),
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
