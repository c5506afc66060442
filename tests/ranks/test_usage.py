"""Tests many uses of a layer, in some of which DeepSpeed's own overlap is wrong or raises: on 2 ranks, fp64, 1e-12.

Each use (`harness.uses`) runs on the overlapped layer and on the reference (`layers.block_faults`).
"""

from functools import partial

import pytest
import torch

from tests.harness import dropin, layers
from tests.harness.cases import singles
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import assert_error, refusal
from tests.harness.transports import Recording
from tests.harness.uses import (
    CHANGES,
    DROPIN_USES,
    GROUPS,
    OTHER_CHANGES,
    SHAPES,
    USES,
    attention_that_changes_the_query_in_place,
    only_input_trains,
    only_query_trains,
    selective,
)

SEPARATE = [shape for shape in SHAPES + GROUPS if not shape.fused]


def faults_of(rank, use, shapes, change=None):
    return [f"{shape}: {fault}" for shape in shapes for fault in layers.block_faults(rank, shape, use, change=change)]


# Uses of one layer, other than one forward and one backward.


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_right_in_every_use(use, rank):
    assert faults_of(rank, use, SHAPES + GROUPS) == []


# Parameters that are frozen, shared or wrapped, and attention that learns; each in every use.


@pytest.mark.parametrize("change", CHANGES + OTHER_CHANGES, ids=lambda change: change.__name__)
def test_right_in_every_use_with(change, rank):
    uses = USES
    if change is attention_that_changes_the_query_in_place:  # it would change the saved product itself, also in the reference
        uses = [use for use in USES if use is not selective]
    cases = singles((use, shape) for use in uses for shape in SEPARATE)
    for use, shape in [*((layers.backward, shape) for shape in SEPARATE), *cases]:
        assert layers.block_faults(rank, shape, use, change=change) == [], (use, shape)


def input_changed_in_place(call, layer, x, dy):
    """Change the layer's input in place before backward, as a residual connection may."""
    hidden = x * 1
    y = call(hidden)
    hidden += 1
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def frozen_inputs(layer):
    for kind in "qkv":
        layer[f"{kind}_proj"].requires_grad_(False)


@pytest.mark.parametrize("change", [frozen_inputs, only_input_trains], ids=lambda change: change.__name__)
def test_an_input_that_no_weight_needs_may_be_changed_in_place_before_backward(change, rank):
    assert faults_of(rank, input_changed_in_place, SEPARATE, change) == []


def reversed_values(q, k, v):
    return v.flip(1)


@pytest.mark.parametrize("rotary", [True, False])
def test_rows_that_nothing_depends_on_get_a_gradient_of_zero(rotary, rank):
    """Guards `Pieces`: it starts from zero for a part without a gradient."""
    shape = Shape(fused=True, bias=True, rotary=rotary)
    x, dy = layers.whole_inputs(shape)
    mine, whole = layers.projections(shape), layers.projections(shape)
    values = whole["qkv_proj"](x).chunk(3, -1)[2]
    whole["o_proj"](values.flip(1)).backward(dy)
    attend = layers.block(shape, mine, torch.distributed.group.WORLD, local_attention=reversed_values)
    if not rotary:
        attend.inputs.rope = lambda heads, tables: Once.apply(heads, [None])
    layers.call_block(shape, attend, rank, layers.my_slice(shape, rank, x)).backward(layers.my_slice(shape, rank, dy))
    assert layers.unlike(shape, rank, mine, whole) == []


class Once(torch.autograd.Function):
    """Copies its input; gives it a gradient in the first backward only."""

    @staticmethod
    def forward(ctx, x, backwards):
        ctx.backwards = backwards
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.backwards.append(dy)
        return dy if len(ctx.backwards) == 1 else None, None


@pytest.mark.parametrize("rotary", [True, False])
def test_parts_that_this_backward_does_not_reach_get_a_gradient_of_zero(rotary, rank):
    """Guards `Gradient.collect`: it takes only the gradients of this backward."""
    shape, backwards = Shape(fused=True, rotary=rotary, config={"head_groups": 1}), []

    def attention(q, k, v):
        return v.flip(1) + (Once.apply(q + k, backwards) if rotary else q + k)

    layer, attend, x, dy = layers.mine(rank, shape, local_attention=attention)
    if not rotary:
        attend.inputs.rope = lambda heads, tables: Once.apply(heads, [])
    y = layers.call_block(shape, attend, rank, x.requires_grad_())
    torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy)
    q, k, v = (rows.abs().max().item() for rows in layer["qkv_proj"].weight.grad.chunk(3))
    assert q == k == 0 < v, "largest gradients of q, k, v"


def test_gradients_that_nobody_needs_are_not_exchanged(rank):
    """Checks the exchanges of backward if the query projection alone trains, and the input needs no gradient."""
    shape, mover = Shape(config={"head_groups": 2}), Recording()
    _, attend, x, dy = layers.mine(rank, shape, mover, change=only_query_trains)
    y = layers.call_block(shape, attend, rank, x)
    mover.log.clear()
    y.backward(dy)
    started = [what for what in mover.log if what.startswith(">")]
    assert started == [">do1", ">do0", ">dqkv1", ">dq0"]


