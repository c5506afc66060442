"""Tests ranks that share query heads, each with a part of the queries, against the whole sequence: 2 to 8 ranks, fp64, 1e-12.

`unit/test_layout_of_shares.py` tests the exchanges alone; random programs (`test_programs.py`) draw shares, too.
"""

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_sp_overlap
from ds_sp_overlap.attention.layer import Call, LayerRuntime
from ds_sp_overlap.attention.mixer import Mixer, Pieces
from ds_sp_overlap.attention.mixer_layer import MixerLayer
from ds_sp_overlap.attention.projected import ProjectedAttention
from ds_sp_overlap.config import SpOverlapConfig
from ds_sp_overlap.exchange.sp_group import SPGroup
from tests.harness import dropin, layers, reference
from tests.harness.cases import pairs, singles
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import assert_error, refusal

# {number of ranks: [(query heads, KV heads, shares)]}: more ranks than heads, heads that don't divide, shared KV heads.
HEADS = {
    2: [(1, 1, 2), (2, 1, 2), (3, 3, 2), (4, 2, 2)],
    4: [(1, 1, 4), (2, 1, 2), (2, 2, 4), (3, 3, 2), (6, 2, 2), (8, 4, 2)],
    6: [(1, 1, 6), (2, 1, 3), (4, 2, 3), (5, 5, 3), (3, 3, 2), (9, 3, 2)],
    8: [(1, 1, 8), (2, 2, 4), (4, 1, 4), (5, 5, 4), (4, 4, 2), (12, 2, 2)],
}
LENGTHS = {
    2: [(4, 4), (5, 2)],
    4: [(4,) * 4, (5, 1, 4, 2)],
    6: [(4,) * 6, (5, 1, 0, 2, 3, 6)],
    8: [(4,) * 8, (5, 1, 0, 2, 3, 6, 1, 4)],
}
ATTENDS = [{}, {"causal": False}, {"window": 5}, {"starts": (2, 3, 6)}, {"window": 3, "starts": (5,)}]
CASES = [
    (size, heads, kv_heads, lengths, batch_first, {"head_groups": groups, "shares": shares})
    for size in HEADS
    for heads, kv_heads, shares in HEADS[size]
    for lengths in LENGTHS[size]
    for batch_first in (True, False)
    for groups in (1, 2)
    if groups <= heads * shares // size
]


def few(size):
    """Return the function that chooses cases: with many ranks on two cores, `singles`, else `pairs`."""
    return pairs if size <= 4 else singles


@pytest.mark.parametrize("size", HEADS)
def test_a_layer_equals_the_reference(size, rank):
    shapes = [
        Shape(*heads, 4, 2, lengths, first, attends=attends, config=config)
        for ranks, *heads, lengths, first, config in CASES
        if ranks == size
        for attends in ATTENDS
    ]
    assert layers.faults_of_all(rank, few(size)(shapes)) == []


@pytest.mark.parametrize("size", HEADS)
def test_the_drop_in_equals_the_reference(size, rank):
    """Includes RoPE after the exchange, which rotates q for the tokens of its share alone, and outputs without a head dimension."""
    cases = [
        Case(*heads, 4, value_dim, 2, lengths, first, rotary_dims=rotary_dims, flat=flat, config=config)
        for ranks, *heads, lengths, first, config in CASES
        if ranks == size
        for value_dim, rotary_dims, flat in ((4, 4, True), (6, 2, False), (6, 0, True))
    ]
    assert dropin.faults_of_all(rank, few(size)(cases)) == []


@pytest.mark.ranks(4)
@pytest.mark.parametrize("heads, shares", [((2, 2), 2), ((6, 2), 2), ((8, 4), 1), ((12, 12), 1)])
def test_auto_shares_where_there_are_more_ranks_than_heads_and_where_heads_do_not_divide(heads, shares, rank):
    with mock.patch("ds_sp_overlap.attention.layer.Call", wraps=Call) as made:
        assert dropin.dropin_faults(rank, Case(*heads, lengths=(4,) * 4)) == []
    assert made.call_args.args[1].shares == shares


# Attention whose results are saved for backward; windows.


class Fused(torch.autograd.Function):
    """Causal attention with q, k, v [b, s, h, d], whose backward reads q, k, v, o and a log-sum-exp, as a flash kernel does."""

    @staticmethod
    def forward(ctx, q, k, v, queries):
        scores = Fused.scores(q, k, queries)
        lse = scores.logsumexp(-1)
        o = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), Fused.repeated(v, q))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.queries = queries
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        p = (Fused.scores(q, k, ctx.queries) - lse[..., None]).exp()
        repeat = q.shape[2] // k.shape[2]
        dp = torch.einsum("bqhd,bkhd->bhqk", do, Fused.repeated(v, q))
        ds = p * (dp - (do * o).sum(-1).transpose(1, 2)[..., None]) * q.shape[-1] ** -0.5
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, Fused.repeated(k, q))
        dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, do)
        dk, dv = (x.unflatten(2, (-1, repeat)).sum(3) for x in (dk, dv))
        return dq, dk, dv, None

    @staticmethod
    def repeated(x, q):
        return x.repeat_interleave(q.shape[2] // x.shape[2], 2)

    @staticmethod
    def scores(q, k, queries):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, Fused.repeated(k, q)) * q.shape[-1] ** -0.5
        future = torch.arange(k.shape[1]) > torch.arange(*queries)[:, None]
        return scores.masked_fill(future, -torch.inf)


