"""Tests ``kv_once_per_node`` against the whole sequence, in fp64, to 1e-12: k and v cross the network only once to each node.

All ranks run on one host, so the tests name the nodes. Each run fails if no exchange ran in two legs.
"""

import contextlib

import pytest

from ds_sp_overlap.exchange import relayed, sp_group
from tests.harness import dropin, layers
from tests.harness.cases import pairs, singles
from tests.harness.dropin import Case
from tests.harness.layers import Shape
from tests.harness.transports import Late

NODES = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)]
ONCE = {"kv_once_per_node": True}


@contextlib.contextmanager
def in_nodes(node):
    """Let this rank be on ``node`` while the body runs; yield a list that collects the exchanges in two legs."""
    before, start = sp_group.hostname, relayed.Relayed.__init__
    started = []

    def counting(self, legs, group, name, *more):
        started.append(name)
        start(self, legs, group, name, *more)

    sp_group.hostname, relayed.Relayed.__init__ = lambda: f"node {node}", counting
    try:
        yield started
    finally:
        sp_group.hostname, relayed.Relayed.__init__ = before, start


def faults_in_nodes(rank, of_nodes, function, *args):
    """List the faults that ``function(rank, [shape], *args)`` finds, for each pair (nodes of the ranks, shape)."""
    found = []
    for nodes, shape in of_nodes:
        with in_nodes(nodes[rank]) as started:
            faults = function(rank, [shape], *args)
        found += faults + [f"{shape}: nothing travelled in two legs"] * (not started)
    return found


SHAPES = [
    Shape(heads, kv_heads, 4, batch, lengths, batch_first, fused=fused, config={"head_groups": groups, **ONCE, **more})
    for heads, kv_heads in ((8, 1), (8, 2), (12, 2))
    for groups in (1, 2)
    for batch, lengths, batch_first, fused in ((1, (3, 3, 3, 3), True, False), (3, (3, 1, 0, 2), True, True), (2, (2, 2, 2, 2), False, False))
    for more in ({}, {"window": 1}, {"checkpointing": "keep"}, {"check": True})
]  # fmt: skip


@pytest.mark.ranks(4)
def test_a_layer_equals_the_reference(rank):
    assert faults_in_nodes(rank, pairs([(nodes, shape) for shape in SHAPES for nodes in NODES]), layers.faults_of_all) == []


@pytest.mark.ranks(4)
def test_a_layer_equals_the_reference_where_ranks_share_query_heads_too(rank):
    shapes = [
        Shape(heads, kv_heads, 4, 2, lengths, config={"head_groups": 1, "shares": shares, **ONCE})
        for heads, kv_heads, shares in ((2, 1, 2), (2, 2, 2), (1, 1, 4), (4, 2, 2))
        for lengths in ((2, 2, 2, 2), (3, 1, 4, 2))
    ]
    assert faults_in_nodes(rank, singles([(nodes, shape) for shape in shapes for nodes in NODES[:2]]), layers.faults_of_all) == []


NODES_OF_MANY = {6: [(0, 0, 0, 1, 1, 1), (0, 1, 0, 1, 0, 1)], 8: [(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2)]}
MANY = [
    (size, nodes, Shape(heads, kv_heads, 4, 2, lengths, batch_first, config={"head_groups": groups, "shares": shares, **ONCE, **more}))
    for size, heads, kv_heads, shares, groups in (
        *((6, 12, 1, 1, 2), (6, 6, 2, 1, 1), (6, 6, 3, 2, 2), (6, 2, 1, 3, 1), (6, 5, 1, 3, 2)),
        *((8, 16, 2, 1, 2), (8, 8, 1, 1, 1), (8, 8, 2, 2, 2), (8, 4, 1, 4, 2), (8, 2, 2, 4, 1), (8, 3, 1, 4, 1)),
    )
    for nodes in NODES_OF_MANY[size]
    for lengths, batch_first in (((3,) * size, True), ((3, 1, 0, 2, 5, 1, 4, 2)[:size], True), ((2,) * size, False))
    for more in ({}, {"window": 1}, {"checkpointing": "keep"})
]  # fmt: skip


@pytest.mark.parametrize("size", NODES_OF_MANY)
def test_a_layer_equals_the_reference_on_more_ranks(size, rank):
    cases = singles([(nodes, shape) for ranks, nodes, shape in MANY if ranks == size])
    assert faults_in_nodes(rank, cases, layers.faults_of_all) == []


@pytest.mark.ranks(4)
def test_the_drop_in_equals_the_reference(rank):
    cases = [
        Case(8, kv_heads, 4, 6, 2, (3,) * 4, batch_first, 4, config={"head_groups": groups, **ONCE})
        for kv_heads in (1, 2)
        for groups in (1, 2)
        for batch_first in (True, False)
    ]
    assert faults_in_nodes(rank, singles([(NODES[0], case) for case in cases]), dropin.faults_of_all) == []


@pytest.mark.ranks(4)
def test_nothing_is_read_before_it_arrived(rank):
    shape = Shape(8, 2, 4, 1, (3,) * 4, config={"head_groups": 2, **ONCE})
    assert faults_in_nodes(rank, [(NODES[0], shape)], layers.faults_of_all, Late) == []


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes, kv_heads", [((0, 0, 1, 1), 4), ((0, 1, 2, 3), 1)])
def test_one_leg_is_enough_where_no_ranks_of_a_node_need_the_same_heads(nodes, kv_heads, rank):
    """Includes nodes of one rank each."""
    with in_nodes(nodes[rank]) as started:
        assert layers.block_faults(rank, Shape(8, kv_heads, 4, 1, (3,) * 4, config=ONCE)) == []
    assert started == []