def test_rotary_tables_that_were_changed_before_backward_are_noticed(rank):
    """Guards the saving of tables by autograd, which notices changes in place."""
    _, attend, x, dy = layers.mine(rank, Shape())
    cos, sin = (torch.ones(6, 8, dtype=x.dtype) for _ in range(2))
    y = attend(x.requires_grad_(), position_embeddings=(cos, sin))
    cos.mul_(0.5)
    assert_error(refusal(y.backward, dy), "modified by an inplace operation", "RuntimeError")


def backward_under_autocast(rank, window=None):
    """Return the relative difference of dx between a backward under autocast and one without."""
    shape, dx = Shape(dtype=torch.float32, config={"head_groups": 2, "window": window}), []
    for enabled in (False, True):
        _, attend, x, dy = layers.mine(rank, shape)
        y = layers.call_block(shape, attend, rank, x.requires_grad_())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y.backward(dy)
        dx.append(x.grad)
    return layers.reference.relative_error(dx[1], dx[0])


def test_backward_may_run_under_autocast_though_forward_did_not(rank):
    assert 0 < backward_under_autocast(rank) < 0.05  # bf16 has 8 bits
    assert backward_under_autocast(rank, 1) == 0  # with a window, backward runs under the autocast of forward


# The drop-in.


def output_changed_in_place(call, q, k, v, do):
    o = call(q, k, v)
    o.mul_(3)
    o += 1
    o.backward(do)
    return {"output": o, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def in_evaluation(call, q, k, v, do):
    with torch.no_grad():
        o = call(q, k, v).mul_(3)
    with torch.inference_mode():
        inferred = call(q, k, v).mul_(3)
    return {"output": o, "inferred": torch.tensor(inferred.tolist(), dtype=o.dtype)}


@pytest.mark.parametrize("use", DROPIN_USES, ids=lambda use: use.__name__)
def test_dropin_is_right_in_every_use(use, rank):
    cases = [
        Case(batch=batch, batch_first=batch_first, rotary_dims=8, config={"head_groups": groups}, lengths=lengths)
        for batch in (1, 2)
        for batch_first in (True, False)
        for groups in (1, 2)
        for lengths in ((6, 6), (1, 1))
    ]
    for case in cases:
        assert dropin.dropin_faults(rank, case, use) == [], case


IN_PLACE = [
    Case(heads, kv_heads, batch=batch, batch_first=batch_first, flat=flat, lengths=lengths, config={"head_groups": groups})
    for heads, kv_heads, groups in ((4, 4, 1), (4, 4, 2), (8, 4, 2), (8, 2, 1), (6, 3, 1), (7, 7, 2))
    for batch, batch_first, flat in ((1, True, False), (1, False, True), (2, True, True), (2, False, False))
    for lengths in ((6, 6), (5, 1))
]


@pytest.mark.parametrize("use", [dropin.backward, output_changed_in_place, in_evaluation], ids=lambda use: use.__name__)
def test_what_a_dropin_receives_and_returns_may_be_changed_in_place(use, rank):
    """Guards exchanges: they return no views, for any layout, batch or length; the ranks of a call may differ in these."""
    for case in IN_PLACE:

        def whole(q, k, v):
            return layers.reference.attention(q * 0.5, k + 0.1, v * 2)

        def local(q, k, v):
            order = (lambda t: t) if case.batch_first else (lambda t: t.transpose(0, 1))  # noqa: B023
            for t, change in ((q, lambda t: t.mul_(0.5)), (k, lambda t: t.add_(0.1)), (v, lambda t: t.mul_(2))):
                change(t)
            o = order(layers.reference.attention(*map(order, (q, k, v))))
            return o.flatten(2) if case.flat else o  # noqa: B023

        assert dropin.dropin_faults(rank, case, use, attend=dropin.module(case, local=local), whole=whole) == [], case


@pytest.mark.parametrize("lengths", [(6, 6), (5, 1)], ids=str)
def test_keys_that_two_head_groups_read_are_not_changed_in_place_in_silence(lengths, rank):
    """Guards `Call.attended`, which checks whether keys were changed."""
    case = Case(heads=8, kv_heads=2, lengths=lengths, config={"head_groups": 2})
    local = lambda q, k, v: layers.reference.attention(q, k.add_(0.1), v)  # noqa: E731
    attend = dropin.module(case, local=local)
    *qkv, _ = (dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case))
    call = lambda: attend(*qkv, 0, sequence_lengths=lengths)  # noqa: E731
    q, k, v, _ = dropin.whole_inputs(case)
    with torch.inference_mode():
        inferred = call().tolist()
    expected = dropin.my_slice(case, rank, layers.reference.attention(q, k + 0.1, v))
    assert layers.faults(1e-12, inferred=(torch.tensor(inferred, dtype=q.dtype), expected)) == []
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert_error(refusal(call), "attention: local attention changes k or v in place", "RuntimeError")


# Guards.


test_the_suite_notices_without_the_guard = notices(
    Watched(
        "unchanged",
        "ctx.save_for_backward(*[x if x is None else x.data for x in made[count:]])",
        test_rotary_tables_that_were_changed_before_backward_are_noticed,
    ),
    Watched(
        "zero without a gradient",
        "make = operands[0].new_empty if self._once else operands[0].new_ones",
        partial(test_rows_that_nothing_depends_on_get_a_gradient_of_zero, rotary=False),
    ),
    Watched(
        "keys stay as they are",
        "if False:",
        partial(test_keys_that_two_head_groups_read_are_not_changed_in_place_in_silence, lengths=(6, 6)),
    ),
    Watched("only what is needed", "needed[part] = True", test_gradients_that_nobody_needs_are_not_exchanged),
)
