"""Tests gradients that a rank does not get or does not need, and second derivatives: on 2 ranks, fp64, 1e-12."""

import functools
from unittest import mock

import pytest
import torch

from tests.harness import dropin, layers
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import refusal
from tests.harness.transports import Recording

BLOCKS = {
    "G = 1": Shape(config={"head_groups": 1}),
    "G = 2": Shape(config={"head_groups": 2}),
    "G = 4": Shape(heads=8, config={"head_groups": 4}),
    "fused": Shape(fused=True, bias=True),
    "node by node": Shape(rotary=False),
    "a window": Shape(config={"head_groups": 2, "window": 1}),
}
DROPINS = {
    "drop-in, G = 1": Case(config={"head_groups": 1}),
    "drop-in, G = 2": Case(config={"head_groups": 2}),
    "drop-in with RoPE": Case(rotary_dims=8),
}


# Second derivatives.


def layer_of(rank, shape, mover=None, local=None, change=None):
    """Return ``(call, inputs, parameters, dy)`` of a block or a drop-in on this rank."""
    if isinstance(shape, Case):
        attend = dropin.module(shape, mover, local=local)
        *qkv, dy = (dropin.my_slice(shape, rank, t) for t in dropin.whole_inputs(shape))
        return (
            lambda *qkv: attend(*qkv, 0 if shape.batch_first else 1, dropin.tables(shape)),
            [t.requires_grad_() for t in qkv],
            [],
            dy,
        )
    layer, attend, x, dy = layers.mine(rank, shape, mover, local, change=change)
    return lambda x: layers.call_block(shape, attend, rank, x), [x.requires_grad_()], list(layer.parameters()), dy


WAYS = {  # {way to differentiate backward, or to differentiate forward by another mode: words of the error}
    "product": "create_graph=True",
    "backward": "create_graph=True",
    "penalty": "create_graph=True",
    "functional": "functorch",
    "forward mode": "jvp",
}


def differentiated(rank, shape, way):
    """Run a differentiable backward, or a transform of torch; return its error, and the exchanges launched before."""
    mover = Recording()
    call, inputs, parameters, dy = layer_of(rank, shape, mover)
    y = call(*inputs)  # the first call also compares the ranks
    mover.log.clear()

    def product():
        """Multiply the Hessian of the loss by ones; the loss is linear in y, so y's cotangent has no graph."""
        leaves = [*inputs, *parameters]
        grads = torch.autograd.grad((y * dy).sum(), leaves, create_graph=True)
        torch.autograd.grad(grads, leaves, [torch.ones_like(g) for g in grads], allow_unused=True)

    def forward_mode():
        """Run forward mode, without gradients."""
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            call(torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0])), *inputs[1:])

    run = {
        "product": product,
        "backward": lambda: y.backward(dy, create_graph=True),
        "penalty": lambda: torch.autograd.grad(y.pow(2).sum(), inputs[:1], create_graph=True),
        "functional": lambda: torch.func.grad(lambda x: (call(x, *inputs[1:]) * dy).sum())(inputs[0]),
        "forward mode": forward_mode,
    }
    return refusal(run[way]), mover.log


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*BLOCKS, *DROPINS])
def test_a_backward_that_is_to_be_differentiated_is_refused_before_it_exchanges(name, way, rank):
    """Guards `refuse_second_derivatives` at the begin of backward; without it, products of all gradients were silently wrong."""
    (kind, message), launched = differentiated(rank, {**BLOCKS, **DROPINS}[name], way)
    assert WAYS[way] in message and (launched == [] or way == "forward mode")  # torch refuses forward mode once q has been sent
    if WAYS[way] == "create_graph=True":  # the package raises this error, and torch the others
        assert kind == "RuntimeError" and message.startswith("layer: " if name in BLOCKS else "attention: ")


# Gradients that one rank does not get.


