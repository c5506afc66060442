"""Tests ``window``: a layer holds few head groups, and recomputes q, k and v in backward; on 2 and 4 ranks, fp64, 1e-12.

Compares with the reference on the whole sequence, with two kinds of local attention. The backward of one reads q, k, v, o and a
log-sum-exp, so its results are saved. The other saves its scores, so it runs again in backward. Dropout and attention with its own
parameters, which the reference can't repeat, are compared with the same layer without a window.
"""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_sp_overlap
from ds_sp_overlap.attention.arguments import LocalAttention
from ds_sp_overlap.attention.memory.recompute import attend_once
from ds_sp_overlap.schedule import by_head_groups, order
from tests.harness import layers, reference
from tests.harness.cases import singles
from tests.harness.guards import Watched, notices
from tests.harness.layers import HEADS, Shape
from tests.harness.listening import listening
from tests.harness.ranks import assert_error, refusal
from tests.harness.schedules import merged_last
from tests.harness.transports import Recording
from tests.harness.uses import (
    CHANGES,
    USES,
    adapted_query_and_output,
    all_adapted,
    only_input_trains,
    without_gradient_of_the_input,
)

MORE_HEADS = [(16, 16), (16, 4), (16, 2)]  # for eight groups on two ranks


class Counted(nn.Module):
    """Attention that counts its calls in forward (False) and in backward (True)."""

    def __init__(self, attention, batch_first):
        super().__init__()
        self.attention, self.calls = layers.laid_out(attention, batch_first), Counter()

    def forward(self, q, k, v):
        self.calls[torch._C._current_autograd_node() is not None] += 1
        return self.attention(q, k, v)


def faults_of(rank, shapes, attention, use=layers.backward, change=None, again=None):
    """List the faults of shapes, and the shapes whose attention ran a wrong number of times.

    again   how often attention must run again in backward for each group, 0 or 1; None for no check
    """
    every = []
    for shape in shapes:
        local, groups = Counted(attention, shape.batch_first), shape.config["head_groups"]
        found = layers.block_faults(rank, shape, use, change=change, local_attention=local)
        every += [f"{shape}: {fault}" for fault in found]
        if again is not None and local.calls != Counter({False: groups, True: again * groups}):
            every.append(f"{shape}: calls in forward and in backward: {local.calls[False]}, {local.calls[True]}")
    return every


# Heads, groups, windows.


def shapes_of(heads, kv_heads, size):
    return [
        Shape(
            heads, kv_heads, 4, lengths=(3,) * size, batch_first=batch_first, fused=fused, bias=bias,
            config={"head_groups": groups, "window": window}
        )
        for groups in (2, 4, 8)
        if groups <= heads // size
        for window in (1, 2, 3)
        for batch_first, fused, bias in ((True, False, False), (False, False, True), (True, True, True), (False, True, False))
    ]  # fmt: skip


@pytest.mark.pairs
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("attention, again", [(reference.fused, 0), (reference.attention, 1)], ids=["kept", "run again"])
@pytest.mark.parametrize("heads, kv_heads", [*HEADS, *MORE_HEADS])
def test_a_window_equals_the_reference_for_all_heads_groups_and_layouts(heads, kv_heads, attention, again, size, rank):
    """Attention must run again in backward only if it saves too much."""
    assert faults_of(rank, singles(shapes_of(heads, kv_heads, size)), attention, layers.backward, None, again) == []


# Uses and changes.

SHAPES = [
    Shape(kv_heads=2, config={"head_groups": 2, "window": 1}),
    Shape(heads=8, bias=True, config={"head_groups": 4, "window": 2}),
    Shape(fused=True, bias=True, batch_first=False, config={"head_groups": 2, "window": 1}),
    Shape(heads=8, kv_heads=2, rope=False, config={"head_groups": 4, "window": 2}),
]
SEPARATE = [shape for shape in SHAPES if not shape.fused]


def with_both(rank, shapes, use=layers.backward, change=None):
    """List the faults with both kinds of attention; saved results must stay if the graph is retained."""
    return [
        fault for attention in (reference.fused, reference.attention) for fault in faults_of(rank, shapes, attention, use, change)
    ]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_window_is_right_in_every_use(use, rank):
    assert with_both(rank, SHAPES, use) == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_window_is_right_for_projections_that_are(change, rank):
    assert with_both(rank, SEPARATE, layers.backward, change) == []


