"""Send buffers written by the GEMM that projects, or by the kernel that rotates: the same layer, and fewer passes over memory."""

from collections import Counter
from unittest import mock

import pytest

from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.relayout import ops
from tests.harness import layers, relayout
from tests.harness.cases import pairs
from tests.harness.layers import Shape, groups_for
from tests.harness.moving import always, counted, kinds, moving
from tests.harness.ranks import on_ranks


def relayouts(rank, rotary, batch_first):
    """What a layer is found to get wrong, and what is packed and unpacked in its forward and backward."""
    seen = Counter()
    shape = Shape(heads=4, kv_heads=4, batch=1, batch_first=batch_first, rotary=rotary, rope=rotary, config={"head_groups": 2})
    with always, counted(seen, folds=False):
        return layers.block_faults(rank, shape), seen


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_nothing_is_packed_and_o_dq_dk_dv_are_unpacked(rotary, batch_first):
    """The table of DESIGN 3, with one batch element: o of both groups is unpacked, and dq, dk, dv of the first.

    This attention's dk isn't contiguous, and is packed.
    """
    for found, seen in on_ranks(2, relayouts, rotary, batch_first):
        assert found == [] and seen == {"unpack": 2 + 3, "pack": 1}


# Rotary embedding in the kernels that move q, k, dq and dk.


def folded(rank, shapes, kind, direct):
    with moving(kind, direct) as seen:
        return layers.faults_of_all(rank, shapes), seen


@pytest.mark.pairs
@kinds
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("heads,kv_heads,size", [(8, 8, 2), (8, 2, 4), (7, 7, 2), (4, 1, 2)])
def test_the_block_equals_the_reference_where_the_kernels_rotate(heads, kv_heads, size, direct, kind):
    shapes = [
        Shape(
            heads=heads, kv_heads=kv_heads, head_dim=4, batch=batch, lengths=lengths, batch_first=batch_first, rotary=True,
            config={"head_groups": groups, "check": check},
        )
        for lengths in ((3,) * size, (1,) * size, (5, 2, 3, 1)[:size])
        for batch, batch_first, check in ((1, True, False), (3, True, True), (3, False, False))
        for groups in groups_for(heads, size)
    ]  # fmt: skip
    for found, seen in on_ranks(size, folded, pairs(shapes), kind, direct):
        assert found == []
        assert seen["rotate_pack"] == seen["unpack_rotate_back"] > 0


def rotated_one_way(rank, name):
    """The faults of a layer whose kernels forget to rotate, in one direction."""

    def straight(source, cos, sin, *parts_and_out):
        (relayout.pack if name == "rotate_pack" else relayout.unpack)(
            source, (source if name == "rotate_pack" else parts_and_out[-1]).dim() - 2, *parts_and_out
        )

    seen = Counter()
    with counted(seen, True):
        straightened = ops.implementation("auto")._replace(**{name: straight})
        with mock.patch.object(ops, "implementation", lambda which: straightened):
            return layers.block_faults(rank, Shape(rotary=True))


@pytest.mark.parametrize("name,wrong", [("rotate_pack", "output"), ("unpack_rotate_back", "dx")])
def test_a_rotation_left_out_is_seen(name, wrong):
    """The negative control of the test above."""
    for found in on_ranks(2, rotated_one_way, name):
        assert any(fault.startswith(wrong) for fault in found)


@pytest.mark.parametrize("heads,kv_heads,size,groups,divide", [
    (8, 8, 4, 2, "qkv"), (8, 4, 2, 2, "qkv"), (8, 2, 2, 4, "qkv"), (7, 7, 2, 1, ""), (8, 2, 4, 1, "q"), (6, 3, 2, 1, "q"), (4, 1, 2, 1, "q"),
])  # fmt: skip
def test_heads_divide_where_all_ranks_are_sent_as_many_and_none_twice(heads, kv_heads, size, groups, divide):
    geometry = Geometry(size, 0, (3,) * size, 1, heads, kv_heads, groups)
    assert "".join(kind for kind in "qkv" if geometry.divides(kind)) == divide
