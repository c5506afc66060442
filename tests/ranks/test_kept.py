"""Tests activation checkpointing with ``keep_attention``: projections, attention and exchanges must not run again before backward.

In fp64, with tolerance 1e-12: rounding of a layer is 1e-15 to 1e-14, and the smallest mistake gives more than 1e-3.
"""

import functools
import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ds_sp_overlap
from tests.harness import layers, reference, uses
from tests.harness.cases import full
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import assert_error, refusal, soon
from tests.harness.transports import Late, Recording, spoiled_buffers

SECTIONS = [
    {"head_groups": 2, "checkpointing": "keep"},
    {"head_groups": 4, "window": 2, "checkpointing": "keep"},
    {"head_groups": 4, "window": 1, "checkpointing": "keep"},
    {"head_groups": 4, "window": 2, "checkpointing": "offload"},
]


LOCAL = {"flash": reference.fused, "math": reference.attention}


def keeping(function, *args, **options):
    return checkpoint(function, *args, use_reentrant=False, context_fn=ds_sp_overlap.keep_attention, **options)


# Uses of a layer in a checkpoint; on the whole sequence they run, too, but there `keep_attention` saves nothing.


def between_others(call, layer, x, dy):
    return layers.backward(lambda x: keeping(lambda x: call(x.tanh()).sin() * x, x), layer, x, dy)


def one_after_another(call, layer, x, dy):
    def body(x):
        return x + call(x.tanh()).sin()

    return layers.backward(lambda x: keeping(body, keeping(torch.sin, keeping(body, x))), layer, x, dy)


def nested(call, layer, x, dy):
    def inner(x):
        return call(x.tanh()).sin()

    return layers.backward(lambda x: keeping(lambda x: call(keeping(inner, x.sin()).sin()).cos(), x), layer, x, dy)


def half_by_half(call, layer, x, dy):
    """Run two calls in one checkpoint, and a backward from each; each backward recomputes the checkpoint."""
    first, second = keeping(lambda x: (call(x.tanh()).sin(), call(x.sin()).sin()), x)
    first.backward(dy)
    second.backward(dy * dy)
    return {"first": first, "second": second, "dx": x.grad}


def a_backward_within(call, layer, x, dy):
    """Run a backward inside of the checkpoint's forward, which recomputes the checkpoint halfway."""

    def body(x):
        y = call(x.tanh()).sin()
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        return call(y + dx.detach()).sin()

    return layers.backward(lambda x: keeping(body, x), layer, x, dy)


def to_its_end(call, layer, x, dy):
    with set_checkpoint_early_stop(False):
        return between_others(call, layer, x, dy)


def in_checkpoints(use):
    """Return a ``use`` of `uses` with each call of the layer in a checkpoint."""

    @functools.wraps(use)
    def of_checkpoints(call, layer, x, dy):
        return use(lambda x: keeping(lambda x: call(x.tanh()).sin(), x), layer, x, dy)

    return of_checkpoints


USES = [
    between_others, one_after_another, nested, half_by_half, a_backward_within, to_its_end,
    *map(in_checkpoints, (uses.second_backward, uses.grad_of_input_then_backward, uses.accumulation, uses.without_grad)),
]  # fmt: skip


CASES = [
    ("flash", Shape(kv_heads=2, config=SECTIONS[0])),
    full("math", Shape(kv_heads=1, lengths=(7, 5), config=SECTIONS[0])),
    full("flash", Shape(heads=8, kv_heads=2, bias=True, config=SECTIONS[1])),
    ("math", Shape(heads=8, kv_heads=8, fused=True, batch_first=False, config=SECTIONS[1])),
    ("flash", Shape(heads=8, kv_heads=4, batch_first=False, config=SECTIONS[2])),
    ("flash", Shape(heads=8, kv_heads=2, lengths=(4, 8), config=SECTIONS[3])),
    full("math", Shape(heads=8, kv_heads=2, config=SECTIONS[3])),
]


@pytest.mark.parametrize(("local", "shape"), CASES, ids=str)
def test_gradients_are_those_of_the_whole_sequence(local, shape, rank):
    local = layers.laid_out(LOCAL[local], shape.batch_first)
    for use in USES:
        transport = Late()
        with spoiled_buffers():
            assert layers.block_faults(rank, shape, use, transport, local_attention=local) + transport.faults == [], use


@pytest.mark.parametrize("section", SECTIONS[1::2], ids=str)
def test_what_does_not_train_may_be_kept_too(section, rank):
    for change in (uses.frozen_query, uses.only_query_trains, uses.only_input_trains, uses.frozen_output, uses.key_is_value):
        shape = Shape(heads=8, kv_heads=2, config=section)
        assert layers.block_faults(rank, shape, between_others, change=change, local_attention=reference.fused) == [], change


# What runs.


EIGHT_HEADS = Shape(heads=8, kv_heads=2, rope=False)