def test_an_input_that_was_changed_in_place_is_noticed(rank):
    _, attend, x, dy = layers.mine(rank, SHAPES[0], change=only_input_trains)
    hidden = x.requires_grad_() * 1
    y = layers.call_block(SHAPES[0], attend, rank, hidden)
    hidden += 1
    kind, message = refusal(y.backward, dy)
    assert kind == "RuntimeError" and "modified by an inplace operation" in message


def in_a_closure(factor):
    return lambda q, k, v: reference.attention(q * factor, k, v)


class InAnObject:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, q, k, v):
        return reference.attention(q * self.factor, k, v)


class InAModule(torch.nn.Module):
    """A module with a tensor as a plain attribute, neither buffer nor parameter."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, q, k, v):
        return reference.attention(q * self.factor, k, v)


@pytest.mark.parametrize("held", [in_a_closure, InAnObject, InAModule])
def test_a_tensor_that_attention_holds_and_that_was_changed_in_place_is_noticed(held, rank):
    factor = torch.tensor(2.0, dtype=torch.float64)
    _, attend, x, dy = layers.mine(rank, SHAPES[0], local_attention=held(factor))
    y = layers.call_block(SHAPES[0], attend, rank, x.requires_grad_())
    factor.mul_(2)
    kind, message = refusal(y.backward, dy)
    assert kind == "RuntimeError" and "a tensor that local attention reads" in message


def only_output_trains(layer):
    layer.requires_grad_(False)
    layer["o_proj"].requires_grad_(True)


def test_the_output_projection_alone_may_learn(rank):
    """Backward then recomputes nothing."""
    shape = Shape(bias=True, config={"head_groups": 2, "window": 1})
    assert layers.block_faults(rank, shape, without_gradient_of_the_input, None, 1e-12, only_output_trains) == []


# Attention of other kinds, against the same layer without a window.


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_query = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.of_output = nn.Parameter(torch.linspace(0.5, 2, 8, dtype=torch.float64))

    def forward(self, q, k, v):
        return reference.fused(q * self.of_query, k, v) * self.of_output


def learned_inside(rank):
    return Scaled(), {}


class Sinks(nn.Module):
    """Attention with a sink for each head, which takes a part of the attention weights."""

    def forward(self, q, k, v, sinks):
        repeat = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeat, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v)


def sinks_that_learn(rank):
    of = torch.linspace(-1, 2, 8, dtype=torch.float64).requires_grad_()
    return Sinks(), {"sinks": ds_sp_overlap.PerHead(of)}


def an_argument_that_learns(rank):
    factor = torch.tensor(1.5, dtype=torch.float64).requires_grad_()
    return (lambda q, k, v, factor: reference.fused(q * factor, k, v)), {"factor": factor}


def hooks_on_what_learns(rank):
    """Return attention whose learnt tensors have hooks; each hook must run once."""
    local, _ = learned_inside(rank)
    factor = torch.tensor(1.5, dtype=torch.float64).requires_grad_()
    for x in (local.of_query, local.of_output, factor):
        x.register_hook(lambda gradient: 2 * gradient + 1)
    return Hooked(local), {"factor": factor}


class Hooked(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, q, k, v, factor):
        return self.inner(q * factor, k, v)


def drop_out(rank):
    return (lambda q, k, v: F.dropout(reference.attention(q, k, v), 0.5)), {}


def drop_out_of_flash(rank):
    return (lambda q, k, v: F.dropout(reference.fused(q, k, v), 0.5)), {}


def changes_query(rank):
    return (lambda q, k, v: reference.fused(q.mul_(0.5), k, v)), {}


def changes_query_and_key(rank):
    return (lambda q, k, v: reference.attention(q.mul_(0.5), k.add_(0.1), v)), {}


def constant_output(rank):
    return (lambda q, k, v: torch.ones_like(q)), {}


def kept_on_one_rank(rank):
    """Return attention whose backward reads o on rank 1 alone; o must still be sent."""
    return (reference.fused if rank else reference.attention), {}


def value_that_is_query(rank):
    """Return attention whose gradients for q, k and v may be one tensor."""
    return (lambda q, k, v: q + k + v), {}


def writes_to_an_argument(rank):
    """Return attention that writes to an argument in every call, which must not count as a change by other code."""

    def attend(q, k, v, scratch):
        scratch.add_(1)
        return reference.attention(q, k, v) * scratch.sign()

    return attend, {"scratch": torch.zeros(1, dtype=torch.float64)}


def checkpointed_inside(rank):
    return (lambda q, k, v: checkpoint(reference.fused, q, k, v, use_reentrant=False)), {}


OTHERS = [
    learned_inside,
    sinks_that_learn,
    an_argument_that_learns,
    hooks_on_what_learns,
    drop_out,
    drop_out_of_flash,
    changes_query,
    changes_query_and_key,
    constant_output,
    kept_on_one_rank,
    value_that_is_query,
    writes_to_an_argument,
    checkpointed_inside,
]


def outcome(rank, shape, other, use=layers.backward, frozen=False):
    """Return the output, all gradients, and the state of the random generator afterwards."""
    local, kwargs = other(rank)
    layer, attend, x, dy = layers.mine(rank, shape, local_attention=local)
    layer.requires_grad_(not frozen)
    tables = reference.rope_tables(torch.arange(6), shape.head_dim, shape.dtype)
    torch.manual_seed(7)
    got = use(lambda x: attend(x, position_embeddings=tables, **kwargs), layer, x.requires_grad_(not frozen), dy)
    learned = [*layer.parameters(), *(local.parameters() if isinstance(local, nn.Module) else ())]
    learned += [x.tensor if isinstance(x, ds_sp_overlap.PerHead) else x for x in kwargs.values()]
    pairs = {f"learned {i}": p.grad for i, p in enumerate(learned)} | {name: x.detach() for name, x in got.items() if x is not None}
    pairs = {name: x for name, x in pairs.items() if not (frozen and x is None)}
    return {**pairs, "random": torch.get_rng_state().double()}


def against_no_window(rank, other, windows, use=layers.backward, frozen=False):
    found = []
    for kv_heads in (8, 2) if other is not changes_query_and_key else (8,):
        for window in windows:
            configs = {"head_groups": 4}, {"head_groups": 4, "window": window}
            expected, got = (outcome(rank, Shape(8, kv_heads, config=config), other, use, frozen) for config in configs)
            assert got.keys() == expected.keys() and len(got) > 2
            faults = layers.faults(1e-12, **{name: (got[name], expected[name]) for name in expected})
            found += [f"{kv_heads} KV heads, window {window}: {fault}" for fault in faults]
    return found


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_a_window_does_to_local_attention_what_is_done_without_it(other, rank):
    assert against_no_window(rank, other, (1, 2)) == []


@pytest.mark.parametrize("other", [drop_out, learned_inside, changes_query], ids=lambda other: other.__name__)
@pytest.mark.parametrize(
    "use", [use for use in USES if use.__name__ in ("second_backward", "twice_before_backward", "non_reentrant")]
)
def test_and_so_where_it_is_used_twice(other, use, rank):
    assert against_no_window(rank, other, (2,), use) == []


@pytest.mark.parametrize("other", [learned_inside, sinks_that_learn], ids=lambda other: other.__name__)
def test_attention_alone_may_learn(other, rank):
    assert against_no_window(rank, other, (1, 2), layers.backward, True) == []


class Dropping(nn.Module):
    """Attention with dropout, an added mask and a learnt factor."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("bias", torch.linspace(2, -2, 144, dtype=torch.float64).reshape(12, 12))
        self.frozen = nn.Parameter(self.bias.sin(), requires_grad=False)

    def forward(self, q, k, v, mask):
        scores = torch.einsum("bqhd,bkhd->bhqk", q * self.factor, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
        scores = scores + mask + self.bias + self.frozen
        weights = F.dropout(scores.softmax(-1), 0.5, self.training)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2))


