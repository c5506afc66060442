"""Tests the probe of norms and MLPs with random weights: it must find out whether each token is computed alone, or refuse."""

import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ds_sp_overlap.integrations.inspect.accounting import Unknown
from ds_sp_overlap.integrations.inspect.tokenwise import fixed_state, probe_tokenwise
from tests.harness.guards import Watched, notices
from tests.harness.zoo import MADE_UP, compiled

CONFIG = LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4)
FORWARD = """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""


def mlp(*changes):
    """Make an MLP like those of transformers, with ``changes`` of its forward; its weights are on the meta device."""
    forward = compiled(FORWARD, changes, {**globals(), "__name__": MADE_UP})
    with torch.device("meta"):
        return type("MLP", (LlamaMLP,), {"forward": forward, "__module__": MADE_UP})(CONFIG)


def norm(forward):
    forward = types.FunctionType(forward.__code__, {"__name__": MADE_UP})
    return type("Norm", (LlamaRMSNorm,), {"forward": forward, "__module__": MADE_UP})(24)


def probe(module):
    return probe_tokenwise("mlp", module, 24)


class Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy + dy.mean(1, keepdim=True)


WHOLE = "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
WRONG = {
    "tokens that meet": ("self.gate_proj(x)", "self.gate_proj(x - x.mean(1, keepdim=True))", "some tokens than of all"),
    "the token before": ("self.gate_proj(x)", "self.gate_proj(x + x.roll(1, 1))", "some tokens than of all"),
    "a random number": ("self.gate_proj(x)", "self.gate_proj(x) + 0 * torch.rand(1, device=x.device)", "draws random numbers"),
    "a random number in training": ("self.gate_proj(x)", "self.gate_proj(x) + (torch.rand(1) if self.training else 0)", "draws random numbers"),
    "a pair": (WHOLE, WHOLE + ", x", "doesn't return hidden states alone"),
    "tokens that meet in backward": ("self.gate_proj(x)", "self.gate_proj(Meeting.apply(x))", "some tokens than of all"),
    "sizes by the count of tokens": ("self.gate_proj(x)", "self.gate_proj(x / x.shape[1])", "makes something else of some"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_mlp_that_is_no_function_of_a_token_is_not_known(what):
    old, new, message = WRONG[what]
    with pytest.raises(Unknown, match=message):
        probe(mlp((old, new)))


RIGHT = {
    "as it is": (),
    "a linear layer twice": (("self.up_proj(x)", "self.up_proj(x) * self.up_proj(x)"),),
    "a linear layer less": ((" * self.up_proj(x)", ""),),
    "a weight by itself": (("self.up_proj(x)", "nn.functional.linear(x, self.up_proj.weight, self.up_proj.bias)"),),
}


@pytest.mark.parametrize("what", RIGHT)
def test_an_mlp_may_be_any_function_of_a_token(what):
    probe(mlp(*RIGHT[what]))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        return x


class Adapted(nn.Linear):
    pass


class Quantised(nn.Parameter):
    """A weight of a library that multiplies it in its own way."""


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
    module = mlp()
    setattr(module, name, child)
    with pytest.raises(
        Unknown, match=f"mlp.{name} .{type(child).__name__}. (is no plain linear layer, and no activation|has code that is neither)"
    ):
        probe(module)


def test_an_mlp_may_have_adapters():
    module = nn.ModuleDict({"mlp": mlp()})
    get_peft_model(module, LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], lora_dropout=0.0))
    assert type(module.mlp.up_proj) is not nn.Linear
    probe(module.mlp)
    module = nn.ModuleDict({"mlp": mlp()})
    get_peft_model(module, LoraConfig(target_modules=["up_proj"], lora_dropout=0.1))
    with pytest.raises(Unknown, match="mlp.up_proj.lora_dropout.default .Dropout. drops out"):
        probe(module.mlp)


def test_dropout_counts_where_it_drops():
    module = mlp(("self.up_proj(x)", "self.drop(self.up_proj(x))"))
    module.drop = nn.Dropout(0.0)
    probe(module)
    before = fixed_state(module)
    module.drop.p = 0.1
    assert fixed_state(module) != before
    with pytest.raises(Unknown, match="mlp.drop .Dropout. drops out"):
        probe(module)


def test_a_norm_with_a_buffer_is_not_known():
    module = LlamaRMSNorm(24)
    probe(module)
    module.register_buffer("mean", torch.zeros(24))
    with pytest.raises(Unknown, match="mlp .LlamaRMSNorm. has more than parameters"):
        probe(module)


def test_a_norm_over_tokens_is_not_known():
    with pytest.raises(Unknown, match="mlp .Norm. makes something else of some tokens"):
        probe(norm(lambda self, x: (x - x.mean(1, keepdim=True)) * self.weight))


def test_weights_that_zero_3_took_into_parts_are_not_needed():
    module = LlamaRMSNorm(24)
    module.weight = nn.Parameter(torch.empty(0))
    module.weight.ds_shape = torch.Size((24,))
    probe(module)


def test_no_hook_is_called_and_nothing_is_left_changed():
    module, called = mlp(), []
    for part in module.modules():
        part.register_forward_pre_hook(lambda *_: called.append(True))
    before = [(dict(vars(part)), part.training) for part in module.modules()]
    drawn = torch.get_rng_state()
    probe(module)
    assert [(dict(vars(part)), part.training) for part in module.modules()] == before and not called
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("kind", [LlamaMLP, LlamaRMSNorm])
def test_a_forward_of_somebody_else_is_not_run(kind, monkeypatch):
    own = kind.forward
    module = LlamaMLP(CONFIG) if kind is LlamaMLP else LlamaRMSNorm(24)
    probe(module)
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x))
    with pytest.raises(Unknown, match="has code that is neither torch's nor transformers'"):
        probe(module)


@pytest.mark.parametrize("own", ["function of its own", "method of its class", "function of its file"])
def test_a_function_of_somebody_else_in_a_forward_is_not_run(own, monkeypatch):
    module = GemmaRMSNorm(24)
    probe(module)
    names = {**GemmaRMSNorm.forward.__globals__, "rotate": torch.nn.functional.silu}
    if own == "method of its class":
        monkeypatch.setattr(GemmaRMSNorm, "_norm", lambda self, x: x)
    else:
        exec("def forward(self, x): return rotate(x)", names)
        monkeypatch.setattr(GemmaRMSNorm, "forward", names["forward"])
    if own == "function of its own":
        module.rotate = lambda x: x
    if own == "function of its file":
        names["rotate"] = lambda x: x
    with pytest.raises(Unknown, match="has code that is neither torch's nor transformers'"):
        probe(module)


def test_a_norm_of_ones_own_is_not_known():
    """Its results depend on a sequence length above the lengths that the probe tries."""

    class Norm(LlamaRMSNorm):
        def forward(self, x):
            return x - x.mean(1, keepdim=True) if x.shape[1] > 1000 else x

    with pytest.raises(Unknown):
        probe(Norm(24))


test_the_suite_notices_without_the_guard = notices(
    Watched("no code of one's own in tiles", "if False:", test_a_norm_of_ones_own_is_not_known)
)
