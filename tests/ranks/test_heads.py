"""Local attention that keeps something for each head gets all of a rank's heads at once, and others their head groups."""

import functools

import pytest
import torch
from deepspeed.sequence.layer import DistributedAttention as Upstream
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_sp_overlap
from ds_sp_overlap.attention.memory.forward_state import in_modes
from tests.harness import dropin, layers, reference
from tests.harness.dropin import Case
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.ranks import on_ranks, refusal
from tests.harness.transports import Recording

HEADS, KV_HEADS = 8, 4  # on two ranks, in two groups of two query heads


def scaled(q, k, v, of_query, of_key):
    """The oracle: attention whose heads have factors of their own."""
    return reference.attention(q, k * of_key.view(-1, 1), v) * of_query.view(-1, 1)


def factors(heads, rank=None):
    """Of all heads, or of a rank's."""
    every = torch.linspace(0.5, 2.0, heads, dtype=torch.float64)
    return every if rank is None else every.chunk(2)[rank]


class Alibi(nn.Module):
    """Holds slopes of this rank's heads and takes as many of them as it is given heads."""

    def __init__(self, rank):
        super().__init__()
        self.register_buffer("slopes", factors(HEADS, rank))

    def forward(self, q, k, v):
        return scaled(q, k, v, self.slopes[: q.shape[2]], torch.ones(k.shape[2]).double())


