"""Gradients that are made in parts, in half precision: no sum over the parts is rounded where the plain layer's isn't.

Against the same layer in fp64. Local attention is a sum, so that no rounding of its own hides those of the layer around it.
"""

import pytest
import torch
from torch import nn

from ds_sp_overlap import SelfAttention
from ds_sp_overlap.attention.runtime.stacks import Stack
from ds_sp_overlap.attention.runtime.waiting import Operands

HEADS, HEAD_DIM, WIDTH, TOKENS = 8, 16, 128, 256
# The parts are rounded once each, as is the plain layer's one gradient, and then their sum once: sqrt(2) times the error if the
# parts are independent. A sum that is rounded with each of four parts has twice the error.
ROUNDED_TWICE = 1.6


def attend(q, k, v):
    return q + k + v


def plain(modules, x):
    q, k, v = (modules[f"{kind}_proj"](x).unflatten(-1, (HEADS, HEAD_DIM)) for kind in "qkv")
    return modules["o_proj"](attend(modules["q_norm"](q), k, v).flatten(2))


def gradients(dtype, autocast, config):
    """dx and the gradient of the norm's weight; of the plain layer without a ``config``."""
    torch.manual_seed(0)
    modules = nn.ModuleDict(
        {f"{kind}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for kind in "qkvo"} | {"q_norm": nn.RMSNorm(HEAD_DIM)}
    )
    numbers = [*modules.parameters(), torch.randn(1, TOKENS, WIDTH), torch.randn(1, TOKENS, WIDTH)]
    for number in numbers:  # as bf16 has them, in every dtype
        number.data = number.data.bfloat16().to(dtype)
    *_, x, dy = numbers
    call = plain
    if config is not None:
        ours = SelfAttention(
            local_attention=attend, num_heads=HEADS, head_dim=HEAD_DIM, batch_first=True, config=config, heads_alike=True, **modules
        )
        call = lambda _, x: ours(x)  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # No leaf, whose cast autocast would keep: its gradient is the sum of what each projection gives back.
        hidden = x.requires_grad_() * 1.0
        y = call(modules, hidden)
    return torch.autograd.grad(y, [hidden, modules["q_norm"].weight], dy.to(y.dtype))


def errors(got, exact):
    return [((mine.double() - true).norm() / true.norm()).item() for mine, true in zip(got, exact, strict=True)]


EXACT = gradients(torch.float64, False, None)


def test_one_group_under_autocast_gives_the_bits_of_the_plain_layer():
    for got, expected in zip(gradients(torch.float32, True, {"head_groups": 1}), gradients(torch.float32, True, None), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, expected)


@pytest.mark.parametrize("config", [{"head_groups": 4}, {"head_groups": 4, "window": 2}])
def test_dx_under_autocast_is_rounded_no_more_for_more_groups(config):
    """Expect the plain layer's error, up to chance: more groups are more roundings, but of smaller numbers, summed in fp32."""
    (noise, _), (error, _) = (errors(gradients(torch.float32, True, each), EXACT) for each in (None, config))
    assert 1e-4 < error < 1.1 * noise


@pytest.mark.parametrize("config", [{"head_groups": 4}, {"head_groups": 4, "window": 2}])
def test_gradients_of_norms_are_summed_over_groups_in_fp32(config):
    (_, noise), (_, error) = (errors(gradients(torch.bfloat16, False, each), EXACT) for each in (None, config))
    assert 1e-4 < error < ROUNDED_TWICE * noise


@pytest.mark.parametrize("expert", [None, 0], ids=["grouped", "one by one"])
def test_gradients_of_experts_that_can_not_wait_are_summed_in_fp32(expert):
    weight, tokens, chunks = nn.Parameter(torch.zeros(1, 32, 32, dtype=torch.bfloat16)), 32, 8
    made = torch.Generator().manual_seed(0)
    left, right = (torch.randn(chunks * tokens, 32, generator=made).bfloat16() for _ in range(2))
    exact, found, sums = left.double().t() @ right.double(), [], []
    for count in (1, chunks):
        stack = Stack(weight, "layers.0")
        for each, other in zip(left.chunk(count), right.chunk(count), strict=True):
            offs = torch.tensor([len(each)], dtype=torch.int32) if expert is None else None
            stack.add(Operands(each, other, expert, offs))
        sums.append(stack.sum is not None and len(stack.chunks) < count)
        (dw,) = stack.summed()
        assert dw.dtype == torch.bfloat16
        found += errors([dw[0]], [exact])
    assert sums == [True, True]  # none of them waited for all
    assert 1e-4 < found[1] < ROUNDED_TWICE * found[0]
