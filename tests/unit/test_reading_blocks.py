"""What the forward of a decoder layer computes, read by running it on recorders: known, or not known, and never mistaken."""

import copy
import gc
import inspect
import textwrap
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint  # noqa: F401, of the forwards below
from transformers import LlamaConfig, MixtralConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from ds_sp_overlap.attention.runtime.linear import PLAIN
from ds_sp_overlap.integrations.inspect.accounting import Unknown
from ds_sp_overlap.integrations.inspect.decoder_layer import BlockReader, BlockReading
from ds_sp_overlap.integrations.inspect.projections import ProjectionProbe
from ds_sp_overlap.integrations.inspect.tokenwise import TRANSFORMERS
from tests.harness.cases import since_transformers

CONFIG = LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2)
FORWARD = """
def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, position_embeddings=None, **kwargs):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(hidden_states, position_embeddings, attention_mask, position_ids=position_ids, past_key_values=past_key_values, **kwargs)
    hidden_states = residual + self.dropout(hidden_states) * self.multiplier
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    return residual + hidden_states
"""
MLP = """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""


def compiled(source, changes, module=__name__):
    """A forward, as one that the file ``module`` defines."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    namespace = {}
    exec(compile(source, "<forward>", "exec"), {**globals(), "__name__": module}, namespace)
    return namespace["forward"]


class Layer(nn.Module):
    """With a forward of its own source; no weight has any memory."""

    def __init__(self):
        super().__init__()
        self.multiplier = 1.0
        with torch.device("meta"):
            self.self_attn = LlamaAttention(CONFIG, 0)
            self.mlp = type("MLP", (LlamaMLP,), {"forward": compiled(MLP, ())})(CONFIG)
            self.input_layernorm = LlamaRMSNorm(24)
            self.post_attention_layernorm = type("Norm", (LlamaRMSNorm,), {})(24)
            self.post_norm, self.dropout = LlamaRMSNorm(24), nn.Dropout(0.0)


def layer(*changes, base=Layer, mlp=(), norm=None):
    """Of a class of its own; ``changes`` of its forward, ``mlp`` of its MLP's, ``norm`` the forward of the norm in the middle."""
    made = type("DecoderLayer", (base,), {"forward": compiled(FORWARD, changes)})()
    type(made.mlp).forward = compiled(MLP, mlp)
    if norm is not None:
        type(made.post_attention_layernorm).forward = norm
    return made


def reading(*changes, **more):
    return BlockReader(layer(*changes, **more), "self_attn").reading


def test_a_layer_is_read():
    same = {name: name for name in ("position_embeddings", "attention_mask", "position_ids")}
    assert reading() == BlockReading(
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", tuple(same.items()), (), True, None
    )


def test_arguments_of_attention_are_found_by_what_they_are():
    found = reading(
        ("position_ids=position_ids", "position_ids=position_ids, output_attentions=False, causal=True"),
        ("attention_mask=None, position_ids", "mask=None, output_attentions=None, position_ids"),
        ("position_embeddings, attention_mask,", "position_embeddings, attention_mask=mask,"),
        (", **kwargs)\n    hidden_states = residual", ")\n    hidden_states = residual"),
    )
    assert (dict(found.arguments)["attention_mask"], found.constants, found.passes_keywords) == ("mask", (("causal", True),), False)
    given = dict(mask=1, position_ids=2, use_cache=True, more=4)
    names = frozenset({"hidden_states", "mask", "position_ids"})
    assert found.attention_arguments(given, names) == dict(attention_mask=1, position_ids=2, causal=True)
    assert reading().attention_arguments(dict(attention_mask=1, more=4), names | {"attention_mask"}) == dict(
        attention_mask=1, more=4
    )


OTHERWISE = {
    "added the other way round": ("    return residual + hidden_states", "    return hidden_states + residual"),
    "in place": ("hidden_states = residual + self.dropout(hidden_states) * self.multiplier", "hidden_states = self.dropout(hidden_states).add_(residual)"),
    "without a name": ("hidden_states = self.mlp(hidden_states)\n", "hidden_states = (lambda f: f(hidden_states))(self.mlp)\n"),
}  # fmt: skip