class Lost(torch.autograd.Function):
    """Copies its input; gives it no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def values_only(attention, q, k, v):
    return v.flip(1).repeat_interleave(q.shape[2] // k.shape[2], 2)


def constant(attention, q, k, v):
    return torch.ones_like(q)


def key_without_gradient(attention, q, k, v):
    return attention(q, Lost.apply(k), v)


def query_and_value_without_gradient(attention, q, k, v):
    return attention(Lost.apply(q), k, v.detach())


def nothing_with_gradient(attention, q, k, v):
    with torch.no_grad():
        return attention(q, k, v)


def output_without_gradient(attention, q, k, v):
    return Lost.apply(attention(q, k, v))


ODD = [
    values_only,
    constant,
    key_without_gradient,
    query_and_value_without_gradient,
    nothing_with_gradient,
    output_without_gradient,
]


def odd_heads(odd, kv_heads, groups):
    """Return attention on the whole sequence, with ``odd`` attention for the heads of rank 1; and attention by rank."""
    plain = layers.reference.attention
    ranges = groups if kv_heads % (2 * groups) == 0 else 1  # each rank has several ranges of heads, in turn with the other rank

    def of_ranks(x):
        pieces = x.chunk(2 * ranges, 2)
        return torch.cat(pieces[0::2], 2), torch.cat(pieces[1::2], 2)

    def whole(q, k, v):
        first, second = zip(*(of_ranks(t) if t.shape[2] > 1 else (t, t) for t in (q, k, v)))
        of_both = zip(plain(*first).chunk(ranges, 2), odd(plain, *second).chunk(ranges, 2))
        return torch.cat([piece for pieces in of_both for piece in pieces], 2)

    return whole, lambda rank: (lambda q, k, v: odd(plain, q, k, v)) if rank == 1 else plain


def odd_on_one_rank(rank, shapes, odd=None, freeze=""):
    """List faults if rank 1 attends with ``odd``; without ``odd``, if the output of rank 1 gets no gradient.

    freeze   those of q, k and v that are frozen
    """

    def run_backward(y, dy, leaves):
        """Run backward; replace missing gradients by zeros, for the sum over the ranks."""
        is_whole = y.shape[1] > LENGTHS[0]
        if not odd and is_whole:
            y = torch.cat([y[:, : LENGTHS[0]], y[:, LENGTHS[0] :].detach()], 1)
        elif not odd and rank == 1:
            y = Lost.apply(y)
        y.clone().backward(dy)
        for leaf in leaves:
            if leaf.requires_grad and leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)

    def of_block(call, layer, x, dy):
        y = call(x)
        run_backward(y, dy, [x, *layer.parameters()])
        return {"output": y, "dx": x.grad}

    def of_dropin(call, q, k, v, do):
        leaves = {"q": q, "k": k, "v": v}
        for kind in freeze:
            leaves[kind].requires_grad_(False)
        o = call(q, k, v)
        run_backward(o, do, leaves.values())
        return {"output": o, **{f"d{kind}": x.grad for kind, x in leaves.items() if x.requires_grad}}

    def frozen(layer):
        for kind in freeze:
            layer[f"{kind}_proj"].requires_grad_(False)

    found = []
    for shape in shapes:
        whole, mine = layers.reference.attention, None
        if odd:
            whole, of_rank = odd_heads(odd, shape.kv_heads, shape.config.get("head_groups", 2))
            mine = of_rank(rank)
        with mock.patch.object(layers.reference, "attention", whole):
            if isinstance(shape, Shape):
                faults = layers.block_faults(rank, shape, of_block, change=frozen, local_attention=mine)
            else:
                faults = dropin.dropin_faults(rank, shape, of_dropin, attend=dropin.module(shape, local=mine))
        found += [f"{shape}: {fault}" for fault in faults]
    return found


LENGTHS = Shape().lengths
ODD_SHAPES = [
    *(Shape(rope=False, rotary=rotary, config={"head_groups": groups}) for rotary in (True, False) for groups in (1, 2)),
    Shape(heads=8, kv_heads=8, rope=False, config={"head_groups": 4}),
    Shape(kv_heads=2, rope=False),
    Shape(rope=False, config={"head_groups": 2, "window": 1}),
    Shape(kv_heads=2, rope=False, config={"head_groups": 2, "window": 2}),
    *(Case(config={"head_groups": groups}, rotary_dims=dims) for groups in (1, 2) for dims in (0, 8)),
    Case(heads=8, kv_heads=2, value_dim=8),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
def test_local_attention_may_lack_gradients_on_one_rank(odd, rank):
    """Guards `_Halves.backward`, which launches all exchanges of the graph, and the path from o's token to q, k and v.

    Other ranks wait for the exchanges of q, k and v, even if attention on this rank does not use these tensors.
    """
    assert odd_on_one_rank(rank, ODD_SHAPES, odd) == []


def test_local_attention_may_lack_gradients_on_one_rank_beside_frozen_inputs(rank):
    for freeze in ("q", "k", "qv"):
        assert odd_on_one_rank(rank, ODD_SHAPES, constant, freeze) == []


def test_every_rank_exchanges_the_same_whatever_its_attention_uses(rank):
    """Guards the chain of tokens: each piece takes the token of the piece before."""
    shape, logs = BLOCKS["G = 2"], []
    for local in (None, lambda q, k, v: torch.ones_like(q)):
        mover = Recording()
        call, inputs, _, dy = layer_of(rank, shape, mover, local)
        call(*inputs).backward(dy)
        logs.append(mover.log)
    assert logs[0] == logs[1]


def test_the_output_may_get_no_gradient_on_one_rank(rank):
    assert odd_on_one_rank(rank, ODD_SHAPES) == []


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched(
        "leads to each of them",
        "self.values.update(zip(piece.gives, made))\nself.values.update({'token': made[0].detach()} if len(made) > 1 else {})",
        test_every_rank_exchanges_the_same_whatever_its_attention_uses,
    ),
    Watched(
        "no second derivatives",
        "if False:",
        functools.partial(differentiated, shape=BLOCKS["G = 2"], way="product"),
        says="create_graph=True",
    ),
)
