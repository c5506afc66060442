"""Tests changes of a model after ``enable``: each takes effect, or all ranks refuse it; no rank attends to its own tokens alone."""

import copy
import functools
import gc
import io
import weakref
from unittest import mock

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import ds_sp_overlap
from ds_sp_overlap.integrations.inspect import accounting, probe
from ds_sp_overlap.integrations.transformers import driven
from ds_sp_overlap.integrations.transformers.mixers import mixer_of
from tests.harness.cases import full
from tests.harness.guards import Watched, notices
from tests.harness.models import EXACT, FP64, batches, outcome, sequence_parallel_model, tiny, worst
from tests.harness.ranks import assert_error, refusal
from tests.harness.whole import on_all_ranks, on_one_rank
from tests.harness.zoo import PROGRAMS
from tests.harness.zoo_on_ranks import fill

BITNET = dict(family="bitnet")  # only its attention function is overlapped
DELTA_NETS = dict(
    family="qwen3_next", layer_types=["linear_attention", "full_attention"], head_dim=8, num_experts=2, num_experts_per_tok=1,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, mlp_only_layers=[0, 1],
)  # fmt: skip
DYNAMIC = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))


def replaced_in_its_parent(model):
    layer = model.model.layers[1]
    layer.self_attn = copy.deepcopy(layer.self_attn)


def layer_appended(model):
    model.model.layers.append(LlamaDecoderLayer(model.config, 2).double())
    model.config.num_hidden_layers += 1


class Student(LlamaAttention):
    """Attention that also holds another attention module, its teacher."""

    def __init__(self, teacher):
        super().__init__(teacher.config, teacher.layer_idx)
        self.teacher = teacher

    def forward(self, *args, **kwargs):
        self.teacher(*args, **kwargs)
        return super().forward(*args, **kwargs)


def attention_around_another(model):
    layer = model.model.layers[1]
    layer.self_attn = Student(layer.self_attn).double()


def delta_net_replaced(model):
    layer = model.model.layers[0]
    layer.linear_attn = type(layer.linear_attn)(model.config, 0).double()


def eager(model):
    model.set_attn_implementation("eager")


def set_back(model):
    layer = model.model.layers[1].self_attn
    layer.forward = type(layer).forward.__get__(layer)


def trunk_disabled(model):
    ds_sp_overlap.disable(model.model)


def another_forward(model):
    """Set ``forward`` on an attention layer, as the patch of a library does."""
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **_: (layer.o_proj(layer.q_proj(hidden_states)), None)


def rotary_changed(model):
    """Change the rotary embedding to one that depends on the length of the sequence."""
    config = copy.deepcopy(model.config)
    config.rope_parameters, config.max_position_embeddings = DYNAMIC["rope_parameters"], 8
    vars(model.model.rotary_emb).update(vars(type(model.model.rotary_emb)(config)))


def wrapped(model):
    """Wrap the forwards of all overlapped modules, without another effect."""
    for module in model.modules():
        if "forward" in vars(module):
            module.forward = functools.partial(module.forward)


