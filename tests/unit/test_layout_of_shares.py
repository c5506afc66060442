"""Tests exchanges in which ranks share query heads: as arithmetic, and by moving numbers in one process."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap.exchange.copies import copies_of
from ds_sp_overlap.exchange.geometry import Geometry, shares_for
from ds_sp_overlap.exchange.shares import possible_shares
from tests.harness.cases import examples
from tests.harness.moving import moved
from tests.harness.pages import ROOT, read

DIM = 3
few = settings(deadline=None, max_examples=examples(200), derandomize=True)


@st.composite
def geometries(draw):
    """Draw the geometry of every rank of one sp group, often with ranks that share heads; by chance with given ``query_chunks``."""
    size = draw(st.sampled_from([2, 3, 4, 6, 8]))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    shares = draw(st.sampled_from(possible_shares(size, heads)))
    groups = draw(st.integers(1, min(3, heads // (size // shares))))
    seq_lens = tuple(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    if draw(st.booleans()) or sum(seq_lens) < shares:
        seq_lens = (draw(st.integers(1, 4)),) * size
    chunks = None
    if draw(st.booleans()):
        tokens = draw(st.permutations(range(sum(seq_lens))))
        owners = [tokens[share::shares] for share in range(shares)]
        chunks = tuple(tuple((token, token + 1) for token in sorted(owned)) for owned in owners)
    batch, batch_first = draw(st.integers(1, 2)), draw(st.booleans())
    return [Geometry(size, rank, seq_lens, batch, heads, kv_heads, groups, batch_first, shares, chunks) for rank in range(size)]


def whole(geometry, kind):
    """Return q, k or v of the whole sequence, with all numbers different."""
    heads = geometry.heads if kind == "q" else geometry.kv_heads
    shape = geometry.shape(sum(geometry.seq_lens), heads, DIM)
    return torch.arange(1, 1 + torch.Size(shape).numel()).double().view(shape)


def cut(x, dim, ranges):
    return torch.cat([x.narrow(dim, 0, 0), *(x.narrow(dim, start, stop - start) for start, stop in ranges)], dim)


def local(geometry, kind, group):
    rank, lengths = geometry.sp_rank, geometry.seq_lens
    mine = whole(geometry, kind).narrow(geometry.seq_dim, sum(lengths[:rank]), lengths[rank])
    return cut(mine, 2, geometry.heads_of(kind, group)).contiguous()


def received(geometry, kind, group):
    """Return the part of q, k or v that a rank must receive for a group."""
    start, stop = geometry.sent_range(kind, geometry.sp_rank, group)
    x = whole(geometry, kind).narrow(2, start, stop - start)
    return cut(x, geometry.seq_dim, geometry.own_queries) if kind == "q" else x


@few
@given(ranks=geometries(), kinds=st.sampled_from(["q", "k", "qkv"]))
def test_each_token_of_each_head_arrives_where_it_is_attended(ranks, kinds):
    for group in range(ranks[0].groups):
        if not set(kinds) <= set(ranks[0].kinds[group]):
            continue
        layouts = [rank.exchange(tuple(kinds), group, (DIM,) * len(kinds)) for rank in ranks]
        outs = moved(layouts, [[local(rank, kind, group) for kind in kinds] for rank in ranks])
        for rank, got in zip(ranks, outs):
            for kind, x in zip(kinds, got):
                assert torch.equal(x, received(rank, kind, group))


@few
@given(ranks=geometries(), what=st.sampled_from(["all", "q", "o"]))
def test_the_inverse_and_o_bring_each_back_and_sum_what_several_ranks_had(ranks, what):
    for group in range(ranks[0].groups):
        kinds = ranks[0].kinds[group] if what == "all" else "q"
        layouts = [rank.exchange(tuple(kinds), group, (DIM,) * len(kinds)).inverse for rank in ranks]
        if what == "o":
            layouts = [rank.exchange("o", group, (DIM,)) for rank in ranks]
        outs = moved(layouts, [[received(rank, kind, group) for kind in kinds] for rank in ranks])
        for rank, got in zip(ranks, outs):
            for kind, x in zip(kinds, got):
                ranges = [rank.sent_range(kind, other, group) for other in range(rank.sp_size)]
                heads = [head for ends in rank.heads_of(kind, group) for head in range(*ends)]
                copies = [sum(start <= head < stop for start, stop in ranges) for head in heads]
                times = torch.tensor(copies if kind != "q" else [1] * len(heads)).view(-1, 1)
                assert torch.equal(x, local(rank, kind, group) * times)


def test_few_views_hold_all_parts_and_none_that_is_summed_holds_an_element_twice():
    """Nine query heads in two parts: the first part needs KV heads 0 and 1, the second KV heads 1 and 2.

    The parts are evenly spaced, but one view of both would hold head 1 twice, and two threads would add to it.
    """
    geometry = Geometry(4, 0, (2,) * 4, 1, 9, 3, shares=2)
    gradients = geometry.exchange(("q", "k", "v"), 0, (DIM,) * 3).inverse.targets
    runs = copies_of(gradients).runs
    assert [run.tensor for run in runs] == [0, 0, 1, 1, 2, 2]
    for run in runs:
        moves = [(size, step) for size, step in zip(run.shape, run.strides) if step]
        touched = torch.arange(1000).as_strided(*zip(*moves), run.offset)
        assert len(touched.unique()) == touched.numel()
    of_64 = Geometry(64, 0, (2,) * 64, 1, 32, 8, shares=2).exchange(("q", "k", "v"), 0, (DIM,) * 3).sources
    assert len(copies_of(of_64).runs) == 3


@pytest.mark.parametrize("size, shares", [(4, 2), (8, 2), (8, 4), (16, 4), (12, 2), (12, 6)])
def test_causal_attention_is_equally_long_for_all_shares(size, shares):
    ranks = [Geometry(size, rank, (8,) * size, 1, size, size, shares=shares) for rank in range(size)]
    pairs = {sum(sum(range(start + 1, stop + 1)) for start, stop in rank.own_queries) for rank in ranks}
    assert len(pairs) == 1


@pytest.mark.parametrize("size, shares, patched", [(4, 2, 0), (8, 2, 0), (8, 4, 0), (6, 2, 2), (4, 4, 4)])
def test_an_even_number_of_parts_needs_one_cut_and_nothing_is_unpacked(size, shares, patched):
    """In other layouts, copies of tiles are slower, and GEMMs can't write the send buffers."""
    found = 0
    for rank in range(size):
        geometry = Geometry(size, rank, (8,) * size, 1, size, size, shares=shares)
        layout = geometry.exchange("q", 0, (DIM,))
        assert copies_of(layout.targets).flat == 0
        found += geometry.cuts_tokens
        one_copy = len(copies_of(layout.sources).runs) == 1 and geometry.divides("q")
        assert one_copy != geometry.cuts_tokens
    assert found == patched