def meanwhile(rank, config, change):
    """Return output and gradients of a layer; call ``change(attention, mask)`` between forward and backward."""
    local, mask = Dropping(), torch.linspace(-3, 3, 144, dtype=torch.float64).reshape(12, 12)

    def use(call, layer, x, dy):
        y = call(x)
        change(local, mask)
        y.backward(dy)
        return {"y": y, "dx": x.grad}

    return outcome(rank, Shape(heads=8, kv_heads=2, config=config), lambda _: (local, {"mask": mask}), use)


def in_evaluation(local, mask):
    local.eval()


def with_frozen_factor(local, mask):
    local.requires_grad_(False)


def with_another_mask(local, mask):
    mask.zero_()


def with_another_buffer(local, mask):
    local.bias.zero_()


def with_another_frozen_parameter(local, mask):
    local.frozen.zero_()


@pytest.mark.parametrize("change", [in_evaluation, with_frozen_factor])
def test_attention_that_is_run_again_runs_as_in_forward(change, rank):
    expected, got = (meanwhile(rank, {"head_groups": 4} | more, change) for more in ({}, {"window": 1}))
    assert layers.faults(1e-12, **{name: (got[name], expected[name]) for name in expected}) == []


def with_a_new_buffer(local, mask):
    local.bias = local.bias.cos()