@pytest.mark.parametrize("spelling", OTHERWISE)
def test_spelling_makes_no_difference(spelling):
    assert reading(OTHERWISE[spelling]) == reading()


@pytest.mark.parametrize("returned, blanks", [("(hidden_states,)", 0), ("(hidden_states, _)", 1), ("(hidden_states, None, _)", 2)])
def test_a_tuple_may_have_the_weights_of_attention_behind_the_hidden_states(returned, blanks):
    found = reading(("return residual + hidden_states", f"hidden_states = residual + hidden_states\n    return {returned}"))
    assert found.blanks == blanks
    x = torch.zeros(2)
    assert found.as_returned(x) == (x, *[None] * blanks) and reading().as_returned(x) is x


def test_a_layer_with_gradient_checkpointing_around_its_forward_is_read():
    class Checkpointed(Layer, GradientCheckpointingLayer):
        pass

    assert reading(base=Checkpointed) == reading()


SUM, OUT = "residual + self.dropout(hidden_states) * self.multiplier", "    return residual + hidden_states"
NORMED, ATTENDED = "self.input_layernorm(hidden_states)", "self.self_attn(hidden_states, position_embeddings, attention_mask"
WRONG = {
    "a multiplier": ((SUM, SUM + " * 0.5"), "not known here: mul"),
    "a residual that is off by little": ((SUM, SUM + " * (1 + 1e-12)"), "not known here: mul"),
    "a residual in fp32": ((SUM, SUM.replace("residual", "residual.float()")), "not known here: float"),
    "clamped where it is infinite": (
        (OUT, "    hidden_states = residual + hidden_states\n    if hidden_states.dtype is torch.float16 and hidden_states.isinf().any():"
              "\n        hidden_states = hidden_states.clamp(-6e4, 6e4)\n    return hidden_states"),
        "not known here: isinf|looks at the dtype",
    ),
    "a norm behind attention": ((SUM, "residual + self.post_norm(hidden_states)"), "calls input_layernorm, self_attn, post_norm, post_att"),
    "no norm in front": ((NORMED, "hidden_states"), "calls self_attn, post_attention_layernorm, mlp, not a norm"),
    "the residual normed": ((NORMED, NORMED + "\n    residual = hidden_states"), "not given the hidden states \\+"),
    "attention beside the MLP": (
        ("    hidden_states = " + SUM + "\n    residual = hidden_states\n", "    residual = residual + hidden_states\n"),
        "post_attention_layernorm is not given the hidden states",
    ),
    "other hidden states for attention": ((ATTENDED, ATTENDED.replace("(hidden_states", "(hidden_states + 1")), "self_attn is not given what"),
    "tokens moved": ((ATTENDED, ATTENDED.replace("(hidden_states", "(hidden_states.roll(1, 1)")), "not known here: roll"),
    "hidden states scaled first": ((NORMED, "self.input_layernorm(hidden_states * 2)"), "not known here: mul"),
    "hidden states changed in place": (("residual = hidden_states\n    hidden_states = self.input", "residual = hidden_states.mul_(2)\n    hidden_states = self.input"), "not known here: mul_"),
    "another mask": ((ATTENDED, ATTENDED.replace("attention_mask", "(attention_mask,)")), "changes what self_attn is given"),
    "a tensor for attention": ((", **kwargs)\n    hidden_states = residual", ", bias=residual)\n    hidden_states = residual"), "changes what self_attn is given"),
    "dropout": ((SUM, "residual + nn.functional.dropout(hidden_states, 0.1, self.training)"), "not known here: dropout"),
    "a random number for nothing": ((SUM, SUM + "\n    torch.rand(1) if self.training else None"), "calls torch.rand"),
    "another sum in evaluation": ((OUT, "    return residual + hidden_states if self.training else hidden_states"), "doesn't return"),
    "other arguments in evaluation": (
        ("position_ids=position_ids", "position_ids=position_ids if self.training else None"), "another one in evaluation"),
    "something remembered": ((OUT, "    self.last = residual\n" + OUT), "sets last"),
    "a child's weight": ((NORMED, NORMED + " * self.input_layernorm.weight"), "reads input_layernorm.weight"),
    "the MLP twice": (("self.mlp(hidden_states)", "self.mlp(self.mlp(hidden_states))"), "calls input_layernorm, .* mlp, mlp"),
    "one more that is returned": ((OUT, OUT + ", residual"), "returns more than hidden states"),
    "other hidden states for the MLP": (("self.mlp(hidden_states)", "self.mlp(hidden_states * 2)"), "not known here: mul"),
    "more arguments of the MLP": (("self.mlp(hidden_states)", "self.mlp(hidden_states, position_ids)"), "gives mlp more than one"),
    "no hidden states": (("hidden_states, attention_mask=None", "x, hidden=None, attention_mask=None"), "takes no hidden_states"),
    "what isn't known here": ((SUM, SUM + ".nothing"), "AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_layer_that_computes_something_else_is_not_known(what):
    change, message = WRONG[what]
    with pytest.raises(Unknown, match=message) as caught:
        reading(change)
    assert "NameError" not in str(caught.value) and "SyntaxError" not in str(caught.value)


class Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy + dy.mean(1, keepdim=True)


WHOLE = "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
WRONG_MLPS = {
    "tokens that meet": ("self.gate_proj(x)", "self.gate_proj(x - x.mean(1, keepdim=True))", "mlp .MLP.: its forward computes over more than a token: mean"),
    "the token before": ("self.gate_proj(x)", "self.gate_proj(x + x.roll(1, 1))", "not known here: roll"),
    "a random number": ("self.gate_proj(x)", "self.gate_proj(x) + 0 * torch.rand(1, device=x.device)", "calls torch.rand"),
    "a random number in training": ("self.gate_proj(x)", "self.gate_proj(x) + (torch.rand(1) if self.training else 0)", "calls torch.rand"),
    "a pair": (WHOLE, WHOLE + ", x", "doesn't return hidden states alone"),
    "tokens that meet in backward": ("self.gate_proj(x)", "self.gate_proj(Meeting.apply(x))", "uses the global Meeting"),
    "a checkpoint": (WHOLE, WHOLE.replace("self.down_proj(", "checkpoint(self.down_proj, ").replace("up_proj(x))", "up_proj(x), use_reentrant=False)"), "calls torch._compile"),
    "a reentrant checkpoint": (WHOLE, WHOLE.replace("self.down_proj(", "checkpoint(self.down_proj, ").replace("up_proj(x))", "up_proj(x), use_reentrant=True)"), "calls torch._compile"),
    "sizes by the count of tokens": ("self.gate_proj(x)", "self.gate_proj(x / x.shape[1])", "makes something else of some|computes with a size"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_MLPS)
def test_an_mlp_that_is_no_function_of_a_token_is_not_known(what):
    old, new, message = WRONG_MLPS[what]
    with pytest.raises(Unknown, match=message):
        reading(mlp=[(old, new)])


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        return x


class Adapted(nn.Linear):
    pass


class Quantised(nn.Parameter):
    """Is a weight that some library multiplies in its own way."""


def quantised():
    linear = nn.Linear(24, 40)
    linear.weight = Quantised(linear.weight.data)
    return linear


CHILDREN = {
    "a linear layer with a weight of another type": ("up_proj", quantised()),
    "an activation with a buffer": ("act_fn", Remembering()),
    "an activation with a parameter": ("act_fn", nn.PReLU()),
    "another linear layer": ("up_proj", Adapted(24, 40, device="meta")),
}


@pytest.mark.parametrize("what", CHILDREN)
def test_an_mlp_with_other_children_is_not_known(what):
    name, child = CHILDREN[what]
    module = layer()
    setattr(module.mlp, name, child)
    with pytest.raises(Unknown, match=f"mlp.{name} .{type(child).__name__}. is no plain linear layer, and no activation"):
        BlockReader(module, "self_attn")


TOGETHER = False


class Around(nn.Module):
    """Multiplies what a linear layer returns by the largest number of all tokens, if it is told to."""

    def __init__(self):
        super().__init__()
        self.linear, self.together = nn.Linear(24, 16), False

    def forward(self, x):
        y = self.linear(x)
        return y * y.abs().max() if self.together or TOGETHER else y


@pytest.mark.parametrize("how", ["an attribute", "a global"])
def test_a_projection_is_probed_again_once_something_has_changed(how, monkeypatch):
    projections, module = ProjectionProbe(TRANSFORMERS), Around()
    assert [projections.why_not(module, 24, PLAIN) for _ in range(2)] == ["", ""]
    if how == "an attribute":
        module.together = True
    else:
        monkeypatch.setitem(Around.forward.__globals__, "TOGETHER", True)
    assert "projection (Around)" in projections.why_not(module, 24, PLAIN)


def test_a_projection_that_was_probed_is_freed_with_its_layer():
    projections, module = ProjectionProbe(TRANSFORMERS), Around()
    assert projections.why_not(module, 24, PLAIN) == ""
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


OTHER_MLPS = {
    "a linear layer twice": [("self.up_proj(x)", "self.up_proj(x) * self.up_proj(x)")],
    "a linear layer less": [(" * self.up_proj(x)", "")],
    "a weight by itself": [("self.up_proj(x)", "nn.functional.linear(x, self.up_proj.weight, self.up_proj.bias)")],
}


@pytest.mark.parametrize("what", OTHER_MLPS)
def test_an_mlp_may_be_any_function_of_a_token(what):
    assert reading(mlp=OTHER_MLPS[what]) == reading()


def test_an_mlp_may_have_adapters():
    module = layer()
    get_peft_model(module, LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], lora_dropout=0.0))
    assert type(module.mlp.up_proj) is not nn.Linear
    assert BlockReader(module, "self_attn").reading == reading()
    module = layer()
    get_peft_model(module, LoraConfig(target_modules=["up_proj"], lora_dropout=0.1))
    with pytest.raises(Unknown, match="mlp.up_proj.lora_dropout.default .Dropout. drops out"):
        BlockReader(module, "self_attn")


# Mixtures of experts.

MOE = MixtralConfig(
    hidden_size=24, intermediate_size=40, num_local_experts=4, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1
)
ROUTE = "_, top_k_weights, top_k_index = self.gate(hidden_states)"


def with_experts(*changes, implementation="eager", config=MOE):
    """Of a class of its own, with ``changes`` of its mixture's forward."""
    config = copy.deepcopy(config)
    config._experts_implementation = implementation
    made = layer()
    with torch.device("meta"):
        made.mlp = MixtralSparseMoeBlock(config)
    if changes:
        forward = compiled(textwrap.dedent(inspect.getsource(MixtralSparseMoeBlock.forward)), changes, "transformers.test")
        made.mlp.__class__ = type("Mixture", (MixtralSparseMoeBlock,), {"forward": forward, "__module__": "transformers.test"})
    return made


@since_transformers("5.1")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_a_mixture_of_experts_that_goes_token_by_token_is_read(implementation):
    assert BlockReader(with_experts(implementation=implementation), "self_attn").reading == reading()


@since_transformers("5.1")
def test_large_experts_are_tried_out_in_little_memory():
    large = copy.deepcopy(MOE)
    large.intermediate_size, large.num_local_experts = 2**20, 64  # 38 GB
    assert BlockReader(with_experts(config=large), "self_attn").reading == reading()


CAPACITY = """
    load = torch.nn.functional.one_hot(top_k_index, 4).sum(1).cumsum(0).gather(1, top_k_index)
    top_k_weights = torch.where(load > 8, 0.0, top_k_weights)
"""
WRONG_MIXTURES = {
    "a capacity": ((ROUTE, ROUTE + CAPACITY), "makes something else of some tokens"),
    "experts that choose tokens": (
        (ROUTE, ROUTE + "\n    top_k_weights = top_k_weights.softmax(0)"), "makes something else of some tokens"),
    "a random number": ((ROUTE, ROUTE + "\n    top_k_weights = top_k_weights + torch.rand(1)"), "draws random numbers"),
    "a count that is kept": ((ROUTE, ROUTE + "\n    self.top_k = len(hidden_states)"), "remembers something"),
    "a gradient of all tokens": ((ROUTE, ROUTE + "\n    top_k_weights = Meeting.apply(top_k_weights[None])[0]"), "makes something else"),
}  # fmt: skip


@since_transformers("5.1")
@pytest.mark.parametrize("what", WRONG_MIXTURES)
def test_a_mixture_of_experts_whose_tokens_meet_is_not_known(what):
    change, message = WRONG_MIXTURES[what]
    with pytest.raises(Unknown, match=message):
        BlockReader(with_experts(change), "self_attn")


def twin(module):
    """Another layer of its class, with the same configs."""
    configs = [part.config for part in module.modules() if hasattr(part, "config")]
    return copy.deepcopy(module, {id(config): config for config in configs})


@since_transformers("5.1")
@pytest.mark.parametrize("made", [layer, with_experts])
def test_a_layer_like_one_that_was_read_is_not_read_again(made, monkeypatch):
    known, one = [], made()
    reader = BlockReader(one, "self_attn", known=known)
    monkeypatch.setattr(BlockReader, "_read", None)
    other = BlockReader(twin(one), "self_attn", known=known)
    assert known == [reader] and other.reading == reader.reading and not other.why_not(twin(one))


def make_noisy(module):
    module.mlp.jitter_noise = 0.1


def let_tokens_meet(module):
    forward = compiled(textwrap.dedent(inspect.getsource(MixtralSparseMoeBlock.forward)), [(ROUTE, ROUTE + CAPACITY)])
    module.mlp.__class__ = type("Mixture", (MixtralSparseMoeBlock,), {"forward": forward, "__module__": "transformers.test"})


def widen(module):
    module.self_attn.config = LlamaConfig(hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2)


def set_multiplier(module):
    module.multiplier = 0.5


def set_p(module):
    module.dropout.p = 0.5


def mix_tokens(module):
    module.post_attention_layernorm.__class__ = type(
        "Norm", (LlamaRMSNorm,), {"forward": lambda self, x: (x - x.mean(1, keepdim=True)) * self.weight}
    )


def lose_the_mlp(module):
    module.mlp = None


@since_transformers("5.1")
@pytest.mark.parametrize("change", [lose_the_mlp, make_noisy, let_tokens_meet, widen, set_multiplier, set_p, mix_tokens])
def test_a_layer_unlike_one_that_was_read_is_read_by_itself(change):
    known, one = [], with_experts()
    BlockReader(one, "self_attn", known=known)
    change(other := twin(one))
    with pytest.raises(Unknown):
        BlockReader(other, "self_attn", known=known)


def test_what_one_layer_has_and_the_other_has_not_is_seen():
    known, one = [], layer(("* self.multiplier", "* getattr(self, 'factor', 1.0)"))
    reader = BlockReader(one, "self_attn", known=known)
    other = twin(one)
    other.factor = 0.5
    with pytest.raises(Unknown):
        BlockReader(other, "self_attn", known=known)
    one.factor = 0.5
    assert "factor changed since it was read" in reader.why_not(one)


def test_another_eps_is_tried_out_by_itself():
    known, one = [], layer()
    BlockReader(one, "self_attn", known=known)
    other = twin(one)
    other.input_layernorm.variance_epsilon = 0.1
    assert BlockReader(other, "self_attn", known=known) is known[1]


def test_an_mlp_or_a_norm_with_a_parameter_or_buffer_is_not_known():
    module = layer()
    module.mlp.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(Unknown, match="mlp .MLP. is no plain linear layer"):
        BlockReader(module, "self_attn")
    module = layer()
    module.post_attention_layernorm.register_buffer("mean", torch.zeros(24))
    with pytest.raises(Unknown, match="post_attention_layernorm .Norm. has more than parameters"):
        BlockReader(module, "self_attn")


def test_a_norm_over_tokens_is_not_known():
    with pytest.raises(Unknown, match="post_attention_layernorm .Norm.: its forward computes over more than a token"):
        reading(norm=lambda self, x: (x - x.mean(1, keepdim=True)) * self.weight)


def test_dropout_counts_where_it_drops():
    module = layer()
    module.dropout.p = 0.1
    with pytest.raises(Unknown, match="calls dropout, which drops out"):
        BlockReader(module, "self_attn")
    module = layer(mlp=[("self.up_proj(x)", "self.drop(self.up_proj(x))")])
    module.mlp.drop = nn.Dropout(0.0)
    assert BlockReader(module, "self_attn").reading == reading()
    module.mlp.drop.p = 0.1
    with pytest.raises(Unknown, match="mlp.drop .Dropout. drops out"):
        BlockReader(module, "self_attn")


def test_a_replaced_forward_is_not_read():
    module = layer()
    module.forward = lambda hidden_states: hidden_states
    with pytest.raises(Unknown, match="its forward was replaced"):
        BlockReader(module, "self_attn")


def hook(*_):
    pass


def replace_linear(module):
    module.mlp.up_proj = Adapted(24, 40, device="meta")


def replace_forward(module):
    module.self_attn.forward = hook


CHANGES = {
    "a multiplier": (set_multiplier, "multiplier changed"),
    "a dropout": (set_p, "dropout.p changed"),
    "another linear layer": (replace_linear, "a module in it changed"),
    "a hook on attention": (lambda module: module.self_attn.register_forward_hook(hook), "self_attn .* has a forward or a hook"),
    "another forward of attention": (replace_forward, "self_attn .* has a forward or a hook"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_since_is_seen(what):
    module, (change, message) = layer(), CHANGES[what]
    reader = BlockReader(module, "self_attn")
    assert not reader.why_not(module)
    change(module)
    with pytest.raises(AssertionError, match=message):
        assert not reader.why_not(module), reader.why_not(module)


def test_the_mode_that_a_layer_is_in_makes_no_difference():
    assert BlockReader(layer().eval(), "self_attn").reading == reading()
    module = layer(mlp=[("self.gate_proj(x)", "self.gate_proj(x) + (torch.rand(1) if self.training else 0)")]).eval()
    with pytest.raises(Unknown, match="calls torch.rand"):
        BlockReader(module, "self_attn")


def test_weights_that_zero_3_took_into_parts_are_not_needed():
    module = layer()
    for norm in (module.input_layernorm, module.post_attention_layernorm):
        norm.weight = nn.Parameter(torch.empty(0))
        norm.weight.ds_shape = torch.Size((24,))
    assert BlockReader(module, "self_attn").reading == reading()


def test_no_hook_is_called():
    module, called = layer(), []
    for part in module.modules():
        part.register_forward_pre_hook(lambda *_: called.append(True))
    assert BlockReader(module, "self_attn").reading == reading()
    assert not called


def test_nothing_that_is_read_is_left_changed():
    module = layer()
    before = [(dict(vars(part)), part.training) for part in module.modules()]
    drawn = torch.get_rng_state()
    BlockReader(module, "self_attn")
    assert [(dict(vars(part)), part.training) for part in module.modules()] == before
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("kind", [LlamaMLP, LlamaRMSNorm])
def test_a_class_of_the_library_with_a_forward_of_somebody_else_is_accounted_for(kind, monkeypatch):
    own = kind.forward

    def by_length(self, x):
        x = own(self, x)
        return x - x.mean(1, keepdim=True) if x.shape[1] > 1000 else x

    one = layer()
    one.mlp = LlamaMLP(CONFIG)
    assert BlockReader(one, "self_attn").reading == reading()
    monkeypatch.setattr(kind, "forward", by_length)
    with pytest.raises(Unknown, match="size of its tensors"):
        BlockReader(one, "self_attn")


def test_a_layer_that_looks_at_the_cache_runs_by_itself_where_there_is_one():
    given = dict(attention_mask=1, position_ids=1, position_embeddings=1)
    looks = ("return residual + hidden_states", "return residual + hidden_states if past_key_values is None else residual")
    reader = BlockReader(layer(looks), "self_attn")
    assert reader.unexpected(given) == reader.unexpected({**given, "past_key_values": None}) == ""
    assert reader.unexpected({**given, "past_key_values": 1}) == "it is given past_key_values"
    assert BlockReader(layer(), "self_attn").unexpected({**given, "past_key_values": 1}) == ""