class Flash(nn.Module):
    """A module that calls `Fused`, and counts the calls in forward and in backward."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first, self.calls = batch_first, [0, 0]

    def forward(self, q, k, v, queries=None):
        self.calls[torch._C._current_autograd_node() is not None] += 1
        q, k, v = (x if self.batch_first else x.transpose(0, 1) for x in (q, k, v))
        start, stop = queries or (0, q.shape[1])
        o = Fused.apply(q, k[:, :stop], v[:, :stop], (start, stop))
        return o if self.batch_first else o.transpose(0, 1)


def in_a_checkpoint(call, layer, x, dy):
    keep = ds_sp_overlap.keep_attention
    return layers.backward(lambda x: checkpoint(call, x, use_reentrant=False, context_fn=keep), layer, x, dy)


def kept(rank, shapes):
    """List the faults of shapes, and the shapes whose attention ran again in backward."""
    found = []
    for shape in shapes:
        local = Flash(shape.batch_first)
        use = in_a_checkpoint if "checkpointing" in shape.config else layers.backward
        found += [f"{shape}: {fault}" for fault in layers.block_faults(rank, shape, use, local_attention=local)]
        ranges = 1 if rank % shape.config["shares"] == shape.config["shares"] - 1 else 2
        expected = [ranges * shape.config["head_groups"], 0]
        found += [f"{shape}: {local.calls} calls"] * (local.calls != expected and len(set(shape.lengths)) == 1)
    return found


WINDOWS = [{"window": 1}, {"window": 2}, {"checkpointing": "keep"}, {"checkpointing": "offload", "window": 1}]
WINDOWED = [
    (size, Shape(heads, kv_heads, 4, batch, lengths, batch_first, config={"head_groups": 2, "shares": shares, **window}))
    for size, heads, kv_heads, shares in (
        *((2, 2, 2, 2), (2, 4, 1, 2), (4, 4, 2, 2), (4, 2, 1, 4), (4, 6, 3, 2)),
        *((6, 4, 2, 3), (6, 6, 1, 2), (8, 4, 4, 4), (8, 8, 2, 2)),
    )
    for lengths in LENGTHS[size]
    for batch, batch_first in ((1, False), (3, True), (2, False))
    for window in WINDOWS
]


@pytest.mark.parametrize("size", HEADS)
def test_few_groups_at_a_time_and_saved_attention_equal_the_reference(size, rank):
    """Attention must run once for each range of queries, also if saved o of all ranges has been joined."""
    shapes = [shape for ranks, shape in WINDOWED if ranks == size]
    assert kept(rank, (pairs if size == 2 else singles)(shapes)) == []


# Other uses.


@pytest.mark.ranks(4)
def test_a_caller_says_which_tokens_each_share_attends_with(rank):
    chunks = (((0, 1), (5, 9), (15, 16)), ((1, 5), (9, 15)))
    shape, case = Shape(2, 1, 4, 2, (4,) * 4), Case(2, 1, 4, 4, 2, (4,) * 4)
    call, attend = ds_sp_overlap.SelfAttention.__call__, ProjectedAttention.__call__

    def attending(self, *args, tokens, **kwargs):
        return attend(self, *args, tokens=tokens._replace(query_chunks=chunks), **kwargs)

    with (
        mock.patch.object(ds_sp_overlap.SelfAttention, "__call__", functools.partialmethod(call, query_chunks=chunks)),
        mock.patch.object(ProjectedAttention, "__call__", attending),
    ):
        assert layers.block_faults(rank, shape) + dropin.dropin_faults(rank, case) == []


def with_slopes(q, k, v, slopes, queries=None):
    """Attend with ALiBi: add each head's slope times the distance of query and key; ``queries`` gives the queries' positions."""
    keys = torch.arange(k.shape[1])
    distance = keys - keys[slice(*(queries or (None,)))][:, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + slopes.view(-1, 1, 1) * distance
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(distance > 0, -torch.inf).softmax(-1), v)


@pytest.mark.ranks(4)
def test_slopes_of_alibi_are_counted_from_the_place_of_each_query(rank):
    case, slopes = Case(4, 4, 4, 4, 2, (4,) * 4, config={"shares": 2}), torch.tensor([0.5, 0.1, 0.9, 0.3], dtype=torch.float64)
    attend = dropin.module(case, local=with_slopes)
    whole = functools.partial(with_slopes, slopes=slopes)
    assert dropin.dropin_faults(rank, case, attend=attend, whole=whole, slopes=ds_sp_overlap.PerHead(slopes)) == []


# Attention that needs all queries.


def whole_only(q, k, v, **ignored):
    """Attend as if q held all queries; ignores ``queries=``, since it takes any keyword."""
    return reference.attention(q, k, v)


class WholeOnly(nn.Module):
    def forward(self, q, k, v):
        return reference.attention(q, k, v)


def drop_in_of(local, heads=1, **config):
    attend = ds_sp_overlap.DistributedAttention(local, torch.distributed.group.WORLD, gather_idx=1, config=config)
    q, k, v = torch.randn(3, 1, 4, heads, 4, dtype=torch.float64)
    return attend(q, k, v, 0)


def runtime(**config):
    return LayerRuntime(SPGroup(torch.distributed.group.WORLD), SpOverlapConfig.parse(config), "layers.3")


def delta_net(heads):
    mixer = Mixer(nn.Identity())
    mixer.by_heads, mixer.counts = "delta rule", lambda: (heads, 1)
    net = MixerLayer(runtime(), mixer)
    return net(torch.randn(1, 4, 4), Pieces([4, 4]))


LACKS = "has no parameter queries=, a range (a, b) of the tokens that it is called with"
FEWER = "1 query heads are fewer than 2 ranks, so that 2 ranks would share query heads; but"
REFUSED = [
    (functools.partial(drop_in_of, whole_only), f"attention: {FEWER} whole_only {LACKS}; use sp size 1 or less"),
    (functools.partial(drop_in_of, WholeOnly()), f"attention: {FEWER} WholeOnly {LACKS}; use sp size 1 or less"),
    (
        functools.partial(drop_in_of, whole_only, heads=2, shares=2),
        f"attention: sp_overlap.shares is 2, so that 2 ranks would share query heads; but whole_only {LACKS}; use sp size 2 or less, "
        'or sp_overlap.shares "auto"',
    ),
    (
        functools.partial(drop_in_of, reference.attention, transport="copy_engine"),
        f'attention: {FEWER} sp_overlap.transport "copy_engine" moves equal parts only; use sp size 1 or less',
    ),
    (
        functools.partial(delta_net, 1),
        f"layers.3: {FEWER} its delta rule needs all queries at once; use sp size 1 or less",
    ),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_needs_all_queries_is_refused_by_name_on_all_ranks(index, rank):
    make, message = REFUSED[index]
    assert refusal(make) == ("ValueError", message)


def test_a_rank_that_can_not_share_is_refused_on_all_ranks(rank):
    """The attention of one rank can work with a range of queries, that of the other can't."""
    said = refusal(drop_in_of, reference.attention if rank else whole_only)
    assert_error(said, "sp rank 0: ")
    assert_error(said, "whole_only has no parameter queries=")


