"""Tests the geometry of exchanges as arithmetic, without a process group."""

import itertools
import math
import re

import pytest
import torch
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_sp_overlap.exchange.copies import copies_of
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.layout import Sides, all_equal
from tests.harness.cases import examples
from tests.harness.guards import Watched, notices

settings.register_profile("layout", deadline=None, max_examples=examples(150), derandomize=True)
settings.load_profile("layout")


@st.composite
def geometries(draw):
    """Draw the geometry of every rank of one sp group."""
    size = draw(st.integers(1, 5))
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(max(1, -(-size // kv_heads)), max(4, -(-size // kv_heads))))
    groups = draw(st.integers(1, min(4, heads // size)))
    seq_lens = tuple(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    batch, batch_first = draw(st.integers(1, 3)), draw(st.booleans())
    return [Geometry(size, rank, seq_lens, batch, heads, kv_heads, groups, batch_first) for rank in range(size)]


def exchanges(geometry):
    """Return (kind, group) for every tensor that is sent."""
    return [(kind, group) for group in range(geometry.groups) for kind in geometry.kinds[group] + "o"]


def members(ranges):
    return [head for start, stop in ranges for head in range(start, stop)]


def queries(geometry):
    """Return the query heads of a rank, in the order of its groups."""
    return members(geometry.query_range(geometry.sp_rank, group) for group in range(geometry.groups))


def received_kv(geometry):
    """Return the KV heads that a rank receives, in the order of arrival."""
    return members(geometry.sent_range("k", geometry.sp_rank, group) for group in range(geometry.groups))


@given(geometries())
def test_heads_of_a_group_lie_together_where_no_kv_head_then_travels_more_often(ranks):
    rank = ranks[0]
    together = all(len(rank.heads_of(kind, group)) == 1 for kind in "qk" for group in range(rank.groups))
    if rank.kv_heads % (rank.sp_size * rank.groups) == 0:
        assert together and sum(len(received_kv(rank)) for rank in ranks) == rank.kv_heads
    else:  # heads have the order that they have without groups
        assert [head for rank in ranks for head in queries(rank)] == list(range(rank.heads))


@given(geometries())
def test_query_heads_are_balanced(ranks):
    counts = [len(queries(rank)) for rank in ranks]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(geometries())
def test_each_rank_receives_each_kv_head_it_needs_once_and_no_other(ranks):
    for rank in ranks:
        shared = rank.heads // rank.kv_heads
        needed = sorted({head // shared for head in queries(rank)})
        assert received_kv(rank) == needed


@given(geometries())
def test_every_query_head_finds_its_own_kv_head(ranks):
    """Assembles KV heads from `kv_pieces` and `kv_expansion`, as `Call.with_kv` does; without an index, by the ratio of GQA."""
    for rank in ranks:
        shared = rank.heads // rank.kv_heads
        arrived = [members([rank.sent_range("k", rank.sp_rank, group)]) for group in range(rank.groups)]
        for group in range(rank.groups):
            held = [head for sent, start, stop in rank.kv_pieces(group, rank.sp_rank) for head in arrived[sent][start:stop]]
            attended = members([rank.query_range(rank.sp_rank, group)])
            index = rank.kv_expansion(group)
            if index is None:
                ratio, rest = divmod(len(attended), len(held))
                assert rest == 0
                index = [place // ratio for place in range(len(attended))]
            assert [held[place] for place in index] == [head // shared for head in attended]


@given(geometries())
@example([Geometry(2, rank, (2, 2), 1, 9, 3, 4) for rank in range(2)])  # a rank receives nothing of some piece
def test_every_rank_reads_each_piece_that_travels_with_a_group(ranks):
    """Guards `kv_pieces`: it names a group's own piece even if this rank receives nothing of the piece.

    If a rank left the piece out of its graph, it would not start the exchange of the piece's gradient. The other ranks would wait.
    """
    for rank in ranks:
        for group in (group for group in range(rank.groups) if "k" in rank.kinds[group]):
            assert group in [sent for sent, _, _ in rank.kv_pieces(group, rank.sp_rank)], (rank, group)


@given(geometries())
def test_all_ranks_exchange_the_same_things(ranks):
    assert len({tuple(exchanges(rank)) for rank in ranks}) == 1
    assert len({tuple(rank.heads_of(kind, group) for kind, group in exchanges(rank) if kind != "o") for rank in ranks}) == 1


@given(geometries())
def test_wire_layout_is_claimed_only_where_the_parts_lie_in_memory_as_they_travel(ranks):
    for rank in ranks:
        for kind, group in exchanges(rank):
            for side in rank.exchange(kind, group, (3,)).each[0]:
                flat = copies_of(Sides((side,))).flat
                if flat is not None:
                    assert flat == 0 and packed_order(side) == list(range(math.prod(side.shape)))


@pytest.mark.parametrize("batch_first,batch,claimed", [(False, 1, True), (False, 3, True), (True, 1, True), (True, 3, False)])
def test_the_global_side_travels_as_it_lies_unless_batch_comes_first(batch_first, batch, claimed):
    layout = Geometry(2, 0, (3, 5), batch, 4, 2, 2, batch_first).exchange("q", 1, (8,))
    assert copies_of(layout.targets).flat == (0 if claimed else None)
    assert copies_of(layout.sources).flat is None


def packed_order(side):
    """Return the linear indices of the tensor's elements in the order of the wire, by the definition."""
    places = torch.arange(math.prod(side.shape)).view(side.shape)
    blocks = [places[tuple(slice(*ends) for ends in block)] for block in itertools.chain(*side.parts)]
    return [place for block in blocks for place in block.flatten().tolist()]


@pytest.mark.parametrize("heads,kv_heads,size", [
    *((2 * kv_heads, kv_heads, size) for kv_heads in (8, 16) for size in (1, 2, 4, 8)), (7, 7, 4), (7, 7, 2), (6, 6, 4), (9, 9, 2),
])  # fmt: skip
def test_heads_are_split_as_deepspeed_splits_them(heads, kv_heads, size):
    """DeepSpeed cuts heads that divide by P into P equal ranges, and other heads by their KV heads."""
    geometry, stop = Geometry(size, 0, (4,) * size, 1, heads, kv_heads), 0
    for rank, count in enumerate(get_shard_size_list(kv_heads, size, AutoTPMeta(num_kv_heads=kv_heads))):
        start, stop = stop, stop + count
        assert geometry.kv_range(rank, 0) == (start, stop)
        assert geometry.query_range(rank, 0) == (start * heads // kv_heads, stop * heads // kv_heads)


@given(geometries())
@example([Geometry(2, rank, (0, 6), 1, 6, 3, 3) for rank in range(2)])  # a rank without tokens, which receives nothing
def test_every_rank_says_the_same_of_an_exchange_of_equal_parts(ranks):
    """If ranks differed in this, they would call different collectives."""
    for one in exchanges(ranks[0]):
        layouts = [rank.exchange(*one, (3,)) for rank in ranks]
        for way in (layouts, [layout.inverse for layout in layouts]):
            assert len({all_equal(layout.sources.sizes, layout.targets.sizes) for layout in way}) == 1


@pytest.mark.parametrize(
    "arguments,message",
    [
        (
            dict(seq_lens=(4, 4, 4)),
            "sequence_lengths: 3 lengths (4, 4, 4) for sp size 2; give the local length of every rank of the sp group",
        ),
        (dict(kv_heads=3), "KV heads must divide the query heads, got 8 query and 3 KV heads; take 1, 2, 4, 8 KV heads"),
        (dict(kv_heads=0), "KV heads must divide the query heads, got 8 query and 0 KV heads; take 1, 2, 4, 8 KV heads"),
        (
            dict(heads=1, kv_heads=1),
            "head scatter of query: 1 heads leave a rank of sp size 2 with no head to attend with; use sp size 1 or less, "
            "or sp_overlap.shares 2",
        ),
        (dict(groups=5), "sp_overlap.head_groups must be between 1 and 4 for 8 heads at sp size 2, got 5"),
        (dict(groups=0), "sp_overlap.head_groups must be between 1 and 4 for 8 heads at sp size 2, got 0"),
    ],
)
def test_impossible_counts_are_refused_with_the_values_and_the_limit(arguments, message):
    good = dict(sp_size=2, sp_rank=0, seq_lens=(4, 4), batch=1, heads=8, kv_heads=8, groups=1)
    Geometry(**good)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Geometry(**{**good, **arguments})


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched("read by every rank", "if held:", test_every_rank_reads_each_piece_that_travels_with_a_group)
)
