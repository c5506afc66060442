"""Megatron-DeepSpeed's layers run as one chain, by a stand-in for their contract (`megatron_models`): fp64 on gloo ranks.

Against the layers on the whole sequence, from weights alone. Its real pretrain_gpt.py is trained in test_megatron_training.py.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn

import ds_sp_overlap
from tests.harness import megatron_layers, megatron_models
from tests.harness.chains import Runs, ran, whole_chain
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.layers import faults
from tests.harness.listening import listening
from tests.harness.megatron_models import DropPath, Experts, Model
from tests.harness.ranks import on_ranks

TOLERANCE = 1e-11  # roundings (1e-16) over three layers of weights of deviation 1; a fault of 1e-9 in v is seen below
BLOCK = {"scope": "block", "token_chunks": 2, "head_groups": 1}


@contextlib.contextmanager
def nothing(model):
    yield


def outcome(model, x, dy, mask, tables, times=1):
    """Output, dx and gradients of some forwards and backwards one after another."""
    model.zero_grad()
    for _ in range(times):
        x = x.detach().requires_grad_()
        out, losses = model(x, mask, tables)
        assert all(loss.shape == () and not loss for loss in losses)
        out.backward(dy)
    return out.detach(), x.grad


def compared(rank, shape, section=None, way=nothing, times=1, prepare=None, factor=1.0, **reference):
    """Faults of two forwards, the first of which compares, and what ran in chains in each."""
    group, size = torch.distributed.group.WORLD, torch.distributed.get_world_size()
    model = megatron_models.model(shape, group)
    if prepare is not None:
        prepare(model)
    weights = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    x, dy, mask, tables = megatron_layers.inputs(shape)
    whole_x = x.clone().requires_grad_()
    expected = megatron_models.reference(shape, weights, whole_x, mask, tables, **reference)
    expected.backward(dy * times)
    cut = lambda t: t.chunk(size)[rank].contiguous()  # noqa: E731
    report = ds_sp_overlap.enable(model, {**BLOCK, "on_unsupported": "error", **(section or {})})
    found = []
    with Runs() as runs, way(model):
        for _ in range(2):
            out, dx = outcome(model, cut(x), cut(dy) * factor, mask, tables, times)
            pairs = {"output": (out, cut(expected.detach())), "dx": (dx * times, cut(whole_x.grad))}
            for name, parameter in model.named_parameters():
                total = None if parameter.grad is None else parameter.grad.clone()
                if total is not None:
                    torch.distributed.all_reduce(total)
                pairs[f"d {name}"] = total, weights[name].grad
            found += faults(TOLERANCE, **pairs)
    ds_sp_overlap.disable(model)
    assert not any("forward" in vars(module) for module in model.modules())
    return found, runs.forwards, {(layer.got, layer.lacks) for layer in report.layers}


SHAPES = [
    (Model(), {}),
    (Model(heads=8, kv_heads=2, gated=True, norm="rms", bias=False, batch=1), {"head_groups": 2}),
    (Model(heads=8, kv_heads=4, fused=True, leaves=True, rope=False), {"token_chunks": 3, "head_groups": 2}),
    (Model("core", fused=True), {"token_chunks": "auto"}),
    (Model(split=True, leaves=True), {"token_chunks": 1}),
]


def of_shapes(rank, cases):
    return [compared(rank, shape, section) for shape, section in cases]


@pytest.mark.parametrize("ranks, cases", [(2, SHAPES), (4, SHAPES[1:3])])
def test_output_and_every_gradient_equal_the_whole_sequences(ranks, cases):
    cases = [(shape, {**section, "head_groups": 1} if ranks == 4 else section) for shape, section in cases]
    for results in on_ranks(ranks, of_shapes, cases):
        for (shape, section), (found, forwards, said) in zip(cases, results):
            assert found == [], (shape, found)
            assert forwards == [ran("-", "-", "-"), whole_chain()], shape
            chunks, groups = (
                {"auto": 4}.get(section.get("token_chunks", 2), section.get("token_chunks", 2)),
                section.get("head_groups", 1),
            )
            assert said == {(f"all eight exchanges, G = {groups}, block of 3 layers, C = {chunks}", "")}


def with_fault(rank, factor):
    return compared(rank, Model(), factor=factor)[0]


def test_the_tolerance_catches_a_fault():
    assert all(on_ranks(2, with_fault, 1 + 1e-9)) and not any(on_ranks(2, with_fault, 1.0))


# What else happens to layers.


@contextlib.contextmanager
def set_to(model, **changes):
    before = {name: getattr(model, name) for name in changes}
    vars(model).update(changes)
    yield
    vars(model).update(before)


def scaled(at, x):
    return x * 1.5 if at == 1 else x


def frozen(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("layers.1.mlp", "dense.weight", "layernorm.bias")))


WAYS = {
    "hidden states scaled between two layers": (
        dict(way=functools.partial(set_to, between=scaled), between=scaled), [ran("-", "-", "-"), ran(">", "<>", "-")]
    ),
    "early exit": (dict(way=functools.partial(set_to, stops=2), stops=2), [ran("-", "-"), ran(">", "<")]),  # the last never compared
    "a reentrant checkpoint": (dict(way=functools.partial(set_to, checkpointed="reentrant")), [[], []]),
    "a checkpoint": (dict(way=functools.partial(set_to, checkpointed="not reentrant")), [[], []]),
    "checkpoints of two layers": (dict(way=functools.partial(set_to, checkpoint_activations=True, checkpoint_num_layers=2)), [[], []]),
    "checkpoints of fewer layers": (
        dict(way=functools.partial(set_to, checkpoint_activations=True, num_layers=2), stops=2), [[], []]
    ),
    "accumulated gradients": (dict(times=2), [ran("-", "-", "-"), *[whole_chain()] * 3]),
    "frozen weights": (dict(prepare=frozen), [ran("-", "-", "-"), whole_chain()]),
}  # fmt: skip


def in_all_ways(rank):
    return {name: compared(rank, Model(), **way) for name, (way, _) in WAYS.items()}


def test_whatever_happens_to_layers_results_are_those_of_the_whole_sequence():
    for results in on_ranks(2, in_all_ways):
        for name, (found, forwards, _) in results.items():
            assert found == [], (name, found)
            assert forwards == WAYS[name][1], (name, forwards)


def checkpointed(rank):
    """Under activation checkpointing of each layer: what is wrong, what ran in chains, and how many layers the chain ran again."""
    found = {}
    for mode in ("recompute", "keep"):
        for prepare in (nothing_to, drop_out_in_attention)[: 2 if mode == "recompute" else 1]:  # nothing else can keep attention
            with Runs() as runs:
                way = functools.partial(set_to, checkpoint_activations=True)
                wrong, forwards, _ = compared(rank, Model(), {"checkpointing": mode}, way, prepare=prepare)
            found[mode, prepare.__name__] = wrong, forwards, runs.recompute
    return found


def nothing_to(model):
    pass


def drop_out_in_attention(model):
    """As its layers say; what they compute stays as it is."""
    model.layers[1].self_attention.dropout_p = 0.1


def test_activation_checkpointing_of_each_layer_is_done_by_the_chain():
    for found in on_ranks(2, checkpointed):
        for mode in ("recompute", "keep"):
            assert found[mode, "nothing_to"] == ([], [ran("-", "-", "-"), whole_chain()], 6)
        assert found["recompute", "drop_out_in_attention"] == ([], [[], []], 0)


def evaluated(rank):
    """Without gradients, in evaluation: whether the output is that of layers one by one, and what ran in chains."""
    model, (x, _, mask, tables) = megatron_models.model(Model(), torch.distributed.group.WORLD), megatron_layers.inputs(Model())
    model.eval()
    found = []
    for scope in ("layer", "block"):
        ds_sp_overlap.enable(model, {**BLOCK, "scope": scope})
        with Runs() as runs, torch.no_grad():
            found.append([model(x.chunk(2)[rank], mask, tables)[0] for _ in range(2)][1])
    return (found[1] - found[0]).abs().max().item(), runs.forwards


def test_evaluation():
    for error, forwards in on_ranks(2, evaluated):
        assert error < TOLERANCE and forwards == [ran("-", "-", "-"), whole_chain()]


# What is said.


def drops_out(layer):
    layer.hidden_dropout = 0.1


def mixes_experts(layer):
    layer.mlp, layer.num_experts = Experts(Model()), 2


def behind_the_norm(layer):
    layer.apply_residual_connection_post_layernorm = True


def drops_paths(layer):
    layer.drop_path = DropPath()


def of_another_width(layer):
    layer.fp32_residual_connection = True


def tensor_parallel_mlp(layer):
    layer.mlp.dense_4h_to_h.sequence_parallel = True


def forgets_biases(layer):
    class Forgetful(megatron_models.ParallelTransformerLayer):
        def add(self, residual, output, bias):
            return residual + output

    layer.__class__ = Forgetful


def mixes_tokens(layer):
    class Mixer(megatron_models.ParallelMLP):
        def forward(self, hidden_states):
            return super().forward(hidden_states.cumsum(0))

    layer.mlp.__class__ = Mixer


def drops_out_in_mlp(layer):
    class Dropping(megatron_models.ParallelMLP):
        def forward(self, hidden_states):
            return super().forward(nn.functional.dropout(hidden_states, 0.1))

    layer.mlp.__class__ = Dropping


REASONS = {
    drops_out_in_mlp: "mlp (Dropping) draws random numbers",
    forgets_biases: "post_attention_layernorm is not given the hidden states + what self_attention returned",
    mixes_tokens: "mlp (Mixer) makes something else of some tokens than of all",
    drops_out: "its forward computes what is not known here: dropout",
    mixes_experts: "a mixture of experts",
    behind_the_norm: "post_attention_layernorm is not given the hidden states + what self_attention returned",
    drops_paths: "its forward calls input_layernorm, self_attention, drop_path, post_attention_layernorm, mlp, drop_path, not a norm, "
    "self_attention, a norm and an MLP",
    of_another_width: "residuals in fp32",
    tensor_parallel_mlp: "mlp.dense_4h_to_h (RowParallelLinear) is no plain linear layer, and no activation",
}  # fmt: skip


def said(rank):
    """Of each change to the layer in the middle: what the table says of each layer, and what was bound."""
    found = {}
    for change in REASONS:
        model = megatron_models.model(Model(), torch.distributed.group.WORLD)
        change(model.layers[1])
        report = ds_sp_overlap.enable(model, BLOCK)
        bound = [name for name, module in model.named_modules() if "forward" in vars(module) and name.count(".") == 1]
        found[change.__name__] = [(layer.got, layer.lacks) for layer in report.layers], bound
    model.checkpoint_activations, model.checkpoint_num_layers = True, 2
    report = ds_sp_overlap.enable(model, BLOCK)
    alone = megatron_layers.layer(Model(), torch.distributed.group.WORLD)
    return found, report.layers[0].lacks, ds_sp_overlap.enable(alone, BLOCK).layers[0].lacks


def test_the_table_says_which_layers_run_as_a_block_and_why_the_others_do_not():
    for found, again, alone in on_ranks(2, said):
        for change, reason in REASONS.items():
            layers, bound = found[change.__name__]
            assert [got.partition("G = 1, ")[2] for got, _ in layers] == [
                "block of 1 layer, C = 2", "query_key_value, dense under them", "block of 1 layer, C = 2"
            ]  # fmt: skip
            assert [lacks for _, lacks in layers] == [
                "",
                f"no block: {'Forgetful' if change is forgets_biases else 'ParallelTransformerLayer'}: {reason}",
                "",
            ]
            assert bound == ["layers.0", "layers.2"]
        assert again == "in training one by one: activation checkpointing of 2 layers at a time"
        assert alone == "no block: ParallelTransformerLayer: it is in no list of layers"


def changed_later(rank):
    """Dropout that is switched on behind enable: what ran in chains, and what was said."""
    model, (x, dy, mask, tables) = megatron_models.model(Model(), torch.distributed.group.WORLD), megatron_layers.inputs(Model())
    ds_sp_overlap.enable(model, BLOCK)
    with Runs() as runs, listening() as messages:
        outcome(model, x.chunk(2)[rank], dy.chunk(2)[rank], mask, tables)
        drops_out(model.layers[1])
        outcome(model, x.chunk(2)[rank], dy.chunk(2)[rank], mask, tables)
    return runs.forwards, messages


def test_a_layer_that_changes_later_runs_by_itself_and_says_so():
    for forwards, messages in on_ranks(2, changed_later):
        assert forwards == [ran("-", "-", "-"), ran("-", "-")]
        assert messages == [
            "sp_overlap: a layer by itself, in no block: layers.1: hidden_dropout changed since it was read; call "
            "ds_sp_overlap.enable again"
        ]


def given_a_loss(rank):
    """A layer that is given a loss adds to it, and runs by itself."""
    model, (x, _, mask, tables) = megatron_models.model(Model(), torch.distributed.group.WORLD), megatron_layers.inputs(Model())
    ds_sp_overlap.enable(model, BLOCK)
    first = model.layers[0].forward
    model.layers[0].forward = lambda *args, **more: first(*args, **more, aggregated_moe_loss=torch.tensor(2.0, dtype=torch.float64))
    with Runs() as runs:
        losses = [loss.item() for loss in model(x.chunk(2)[rank], mask, tables)[1]]
    return [] if (losses, runs.forwards) == ([2.0, 0.0, 0.0], [ran("-", "-")]) else [f"{losses}, {runs.forwards}"]


def test_a_layer_that_is_given_a_loss_returns_it():
    assert not any(on_ranks(2, given_a_loss))


def random_numbers_taken(rank):
    """An MLP that drops out is run when its layer is read."""
    model = megatron_models.model(Model(), torch.distributed.group.WORLD)
    drops_out_in_mlp(model.layers[1])
    before = torch.get_rng_state()
    ds_sp_overlap.enable(model, BLOCK)
    return [] if torch.equal(torch.get_rng_state(), before) else ["random numbers are gone"]


def test_reading_layers_takes_none_of_the_random_numbers_of_training():
    assert not any(on_ranks(2, random_numbers_taken))


# Guards.

WATCHED = [
    Watched(Guard("what was left out when it was read is not given", without='return ""'), given_a_loss),
    Watched(Guard("the program's random numbers stay", without='with torch.no_grad(), torch.device("cpu"):'), random_numbers_taken),
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
