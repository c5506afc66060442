"""Compares norms and MLPs that run in tiles with the same modules run whole, forward and backward; counts the runs."""

import contextlib
import copy

import peft
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, LlamaConfig, PhiConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.phi.modeling_phi import PhiMLP

from ds_sp_overlap.attention.runtime.tiles import run_in_tiles

M, INNER, TOKENS = 12, 20, 5
SHAPE = (2, 11, M)  # the last tile is not full


class MLP(LlamaMLP):
    """An MLP; ``ran[0]`` counts the tokens that its forward got."""

    def __init__(self, bias=False):
        super().__init__(LlamaConfig(hidden_size=M, intermediate_size=INNER, num_attention_heads=2, mlp_bias=bias))
        self.ran = [0]

    def forward(self, x):
        self.ran[0] += x.shape[:-1].numel()
        return super().forward(x)


def gpt2(dropout=0.0):
    return GPT2MLP(INNER, GPT2Config(n_embd=M, resid_pdrop=dropout))


def lora():
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["gate_proj", "down_proj"], init_lora_weights=False), MLP())


MODULES = {
    "rms norm": lambda: LlamaRMSNorm(M),
    "layer norm": lambda: nn.LayerNorm(M),
    "layer norm without bias": lambda: nn.LayerNorm(M, bias=False),
    "norm without weights": lambda: OlmoLayerNorm(M),
    "torch's rms norm": lambda: nn.RMSNorm(M),
    "gated": MLP,
    "gated with biases": lambda: MLP(bias=True),
    "plain": lambda: PhiMLP(PhiConfig(hidden_size=M, intermediate_size=INNER, num_attention_heads=2)),
    "gpt2": gpt2,
    "lora": lora,
}


def pair(make, dtype=torch.float64):
    """Make a module with random weights, and a copy that runs in tiles."""
    torch.manual_seed(0)
    module = make().to(dtype).train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    tiled = copy.deepcopy(module)
    tiled.forward = lambda x: run_in_tiles(tiled, x, TOKENS)
    return module, tiled


def inputs(dtype=torch.float64, requires_grad=True):
    torch.manual_seed(1)
    return torch.randn(SHAPE, dtype=dtype).requires_grad_(requires_grad), torch.randn(SHAPE, dtype=torch.float32).to(dtype)


def step(module, x, dy, run=lambda module, x: module(x), backwards=1):
    """Return the output, and the gradients of the input and of each weight (or None)."""
    x = x.detach().requires_grad_(x.requires_grad)
    module.zero_grad()
    y = run(module, x)
    for left in reversed(range(backwards)):
        y.backward(dy.to(y.dtype), retain_graph=bool(left))
    return y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())


def check(module, tiled, x, dy, tolerance=1e-12, **more):
    for expected, actual in zip(step(module, x, dy, **more), step(tiled, x, dy, **more), strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert actual.dtype == expected.dtype and actual.shape == expected.shape
            assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", MODULES)
def test_tiles_compute_what_the_whole_computes(name):
    # Some norms compute in fp32, even for fp64 inputs.
    check(*pair(MODULES[name]), *inputs(), tolerance=1e-6 if name == "norm without weights" else 1e-12)


@pytest.mark.parametrize("shape", [(1, 4, M), (3, 5, M), (1, 0, M), (1, 40, M)])
def test_any_number_of_tokens(shape):
    module, tiled = pair(MLP)
    x, dy = (t.new_ones(shape) for t in inputs())
    y, dx, *_ = step(tiled, x.requires_grad_(), dy)
    assert y.shape == dx.shape == shape
    if x.numel():
        check(module, tiled, x, dy)


@pytest.mark.parametrize("name", ["rms norm", "gated with biases"])
@pytest.mark.parametrize("backwards, requires_grad", [(2, True), (1, False)])
def test_backward_runs_twice_over_one_graph_and_an_input_needs_no_gradient(name, backwards, requires_grad):
    check(*pair(MODULES[name]), *inputs(requires_grad=requires_grad), backwards=backwards)


def test_weights_may_be_frozen_all_or_in_part():
    for frozen in (["gate_proj"], ["gate_proj", "up_proj", "down_proj"]):
        module, tiled = pair(MLP)
        for each in (module, tiled):
            for name in frozen:
                getattr(each, name).requires_grad_(False)
        check(module, tiled, *inputs())


# Without gpt2: its linear layers are not torch's, and each tile rounds their gradients.
@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"gpt2"}))
def test_bf16_is_as_near_to_fp64(name):
    """If each of 80 tiles rounded the gradients of weights, they would be worse than those of the whole in most of five draws."""
    (exact, _), (module, tiled) = pair(MODULES[name]), pair(MODULES[name], torch.bfloat16)
    exact.load_state_dict(module.state_dict())
    for seed in range(5):
        x, dy = torch.randn(2, 1, 80 * TOKENS, M, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))
        exactly = step(exact, x.double().requires_grad_(), dy.double())
        far = []
        for each in (module, tiled):
            found = step(each, x.clone().requires_grad_(), dy)
            far.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exactly) if b is not None])
        for whole, tiles in zip(*far):
            assert tiles <= 1.01 * whole  # sums in another order round some elements differently