class Around(torch.nn.Module):
    """A module around a layer, which passes its arguments on to the layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.layer(hidden_states, attention_mask=attention_mask, **kwargs)

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "layer" else getattr(self.layer, name)


class Skip(torch.nn.Module):
    """Replaces a layer that was pruned."""

    attention_type = "full_attention"

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return hidden_states


def pruned(model):
    """Prune a layer, and hold a copy of a layer that is never called, as an average of weights is."""
    model.model.layers[1] = Skip()
    model.average = copy.deepcopy(model.model.layers[0])


def wrapped_in_a_module(model):
    model.model.layers[1] = Around(model.model.layers[1])


def patched(model):
    before = LlamaAttention.forward
    LlamaAttention.forward = lambda self, *args, **kwargs: before(self, *args, **kwargs)
    return lambda: setattr(LlamaAttention, "forward", before)


def delta_net_patched(model):
    kind = type(model.model.layers[0].linear_attn)
    before = kind.forward
    kind.forward = lambda self, *args, **kwargs: 2 * before(self, *args, **kwargs)
    return lambda: setattr(kind, "forward", before)


def half_patched(model):
    before = modeling_llama.rotate_half
    modeling_llama.rotate_half = lambda x: 2 * before(x)
    return lambda: setattr(modeling_llama, "rotate_half", before)


CHANGES = {
    "the attention is replaced in its parent": (replaced_in_its_parent, {}, "LlamaAttention: this is a copy of one that is overlapped"),
    "a decoder layer is appended": (layer_appended, {}, "the new model.layers.2.self_attn (LlamaAttention) ran without"),
    "an attention is put around another": (attention_around_another, {}, "the new model.layers.1.self_attn (Student) ran without"),
    "a delta net is replaced": (delta_net_replaced, DELTA_NETS, "the new model.layers.0.linear_attn (Qwen3NextGatedDeltaNet) ran without"),
    "eager attention": (eager, {}, 'attention "eager" needs a mask'),
    "eager attention of a layer at its function": (eager, BITNET, "model.layers.0.self_attn (BitNetAttention, and 1 more) ran without"),
    "the forward of an attention is set back": (set_back, {}, "model.layers.1.self_attn (LlamaAttention) ran without an exchange"),
    "the trunk is disabled": (trunk_disabled, {}, "model.layers.0.self_attn (LlamaAttention, and 1 more) ran without an exchange"),
    "an attention is given another forward": (another_forward, {}, "model.layers.1.self_attn (LlamaAttention) ran without"),
    "a rotary embedding becomes dynamic": (rotary_changed, {}, "the new model.rotary_emb (LlamaRotaryEmbedding) ran without"),
    "the class's forward is patched": (patched, {}, "computes something else since __class__.forward changed"),
    "the class of a delta net is patched": (delta_net_patched, DELTA_NETS, "computes something else since its class was given another"),
    "what the rotary function calls is patched": (half_patched, {}, "computes something else since rotate_half changed"),
}  # fmt: skip


def changed(rank, what):
    """Change a model after its first step; return the refusal of the next step."""
    change, options, _ = CHANGES[what]
    model, tokens, group = tiny(**EXACT, **options), batches(1)[0], torch.distributed.group.WORLD
    ds_sp_overlap.enable(model, {"head_groups": 2}, group)
    outcome(model, tokens, rank, 2, group)
    undo = change(model)
    try:
        return refusal(outcome, model, tokens, rank, 2, group)
    finally:
        if undo is not None:
            undo()


@pytest.mark.parametrize(
    "change, options",
    [
        (wrapped, {}),
        (wrapped, BITNET),
        (wrapped, DELTA_NETS),
        (wrapped, DYNAMIC),
        (set_back, BITNET),
        (wrapped_in_a_module, {}),
        (pruned, {}),
    ],
    ids=["whole", "at its function", "delta net", "rotary", "set back, at its function", "in a module", "pruned"],
)
def test_layers_whose_forwards_somebody_wraps_after_enable_stay_overlapped(change, options, rank):
    model, tokens, group = tiny(**EXACT, **options), batches(1)[0], torch.distributed.group.WORLD
    alone = copy.deepcopy(model)
    change(alone)
    whole = outcome(alone, tokens, 0, 1, None)
    ds_sp_overlap.enable(model, {"head_groups": 2}, group)
    outcome(model, tokens, rank, 2, group)
    change(model)
    assert worst(outcome(model, tokens, rank, 2, group), whole) < (1e-6 if options == DELTA_NETS else FP64)  # a rule in fp32


def disabled(model):
    ds_sp_overlap.disable(model.model.layers[1])


@pytest.mark.parametrize("change", [disabled, layer_appended])
def test_a_layer_that_is_not_overlapped_is_left_to_stock_where_stock_exchanges(change, rank):
    tokens = batches(1)[0]
    torch.manual_seed(1)  # for the weights of a new layer
    alone = tiny(**EXACT)
    if change is layer_appended:
        change(alone)
    whole = outcome(alone, tokens, 0, 1, None)
    with sequence_parallel_model(2, **EXACT) as (model, group):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        change(model)
        model.load_state_dict(alone.state_dict())
        assert worst(outcome(model, tokens, rank, 2, group), whole) < FP64


def test_modules_that_are_replaced_after_enable_are_freed(rank):
    model, group = tiny(**EXACT), torch.distributed.group.WORLD
    ds_sp_overlap.enable(model, {"head_groups": 2}, group)
    layer = model.model.layers[0].mlp
    alive = [weakref.ref(layer.up_proj), weakref.ref(model.lm_head)]
    layer.up_proj, model.lm_head = copy.deepcopy(layer.up_proj), copy.deepcopy(model.lm_head)
    gc.collect()
    assert [one() is not None for one in alive] == [False, False]


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_refused_by_name_on_both_ranks(what, rank):
    kind, message = changed(rank, what)
    assert kind in ("RuntimeError", "ValueError") and CHANGES[what][2] in message


def test_a_mixer_whose_class_is_patched_is_no_known_one():
    model = tiny(**EXACT, **DELTA_NETS)
    layer = model.model.layers[0].linear_attn
    known = mixer_of(layer)
    undo = delta_net_patched(model)
    try:
        assert known is not None and mixer_of(layer) is None
    finally:
        undo()
    assert mixer_of(layer) is known


def test_calls_that_a_checkpoint_runs_again_are_neither_compared_nor_counted(rank):
    """Run four steps; comparisons are due in the first step, and then in every second one."""
    model, tokens, group = tiny(**EXACT).train(), batches(1)[0], torch.distributed.group.WORLD
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ds_sp_overlap.enable(model, {"head_groups": 2, "check": True}, group)
    with mock.patch.object(probe, "EVERY", 2), mock.patch.object(driven, "refuse_difference") as comparison:
        for _ in range(4):
            outcome(model, tokens, rank, 2, group)
    assert comparison.call_count == 3  # of the first, second and fourth call


def pickled(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("options, copied", [({}, copy.deepcopy), ({}, pickled), (BITNET, copy.deepcopy)])
def test_a_copy_of_an_overlapped_model_refuses_to_attend_alone_and_can_be_overlapped(options, copied, rank):
    model, tokens, group = tiny(**EXACT, **options), batches(1)[0], torch.distributed.group.WORLD
    whole = outcome(tiny(**EXACT, **options), tokens, 0, 1, None)
    ds_sp_overlap.enable(model, {"head_groups": 2}, group)
    other = copied(model)
    said = refusal(outcome, other, tokens, rank, 2, group)
    of_part = refusal(copy.deepcopy(model.model.layers[0].self_attn), torch.zeros(1, 2, 32).double(), (None, None))
    for refused in (of_part, *[said] * (copied is copy.deepcopy)):  # a pickle may come from another process
        assert_error(refused, "this is a copy of one that is overlapped", "RuntimeError")
    assert worst(outcome(model, tokens, rank, 2, group), whole) < FP64
    for parameter in model.parameters():
        parameter.data.zero_()  # so that a copy that used the original's projections would be wrong
    ds_sp_overlap.enable(other, {"head_groups": 2}, group)
    assert worst(outcome(other, tokens, rank, 2, group), whole) < FP64
    ds_sp_overlap.disable(other)
    assert worst(outcome(other, tokens, 0, 1, None), whole) < FP64


@pytest.mark.parametrize(
    "config, checkpointing",
    [({"head_groups": 2, "checkpointing": "keep"}, True), ({"head_groups": 2, "window": 1}, False)],
)
def test_a_rank_without_tokens_takes_part(config, checkpointing, rank):
    model = tiny(**EXACT)
    whole = on_one_rank(model)
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    ds_sp_overlap.enable(model, config, torch.distributed.group.WORLD)
    assert worst(on_all_ranks(rank, model, [32, 0]), whole) < FP64


def watch_forward(module):
    module.register_forward_hook(lambda *_: None)


def watch_parameters(module):
    for parameter in module.parameters():
        parameter.register_hook(lambda _: None)


@pytest.mark.parametrize(
    "config, options, path, watch",
    [
        ({"head_groups": 2, "window": 1}, {}, "self_attn.q_proj", watch_forward),
        ({"head_groups": 2, "window": 1}, dict(family="qwen3"), "self_attn.q_norm", watch_parameters),
        full({"head_groups": 2}, {}, "self_attn.o_proj", watch_forward),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_hook_that_comes_on_one_rank_alone_has_all_ranks_fall_back(config, options, path, watch, rank):
    """The step must not hang: a rank with a hook makes other exchanges than before, so all ranks must."""
    tokens = batches(1)[0]
    whole = outcome(tiny(**EXACT, **options), tokens, 0, 1, None)
    with sequence_parallel_model(2, **EXACT, **options) as (model, group):
        ds_sp_overlap.enable(model, config, group)
        for step in range(3):
            module = model.model.layers[1].get_submodule(path)
            if rank == 0 and step == 1:
                watch(module)
            assert worst(outcome(model, tokens, rank, 2, group), whole) < FP64
        ds_sp_overlap.disable(model)


# Guards.


def misread(rank):
    """Return the refusal of a layer that takes the absolute value of q, if the reader wrongly ignores this."""
    model, tokens, group = tiny(**EXACT), batches(1)[0], torch.distributed.group.WORLD
    with mock.patch.object(accounting, "MOVES", accounting.MOVES | {"abs"}):
        fill(model, PROGRAMS["abs, of q"])
        ds_sp_overlap.enable(model, {"head_groups": 2}, group)
        return refusal(outcome, model, tokens, rank, 2, group)


def refused(what):
    """Return the arguments of `Watched` for one of `CHANGES`: its check, and the words of its refusal."""
    return dict(check=functools.partial(changed, what=what), says=CHANGES[what][2])


A_COPY = test_a_copy_of_an_overlapped_model_refuses_to_attend_alone_and_can_be_overlapped
test_the_suite_notices_without_the_guard = notices(
    Watched("no rank attends alone", "if False:", functools.partial(A_COPY, options={}, copied=copy.deepcopy)),
    Watched("by a name of its own", "foreign[name] = part", **refused("an attention is put around another")),
    Watched("a mixer computes what was described", "if False:", **refused("the class of a delta net is patched")),
    Watched("the layer's own forward is the judge", "if False:", misread, says="something else than what was read"),
)