class Traced:
    """A layer that logs its exchanges and the calls of its attention.

    log   ``>q0`` and ``<q0`` for start and finish of an exchange, "attention", and entries that the test adds
    """

    def __init__(self, section, local=reference.fused, name="layer", transport=None):
        self.transport = transport or Recording()
        self.log = self.transport.log
        self.modules = layers.projections(EIGHT_HEADS)

        def attention(q, k, v, *rest):
            self.log.append("attention")
            return local(q, k, v, *rest)

        shape = replace(EIGHT_HEADS, config=section)
        self.block = layers.block(shape, self.modules, torch.distributed.group.WORLD, self.transport, attention)
        self.block.layer.where = name

    def __call__(self, x, *args):
        return self.block(x, *args)

    def body(self, x):
        self.log.append("begin")
        y = self(x.tanh())
        self.log.append("behind")
        return y.sin()

    def gradients(self):
        return {name: p.grad.clone() for name, p in self.modules.named_parameters()}


def tokens(rank):
    return layers.my_slice(EIGHT_HEADS, rank, layers.whole_inputs(EIGHT_HEADS)[0]).requires_grad_()


def logs(rank, section, local, how):
    """Return the log of a forward, and the log of its backward."""
    layer = Traced(section, LOCAL[local])
    layer(tokens(rank)).sum().backward()  # a first call makes more comparisons between ranks
    layer.log.clear()
    context = {"context_fn": ds_sp_overlap.keep_attention} if how == "kept" else {}
    x = tokens(rank)
    y = layer.body(x) if how == "plain" else checkpoint(layer.body, x, use_reentrant=False, **context)
    forward = list(layer.log)
    layer.log.clear()
    y.sum().backward()
    return forward, list(layer.log)


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("section", SECTIONS[1::2], ids=str)
def test_the_recomputation_exchanges_nothing_and_does_not_attend(section, local, rank):
    forward, backward = logs(rank, section, local, "plain")
    assert backward.count("attention") == (4 if local == "math" else 0)
    assert any(entry.startswith(">odo" if local == "flash" else ">do") for entry in backward)
    assert logs(rank, section, local, "kept") == (forward, ["begin", "behind", *backward])
    assert logs(rank, {**section, "checkpointing": "recompute"}, local, "recomputed") == (forward, [*forward, *backward])


def entries_of_nested(rank, run):
    """Call a layer in a checkpoint that is inside another checkpoint, and again in the outer one; return the sorted log."""
    layer = Traced(SECTIONS[1])
    run = keeping if run == "kept" else lambda function, x: function(x)
    for _ in range(2):
        layer.log.clear()
        run(lambda x: layer(run(lambda x: layer(x.tanh()).sin(), x.cos()).cos()).sin(), tokens(rank)).sum().backward()
    return sorted(layer.log)


def test_a_checkpoint_inside_another_exchanges_no_more_either(rank):
    assert entries_of_nested(rank, "kept") == entries_of_nested(rank, "plain")


def test_under_autocast_the_same_is_kept_as_is_computed(rank):
    for section in SECTIONS[1:]:
        got = {}
        for kept in (section["checkpointing"], "recompute"):
            shape = Shape(8, 4, dtype=torch.float32, config={**section, "checkpointing": kept})
            layer, call, x, dy = layers.mine(rank, shape, local_attention=reference.fused)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = keeping(lambda x: layers.call_block(shape, call, rank, x), x.requires_grad_())  # noqa: B023
            y.backward(dy.to(y.dtype))
            got[kept] = [y, x.grad, *(p.grad for p in layer.parameters())]
        ours, expected = got.values()
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), section
        assert ours[0].dtype == torch.bfloat16, "BLIND, not cast"


@pytest.mark.parametrize(("how", "attended"), [("both", 0), ("mixed", 2)])
def test_layers_of_one_checkpoint_keep_each_its_own(how, attended, rank):
    sections = SECTIONS[1], {"head_groups": 2} if how == "mixed" else SECTIONS[0]
    found = []
    for kept in (False, True):
        transport = Recording()
        first, second = (Traced(each, name=name, transport=transport) for each, name in zip(sections, ("first", "second")))
        x = tokens(rank)
        run = keeping if kept else lambda function, x: function(x)
        y = run(torch.sin, run(lambda x: second(first(x.tanh()).sin()).sin(), x))
        transport.log.clear()
        y.sum().backward()
        found.append({"dx": x.grad, **first.gradients(), **{f"second {k}": v for k, v in second.gradients().items()}})
    assert layers.faults(1e-12, **{name: (found[1][name], found[0][name]) for name in found[0]}) == []
    assert transport.log.count("attention") == attended


# Random numbers.


