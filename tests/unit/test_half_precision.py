"""Tests the rounding of gradients that are summed from parts, in half precision, against the same layer in fp64.

The sum over the parts must not be rounded more often than the plain layer's gradient. Local attention is only a sum, so that
rounding in attention does not hide rounding in the layer.
"""

import pytest
import torch
from torch import nn

from ds_sp_overlap import SelfAttention

HEADS, HEAD_DIM, WIDTH, TOKENS = 8, 16, 128, 256
# The plain layer rounds its gradient once. Here each part is rounded once, and then their sum: sqrt(2) times the error, if the
# roundings are independent. If the sum were rounded after each of four parts, the error would double.
ROUNDED_TWICE = 1.6


def attend(q, k, v):
    return q + k + v


def plain(modules, x):
    q, k, v = (modules[f"{kind}_proj"](x).unflatten(-1, (HEADS, HEAD_DIM)) for kind in "qkv")
    return modules["o_proj"](attend(modules["q_norm"](q), k, v).flatten(2))


def gradients(dtype, autocast, config):
    """Return the gradients of x, of the norm's weight and of the projections' weights; ``config`` None for the plain layer."""
    torch.manual_seed(0)
    modules = nn.ModuleDict(
        {f"{kind}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for kind in "qkvo"} | {"q_norm": nn.RMSNorm(HEAD_DIM)}
    )
    numbers = [*modules.parameters(), torch.randn(1, TOKENS, WIDTH), torch.randn(1, TOKENS, WIDTH)]
    for number in numbers:  # round to bf16, so that the numbers are the same in every dtype
        number.data = number.data.bfloat16().to(dtype)
    *_, x, dy = numbers
    call = plain
    if config is not None:
        ours = SelfAttention(
            local_attention=attend, num_heads=HEADS, head_dim=HEAD_DIM, batch_first=True, config=config, heads_alike=True, **modules
        )
        call = lambda _, x: ours(x)  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # Not a leaf: autocast caches the cast of a leaf, so the projections would share one cast, and one gradient.
        hidden = x.requires_grad_() * 1.0
        y = call(modules, hidden)
    projections = [modules[f"{kind}_proj"].weight for kind in "qkvo"]
    return torch.autograd.grad(y, [hidden, modules["q_norm"].weight, *projections], dy.to(y.dtype))


def errors(got, exact):
    return [((mine.double() - true).norm() / true.norm()).item() for mine, true in zip(got, exact, strict=True)]


EXACT = gradients(torch.float64, False, None)


def test_one_group_under_autocast_gives_the_bits_of_the_plain_layer():
    for got, expected in zip(gradients(torch.float32, True, {"head_groups": 1}), gradients(torch.float32, True, None), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, expected)


@pytest.mark.parametrize("config", [{"head_groups": 4}, {"head_groups": 4, "window": 2}])
@pytest.mark.parametrize(
    "dtype, autocast, which, times", [(torch.float32, True, 0, 1.1), (torch.bfloat16, False, 1, ROUNDED_TWICE)]
)
def test_dx_under_autocast_and_gradients_of_norms_are_rounded_no_more_for_more_groups(dtype, autocast, which, times, config):
    """The error of dx is about that of the plain layer: more groups round more often, but smaller numbers, and sum them in fp32."""
    noise, error = (errors(gradients(dtype, autocast, each), EXACT)[which] for each in (None, config))
    assert 1e-4 < error < times * noise
