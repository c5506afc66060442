"""Tests that local attention gets all heads of a rank at once, and head groups only if it is declared to treat all heads alike."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention as Upstream
from torch import nn

import ds_sp_overlap
from tests.harness import dropin, layers, reference
from tests.harness.dropin import Case
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.ranks import refusal
from tests.harness.transports import Recording

HEADS, KV_HEADS = 8, 4  # on two ranks, in two groups of two query heads


def scaled(q, k, v, of_query, of_key):
    """Attend with a factor for each query head and each KV head; also the oracle."""
    return reference.attention(q, k * of_key.view(-1, 1), v) * of_query.view(-1, 1)


def factors(heads, rank=None):
    """Return the factors of all heads, or those of a rank's heads."""
    every = torch.linspace(0.5, 2.0, heads, dtype=torch.float64)
    return every if rank is None else every.chunk(2)[rank]


class Alibi(nn.Module):
    """Attention with a slope for each head of this rank; uses the first slopes, one for each head that it gets."""

    def __init__(self, rank):
        super().__init__()
        self.register_buffer("slopes", factors(HEADS, rank))

    def forward(self, q, k, v):
        return scaled(q, k, v, self.slopes[: q.shape[2]], torch.ones(k.shape[2]).double())


class KeyScale(nn.Module):
    """Attention with a learnt factor for each KV head."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, q, k, v):
        return scaled(q, k, v, torch.ones(q.shape[2]).double(), self.scale[: k.shape[2]])


def given(q, k, v, slopes):
    """Attend with ``slopes``, a tensor, or a list or dict that holds one."""
    while not isinstance(slopes, torch.Tensor):
        slopes = next(iter(slopes.values())) if isinstance(slopes, dict) else slopes[0]
    return scaled(q, k, v, slopes[: q.shape[2]], torch.ones(k.shape[2]).double())


def kinds(rank):
    """Return {kind of state: (local attention, its keywords, factors of all heads for the oracle)}."""
    ones, slopes = torch.ones(HEADS).double(), factors(HEADS, rank)
    of_heads, of_keys = (factors(HEADS), torch.ones(KV_HEADS).double()), (ones, factors(KV_HEADS))
    return {
        "slopes of a module": (Alibi(rank), {}, of_heads),
        "a scale of each KV head": (KeyScale(factors(KV_HEADS, rank)), {}, of_keys),
        "slopes in a dict": (given, {"slopes": {"slopes": slopes}}, of_heads),
        "a factor of each rank": (
            lambda q, k, v: (0.5, 2.0)[rank] * reference.attention(q, k, v),
            {},
            (torch.tensor([0.5] * 4 + [2.0] * 4).double(), ones[:4]),
        ),
    }


@pytest.mark.parametrize("config", [{}, {"head_groups": 4, "check": True}], ids=str)
@pytest.mark.parametrize("kind", kinds(0))
def test_right_in_one_head_group_for(kind, config, rank):
    """With two head groups, the default, results would be wrong by 0.3."""
    case = Case(heads=HEADS, kv_heads=KV_HEADS, config=config)
    local, keywords, of = kinds(rank)[kind]
    inputs, mover = dropin.whole_inputs(case), Recording()
    with listening() as messages:
        attend = dropin.module(case, mover, local=local, heads_alike=False)
        found = dropin.dropin_faults(rank, case, attend=attend, whole=lambda q, k, v: scaled(q, k, v, *of), **keywords)
    if isinstance(local, KeyScale):
        grad = torch.autograd.grad(scaled(*inputs[:3], of[0], p := of[1].clone().requires_grad_()), p, inputs[3])[0]
        found += layers.faults(1e-12, scale=(local.scale.grad, grad.chunk(2)[rank]))
    assert found == []
    assert {what for what in mover.log if what[1] == "q"} == {"<q", ">q"}
    (said,) = messages
    assert "runs in one head group, since it isn't known to treat all heads alike" in said and "heads_alike=True" in said


@pytest.mark.parametrize(
    "config, queries", [({"head_groups": 1}, ["<q", ">q"]), ({"head_groups": 2}, ["<q0", "<qkv1", ">q0", ">qkv1"])]
)
@pytest.mark.parametrize("heads", [8, 6])
def test_what_is_said_to_be_per_head_goes_with_its_heads(heads, config, queries, rank):
    """With six heads, each rank has a group of two heads and one of one head.

    A head's slope gets its gradient on the rank that has the head.
    """
    case, mover, of = Case(heads=heads, kv_heads=heads // 2, config=config), Recording(), factors(heads).requires_grad_()

    def attend(q, k, v, slopes):
        assert slopes.shape == (q.shape[2],)
        return scaled(q, k, v, slopes, torch.ones(k.shape[2]).double())

    def whole(q, k, v):
        return scaled(q, k, v, of, torch.ones(heads // 2).double())

    slopes = ds_sp_overlap.PerHead(factors(heads).requires_grad_())
    assert dropin.dropin_faults(rank, case, attend=dropin.module(case, mover, local=attend), whole=whole, slopes=slopes) == []
    torch.distributed.all_reduce(slopes.tensor.grad)
    assert layers.faults(1e-12, slopes=(slopes.tensor.grad, of.grad)) == []
    assert sorted({what for what in mover.log if what[1] == "q"}) == queries


def test_too_few_of_what_is_per_head_are_refused_on_every_rank(rank):
    of = torch.ones(HEADS // 2 if rank else HEADS).double()
    case = Case(heads=HEADS, kv_heads=KV_HEADS, config={"head_groups": 2})
    mine = [dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]]
    kind, message = refusal(dropin.module(case, Recording(), local=given), *mine, 0, slopes=ds_sp_overlap.PerHead(of))
    assert kind == "ValueError" and "a tensor of [4] for 8 query heads; give [8, ..]" in message


# Head groups of attention that is declared to treat its heads alike.


def plain(q, k, v):
    return reference.attention(q, k, v)


def declared(q, k, v):
    return reference.attention(q, k, v)


ds_sp_overlap.attention_function(declared, heads_alike=True)


def groups_of(rank, local, alike, shape=None, **config):
    """Call the drop-in, or the block of ``shape``; return its number of head groups, and the messages."""
    mover = Recording()
    with listening() as messages:
        if shape is None:
            case = Case(heads=HEADS, kv_heads=2, config=config)
            attend = dropin.module(case, mover, local=local, heads_alike=alike)
            attend(*[dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]], 0)
        else:
            _, attend, x, _ = layers.mine(rank, shape, mover, local, heads_alike=alike)
            layers.call_block(shape, attend, rank, x)
    return len([what for what in mover.log if what.startswith(">q")]), messages


@pytest.mark.parametrize("shape", [None, Shape(heads=HEADS, kv_heads=2)])
def test_head_groups_are_of_attention_that_is_said_to_treat_heads_alike(shape, rank):
    for local, alike in ((plain, True), (declared, False), (declared, True)):
        assert groups_of(rank, local, alike, shape) == (2, [])
    groups, messages = groups_of(rank, plain, False, shape)
    assert groups == 1 and len(messages) == 1


def test_who_asks_for_one_group_is_told_nothing(rank):
    assert groups_of(rank, plain, False, head_groups=1) == (1, [])


def test_ranks_that_say_different_things_are_refused(rank):
    kind, message = refusal(groups_of, rank, plain, rank == 1)
    assert kind == "ValueError" and "head_groups" in message


@pytest.mark.parametrize("local, heads", [(plain, HEADS // 2), (declared, HEADS // 4)])
def test_deepspeeds_class_has_head_groups_where_its_local_attention_is_declared(local, heads, rank):
    case, seen = Case(heads=HEADS, kv_heads=KV_HEADS), set()
    inputs, group = dropin.whole_inputs(case), dist.group.WORLD
    model = nn.Sequential(Upstream(local, group, gather_idx=1))
    mine = [dropin.my_slice(case, rank, t) for t in inputs[:3]]
    report = " ".join(str(ds_sp_overlap.enable(model, {"policy": {"warmup_steps": 8}}, group)).split())
    model[0].local_attn = lambda q, k, v: seen.add(q.shape[2]) or local(q, k, v)
    o = model[0](*mine, 0)
    ds_sp_overlap.disable(model)
    assert layers.faults(1e-12, o=(o, dropin.my_slice(case, rank, reference.attention(*inputs[:3])))) == []
    assert seen == {heads} and ("plain runs in one head group" in report) == (local is plain)
