"""Compares outputs and gradients with those of attention on the whole sequence, in fp64, to 1e-12 (see `layers.block_faults`)."""

import pytest
import torch
from deepspeed.sequence.layer import DistributedAttention as Upstream

import ds_sp_overlap
from tests.harness import dropin, layers, reference
from tests.harness.cases import pairs
from tests.harness.dropin import Case
from tests.harness.layers import HEADS, Shape, groups_for


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads,kv_heads", HEADS)
def test_block_equals_the_reference_for_all_layouts_batches_and_groups(heads, kv_heads, size, rank):
    shapes = [
        Shape(heads, kv_heads, 4, batch, (3,) * size, batch_first, rope, rotary, config={"head_groups": groups})
        for batch in (1, 3)
        for batch_first in (True, False)
        for rope, rotary in ((True, True), (True, False), (False, False))
        for groups in groups_for(heads, size)
    ]
    assert layers.faults_of_all(rank, pairs(shapes)) == []


def test_block_equals_the_reference_on_one_rank():
    assert torch.distributed.group.WORLD is None, "there is no process group"
    assert layers.faults_of_all(0, [Shape(kv_heads=2, lengths=(12,), config={"head_groups": groups}) for groups in (1, 2, 4)]) == []


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads,kv_heads", HEADS)
def test_dropin_equals_the_reference_for_all_layouts_batches_and_groups(heads, kv_heads, size, rank):
    cases = [
        Case(heads, kv_heads, 4, value_dim, batch, (3,) * size, batch_first, rotary_dims, flat, {"head_groups": groups})
        for batch, value_dim, flat, rotary_dims in ((1, 4, False, 4), (3, 4, True, 0), (3, 6, False, 2), (1, 6, True, 4))
        for batch_first in (True, False)
        for groups in groups_for(heads, size)
    ]
    assert dropin.faults_of_all(rank, pairs(cases)) == []


def test_arguments_reach_local_attention_once_a_head_group(rank):
    case, calls = Case(heads=8, kv_heads=4), []

    def local(q, k, v, scale, note=None):
        calls.append((q.shape[2], scale, note))
        return reference.attention(q * scale, k, v)

    q, k, v, _ = dropin.whole_inputs(case)
    mine = (dropin.my_slice(case, rank, t) for t in (q, k, v))
    got = dropin.module(case, local=local)(*mine, 0, None, 0.3, note="mine")
    assert layers.faults(1e-12, output=(got, dropin.my_slice(case, rank, reference.attention(q * 0.3, k, v)))) == []
    assert calls == [(2, 0.3, "mine")] * 2


def test_ranks_with_different_head_counts_agree_on_the_number_of_groups(rank):
    """Five heads on two ranks are 3 and 2: to rank 0 alone, an argument of size 3 seems to have a slice for each head."""
    case, sizes = Case(heads=5, kv_heads=5), []

    def attend(q, k, v, extra):
        sizes.append(q.shape[2])
        return reference.attention(q, k, v)

    assert dropin.dropin_faults(rank, case, attend=dropin.module(case, local=attend), extra=torch.zeros(3, 12, 12)) == []
    assert len(sizes) == 1


@pytest.mark.parametrize("heads, kv_heads, batch, lengths", [(4, 4, 2, (6, 6)), (8, 4, 3, (6, 6)), (8, 4, 2, (3,) * 4)])
def test_no_group_is_all_ranks_as_in_deepspeeds_own_class(heads, kv_heads, batch, lengths, rank):
    case = Case(heads, kv_heads, batch=batch, lengths=lengths)
    for cls in (Upstream, ds_sp_overlap.DistributedAttention):
        assert dropin.dropin_faults(rank, case, attend=cls(dropin.local_attention(case), None, gather_idx=1)) == []


@pytest.mark.ranks(4)
def test_modules_without_a_group_take_the_one_that_enable_is_given(rank):
    case = Case()
    halves = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    model = torch.nn.Sequential(Upstream(dropin.local_attention(case), None, gather_idx=1))
    report = ds_sp_overlap.enable(model, case.config, halves[rank // 2])
    assert dropin.dropin_faults(rank % 2, case, attend=model[0]) == []
    ds_sp_overlap.disable(model)
    assert report.sp_size == 2


def test_dropin_is_constructed_and_read_like_deepspeeds_class(rank):
    group, local = torch.distributed.group.WORLD, torch.nn.Identity()
    ours = ds_sp_overlap.DistributedAttention(local, group, 2, 1, None, 4)
    theirs = Upstream(local, group, 2, 1, None, 4)
    for name in ("local_attn", "spg", "scatter_idx", "gather_idx", "num_kv_heads", "sp_stream"):
        assert getattr(ours, name) is getattr(theirs, name), name
    assert list(ours.state_dict()) == []


def test_reference_is_scaled_dot_product_attention():
    """Compares the oracle of these tests with PyTorch's attention."""
    q, k, v = (torch.randn(2, 5, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert layers.faults(1e-12, output=(reference.attention(q, k, v), expected)) == []