@pytest.mark.parametrize("name", ["rms norm", "layer norm", "gated with biases"])
def test_autocast_over_fp32_weights(name):
    module, tiled = pair(MODULES[name], torch.float32)

    def run(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    x, dy = inputs(torch.float32)
    assert step(tiled, x, dy, run)[0].dtype == step(module, x, dy, run)[0].dtype
    check(module, tiled, x, dy, tolerance=1e-2, run=run)  # a bf16 has 8 bits
    # Autocast caches casts of weights. A cast that was made in the tiles, without a graph, must not be used after them.
    with torch.autocast("cpu", torch.bfloat16):
        tiled(x)
        weight = next(tiled.parameters())
        assert weight.dim() < 2 or nn.functional.linear(x.detach()[..., : weight.shape[1]], weight).requires_grad


@pytest.mark.parametrize("name", ["gated", "rms norm"])
@pytest.mark.parametrize("edited", [0, 1, -1])
def test_an_input_or_a_weight_that_is_edited_before_backward_is_refused(edited, name):
    _, tiled = pair(MODULES[name])
    x, dy = inputs()
    hidden = x * 1
    y = tiled(hidden)
    with torch.no_grad():
        [hidden, *tiled.parameters()][edited].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_backward_runs_in_the_modes_of_forward():
    module, tiled = pair(lambda: gpt2(dropout=0.5))
    x, dy = inputs()
    for each in (module, tiled):
        each.eval()
    y = tiled(x)
    tiled.train()
    y.backward(dy)
    assert torch.allclose(x.grad, step(module, x, dy)[1], atol=0, rtol=1e-12)


def test_no_graph_without_gradients():
    module, tiled = pair(MLP)
    x, _ = inputs()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = tiled(x)
        assert not y.requires_grad and torch.allclose(y, module(x), rtol=1e-12)


def test_each_gradient_is_delivered_once():
    _, tiled = pair(MLP)
    seen = []
    for name, parameter in tiled.named_parameters():
        parameter.register_hook(lambda dw, name=name: seen.append(name))
    step(tiled, *inputs())
    assert sorted(seen) == sorted(name for name, _ in tiled.named_parameters())


def test_hooks_of_linears_run_once_around_all_tiles():
    module, tiled = pair(MLP)
    seen = []
    for linear in (tiled.gate_proj, tiled.up_proj, tiled.down_proj):
        linear.register_forward_pre_hook(lambda linear, args: seen.append("begin"))
        linear.register_forward_hook(lambda linear, args, y: seen.append("end"))
    check(module, tiled, *inputs())
    assert seen == ["begin"] * 3 + ["end"] * 3


def test_second_derivatives_are_refused():
    _, tiled = pair(MLP)
    x, dy = inputs()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(tiled(x), x, dy, create_graph=True)


class Layer(nn.Module):
    """A layer that ends with an MLP, or with an MLP and a norm."""

    def __init__(self, mlp, norm=None):
        super().__init__()
        self.pre, self.mlp, self.norm = nn.Linear(M, M).double(), mlp, norm

    def forward(self, x):
        h = x + torch.tanh(self.pre(x))
        y = self.mlp(h)
        return h + (y if self.norm is None else self.norm(y))


@pytest.mark.parametrize("reentrant, behind, times", [(False, False, 2), (False, True, 3), (True, False, 3), (None, False, 2)])
def test_an_mlp_at_the_end_of_a_checkpoint_runs_twice(reentrant, behind, times):
    torch.manual_seed(3)
    (module, tiled), norm = pair(MLP), nn.LayerNorm(M).double() if behind else None

    def run(layer, x):
        return layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)

    layer = Layer(module, norm)
    other = copy.deepcopy(layer)
    other.mlp = tiled
    check(layer, other, *inputs(), run=run)
    tiled.ran[0] = 0
    step(other, *inputs(), run)
    assert tiled.ran[0] == times * SHAPE[0] * SHAPE[1]


def test_saved_tensors_go_to_the_host():
    @contextlib.contextmanager
    def counted():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            yield

    def run(module, x, hooks=save_on_cpu):
        with hooks():
            return module(x)

    saved: list = []
    module, tiled = pair(MLP)
    check(module, tiled, *inputs(), run=run)
    step(tiled, *inputs(), run=lambda module, x: run(module, x, counted))
    assert sorted(saved) == sorted([SHAPE, *(parameter.shape for parameter in tiled.parameters())])


def test_temporaries_of_one_tile_at_a_time():
    """Measures the peak memory of an RMSNorm in bf16, in sizes of its input; in tiles, little more than output and dx is needed."""

    def peak(module, tokens):
        x, dy = torch.randn(1, tokens, M, dtype=torch.bfloat16, requires_grad=True), torch.randn(1, tokens, M, dtype=torch.bfloat16)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            module(x).backward(dy)
        held = most = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most / (2 * tokens * M)

    module, tiled = pair(lambda: LlamaRMSNorm(M), torch.bfloat16)
    assert peak(module, 40 * TOKENS) > 10
    assert peak(tiled, 40 * TOKENS) < 3
