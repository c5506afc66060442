"""Counts the launches of a step, besides matrix products, on one of many emulated ranks: copies of weights, packs and unpacks."""

from unittest import mock

import pytest
import torch

from ds_sp_overlap.attention.runtime import operations, parts, slices
from ds_sp_overlap.exchange.geometry import Geometry
from tests.harness import launches
from tests.harness.cases import full

HEAD_DIM = 16
# (ranks, query heads, KV heads): Llama-8B on one node and on two; KV heads for two groups, but not for four; MHA; uneven heads.
HEADS = [(8, 32, 8), (16, 32, 8), (8, 32, 16), (8, 32, 32), (4, 16, 16), (4, 18, 6)]
CASES = [(*heads, groups) for heads in HEADS for groups in (1, 2, 4) if groups <= heads[1] // heads[0]]


def summed_over(size, heads, kv_heads, groups, form):
    """Return the number of elements in slices of weights over which a product sums; each is copied once in a step.

    See Note [Slices of weights].
    """
    geometry = Geometry(size, 0, (4,) * size, 1, heads, kv_heads, groups)
    shared, total = heads // kv_heads, 0
    for kind in "qkvo":
        for group in range(groups):
            ranges = geometry.heads_of("q" if kind == "o" else kind, group)
            of_kind = sum(stop - start for start, stop in ranges)
            is_apart = len(ranges) > 1
            if form == "interleaved" and kind != "o":  # one slice for each KV head that the ranges touch
                per_slice = shared if kind == "q" else 1
                is_apart = any(start // per_slice != (stop - 1) // per_slice for start, stop in ranges) or is_apart
            total += is_apart * of_kind
    return total * HEAD_DIM * heads * HEAD_DIM


FORMS = ["separate", *(pytest.param(form, marks=pytest.mark.pairs) for form in ("fused", "interleaved"))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size,heads,kv_heads,groups", CASES)
def test_a_weight_is_copied_for_products_that_sum_over_its_slices_alone(size, heads, kv_heads, groups, form):
    """The products for q, k, v, do and gradients of weights copy nothing; earlier versions copied at least three times as much."""
    counts = launches.of_layer(size, heads, kv_heads, head_dim=HEAD_DIM, head_groups=groups, form=form, shares=1)
    assert counts.written["weights"] == summed_over(size, heads, kv_heads, groups, form) * torch.float32.itemsize
    assert counts.launched["products"] >= 12


def test_a_copy_of_a_weight_or_of_its_gradient_is_seen(monkeypatch):
    """Negative control: patches in products that copy slices, as in earlier versions."""
    plain = launches.of_layer(8, 32, 8, head_groups=2).written["weights"]

    def by_copies(a, whole, part, bias=None):
        y = a @ slices.cut_ranges(whole, 1, part)
        return y if bias is None else y + slices.cut_ranges(bias, 0, part)

    def to_copies(a, b, whole, part, add):
        slices.put_ranges(whole, 1, part, a @ b, add)

    monkeypatch.setattr(parts, "mm_to_slices", to_copies)
    with_gradients = launches.of_layer(8, 32, 8, head_groups=2).written["weights"]
    # The gradients of Wq and Wo are copied.
    assert with_gradients - plain == 2 * (32 * 16) ** 2 * 4
    monkeypatch.setattr(operations, "mm_of_slices", by_copies)
    # Ranks have different numbers of heads, so no GEMM writes the send buffers of q and do.
    assert launches.of_layer(4, 18, 6, head_groups=2, shares=1).written["weights"] > summed_over(4, 18, 6, 2, "separate") * 4


# {(head groups, KV heads): (launches, bytes)} of a layer in forward and backward, in bf16, without products and attention.
# Launches and bytes are (weights, joins, activations); bytes of weights in units of Wq, the others in units of a rank's q.
#
#     weights       slices of Wq in one dgrad and of Wo in one product, for each group
#     joins         one for each tensor that is packed or unpacked; a sum and a copy for dk and dv of heads that several ranks need.
#                   Send buffers that a GEMM writes are not packed; tensors that arrive in the order of their use are not unpacked
#     activations   none
#
# The numbers don't grow with the number of ranks. KV heads that ranks share are packed once for each of these ranks.
BUDGET = {
    (1, "fewer"): ((0, 10, 0), (0, 6.5, 0)),
    (1, "as many"): ((0, 8, 0), (0, 6, 0)),
    (1, "more"): ((0, 8, 0), (0, 8, 0)),
    (2, "fewer"): ((4, 10, 0), (2, 4.5, 0)),
    (2, "as many"): ((4, 8, 0), (2, 4, 0)),
    (2, "more"): ((0, 22, 0), (0, 11, 0)),
}


@pytest.mark.parametrize("groups,kv", BUDGET)
@pytest.mark.parametrize("size", [8, full(16), 64])
def test_a_step_launches_and_copies_what_its_budget_says(groups, kv, size):
    """``kv``: "fewer" KV heads than ranks, "as many", or "more"; each rank has two query heads."""
    heads = {"fewer": size // 2, "as many": size, "more": 2 * size}
    shape = dict(size=size, heads=2 * size, kv_heads=heads[kv], head_dim=4, dtype=torch.bfloat16)
    counts = launches.of_layer(head_groups=groups, **shape)
    width, kinds = 4 * shape["heads"], ("weights", "joins", "activations")
    q = 4 * width * 2
    launched = tuple(counts.launched[kind] for kind in kinds)
    written = tuple(counts.written[kind] / unit for kind, unit in zip(kinds, (width * width * 2, q, q)))
    assert (launched, written) == BUDGET[groups, kv]


@pytest.mark.parametrize("groups,window,most", [(1, None, 239), (2, None, 348), (4, None, 526), (2, 1, 654)])
def test_a_step_calls_no_more_functions_than_its_budget_says(groups, window, most):
    """Counts calls of the package's functions, the host's work besides torch; see benchmarks/instructions.py."""
    assert launches.calls_of_layer(groups, window=window) <= most


def test_autograd_takes_no_step_beside_attention_where_heads_arrive_whole():
    """Once for each group in each of three steps; where heads are cut or joined, it takes one more."""
    with mock.patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as grad:
        launches.calls_of_layer(2, window=1)
    assert grad.call_count == 2 * 3