def test_attention_that_needs_all_queries_gets_them_where_each_rank_has_a_head(rank):
    case = Case(3, 3, lengths=(4, 4))
    assert dropin.dropin_faults(rank, case, attend=dropin.module(case, local=whole_only)) == []


def keys_in_place(q, k, v, queries=None):
    return reference.attention(q, k.mul_(2), v, queries=queries)


def test_keys_that_attention_changes_between_ranges_are_refused(rank):
    """The rank with a single range refuses, too."""
    kind, message = refusal(drop_in_of, keys_in_place)
    assert kind == "RuntimeError" and "changes k or v in place" in message and "fewer ranks" in message


def queries_in_place(q, k, v, queries=None):
    return reference.attention(q.mul_(1), k, v, queries=queries)


def test_queries_may_be_changed_in_place_in_each_range(rank):
    """Rank 0 has two ranges of queries."""
    case = Case(1, 1, lengths=(4, 4))
    assert dropin.dropin_faults(rank, case, attend=dropin.module(case, local=queries_in_place)) == []


# Guards.


def swallowed():
    """List a fault if the package believes that `whole_only` uses ``queries=``."""
    return [] if ds_sp_overlap.attention.arguments.takes(whole_only, "queries") is False else ["swallowed"]


ROTATED = Case(1, 1, 4, 4, 2, (4, 4), rotary_dims=4)
test_the_suite_notices_without_the_guard = notices(
    Watched(
        "no keyword is swallowed",
        "return attend.__code__.co_flags & 8 > 0 or 'queries' in inspect.signature(attend).parameters",
        swallowed,
    ),
    Watched(
        "no attention with a share of the queries unless it can",
        "return shares",
        functools.partial(test_what_needs_all_queries_is_refused_by_name_on_all_ranks, index=0),
    ),
    Watched("rotated by its own positions", "if False:", functools.partial(dropin.dropin_faults, case=ROTATED), raises=True),
)