@pytest.mark.parametrize(
    "heads, kv_heads, size, shares",
    [
        (32, 8, 32, 1),
        (32, 8, 64, 2),
        (12, 12, 8, 1),
        (8, 8, 8, 1),
        (1, 1, 4, 4),
        (3, 3, 4, 4),
        (6, 2, 4, 2),
        (7, 7, 14, 2),
        (40, 8, 16, 2),
    ],
)
def test_auto_is_the_smallest_number_by_which_heads_divide(heads, kv_heads, size, shares):
    assert shares_for(size, heads, kv_heads) == shares


def test_the_table_of_the_docs_is_counted():
    """Checks docs/scaling.md."""
    table = next(rows for _, rows in read(ROOT / "docs/scaling.md").tables if rows[0][0].content == "query heads")
    assert len(table) == 8
    for cells in table[1:]:
        heads, kv_heads, size, shares, *counted = (cell.content for cell in cells)
        heads, kv_heads, size, shares = int(heads), int(kv_heads), int(size), int(shares)
        assert shares_for(size, heads, kv_heads) == shares
        expected = []
        for r in (1, shares):
            if size // r > heads:
                expected.append(("-", "-"))
                continue
            geometry = Geometry(size, 0, (r,) * size, 1, heads, kv_heads, shares=r)
            most = max(stop - start for start, stop in (geometry.query_range(rank, 0) for rank in range(size))) / r
            expected.append((f"{2 * geometry.most_received:.4g}", f"{most * size / heads:.3g}"))
        assert counted == [expected[0][0], expected[1][0], expected[0][1], expected[1][1]], cells


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(shares=3), "sp_overlap.shares must divide sp size 4 and leave each of 2 heads to a part of the ranks, got 3; take 2, 4"),
        (dict(shares=1), "head scatter of query: 2 heads leave a rank of sp size 4 with no head to attend with; use sp size 2 or less, "
         "or sp_overlap.shares 2, 4"),
        (dict(seq_lens=(1, 0, 0, 0)), "sp_overlap.shares: 1 tokens leave a share of 2 without a query; give longer sequences, or fewer shares"),
        *(
            (dict(query_chunks=chunks), f"query_chunks: {chunks} must give each of 2 shares some of 8 tokens in ascending ranges, and each "
             "token to one share")
            for chunks in (
                (((0, 8),),), (((0, 8),), ()), (((0, 5),), ((4, 8),)), (((0, 3),), ((4, 8),)), (((2, 4), (0, 2)), ((4, 8),)),
                (((0, 4),), ((4, 7),)), (((0, 4), (4, 4)), ((4, 8),)),
            )
        ),
    ],
)  # fmt: skip
def test_shares_that_can_not_be_are_refused_with_the_values_and_the_limit(arguments, message):
    good = dict(sp_size=4, sp_rank=0, seq_lens=(2, 2, 2, 2), batch=1, heads=2, kv_heads=2, shares=2)
    Geometry(**good)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Geometry(**{**good, **arguments})