@pytest.mark.parametrize("change", [with_another_mask, with_another_buffer, with_another_frozen_parameter, with_a_new_buffer])
def test_what_was_changed_or_replaced_is_not_read_by_attention_that_is_run_again(change, rank):
    """A layer without a window is not affected, like stock: its backward does not read the mask."""
    said = refusal(meanwhile, rank, {"head_groups": 4, "window": 1}, change)
    assert_error(said, "changed or replaced between forward and backward", "RuntimeError")
    expected, got = (meanwhile(rank, {"head_groups": 4}, each) for each in (lambda local, mask: None, change))
    assert layers.faults(1e-12, **{name: (got[name], expected[name]) for name in expected}) == []


# What is refused.


def foreign(rank, later=False):
    """Let local attention use a learnt tensor that is no argument; return the error.

    Only rank 1 uses the tensor. With ``later``, both ranks use it, and it is learnt only from the second call on.
    """
    hidden = torch.ones((), dtype=torch.float64, requires_grad=not later)
    local = (lambda q, k, v: reference.fused(q * hidden, k, v)) if rank or later else reference.fused
    shape = Shape(config={"head_groups": 2, "window": 1})
    _, attend, x, _ = layers.mine(rank, shape, local_attention=local)
    if later:
        layers.call_block(shape, attend, rank, x)
        hidden.requires_grad_()
    return refusal(layers.call_block, shape, attend, rank, x)


@pytest.mark.parametrize("later", [False, True])
def test_what_attention_learns_without_being_given_it_is_refused_on_every_rank(later, rank):
    """The gradient of this tensor would be lost."""
    assert_error(foreign(rank, later), "layer: local attention learns a tensor of [], which it is not called with")


@pytest.mark.parametrize("section", [{"window": 1}, {"checkpointing": "keep"}], ids=str)
def test_a_schedule_of_ones_own_beside_a_window_is_refused(section):
    make = functools.partial(
        ds_sp_overlap.SelfAttention, local_attention=reference.attention, num_heads=4, head_dim=8, schedule=merged_last,
        **{f"{kind}_proj": nn.Linear(32, 32) for kind in "qkvo"},
    )  # fmt: skip
    make(config={})
    with pytest.raises(
        ValueError, match="^attention: schedule= beside sp_overlap.window or checkpointing: .* leave out one of the two"
    ):
        make(config=section)


# Layers that can't have a window.


@pytest.mark.parametrize(
    "what", [None, all_adapted, adapted_query_and_output], ids=lambda what: what.__name__ if what else "tables"
)
def test_projections_that_cannot_be_split_hold_all_groups_and_it_is_said(what, rank):
    """Layers with learnt RoPE tables hold all groups, too."""
    shape, mover = Shape(config={"head_groups": 2, "window": 1}), Recording()
    _, attend, x, dy = layers.mine(rank, shape, mover, change=what)
    tables = [t.requires_grad_(what is None) for t in reference.rope_tables(torch.arange(6), 8, shape.dtype)]
    with listening() as messages:
        attend(x.requires_grad_(), position_embeddings=tables).backward(dy)
    made = by_head_groups(("qkv", "qkv"))
    assert mover.log[:12] == order(made, made.forward) and sorted(mover.log[12:]) == sorted(order(made, made.backward))
    (said,) = messages
    assert said.startswith("sp_overlap: window and checkpointing need projections") and "holds all head groups" in said


# Autocast.


