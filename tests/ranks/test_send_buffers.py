"""Tests send buffers that the projection's GEMM or the rotating kernel writes: equal results, and fewer packs and unpacks."""

from collections import Counter
from unittest import mock

import pytest

from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.relayout import ops
from tests.harness import layers, relayout
from tests.harness.cases import pairs
from tests.harness.layers import Shape, groups_for
from tests.harness.moving import always, counted, kinds, moving


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_nothing_is_packed_and_o_dq_dk_dv_are_unpacked(rotary, batch_first, rank):
    """Checks the table of DESIGN 3, with one batch element: o of both groups is unpacked, and dq, dk, dv of the first group.

    dk is packed, since it isn't contiguous with this attention.
    """
    seen = Counter()
    shape = Shape(heads=4, kv_heads=4, batch=1, batch_first=batch_first, rotary=rotary, rope=rotary, config={"head_groups": 2})
    with always, counted(seen, folds=False):
        assert layers.block_faults(rank, shape) == []
    assert seen == {"unpack": 2 + 3, "pack": 1}


# Rotary embedding in the kernels that move q, k, dq and dk.


@pytest.mark.pairs
@kinds
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("heads,kv_heads,size", [(8, 8, 2), (8, 2, 4), (7, 7, 2), (4, 1, 2)])
def test_the_block_equals_the_reference_where_the_kernels_rotate(heads, kv_heads, size, direct, kind, rank):
    shapes = [
        Shape(
            heads=heads, kv_heads=kv_heads, head_dim=4, batch=batch, lengths=lengths, batch_first=batch_first, rotary=True,
            config={"head_groups": groups, "check": check},
        )
        for lengths in ((3,) * size, (1,) * size, (5, 2, 3, 1)[:size])
        for batch, batch_first, check in ((1, True, False), (3, True, True), (3, False, False))
        for groups in groups_for(heads, size)
    ]  # fmt: skip
    with moving(kind, direct) as seen:
        assert layers.faults_of_all(rank, pairs(shapes)) == []
    assert seen["rotate_pack"] == seen["unpack_rotate_back"] > 0


@pytest.mark.parametrize("name,wrong", [("rotate_pack", "output"), ("unpack_rotate_back", "dx")])
def test_a_rotation_left_out_is_seen(name, wrong, rank):
    """Negative control of the test above: a kernel that does not rotate must be noticed."""

    def straight(source, cos, sin, *parts_and_out):
        (relayout.pack if name == "rotate_pack" else relayout.unpack)(
            source, (source if name == "rotate_pack" else parts_and_out[-1]).dim() - 2, *parts_and_out
        )

    with counted(Counter(), True):
        straightened = ops.implementation("auto")._replace(**{name: straight})
        with mock.patch.object(ops, "implementation", lambda which: straightened):
            assert any(fault.startswith(wrong) for fault in layers.block_faults(rank, Shape(rotary=True)))


@pytest.mark.parametrize("heads,kv_heads,size,groups,divide", [
    (8, 8, 4, 2, "qkv"), (8, 4, 2, 2, "qkv"), (8, 2, 2, 4, "qkv"), (7, 7, 2, 1, ""), (8, 2, 4, 1, "q"), (6, 3, 2, 1, "q"), (4, 1, 2, 1, "q"),
])  # fmt: skip
def test_heads_divide_where_all_ranks_are_sent_as_many_and_none_twice(heads, kv_heads, size, groups, divide):
    geometry = Geometry(size, 0, (3,) * size, 1, heads, kv_heads, groups)
    assert "".join(kind for kind in "qkv" if geometry.divides(kind)) == divide