def drawn(rank, section, dropout, how):
    """Draw random numbers before, in and after attention; return output, gradients, and the numbers drawn after backward."""
    layer = Traced(section, lambda q, k, v: reference.fused(q, k, v, dropout))
    x = tokens(rank)

    def body(x):
        return F.dropout(layer(F.dropout(x, 0.3)).sin(), 0.3) * torch.rand(()).double()

    for _ in range(2):
        x.grad = None
        layer.modules.zero_grad()
        torch.manual_seed(11 + rank)
        y = keeping(lambda x: body(body(x)), x) if how == "kept" else body(body(x))
        y.sum().backward()
    return {"y": y.detach(), "dx": x.grad, **layer.gradients(), "after": torch.rand(3)}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_random_numbers_are_those_of_the_first_forward(dropout, rank):
    expected = drawn(rank, {"head_groups": 4}, dropout, "plain")
    got = drawn(rank, SECTIONS[1], dropout, "kept")
    assert layers.faults(1e-12, **{name: (got[name], expected[name]) for name in expected}) == []


# What is held, and for how long.


def held(rank, section, end):
    """Return the bytes that a checkpoint saves, the bytes of o, and for each step whether anything is still held afterwards.

    end   words that say how a step ends, such as "backward" or "abandoned", and whether attention is "learned"
    """
    seen = []

    def context():
        during = ds_sp_overlap.keep_attention()
        seen.append(weakref.ref(during[0].cache))
        return during

    layer = Traced(section, scaled if "learned" in end else reference.fused)
    gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def body(x):  # attention gets a tensor with a graph in the checkpoint; the saved values must not hold this graph
        return layer(x.tanh(), *([gain.exp()] if "learned" in end else [])).sin()

    gc.collect()
    gc.disable()
    left = []
    try:
        for step in range(3):
            x = tokens(rank)
            y = checkpoint(body, x, use_reentrant=False, context_fn=context)
            entries = seen[-1]().entries
            flat = {id(x): getattr(x, "host", x) for x in tree_leaves(entries)}.values()
            size = sum(x.nbytes for x in flat if isinstance(x, torch.Tensor))
            del entries, flat
            if "abandoned" not in end:
                y.sum().backward()
            if "y held" not in end:
                del y
            left.append(not soon(lambda: seen[-1]() is None))
    finally:
        gc.enable()
    return size, x.numel() * x.element_size(), left


def scaled(q, k, v, gain):
    return reference.fused(q, k, v * gain)


ENDS = [(section, end) for section in SECTIONS[1::2] for end in ("backward", "abandoned")]
ENDS += [(SECTIONS[1], "backward, y held")]  # as a loss does, y lives until the next step has computed a new y
ENDS += [({**SECTIONS[0], "head_groups": 1}, end) for end in ("learned", "learned and abandoned")]


@pytest.mark.parametrize(("section", "end"), ENDS, ids=str)
def test_o_and_the_log_sum_exp_are_kept_and_let_go(section, end, rank):
    size, of_o, left = held(rank, section, end)
    log_sum_exp = of_o // 8  # one fp64 number for each head and token
    scaled_value = of_o // 4 + 8 if "learned" in end else 0  # v has a quarter of the heads; 8 bytes for the gain
    assert size == of_o + log_sum_exp + scaled_value and left == [False] * 3


# Refusals.


def test_a_checkpoint_that_keeps_nothing_or_changes_is_refused_by_all_ranks_before_it_exchanges(rank):
    layer, other = Traced(SECTIONS[1]), Traced(SECTIONS[1], name="other")
    sent, times = set(), []

    def refused(run):
        layer.log.clear()
        found = refusal(run)
        sent.add(sum(entry.startswith(">") for entry in layer.log))
        return found

    def changing(x):
        times.append(None)
        return (layer if len(times) == 1 else other)(x).sin()

    for reentrant in (True, False):
        said = refused(lambda: checkpoint(layer.body, tokens(rank), use_reentrant=reentrant).sum().backward())
        assert_error(said, "context_fn=ds_sp_overlap.keep_attention", "RuntimeError")
        assert_error(said, '"recompute"', "RuntimeError")
    said = refused(lambda: keeping(changing, tokens(rank)).sum().backward())
    assert_error(said, "other: called when its checkpoint is computed again, where there was layer", "RuntimeError")
    assert len(sent) == 1  # only the exchange of forward


# Guards.


of_dropout = functools.partial(test_random_numbers_are_those_of_the_first_forward, dropout=0.25)
test_the_suite_notices_without_the_guard = notices(
    Watched("the same random numbers", "pass", of_dropout),
    Watched("what is drawn behind attention is as before", "pass", of_dropout),
    Watched(
        "a checkpoint or offload around is not asked",
        "hooks = torch.enable_grad()",
        functools.partial(
            layers.block_faults, shape=Shape(kv_heads=2, config=SECTIONS[0]), use=a_backward_within, local_attention=reference.fused
        ),
        raises=True,  # torch checks the number of saved tensors
    ),
    Watched(
        "nothing circular",
        "records = dict(call.attended)",
        functools.partial(held, section=ENDS[-1][0], end=ENDS[-1][1]),
        says="[False, False, False]",
    ),
)
