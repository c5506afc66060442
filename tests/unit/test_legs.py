"""Tests the exchange of k and v in two legs, as arithmetic.

All tokens of all heads must arrive, and each must cross the network only once to each node.
"""

import pytest
import torch

from ds_sp_overlap.exchange.copies import copies_of
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.relayed import legs_of
from tests.harness.moving import moved
from tests.harness.pages import ROOT, read


def ranks_of(size, nodes, heads, kv_heads, lengths=None, groups=1, **more):
    lengths = lengths or (2,) * size
    return [Geometry(size, rank, lengths, 2, heads, kv_heads, groups, nodes=nodes, **more) for rank in range(size)]


GRID = [
    (4, (0, 0, 1, 1), 8, 2, {}),
    (4, (0, 1, 0, 1), 8, 1, {"groups": 2}),
    (6, (0, 0, 0, 0, 1, 1), 6, 2, {"lengths": (3, 0, 1, 2, 5, 1)}),
    (8, (0,) * 4 + (1,) * 4, 8, 2, {"batch_first": True}),
    (8, (0,) * 4 + (1,) * 4, 4, 1, {"shares": 2}),
]


@pytest.mark.parametrize("size,nodes,heads,kv_heads,more", GRID)
def test_both_legs_move_what_one_exchange_moves_and_sum_what_it_sums(size, nodes, heads, kv_heads, more):
    ranks = ranks_of(size, nodes, heads, kv_heads, **more)
    for group in range(ranks[0].groups):
        if ranks[0].kinds[group] == "q":
            continue
        of_one = [rank.exchange(("k", "v"), group, (3, 2)) for rank in ranks]
        legs = [legs_of(rank, ("k", "v"), group, (3, 2)) for rank in ranks]
        assert None not in legs
        first, second, *_ = zip(*legs)
        torch.manual_seed(0)
        sent = [[torch.randn(shape, dtype=torch.float64) for shape in layout.sources.shapes] for layout in of_one]
        expected, got = moved(of_one, sent), moved(second, moved(first, sent))
        assert all(torch.equal(x, y) for of_rank in zip(expected, got) for x, y in zip(*of_rank))
        gradients = [[torch.randn_like(x) for x in xs] for xs in expected]
        expected = moved([layout.inverse for layout in of_one], gradients)
        got = moved([layout.inverse for layout in first], moved([layout.inverse for layout in second], gradients))
        for x, y in ((x, y) for of_rank in zip(expected, got) for x, y in zip(*of_rank)):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)  # sums of at most 8 numbers of magnitude 1, in different orders


def test_ranks_of_a_node_that_receive_no_head_are_no_reason_for_two_legs():
    assert legs_of(ranks_of(5, (0, 0, 0, 0, 1), 10, 2, groups=2)[0], ("k", "v"), 1, (3, 2)) is None


def test_a_piece_is_given_to_its_siblings_and_summed_by_one_copy():
    """Also for a piece with the tokens of several ranks, one rank after another, whose local sequences differ in length."""
    for rank in ranks_of(4, (0, 0, 1, 1), 8, 1, lengths=(1, 5, 3, 8)):
        pieces = legs_of(rank, ("k", "v"), 0, (3, 2)).second.sources
        copies = copies_of(pieces)
        assert [run.tensor for run in copies.runs] == [0, 1]
        assert copies.disjoint  # one sum over the siblings gives the result, without adding to zeros


def elements_over_the_network(size, heads, kv_heads, shares, in_legs):
    """Count elements that cross the network in forward and backward, in nodes of 8 ranks; in units of s d.

    Returns for each rank the number of received elements, and the sum over exchanges of max(received, sent).
    """
    nodes, counts = tuple(rank // 8 for rank in range(size)), []
    for rank in ranks_of(size, nodes if in_legs else None, heads, kv_heads, shares=shares, lengths=(4,) * size):
        legs = legs_of(rank, ("k", "v"), 0, (1, 1))
        layouts = [rank.exchange(kind, 0, (1,)) for kind in ("q", "o", *(() if legs else "kv"))] + list(legs or ())[:2]
        received = more = 0
        for layout in (*layouts, *(layout.inverse for layout in layouts)):
            both = []
            for sizes in (layout.targets.sizes, layout.sources.sizes):
                both.append(sum(count for peer, count in enumerate(sizes) if nodes[peer] != nodes[rank.sp_rank]))
            received, more = received + both[0], more + max(both)
        counts.append((received / (8 * size), more / (8 * size)))  # a batch of 2
    return counts


def test_elements_that_cross_the_network_are_those_of_the_docs():
    """The table of docs/scaling.md shows the rank with most elements.

    If ranks share query heads, some ranks attend with more queries of their own node than others. So the mean is lower.
    """
    *_, (_, table) = (found for found in read(ROOT / "docs/scaling.md").tables if found[1][0][-1].content == "true")
    assert [[cell.content for cell in row] for row in table[1:3]] == [
        ["32", "8", "32", "1", "6", "3.75"],
        ["32", "8", "64", "2", "5.5", "2.44"],
    ]
    for row in table[1:]:
        *shape, plain, once = (cell.content for cell in row)
        heads, kv_heads, size, shares = map(int, shape)
        counts = [elements_over_the_network(size, heads, kv_heads, shares, in_legs) for in_legs in (False, True)]
        assert [f"{max(more for _, more in of_ranks):.3g}" for of_ranks in counts] == [plain, once], shape
        if shares == 1:
            assert all(len(set(of_ranks)) == 1 for of_ranks in counts)
        elif heads == 32:
            assert [sum(received for received, _ in of_ranks) / size for of_ranks in counts] == [5.25, 2.1875]