@pytest.mark.parametrize("forward, backward", [(True, False), (False, True), (True, True)])
def test_backward_makes_q_k_and_v_under_the_autocast_of_forward(forward, backward, rank):
    """Attention that runs again in backward must get the same dtypes and autocast as in forward."""
    shape, seen = Shape(dtype=torch.float32, config={"head_groups": 2, "window": 1}), []

    def local(q, k, v):
        seen.append((q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")))
        return reference.attention(q, k, v)

    layer, attend, x, dy = layers.mine(rank, shape, local_attention=local, heads_alike=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        y = layers.call_block(shape, attend, rank, x.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        y.backward(dy.to(y.dtype))
    assert len(seen) == 4 and x.grad.dtype == torch.float32
    dtype = torch.bfloat16 if forward else torch.float32  # the dtype of v; q and k have the dtype of RoPE's tables
    assert len(set(seen)) == 1 and seen[0][2:] == (dtype, forward)


def in_fp32(q, k, v):
    """Attend with fp32 scores, which are too large to be saved, so that attention runs again in backward."""
    with torch.autocast("cpu", enabled=False):
        scores = (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)).softmax(-1)
        return (scores @ v.float().transpose(1, 2)).transpose(1, 2)


def fused(q, k, v):
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@pytest.mark.parametrize("attention, runs_again", [(in_fp32, True), (fused, False)])
def test_gradients_of_attention_are_rounded_as_in_its_own_graph(attention, runs_again):
    """A window's backward runs under the autocast of forward; PyTorch's backward runs without autocast."""
    heads = [torch.randn(1, 64, 2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    local = LocalAttention(attention, (), {})
    local.begin(seq_dim=1, where="layer", without=[])
    leaves, pieces = [x.clone().requires_grad_() for x in heads], lambda *heads: [attention(*heads)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = attention(*leaves)
        o, attended, saved = attend_once(pieces, heads, [True] * 3, local)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3))
    expected.backward(do)
    with torch.autocast("cpu", torch.bfloat16):
        found = attended.backward(pieces, heads, o, do, saved, local)
    assert (attended.edges is None) == runs_again
    for dx, leaf in zip(found, leaves):
        torch.testing.assert_close(dx, leaf.grad, rtol=1e-6, atol=1e-6)  # fp32; bf16 would be off by 4e-3


@pytest.mark.parametrize("window", [None, 1])
def test_a_hook_on_one_rank_is_refused_on_all_where_it_stands_in_the_way_of_a_window(window, rank):
    """Else the other ranks would wait for exchanges that this rank leaves out of its backward."""
    shape = Shape(config={"head_groups": 2, "window": window})
    layer, attend, x, dy = layers.mine(rank, shape)
    if rank == 0:  # with the hook, the output projection can't be computed in parts
        layer["o_proj"].register_forward_hook(lambda module, args, y: y)
    said = refusal(lambda: layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy))
    if window is None:
        assert said is None  # both ranks make the same exchanges
    else:
        assert_error(said, "projections in parts for a window")


# Guards.


def against(other):
    return functools.partial(against_no_window, other=other, windows=(1, 2))


def leaves_a_mode(rank):
    """Return a fault if attention that is in evaluation mode at the begin of backward is in training mode afterwards."""
    seen = []

    def change(local, mask):
        seen.append(local.eval())

    meanwhile(rank, {"head_groups": 4, "window": 1}, change)
    return ["it trains behind backward"] * any(local.training for local in seen)


test_the_suite_notices_without_the_guard = notices(
    Watched(
        "run again in its mode",
        "pass",
        functools.partial(test_attention_that_is_run_again_runs_as_in_forward, change=in_evaluation),
    ),
    Watched("in the mode of now", "module.training = True", leaves_a_mode),
    Watched("the same random numbers", "pass", against(drop_out)),
    Watched("what is drawn next is as before", "pass", against(drop_out)),
    Watched("changed, so run again", "changed = False", against(changes_query)),
    Watched("no view, which nobody may change", "return x.view_as(x)", against(changes_query), raises=True),
    Watched("hooks run once", "pass", against(hooks_on_what_learns)),
    Watched("others may exchange one", "pass", against(constant_output), raises=True),
    Watched("no gradient is lost", "if False:", functools.partial(foreign, later=True), says="learns a tensor"),
    Watched(
        "attention of forward",
        "if False:",
        functools.partial(test_what_was_changed_or_replaced_is_not_read_by_attention_that_is_run_again, change=with_another_mask),
    ),
    Watched(
        "q, k and v are made as before",
        "if True:",
        functools.partial(test_backward_makes_q_k_and_v_under_the_autocast_of_forward, forward=False, backward=True),
    ),
)
