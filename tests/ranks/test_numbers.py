"""Tests NaN and Inf, overflow, dropout and reproducible bits, against DeepSpeed's own class."""

import math

import pytest
import torch
from deepspeed.sequence.layer import DistributedAttention as Upstream
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_sp_overlap
from tests.harness import dropin, layers
from tests.harness.dropin import Case
from tests.harness.layers import Shape
from tests.harness.ranks import on_ranks


class Stock(nn.Module):
    """A layer with the modules of `layers.projections`, and DeepSpeed's class for attention."""

    def __init__(self, shape, layer):
        super().__init__()
        self.shape, self.layer = shape, layer
        attention = ds_sp_overlap.attention_function(layers.reference.attention, heads_alike=True)
        self.attend = Upstream(attention, torch.distributed.group.WORLD, gather_idx=1)

    def forward(self, x):
        q, k, v = (self.layer[f"{kind}_proj"](x).unflatten(-1, (-1, self.shape.head_dim)) for kind in "qkv")
        return self.layer["o_proj"](self.attend(q, k, v, 0).flatten(2))


def overlapped(shape, layer):
    return layers.block(shape, layer, torch.distributed.group.WORLD)


# NaN and Inf.


def unlike(got, expected):
    """Describe the difference of two tensors; empty if there is none.

    NaN, Inf and -Inf must stand at the same places; other numbers may differ by 1e-12 of the largest number.
    """
    kinds = [torch.stack((t.isnan(), t == math.inf, t == -math.inf)) for t in (got, expected)]
    if not torch.equal(*kinds):
        return f"{(kinds[0] != kinds[1]).any(0).sum()} elements are NaN or Inf in one of them only"
    numbers = [torch.where(t.isfinite(), t, 0) for t in (got, expected)]
    return "; ".join(layers.faults(1e-12, numbers=numbers))


PLACES = [("x", math.nan), ("x", math.inf), ("x", -math.inf), ("dy", math.nan), ("dy", math.inf), ("weight", math.nan)]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("place,value", PLACES, ids=str)
def test_a_number_that_is_none_goes_where_it_goes_in_stock(place, value, groups, rank):
    """The NaN or Inf is one element of the input or cotangent of rank 1, or of a weight."""
    shape, seen = Shape(kv_heads=2, rope=False, bias=True, config={"head_groups": groups}), []
    for build in (Stock, overlapped):
        layer = layers.projections(shape)
        x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        if place == "weight":
            layer["k_proj"].weight.data[3, 5] = value
        elif rank == 1:
            (x if place == "x" else dy)[0, 2, 7] = value
        attend = build(shape, layer)
        y = attend(x.requires_grad_())
        y.backward(dy)
        seen.append({"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    expected, got = seen
    assert [f"{name}: {fault}" for name in expected if (fault := unlike(got[name], expected[name]))] == []
    strange = sum((~t.isfinite()).sum() for t in expected.values())
    torch.distributed.all_reduce(strange)
    assert strange > 100, "the control: it spreads"


# Dropout.


class Drop(nn.Module):
    """Attention that returns v after dropout; with ones for v and for the cotangent, output and gradient are the mask."""

    def __init__(self, p):
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, q, k, v):
        return self.drop(v) + 0 * (q + k)


P_DROP, LENGTHS = 0.25, (64, 64)


def masks(rank, groups, how):
    """Return the masks [h/P, n] of a rank's heads: in the output, in the gradient, and in the output of a second call."""
    torch.manual_seed(100 + rank)
    case = Case(heads=8, kv_heads=8, lengths=LENGTHS, config={"head_groups": groups})
    attend = dropin.module(case, local=Drop(P_DROP))
    ones = [torch.ones(2, LENGTHS[rank], 8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(q, k, v):
        return attend(q, k, v, 0)

    o = call(*ones) if how is None else checkpoint(call, *ones, use_reentrant=how == "reentrant")
    o.sum().backward()
    return [t.detach().movedim(2, 0).flatten(1) for t in (o, ones[2].grad, call(*ones))]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("how", [None, "reentrant", "non-reentrant"])
def test_dropout_has_its_rate_in_every_head_and_no_two_heads_share_a_mask(groups, how):
    """Two calls must not share a mask, either.

    Compares rates of dropout, and the shares of elements in which two masks agree, within 5 standard deviations; a shared mask
    would be off by 30. If each of n elements is dropped with probability p, and q = 1 - p, the rate deviates by sqrt(p q / n). Two
    masks agree with probability p^2 + q^2.
    """
    outputs, gradients, again = (torch.cat(of_ranks, 1) for of_ranks in zip(*on_ranks(2, masks, groups, how)))
    assert torch.equal(outputs, gradients)  # backward uses the same mask, even if it draws it again
    assert set(outputs.unique().tolist()) == {0.0, 1 / (1 - P_DROP)}
    dropped = outputs == 0
    n, agree = dropped.shape[1], P_DROP**2 + (1 - P_DROP) ** 2
    for head, mask in enumerate(dropped):
        assert abs(mask.double().mean() - P_DROP) < 5 * math.sqrt(P_DROP * (1 - P_DROP) / n), head
        for other in (*dropped[:head], again[head] == 0):
            same = (mask == other).double().mean()
            assert abs(same - agree) < 5 * math.sqrt(agree * (1 - agree) / n), head


def finite_gradients(rank, build, shape):
    """Run backward with 28 scales of the cotangent, in fp16; return for each scale which parameters have a finite gradient."""
    layer, seen = layers.projections(shape), []
    attend = build(shape, layer)
    for step in range(28):
        x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        layer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = attend(x.requires_grad_())
        y.backward((dy * 2.0 ** (18 - step / 4)).clamp(-60000, 60000).half())  # the cotangent itself is finite
        seen.append([bool(p.grad.isfinite().all()) for p in layer.parameters()])
    return seen


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_overflow_inside_the_layer_where_stocks_do(groups, rank):
    shape = Shape(rope=False, dtype=torch.float32, config={"head_groups": groups})
    stock, ours = [finite_gradients(rank, build, shape) for build in (Stock, overlapped)]
    assert stock == ours and {all(finite) for finite in stock} == {True, False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("heads, kv_heads, bias", [(4, 4, True), (4, 1, True), (6, 3, False)])  # last: both ranks need a KV head
def test_deterministic_mode_gives_the_same_bits_again(heads, kv_heads, bias, groups, dtype, rank):
    """In this mode, uninitialised memory is NaN, so reading it would give NaN."""
    shape, runs = Shape(heads=heads, kv_heads=kv_heads, dtype=dtype, bias=bias, config={"head_groups": groups}), []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            layer, attend, x, dy = layers.mine(rank, shape)
            y = layers.call_block(shape, attend, rank, x.requires_grad_())
            y.backward(dy)
            runs.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in runs[0])
    assert all(torch.equal(*pair) for pair in zip(*runs))