class KeyScale(nn.Module):
    """A learnt factor of each KV head; of queries none."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, q, k, v):
        return scaled(q, k, v, torch.ones(q.shape[2]).double(), self.scale[: k.shape[2]])


def given(q, k, v, slopes):
    """Takes slopes in whatever they come."""
    while not isinstance(slopes, torch.Tensor):
        slopes = next(iter(slopes.values())) if isinstance(slopes, dict) else slopes[0]
    return scaled(q, k, v, slopes[: q.shape[2]], torch.ones(k.shape[2]).double())


def padded(q, k, v, slopes):
    """Takes slopes from a tensor in which no dimension is as long as a rank has heads."""
    return given(q, k, v, slopes["slopes"][:, 0])


def holding(slopes):
    """Return an attention that finds its slopes in its closure."""
    return lambda q, k, v: given(q, k, v, slopes)


def times(factor, q, k, v):
    return factor * reference.attention(q, k, v)


def blind(q, k, v):
    """NaN where it is given some of a rank's heads alone."""
    return reference.attention(q, k, v) * (1 if q.shape[2] == HEADS // 2 else torch.nan)


def kinds(rank):
    """Local attention and its keywords, and the factors of all heads that the oracle takes, for each kind of state."""
    ones, slopes = torch.ones(HEADS).double(), factors(HEADS, rank)
    of_heads, of_keys = (factors(HEADS), torch.ones(KV_HEADS).double()), (ones, factors(KV_HEADS))
    return {
        "slopes of a module": (Alibi(rank), {}, of_heads),
        "a scale of each KV head": (KeyScale(factors(KV_HEADS, rank)), {}, of_keys),
        "a scale of each KV head that begins at 1": (KeyScale(ones[: KV_HEADS // 2]), {}, (ones, ones[:KV_HEADS])),
        "factors of a closure that begin at 1": (holding(ones[: HEADS // 2]), {}, (ones, ones[:KV_HEADS])),
        "slopes in a dict": (given, {"slopes": {"slopes": slopes}}, of_heads),
        "slopes in a tuple of lists": (given, {"slopes": ([slopes], None)}, of_heads),
        "slopes among more": (padded, {"slopes": {"slopes": torch.cat((slopes, slopes))[:, None]}}, of_heads),
        "a factor of each rank": (
            functools.partial(times, (0.5, 2.0)[rank]),
            {},
            (torch.tensor([0.5] * 4 + [2.0] * 4).double(), ones[:4]),
        ),
        "NaN of some heads": (blind, {}, (ones, ones[:KV_HEADS])),
        "slopes that the other rank has not": (Alibi(rank) if rank else reference.attention, {}, None),
    }


def heads_seen(rank):
    """How many heads a layer's attention is called with, whose constructor is not told whether it treats heads alike."""
    local, shape = Alibi(rank), Shape(HEADS, KV_HEADS, 4, lengths=(3, 3))
    attend = ds_sp_overlap.SelfAttention(
        local_attention=local, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=4,
        sequence_process_group=torch.distributed.group.WORLD, config={"head_groups": 2}, **layers.projections(shape),
    )  # fmt: skip
    x = torch.ones(2, 3, shape.width, dtype=torch.float64)
    attend(x)  # probes
    seen = []
    local.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[2]))
    attend(x)
    return seen


def test_a_layer_probes_its_attention_unless_it_is_told_that_heads_are_alike():
    assert on_ranks(2, heads_seen) == [[HEADS // 2]] * 2


def stateful(rank, kind, config, wrapped=None):
    """Faults of output and gradients, whether there was one head group, and the warnings."""
    case = Case(heads=HEADS, kv_heads=KV_HEADS, config=config)
    local, keywords, of = kinds(rank)[kind]
    of = of or (torch.cat((torch.ones(HEADS // 2).double(), factors(HEADS, 1))), torch.ones(KV_HEADS).double())
    inputs, mover = dropin.whole_inputs(case), Recording()
    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    expected = scaled(q, k, v, *of)
    expected.backward(inputs[3])
    attend = dropin.module(case, mover, local=local)
    mine = [dropin.my_slice(case, rank, t).requires_grad_() for t in inputs[:3]]

    def call(q, k, v):
        return attend(q, k, v, 0, **keywords)

    state = torch.get_rng_state()
    with listening() as messages:
        o = call(*mine) if wrapped is None else checkpoint(call, *mine, use_reentrant=wrapped == "reentrant")
    found = [] if torch.equal(state, torch.get_rng_state()) else ["the random state changed"]
    o.backward(dropin.my_slice(case, rank, inputs[3]))
    pairs = {"o": (o, expected), **dict(zip(("dq", "dk", "dv"), ((t.grad, w.grad) for t, w in zip(mine, (q, k, v)))))}
    found += layers.faults(1e-12, **{n: (t.detach(), dropin.my_slice(case, rank, w.detach())) for n, (t, w) in pairs.items()})
    if isinstance(local, KeyScale):
        grad = torch.autograd.grad(scaled(*inputs[:3], of[0], p := of[1].clone().requires_grad_()), p, inputs[3])[0]
        found += layers.faults(1e-12, scale=(local.scale.grad, grad.chunk(2)[rank]))
    return found, sorted({what for what in mover.log if what[1] == "q"}), messages


@pytest.mark.parametrize("config", [{}, {"head_groups": 4}, {"head_groups": 2, "check": True}], ids=str)
@pytest.mark.parametrize("kind", kinds(0))
def test_right_in_one_head_group_for(kind, config):
    """At the two groups of the default it would be wrong by 0.3."""
    for found, queries, messages in on_ranks(2, stateful, kind, config):
        assert found == []
        assert queries == ["<q", ">q"]
        if kind not in ("slopes in a dict", "slopes in a tuple of lists"):  # those are seen in the arguments
            (said,) = messages
            assert "runs in one head group" in said and "sp rank 1: " in said and "heads_alike=True" in said


@pytest.mark.parametrize("wrapped", ["reentrant", "non-reentrant"])
def test_a_first_call_under_checkpointing_and_its_recomputation_are_one_graph(wrapped):
    for found, queries, _ in on_ranks(2, stateful, "slopes of a module", {}, wrapped):
        assert found == [] and queries == ["<q", ">q"]


def with_slopes(rank, config, heads):
    """Faults of attention whose slopes are said to be per head, and the exchanges of q."""
    case, mover, of = Case(heads=heads, kv_heads=heads // 2, config=config), Recording(), factors(heads).requires_grad_()

    def attend(q, k, v, slopes):
        assert slopes.shape == (q.shape[2],)
        return scaled(q, k, v, slopes, torch.ones(k.shape[2]).double())

    inputs = dropin.whole_inputs(case)
    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    expected = scaled(q, k, v, of, torch.ones(heads // 2).double())
    expected.backward(inputs[3])
    of_expected, of.grad = of.grad, None
    mine = [dropin.my_slice(case, rank, t).requires_grad_() for t in inputs[:3]]
    o = dropin.module(case, mover, local=attend)(*mine, 0, slopes=ds_sp_overlap.PerHead(of))
    o.backward(dropin.my_slice(case, rank, inputs[3]))
    torch.distributed.all_reduce(of.grad)
    pairs = {"o": (o, expected), **dict(zip(("dq", "dk", "dv"), ((t.grad, w.grad) for t, w in zip(mine, (q, k, v)))))}
    found = layers.faults(1e-12, **{n: (t.detach(), dropin.my_slice(case, rank, w.detach())) for n, (t, w) in pairs.items()})
    return found + layers.faults(1e-12, slopes=(of.grad, of_expected)), sorted({what for what in mover.log if what[1] == "q"})


@pytest.mark.parametrize(
    "config, queries", [({"head_groups": 1}, ["<q", ">q"]), ({"head_groups": 2}, ["<q0", "<qkv1", ">q0", ">qkv1"])]
)
@pytest.mark.parametrize("heads", [8, 6])
def test_what_is_said_to_be_per_head_goes_with_its_heads(heads, config, queries):
    """Six heads: groups of two and of one on each rank; the slopes' gradients come from the ranks that have the heads."""
    for found, sent in on_ranks(2, with_slopes, config, heads):
        assert found == [] and sent == queries


def wrong_slopes(rank, count):
    of = torch.ones(count if rank else HEADS).double()
    case = Case(heads=HEADS, kv_heads=KV_HEADS, config={"head_groups": 2})
    mine = [dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]]
    return refusal(dropin.module(case, Recording(), local=given), *mine, 0, slopes=ds_sp_overlap.PerHead(of))


def test_too_few_of_what_is_per_head_are_refused_on_every_rank():
    for kind, message in on_ranks(2, wrong_slopes, HEADS // 2):
        assert kind == "ValueError" and "a tensor of [4] for 8 query heads; give [8, ..]" in message


class Kept(list):
    """A list of the test's own, which the trial does not put back as it was."""


class Dropout(nn.Module):
    """Draws random numbers while it trains, and so does a part of it that doesn't always train with it."""

    def __init__(self):
        super().__init__()
        self.drop, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5).eval()
        self.modes = Kept()

    def forward(self, q, k, v):
        self.modes.append((self.training, self.drop.training, self.frozen.training))
        return self.frozen(self.drop(reference.attention(q, k, v)))


def functional(q, k, v):
    return nn.functional.dropout(reference.attention(q, k, v), 0.5)


class Raising(nn.Module):
    """Raises the first time on rank 1."""

    def __init__(self, rank):
        super().__init__()
        self.faults = Kept(["not yet"] * rank)

    def forward(self, q, k, v):
        if self.faults:
            raise LookupError(self.faults.pop())
        return reference.attention(q, k, v)


LOCALS = {
    "plain": lambda rank: reference.attention,
    "dropout": lambda rank: Dropout(),
    "dropout of a closure": lambda rank: (lambda module: lambda q, k, v: module(q, k, v))(Dropout()),
    "dropout of a method": lambda rank: Dropout().forward,
    "functional dropout": lambda rank: functional,
    "raising": Raising,
}


def groups_of(rank, kind, alike=False, shape=None):
    """Head groups of two calls of the drop-in, or of the block; the random state before and after; what was said."""
    local, mover = LOCALS[kind](rank), Recording()
    with listening() as messages:
        if shape is None:
            case = Case(heads=HEADS, kv_heads=2)
            attend = dropin.module(case, mover, local=local, heads_alike=alike)
            inputs = [dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]]
            calls = [lambda: attend(*inputs, 0)] * 2
        else:
            attend = layers.block(shape, layers.projections(shape), torch.distributed.group.WORLD, mover, local)
            x = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0])
            calls = [lambda: layers.call_block(shape, attend, rank, x)] * 2
        groups = []
        for call in calls:
            mover.log.clear()
            call()
            groups.append(len([what for what in mover.log if what.startswith(">q")]))
    return groups, messages, getattr(local, "modes", None)


def test_attention_that_treats_its_heads_alike_keeps_its_head_groups():
    for shape in (None, Shape(heads=HEADS, kv_heads=2), Shape(heads=5, kv_heads=1), Shape(heads=6, kv_heads=3, batch_first=False)):
        for groups, messages, _ in on_ranks(2, groups_of, "plain", False, shape):
            assert groups == [2, 2] and messages == []


@pytest.mark.parametrize("kind", ["dropout", "dropout of a closure", "dropout of a method"])
def test_modules_are_tried_out_in_evaluation_and_then_train_as_before(kind):
    for groups, messages, modes in on_ranks(2, groups_of, kind):
        assert groups == [2, 2] and messages == []
        # tried out over all heads and twice by groups, then called for two times two groups
        assert modes is None or modes == [(False,) * 3] * 3 + [(True, True, False)] * 4


def test_attention_that_draws_random_numbers_anyway_runs_in_one_group_and_says_so():
    for groups, messages, _ in on_ranks(2, groups_of, "functional dropout"):
        assert groups == [1, 1]
        assert ["sp rank 0: draws random numbers" in message for message in messages] == [True]


def test_attention_that_is_said_to_treat_heads_alike_is_not_tried_out():
    for groups, messages, _ in on_ranks(2, groups_of, "functional dropout", True):
        assert groups == [2, 2] and messages == []


def random_numbers_differ(rank):
    """Whether a first call draws others than a call that nothing was tried out for."""
    case, outputs = Case(heads=HEADS, kv_heads=2), []
    for config in ({"head_groups": 1}, {"head_groups": 2}):
        attend = dropin.module(Case(heads=HEADS, kv_heads=2, config=config), local=functional)
        torch.manual_seed(11)
        outputs.append(attend(*(dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]), 0))
    return [] if torch.equal(*outputs) else ["other random numbers"]


def test_random_numbers_are_those_of_a_run_in_which_nothing_was_tried_out():
    assert on_ranks(2, random_numbers_differ) == [[], []]


# For the guards at the end.


def misses_slopes(rank):
    return stateful(rank, "slopes of a module", {})[0]


def misses_heads_that_begin_alike(rank):
    """Return the faults of a parameter's gradient. Factors of a closure get none: then the exchanges."""
    found, _, _ = stateful(rank, "a scale of each KV head that begins at 1", {})
    _, queries, _ = stateful(rank, "factors of a closure that begin at 1", {})
    return found + [f"exchanged {queries}"] * (queries != ["<q", ">q"])


def leaves_other_values(rank):
    """Whether a tensor that a function knows, and no module, is another one behind the trial."""
    scale = torch.ones(KV_HEADS // 2).double()
    address, mover = scale.data_ptr(), Recording()

    def local(q, k, v):
        return scaled(q, k, v, torch.ones(q.shape[2]).double(), scale[: k.shape[2]])

    attend = dropin.module(case := Case(heads=HEADS, kv_heads=KV_HEADS), mover, local=local)
    attend(*[dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]], 0)
    moved = scale.data_ptr() != address or not bool((scale == 1).all())
    return ["the tensor is another"] * moved


def misses_what_the_other_rank_found(rank):
    return stateful(rank, "slopes that the other rank has not", {})[0]


def misses_what_all_heads_of_a_rank_have(rank):
    return stateful(rank, "a factor of each rank", {})[0]


def stays_in_another_mode():
    module = nn.Dropout()
    with in_modes([module], [False]):
        pass
    return [] if module.training else ["it evaluates from now on"]


def modes_differ(rank):
    groups, _, modes = groups_of(rank, "dropout")
    fine = groups == [2, 2] and modes == [(False,) * 3] * 3 + [(True, True, False)] * 4
    return [] if fine else [f"groups {groups}, modes {modes}"]


def test_attention_that_raises_when_it_is_tried_out_on_one_rank_keeps_nobody_waiting():
    for groups, messages, _ in on_ranks(2, groups_of, "raising"):
        assert groups == [1, 1]
        assert ["(sp rank 1: raises LookupError: not yet)" in message for message in messages] == [True]


def trained_by_timing(rank):
    """Modules of DeepSpeed's own class that `enable` overlaps with "auto": which G their exchanges had, and the faults."""
    case, seen = Case(heads=HEADS, kv_heads=KV_HEADS), set()
    inputs, group = dropin.whole_inputs(case), torch.distributed.group.WORLD
    model = nn.Sequential(Upstream(Alibi(rank), group, gather_idx=1))
    mine = [dropin.my_slice(case, rank, t).requires_grad_() for t in inputs[:3]]
    q, k, v = inputs[:3]
    expected = dropin.my_slice(case, rank, scaled(q, k, v, factors(HEADS), torch.ones(KV_HEADS).double()))
    optimizer, found = torch.optim.SGD(mine, lr=0.0), []
    with listening() as messages:
        ds_sp_overlap.enable(model, {"policy": {"warmup_steps": 8}}, group)
        inner = model[0].local_attn.forward
        model[0].local_attn.forward = lambda q, k, v: seen.add(q.shape[2]) or inner(q, k, v)
        for step in range(12):
            seen.clear() if step else None
            o = model[0](*mine, 0)
            found += layers.faults(1e-12, **{f"step {step}": (o.detach(), expected)})
            o.sum().backward()
            optimizer.step()
            found += [f"heads {seen} in step {step}"] * (step > 0 and seen != {HEADS // 2})
    ds_sp_overlap.disable(model)
    return found, sum("runs in one head group" in message for message in messages)


def test_auto_tries_no_more_than_one_group_of_what_needs_all_heads():
    for found, said in on_ranks(2, trained_by_timing):
        assert found == [] and said == 1


def flagged(q, k, v, *, causal):
    assert causal is True
    return reference.attention(q, k, v)


def rounding(q, k, v):
    return reference.attention(q, k, v) * (1 + 1e-6 * q.shape[2])  # as another order of sums would in fp32


def partial_of_dropout():
    return functools.partial(lambda module, q, k, v: module(q, k, v), Dropout())


def naming_a_later_variable():
    """Attention whose closure has a variable that gets its value once training is over."""

    def attend(q, k, v):
        return report(q) if q is None else reference.attention(q, k, v)

    if torch.is_grad_enabled():
        return attend
    report = print


HARMLESS = {
    "a variable without a value": (naming_a_later_variable, {}),
    "a keyword": (lambda: flagged, {"causal": True}),
    "dropout": (partial_of_dropout, {}),
    "rounding": (lambda: rounding, {}),
}


def of_harmless(rank, kind):
    """Head groups of a local attention that treats all heads alike, and what was said of it."""
    (local, kwargs), mover, case = HARMLESS[kind], Recording(), Case(heads=8, kv_heads=2)
    attend = dropin.module(case, mover, local=local())
    with listening() as messages:
        attend(*[dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]], 0, **kwargs)
    return len([what for what in mover.log if what.startswith(">q")]), messages


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_is_no_difference_of_heads_costs_no_head_group(kind):
    assert on_ranks(2, of_harmless, kind) == [(2, [])] * 2


# Guards.

WATCHED = [
    Watched(Guard("heads alike", without="if False:"), misses_slopes),
    Watched(
        Guard(
            "what any rank found",
            without='fault = "; ".join(f"sp rank {rank}: {text}" for rank, text in enumerate(faults[:1]) if text)',
        ),
        misses_what_the_other_rank_found,
    ),
    Watched(Guard("alike on all ranks", without="pass"), misses_what_all_heads_of_a_rank_have),
    Watched(Guard("heads that begin alike", without="with contextlib.nullcontext():"), misses_heads_that_begin_alike),
    Watched(Guard("values as they were", without="pass"), leaves_other_values),
    Watched(Guard("tried out in evaluation", without="pass"), modes_differ),
    Watched(Guard("left as it was", without="pass"), stays_in_another_mode, ranks=0),
    Watched(Guard("takes no random numbers", without="pass"), random_numbers_differ),
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
