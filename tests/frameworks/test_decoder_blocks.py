"""transformers' decoder layers run as one chain: against the model on the whole sequence, in fp64, on every rank.

Weights are drawn large (`EXACT`), so that each layer matters. What remains are roundings (1e-16) over three layers and sums in another
order; `test_the_tolerance_catches_a_fault` proves `FP64` tight enough.
"""

import contextlib
import functools
import itertools
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

import ds_sp_overlap
from ds_sp_overlap.autotune.trial import BLOCK, LAYER, OFF
from ds_sp_overlap.chain.chain import Chain
from ds_sp_overlap.integrations.inspect import probe
from tests.harness.cases import everything, full
from tests.harness.chains import Runs, ran, whole_chain
from tests.harness.families import tiny_model
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.launches import Made
from tests.harness.listening import listening
from tests.harness.models import (
    EXACT,
    FP64,
    SEQ,
    batches,
    cut,
    document_by_document,
    ds_config,
    forget_sequence_parallel,
    mean_loss,
    of_all_ranks,
    outcome,
    packed,
    scaled_values,
    sequence_parallel,
    sequence_parallel_model,
    tiny,
    train_run,
    worst,
)  # fmt: skip
from tests.harness.policies import scripted
from tests.harness.ranks import on_ranks, refusal
from tests.harness.reference import relative_error
from tests.harness.sweep import in_double
from tests.harness.whole import found as loss_and_gradients
from tests.harness.whole import inputs_of, share, tokens_of

LAYERS = 3
FAMILIES = [
    dict(family="llama", kv_heads=4),
    dict(family="llama", heads=8, kv_heads=2, attention_bias=True, mlp_bias=True),
    dict(family="qwen3", kv_heads=2),
]


@contextlib.contextmanager
def block(model, group=None, **section):
    section = {"scope": "block", "on_unsupported": "error", "head_groups": 1, **section}
    report = ds_sp_overlap.enable(model, section, group)
    with Runs() as runs:
        yield report, runs
    ds_sp_overlap.disable(model)


def against_whole(rank, size, cases, chunks):
    """Of each case and C x G: the error against the whole sequence, and whether all layers ran as one chain."""
    tokens, figures = batches(1)[0], {}
    for case, options in enumerate(cases):
        options = {**EXACT, "layers": LAYERS, **options}
        whole = outcome(tiny(**options), tokens, 0, 1, None)
        with sequence_parallel_model(size, **options) as (model, group):
            for count, groups in itertools.product(chunks, range(1, model.config.num_attention_heads // size + 1)):
                if groups > 2:
                    continue
                with block(model, token_chunks=count, head_groups=groups) as (report, runs):
                    first = outcome(model, tokens, rank, size, group)  # whose layers compare themselves, with nothing under way
                    found = outcome(model, tokens, rank, size, group)
                assert all(
                    f"G = {groups}, block of 3 layers, C = {4 if count == 'auto' else count}" in x.got for x in report.layers
                )
                errors = worst(first, whole), worst(found, whole)
                figures[case, count, groups] = max(errors), runs.forwards == [[(False, False)] * LAYERS, whole_chain()]
    return figures


def under_autocast_in_one_alone(rank, cast, checkpointing):
    """For each number of chunks the gradients' errors, relative to all: of the block, and of the model on the whole sequence.

    ``cast`` is "forward" or "backward"; with a ``checkpointing`` layers run again in backward.
    """

    def gradients(model, lengths, at, group, cast):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast == "forward"):
            loss = share(model, *inputs_of(batches(1)[0], lengths, at))
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast == "backward"):
            loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        if group is not None:
            dist.all_reduce(flat, group=group)
        return flat

    model, figures = tiny(**{**EXACT, "dtype": torch.float32}), []
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    exact = gradients(model, [SEQ], 0, None, cast=None)
    alone = gradients(model, [SEQ], 0, None, cast=cast)
    for chunks in (2, 3):
        with block(model, dist.group.WORLD, token_chunks=chunks, checkpointing=checkpointing or "recompute"):
            mine = gradients(model, [SEQ // 2] * 2, rank, dist.group.WORLD, cast=cast)
        figures.append([((x - exact).norm() / exact.norm()).item() for x in (mine, alone)])
    return figures


AUTOCAST = [("backward", ""), ("forward", ""), ("forward", "recompute"), ("forward", "keep")]


@pytest.mark.parametrize("cast, checkpointing", AUTOCAST)
def test_under_autocast_in_forward_or_backward_alone_it_rounds_as_pytorchs_own(cast, checkpointing):
    for figures in on_ranks(2, under_autocast_in_one_alone, cast, checkpointing):
        assert all(0 < mine < 1.5 * alone for mine, alone in figures), figures


@pytest.mark.parametrize("size, cases, chunks", [(2, FAMILIES, (2,)), full(2, FAMILIES, (1, "auto")), (4, FAMILIES[1:2], (3,))])
def test_logits_and_every_gradient_equal_the_whole_sequences(size, cases, chunks):
    for figures in on_ranks(size, against_whole, size, cases, chunks):
        assert len(figures) == sum(min(case.get("heads", 4) // size, 2) for case in cases) * len(chunks)
        assert all(error < FP64 and chained for error, chained in figures.values()), figures


def of_unequal_lengths(rank, lengths, section):
    """Of each family the error of a forward whose layers compare themselves, of one more, and of one under checkpoints; what ran in chains."""
    errors, forwards, tokens = [], [], tokens_of(sum(lengths))
    for options in FAMILIES:
        model = tiny(**{**EXACT, "layers": LAYERS, **options})
        whole = loss_and_gradients(model, [share(model, *inputs_of(tokens, [sum(lengths)], 0))])
        with block(model, dist.group.WORLD, **section) as (_, runs):
            for way in (nothing, nothing, functools.partial(checkpointing, reentrant=False)):
                with way(model):
                    mine = loss_and_gradients(model, [share(model, *inputs_of(tokens, lengths, rank))], dist.group.WORLD)
                errors.append(worst(mine, whole))
        forwards += runs.forwards
    return errors, forwards


@pytest.mark.singles
@pytest.mark.parametrize("lengths", [[20, 12], [1, 27]], ids=str)
@pytest.mark.parametrize("section", [dict(token_chunks=3), dict(head_groups=2)], ids=str)
def test_ranks_with_unequal_lengths_equal_the_whole_sequence(lengths, section):
    for errors, forwards in on_ranks(2, of_unequal_lengths, lengths, section):
        assert forwards == [ran(*["-"] * LAYERS), whole_chain(), whole_chain()] * len(FAMILIES)
        assert all(error < FP64 for error in errors), errors


def with_fault(rank, factor):
    options, tokens = {**EXACT, "layers": LAYERS}, batches(1)[0]
    whole = outcome(tiny(**options), tokens, 0, 1, None)
    with sequence_parallel_model(2, **options) as (model, group), scaled_values(factor), block(model):
        return worst(outcome(model, tokens, rank, 2, group), whole)


def test_the_tolerance_catches_a_fault():
    assert all(error > 10 * FP64 for error in on_ranks(2, with_fault, 1 + 1e-7))
    assert all(error < FP64 for error in on_ranks(2, with_fault, 1.0))


# What else happens to layers. Each is done to a model on the whole sequence and to one in a chain, three forwards one after the other.


@contextlib.contextmanager
def nothing(model):
    yield


@contextlib.contextmanager
def hooked(model, hook, register="register_forward_hook"):
    handle = getattr(model.model.layers[1], register)(hook)
    yield
    handle.remove()


@contextlib.contextmanager
def other_layers(model, change):
    """``change``: a list of layers -> that which runs."""
    before = model.model.layers
    model.model.layers = torch.nn.ModuleList(change(list(before)))
    yield
    model.model.layers = before


@contextlib.contextmanager
def fewer_layers(model, count):
    model.config.num_hidden_layers = count
    yield
    model.config.num_hidden_layers = LAYERS


@contextlib.contextmanager
def checkpointing(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    yield
    model.gradient_checkpointing_disable()


class Checkpointed(torch.nn.Module):
    """Somebody's own checkpoint around a layer."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, hidden, **more):
        return checkpoint(lambda x: self.layer(x, **more), hidden, use_reentrant=self.reentrant)


@contextlib.contextmanager
def checkpoint_around(model, reentrant):
    """Somebody's own checkpoint around all layers."""
    inner = model.model
    forward, own = inner.forward, "forward" in vars(inner)

    def checkpointed(input_ids, **more):
        def run(x):
            return forward(**{**more, "inputs_embeds": x}).last_hidden_state

        return BaseModelOutputWithPast(checkpoint(run, inner.embed_tokens(input_ids), use_reentrant=reentrant))

    inner.forward = checkpointed
    yield
    del inner.forward
    if own:
        inner.forward = forward


@contextlib.contextmanager
def saved_elsewhere(model):
    with torch.autograd.graph.save_on_cpu():
        yield


@contextlib.contextmanager
def nowhere_from(model):
    """Hidden states between two layers are cut off from what they come from."""
    with hooked(model, lambda module, given, output: output.detach()):
        yield


def in_place(module, given, output):
    with torch.no_grad():
        output.mul_(1.5)


def of_gradient(module, given, output):
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 1.5)


def before_layer(module, given):
    return (given[0] * 1.5, *given[1:])


def same_values(module, given, output):
    return output.clone()


ALL = [whole_chain()] * 3
BEHIND = [ran(">", "<>", "-")] * 2 + [ran(">", "<", "-")]  # layer 2 isn't given what layer 1 returns; which is learnt
ALONE = [ran("-", "-")] * 3  # without layer 1
FOREIGN = [ran(">", "-")] * 2 + [ran("-", "-")]  # it isn't given to layer 1
WAYS = {
    "nothing": (nothing, ALL),
    "a hook that reads": (lambda model: hooked(model, lambda *_: None), ALL),
    "saved on the host": (saved_elsewhere, ALL),
    "a hook that scales": (lambda model: hooked(model, lambda module, given, output: output * 1.5), BEHIND),
    "a hook that copies": (lambda model: hooked(model, same_values), BEHIND),
    "a hook that scales in place": (lambda model: hooked(model, in_place), BEHIND),
    "a hook that scales what comes in": (lambda model: hooked(model, before_layer, "register_forward_pre_hook"), ALONE),
    "a hook that cuts off": (nowhere_from, BEHIND),
    "a hook on the gradient": (lambda model: hooked(model, of_gradient), BEHIND),
    "a hook in backward": (
        lambda model: hooked(model, lambda module, dx, dy: (dx[0] * 1.5,), "register_full_backward_hook"),
        ALONE,
    ),
    "a hook before backward": (
        lambda model: hooked(model, lambda module, dy: (dy[0] * 1.5,), "register_full_backward_pre_hook"),
        ALONE,
    ),
    "early exit": (lambda model: fewer_layers(model, 2), [ran(">", "<>")] * 2 + [ran(">", "<")]),
    "a layer left out": (lambda model: other_layers(model, lambda layers: [layers[0], layers[2]]), FOREIGN),
    "a layer twice": (
        lambda model: other_layers(model, lambda layers: [layers[0], layers[1], layers[1]]),
        [ran(">", "<>", "-")] * 2 + [ran(">", "<", "-")],
    ),
    "layers the other way about": (lambda model: other_layers(model, lambda layers: layers[::-1]), None),
    "gradient checkpointing": (lambda model: checkpointing(model, False), ALL),
    "a checkpoint around all layers": (lambda model: checkpoint_around(model, False), [[]] * 6),
    "a reentrant checkpoint around all layers": (lambda model: checkpoint_around(model, True), [[]] * 6),
    "reentrant gradient checkpointing": (lambda model: checkpointing(model, True), ALL),
    **{
        f"{'a reentrant' if reentrant else 'a'} checkpoint around {words}": (
            lambda model, reentrant=reentrant, which=which: other_layers(
                model, lambda layers: [Checkpointed(x, reentrant) if at in which else x for at, x in enumerate(layers)]), expected)
        for reentrant in (False, True)
        for words, which, expected in (
            ("each layer", (0, 1, 2), [[]] * 3),
            ("the layer in the middle", (1,), FOREIGN),
            ("all but that", (0, 2), [ran(">")] * 2 + [ran("-")]),
        )
    },
}  # fmt: skip


def in_all_ways(rank, size, names, section):
    """Of each way, the errors of three forwards and what ran in chains; under gradient checkpointing if the section speaks of it."""
    options, tokens, figures = {**EXACT, "layers": LAYERS}, batches(1)[0], {}
    again = "checkpointing" in section
    for name in names:
        way, _ = WAYS[name]
        whole = tiny(**options)
        with way(whole):
            expected = outcome(whole, tokens, 0, 1, None)
        with sequence_parallel_model(size, **options) as (model, group), block(model, **section) as (_, runs):
            if again:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            outcome(model, tokens, rank, size, group)  # all layers have compared themselves
            with way(model):
                errors = [worst(outcome(model, tokens, rank, size, group), expected) for _ in range(3)]
        figures[name] = errors, runs.forwards[1:]
    return figures


SECTIONS = [
    dict(token_chunks=2),
    dict(token_chunks=3, head_groups=2),
    dict(token_chunks=2, checkpointing="recompute"),
    dict(token_chunks=2, checkpointing="keep"),
]


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_whatever_happens_to_layers_results_are_those_of_the_whole_sequence(section):
    names = list(WAYS) if section["token_chunks"] == 2 else list(WAYS)[:3]
    if section.get("checkpointing") == "keep":  # refused under checkpoints that keep nothing
        names = [name for name in names if "checkpoint" not in name]
    if not everything():  # each way in one of the sections, and some in the others
        names = names[::6] if section.get("checkpointing") == "keep" else names["checkpointing" in section :: 2]
    for figures in on_ranks(2, in_all_ways, 2, names, section, timeout_s=300):
        for name, (errors, forwards) in figures.items():
            assert max(errors) < FP64, (name, errors, forwards)
            assert WAYS[name][1] in (None, forwards), (name, forwards)


def now_and_then(rank):
    """What runs in chains while hidden states are copied between two layers in every other forward."""
    options, tokens, times = {**EXACT, "layers": LAYERS}, batches(1)[0], itertools.count()
    with sequence_parallel_model(2, **options) as (model, group), block(model) as (_, runs):
        outcome(model, tokens, rank, 2, group)
        with hooked(model, lambda module, given, output: output.clone() if next(times) % 2 else output):
            for _ in range(6):
                outcome(model, tokens, rank, 2, group)
    return runs.forwards[1:]


def test_a_successor_is_given_up_after_two_misses_in_a_row_alone():
    for forwards in on_ranks(2, now_and_then):
        assert forwards == [whole_chain(), ran(">", "<>", "-")] * 3


def edits(module, given, output):
    output.data.mul_(1.5)


def edited(rank, section):
    """Errors of forwards that `edits`, what ran in chains, and what was said."""
    options, tokens, whole = {**EXACT, "layers": LAYERS}, batches(1)[0], tiny(**EXACT, layers=LAYERS)
    with hooked(whole, edits):
        expected = outcome(whole, tokens, 0, 1, None)
    with sequence_parallel_model(2, **options) as (model, group), block(model, **section) as (_, runs), listening() as messages:
        with hooked(model, edits):
            errors = [worst(outcome(model, tokens, rank, 2, group), expected) for _ in range(4)]
    return errors, runs.forwards, sum("model.layers.1 returns is edited through .data" in said for said in messages)


@pytest.mark.parametrize("section", [dict(token_chunks=2), full(dict(checkpointing="recompute"))], ids=str)
def test_edits_through_data_between_two_layers_are_seen_in_the_first_forward(section):
    for errors, forwards, said in on_ranks(2, edited, section):
        assert max(errors) < FP64 and said == 1, (errors, said)
        assert forwards == [ran(*["-"] * LAYERS)] + [ran(">", "<", "-")] * 3


def edited_where_something_is_started(rank):
    """As `edited`, where layers ran by themselves before, so that the first forward of the chain starts q, k and v already."""
    options, tokens, whole = {**EXACT, "layers": LAYERS}, batches(1)[0], tiny(**EXACT, layers=LAYERS)
    with hooked(whole, edits):
        expected = outcome(whole, tokens, 0, 1, None)
    with sequence_parallel_model(2, **options) as (model, group), block(model) as (_, runs):
        with mock.patch.object(Chain, "_may_start", lambda chain, successor: chain.in_step), hooked(model, edits):
            errors = [worst(outcome(model, tokens, rank, 2, group), expected) for _ in range(2)]
    return errors, runs.forwards


def test_an_edit_is_seen_in_time_where_the_first_forward_of_a_chain_starts_something():
    for errors, forwards in on_ranks(2, edited_where_something_is_started):
        assert max(errors) < FP64, (errors, forwards)
        assert forwards == [ran(">", "<>", "-"), ran(">", "<", "-")]


def edited_later(rank):
    tokens, options = batches(1)[0], {**EXACT, "layers": LAYERS}
    with sequence_parallel_model(2, **options) as (model, group), block(model), mock.patch.object(probe, "EVERY", 3):
        for _ in range(2):
            outcome(model, tokens, rank, 2, group)
        with hooked(model, edits if rank else lambda *_: None):
            return refusal(outcome, model, tokens, rank, 2, group)


def test_edits_that_begin_later_are_refused_on_all_ranks():
    for kind, message in on_ranks(2, edited_later):
        assert kind == "RuntimeError" and "model.layers.1 returns is edited through .data before model.layers.2" in message


# Layers of other kinds, other batches, other uses.


def with_lora(*targets):
    """Adapters, none of them zero."""

    def prepare(model):
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False))
        generator = torch.Generator().manual_seed(4)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        return adapted

    return prepare


def frozen(*targets):
    def prepare(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(target in name for target in targets))
        return model

    return prepare


PREPARED = {
    "LoRA on q and v": with_lora("q_proj", "v_proj"),
    "LoRA on every linear layer": with_lora("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "LoRA on the MLP": with_lora("up_proj"),
    "frozen projections": frozen("q_proj", "o_proj", "up_proj"),
    "frozen norms": frozen("layernorm"),
    "frozen but norms": frozen("proj", "embed", "lm_head"),
    "frozen at first": frozen("embed", "layers.0"),
    "frozen at last": frozen("layers.2", "lm_head"),
    "frozen in the middle": frozen("embed", "layers.1"),
}


def prepared(rank, names, section):
    options, tokens, figures = {**EXACT, "layers": LAYERS}, batches(1)[0], {}
    for name in names:
        whole = outcome(PREPARED[name](tiny(**options)), tokens, 0, 1, None)
        with sequence_parallel_model(2, **options) as (model, group):
            model = PREPARED[name](model)
            with block(model, **section) as (_, runs):
                errors = [worst(outcome(model, tokens, rank, 2, group), whole) for _ in range(2)]
        figures[name] = max(errors), runs.forwards[1] == whole_chain()
    return figures


@pytest.mark.parametrize("section", [full(dict(token_chunks=2)), dict(token_chunks=2, head_groups=2)], ids=str)
def test_adapters_and_frozen_weights_get_the_gradients_of_the_whole_sequence(section):
    for figures in on_ranks(2, prepared, list(PREPARED), section):
        assert all(error < FP64 and chained for error, chained in figures.values()), figures


class OneScale(torch.nn.Linear):
    """Rounds its input by one scale for all tokens, as layers for fp8 do."""

    def forward(self, x):
        scale = x.detach().abs().max() / 8
        return torch.nn.functional.linear((x / scale).round() * scale + x - x.detach(), self.weight, self.bias)


def rounded_together(rank, target, late):
    """Layer 1 has such a projection, since before `enable` or after a first forward: the error against stock, and what ran in chains."""
    tokens = batches(1)[0]
    with sequence_parallel_model(2, **EXACT, layers=LAYERS) as (model, group):
        projection = getattr(model.model.layers[1].self_attn, target)
        projection.__class__ = OneScale
        stock = outcome(model, tokens, rank, 2, group)
        projection.__class__ = torch.nn.Linear if late else OneScale
        with block(model, on_unsupported="warn") as (report, runs):
            outcome(model, tokens, rank, 2, group)
            outcome(model, tokens, rank, 2, group)
            projection.__class__ = OneScale
            error = worst(outcome(model, tokens, rank, 2, group), stock)
    return error, runs.forwards, str(report)


@pytest.mark.parametrize("target, late", [("q_proj", False), ("o_proj", False), ("v_proj", True), full("o_proj", True)])
def test_a_projection_in_which_all_tokens_have_a_say_is_called_with_all(target, late):
    for error, forwards, report in on_ranks(2, rounded_together, target, late):
        assert error < FP64 and forwards[1] == (whole_chain() if late else ran("-", "-"))
        assert forwards[2] == ran("-", "-")
        assert late or "projection (OneScale) is no plain linear layer" in " ".join(report.split())


def faults_of_rounding(rank):
    error, *_ = rounded_together(rank, "o_proj", late=False)
    return [] if error < FP64 else [f"off by {error}"]


ROWS = [[7, 18, 7], [20, 12]]
PADDING = torch.ones(2, 32, dtype=torch.long)
PADDING[1, -5:] = 0
WINDOWS = dict(family="qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1)


def batches_of_kinds(rank):
    """Errors with packed documents, with padding, and with windows in some layers."""
    options, tokens, figures = {**EXACT, "layers": LAYERS}, batches(1)[0], {}
    for name, more, how in (
        ("packed", {}, dict(positions=packed(ROWS))),
        ("padded", {}, dict(mask=PADDING)),
        ("windows", WINDOWS, {}),
    ):
        model = tiny(**options, **more)
        whole = document_by_document(model, tokens, ROWS) if name == "packed" else outcome(model, tokens, 0, 1, None, **how)
        with sequence_parallel_model(2, **options, **more) as (model, group), block(model) as (_, runs):
            errors = [worst(outcome(model, tokens, rank, 2, group, **how), whole) for _ in range(2)]
        figures[name] = max(errors), runs.forwards[1] == whole_chain()
    return figures


def test_documents_padding_and_windows_are_those_of_the_whole_sequence():
    for figures in on_ranks(2, batches_of_kinds):
        assert all(error < FP64 and chained for error, chained in figures.values()), figures


def used(model, tokens, rank, size, group):
    """Two backwards without a zero_grad between them, hidden states, and logits without gradients, in evaluation."""
    inputs = [cut(batch, rank, size) for batch in tokens]
    model.zero_grad()
    found = {}
    for number, batch in enumerate(inputs):
        labels = batch.pop("labels")
        out = model(**batch, use_cache=False, output_hidden_states=True)
        torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        found.update({f"{number} hidden {at}": x.detach() for at, x in enumerate(out.hidden_states)})
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found[mode.__name__] = model(**inputs[0], use_cache=False).logits.clone()
    model.train()
    return of_all_ranks(found, {name: p.grad.clone() for name, p in model.named_parameters()}, size, group)


def compared_in_use(rank):
    options, tokens = {**EXACT, "layers": LAYERS}, batches(2)
    whole = used(tiny(**options), tokens, 0, 1, None)
    with sequence_parallel_model(2, **options) as (model, group), block(model) as (_, runs):
        errors = [worst(used(model, tokens, rank, 2, group), whole) for _ in range(2)]
    return max(errors), runs.forwards, len(whole)


def test_accumulated_gradients_hidden_states_and_evaluation_equal_the_whole_sequences():
    for error, forwards, count in on_ranks(2, compared_in_use):
        assert error < FP64 and count > 2 * (LAYERS + 1) + 2
        assert forwards[1:] == [whole_chain()] * 2 + [ran("-", "-", "-")] + [whole_chain()] * 3 + [ran("-", "-", "-")]


# Mixtures of experts, whose experts' weights get a gradient of each chunk.

ROUTERS = 1e-5  # they compute in fp32, whose roundings (1e-7) differ by position; a token in a wrong place gives more than 1e-2
EAGER = dict(experts_implementation="eager")  # grouped products know no fp64
MIXTURES = {
    "mixtral": dict(family="mixtral", num_local_experts=4, head_dim=8),
    "qwen3_moe": dict(family="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16),
    "qwen2_moe": dict(
        family="qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
}


def mixtures(rank, size, chunks):
    """Of each family, and one whose first layer is dense, the error against the whole sequence and what ran in chains."""
    tokens, figures = batches(1)[0], {}
    dense = {**MIXTURES["qwen3_moe"], "mlp_only_layers": [0]}
    for name, options in {**(MIXTURES if everything() else {}), "dense first": dense}.items():
        for again in (False, True):
            options = {**EXACT, **EAGER, "layers": LAYERS, **options}
            with contextlib.nullcontext() if again else in_double():  # which doesn't reach into backward
                whole = outcome(tiny(**options), tokens, 0, 1, None)
                with sequence_parallel_model(size, **options) as (model, group), block(model, token_chunks=chunks) as (_, runs):
                    if again:
                        model.gradient_checkpointing_enable({"use_reentrant": False})
                    errors = [worst(outcome(model, tokens, rank, size, group), whole) for _ in range(2)]
            figures[name, again] = max(errors), runs.forwards[1]
    return figures


@pytest.mark.parametrize("chunks", [full(3), 20])  # of 16 tokens: some chunks are empty
def test_mixtures_of_experts_equal_the_whole_sequences(chunks):
    for figures in on_ranks(2, mixtures, 2, chunks):
        for (_, again), (error, forward) in figures.items():
            assert error < (ROUTERS if again else FP64) and forward == whole_chain(), figures


def learning_alone(rank, lengths, name, frozen, again):
    """Return how far the gradients of a part of the first layer are off, where nothing else learns, or is asked for."""
    model = tiny(**EXACT, **EAGER, **MIXTURES["mixtral"], layers=2)
    part = model.model.layers[0].get_submodule(name)
    model.requires_grad_(not frozen)
    part.requires_grad_()
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def gradients(lengths, at):
        model.zero_grad()
        loss = share(model, *inputs_of(batches(1)[0], lengths, at))
        loss.backward(inputs=None if frozen else list(part.parameters()))
        return {name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in part.named_parameters()}

    whole = gradients([SEQ], 0)
    with block(model, dist.group.WORLD, token_chunks=3):
        for _ in range(2):  # in the first call nothing is started ahead
            found = gradients(lengths, rank)
    for x in found.values():
        dist.all_reduce(x)
    return worst(found, whole)


@pytest.mark.parametrize("frozen, again", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(
    "lengths, name", [((2, SEQ - 2), "mlp.experts"), ((SEQ, 0), "mlp.gate"), ((SEQ - 2, 2), "post_attention_layernorm")], ids=str
)
def test_a_part_around_experts_learns_alone_though_a_rank_has_a_chunk_without_tokens(lengths, name, frozen, again):
    assert max(on_ranks(2, learning_alone, lengths, name, frozen, again, timeout_s=60)) < ROUTERS


def reduced(rank, stage, lengths):
    """Relative errors of the gradients that ZeRO has summed over two ranks, in fp32."""
    options = dict(**EAGER, **MIXTURES["mixtral"], layers=3, initializer_range=0.3, dtype=torch.float32)
    model, whole, tokens = tiny(**options), tiny(**options), tokens_of(SEQ)
    share(whole, *inputs_of(tokens, [SEQ], 0)).backward()
    config = ds_config(stage, 1, torch.float32, "SGD", gradient_clipping=0.0)
    config["optimizer"]["params"]["lr"] = 0.0
    config["sp_overlap"] = {"scope": "block", "token_chunks": 3}
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=sequence_parallel(model, 2))
        engine.backward(share(engine, *inputs_of(tokens, lengths, rank)))
        errors = {}
        for name, parameter in engine.module.named_parameters():
            errors[name] = relative_error(deepspeed.utils.safe_get_full_grad(parameter), whole.get_parameter(name).grad)
        ds_sp_overlap.disable(engine.module)
        engine.destroy()
        return errors
    finally:
        forget_sequence_parallel()


@pytest.mark.parametrize("stage, lengths", [(1, (1, SEQ - 1)), full(2, (SEQ - 1, 1)), (2, (0, SEQ))], ids=str)
def test_zero_sums_gradients_around_experts_where_a_rank_has_a_chunk_without_tokens(stage, lengths):
    """ZeRO sums what the ranks give it, in the order in which they do; in other orders it adds up other parameters' gradients."""
    for errors in on_ranks(2, reduced, stage, lengths, timeout_s=60):
        assert len(errors) > 20 and max(errors.values()) < 1e-4, errors


def said_of_experts(rank):
    """What the table says of layers with experts, by how they are implemented, and the MiB of their experts in a layer."""
    found = {}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        options = {**MIXTURES["mixtral"], "layers": 2, "experts_implementation": implementation}
        with sequence_parallel_model(2, **options) as (model, _), block(model) as (report, _):
            experts = model.model.layers[0].mlp.experts
            size = sum(weight.nbytes for weight in experts.parameters()) / 2**20
            found[implementation] = [layer.lacks for layer in report.layers], f"({size:,.0f} MiB more"
    return found


def test_the_table_says_what_chunks_cost_a_mixture_of_experts():
    for found in on_ranks(2, said_of_experts):
        for implementation, (remarks, size) in found.items():
            assert len(remarks) == 2
            for remark in remarks:
                summed = f"weight gradients of batched_mm experts are made by chunk and summed {size}"
                assert remark.startswith(summed) == (implementation == "batched_mm")
                assert ("make the host wait in each chunk" in remark) == (implementation == "eager")
                assert bool(remark) == (implementation != "grouped_mm")


def stacks_made(rank):
    """By implementation: weight gradients of experts that a layer's backward makes, in a block and one by one, and how far the two are off."""
    tokens, figures = batches(1)[0], {}
    for implementation in ("eager", "grouped_mm"):
        options = {**MIXTURES["mixtral"], "layers": LAYERS, "experts_implementation": implementation, "initializer_range": 0.2}
        counts, gradients = [], []
        for scope in ("block", "layer"):
            with sequence_parallel_model(2, **options) as (model, group), block(model, scope=scope, token_chunks=4) as (_, runs):
                experts = model.model.layers[0].mlp.experts
                for _ in range(2):
                    model.zero_grad()
                    loss = mean_loss(model, cut(tokens, rank, 2), group)
                    with Made(*experts.parameters()) as made:
                        loss.backward()
                counts.append(made.count)
                gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        figures[implementation] = counts, worst(*gradients), runs.forwards
    return figures


def test_experts_weight_gradients_are_made_once_in_a_block():
    """One by one, eager experts make a whole gradient for each expert, and sums."""
    for figures in on_ranks(2, stacks_made):
        for implementation, ((mine, stock), off, _) in figures.items():
            assert mine == 2 * LAYERS and off < 1e-5, (implementation, figures)  # in fp32
            assert (stock > 3 * mine) == (implementation == "eager"), figures


def routed(model, tokens, rank, size, group, record):
    """Logits, those of the routers if they are recorded, and gradients of the loss with that of the routers in it."""
    inputs = cut(tokens, rank, size)
    labels = inputs.pop("labels")
    model.zero_grad()
    out = model(**inputs, use_cache=False, output_router_logits=record, output_hidden_states=True)
    found = {"logits": out.logits.detach()}
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    for number, logits in enumerate(out.router_logits or ()):
        found[f"router {number}"] = by_row = logits.unflatten(0, (len(tokens), -1))
        loss = loss + by_row.square().sum()
    loss.backward()
    found = {name: x.detach() for name, x in found.items()}
    return of_all_ranks(found, {name: p.grad.clone() for name, p in model.named_parameters()}, size, group)


def recorded_routers(rank):
    """Of forwards that record their routers' logits, and of those that don't, between them: errors, what ran, what was said."""
    options, tokens = {**EXACT, **EAGER, "layers": LAYERS, **MIXTURES["qwen3_moe"]}, batches(1)[0]
    errors = []
    with in_double():
        model = tiny(**options)
        whole = {record: routed(model, tokens, 0, 1, None, record) for record in (False, True)}
        assert len(whole[True]) == len(whole[False]) + LAYERS
        with sequence_parallel_model(2, **options) as (model, group), block(model) as (_, runs), listening() as messages:
            for record in (False, False, True, False, True):
                errors.append(worst(routed(model, tokens, rank, 2, group, record), whole[record]))
    return max(errors), runs.forwards, [message for message in messages if "no block" in message]


def test_a_layer_whose_router_is_recorded_runs_by_itself():
    for error, forwards, messages in on_ranks(2, recorded_routers):
        assert error < FP64
        assert forwards[1:] == [whole_chain(), [], whole_chain(), []]
        assert len(messages) == LAYERS and all("Qwen3MoeTopKRouter has a forward or a hook of its own" in x for x in messages)


# DeepSpeed.

FP32 = {"gradients": 1e-5, "losses": 1e-6, "norms": 2e-6}  # as in test_deepspeed.py, where they are shown to be tight


def trained(rank, stage, cases):
    """Of each case, how far training is from stock's, and what ran in chains in the last forward."""
    figures = {}
    for name, (section, options) in cases.items():
        train = functools.partial(train_run, rank, 2, stage=stage, steps=3, layers=LAYERS, initializer_range=0.2, **options)
        stock = train(None)
        with Runs() as runs:
            mine = train({"scope": "block", "token_chunks": 2, **section})
        figures[name] = mine.distance(stock), runs.forwards[-1]
    return figures


@pytest.mark.parametrize("stage", [full(0), full(1), full(2), 3])
def test_training_with_deepspeed_equals_stock(stage):
    cases = {
        "accumulation": ({"head_groups": 1}, dict(accumulation=2)),
        "head groups": ({"head_groups": 2}, dict(heads=8)),
        "experts": ({"head_groups": 1}, MIXTURES["mixtral"]),
    }
    if not everything():
        cases = {"accumulation, head groups": ({"head_groups": 2}, dict(accumulation=2, heads=8)), "experts": cases["experts"]}
    for figures in on_ranks(2, trained, stage, cases):
        for name, (off, ran_last) in figures.items():
            assert all(off[what] <= FP32[what] for what in FP32), (name, off)
            leaf = stage == 3 and name == "experts"  # of ZeRO-3, as DeepSpeed makes these mixtures
            assert ran_last == ([] if leaf else whole_chain()), (name, ran_last)


def faulty(rank, factor):
    with scaled_values(factor):
        return trained(rank, 1, {"fault": ({"head_groups": 1}, {})})["fault"][0]


def test_a_fault_of_a_tenth_of_a_percent_is_seen_in_training():
    for off in on_ranks(2, faulty, 1.001):
        assert all(off[what] > 10 * FP32[what] for what in FP32), off


# What is said, and what is left behind.

KINDS = {
    "llama": {"block of 2 layers, C = 4"},
    "dots1": {"block of 2 layers, C = 4"},
    "phimoe": {"no block: PhimoeDecoderLayer: mlp (PhimoeSparseMoeBlock) draws random numbers"},
    "glm4": {
        "no block: Glm4DecoderLayer: its forward calls input_layernorm, self_attn, post_self_attn_layernorm, "
        "post_attention_layernorm, mlp, post_mlp_layernorm, not a norm, self_attn, a norm and an MLP"
    },
    "phi": {"no block: PhiDecoderLayer: its forward calls input_layernorm, self_attn, mlp, not a norm, self_attn, a norm and an MLP"},
    "gpt_neox": {
        "no block: GPTNeoXLayer: post_attention_layernorm is not given the hidden states + what attention returned"
    },
    "bitnet": set(),
}  # fmt: skip


def said_of_kinds(rank):
    found = {}
    for kind in KINDS:
        report = ds_sp_overlap.enable(model := tiny_model(kind), {"scope": "block"}, torch.distributed.group.WORLD)
        said = "\n".join(f"{layer.got}; {layer.lacks}" for layer in report.layers)
        found[kind] = said, str(report)
        ds_sp_overlap.disable(model)
        assert not any("forward" in vars(module) for module in model.modules())
    model = tiny_model("llama")
    sections = {
        "window": {"window": 2},
        "whole": {"projections": False},
        "again": {},
        "offload": {"checkpointing": "offload"},
        "not torch's": {},
    }
    for what, section in sections.items():
        report = ds_sp_overlap.enable(model, {"scope": "block", **section}, torch.distributed.group.WORLD)
        found[what] = report.layers[0].lacks
        if what != "window":
            model.gradient_checkpointing_enable({"use_reentrant": what == "again"})  # of the next
        if what == "offload":
            for layer in model.model.layers:
                layer._gradient_checkpointing_func = functools.partial(lambda function, *args, **_: function(*args))
    return found


def test_the_table_says_which_layers_run_as_a_block_and_why_the_others_do_not():
    for found in on_ranks(2, said_of_kinds):
        for kind, expected in KINDS.items():
            lines = found[kind][0].split("\n")
            assert {next((words for words in expected if words in line), line) for line in lines} == expected or not expected
            assert expected or "block" not in found[kind][0]
        assert "all eight exchanges, G = 2, block of 2 layers, C = 4" in found["llama"][1]
        assert "no block: LlamaDecoderLayer: sp_overlap.projections is false" in found["whole"]
        assert "no block: LlamaDecoderLayer: sp_overlap.window is of layers one by one" in found["window"]
        assert found["again"] == ""
        assert found["not torch's"] == "in training one by one: gradient checkpointing that is not torch's"
        assert found["offload"] == 'in training one by one: gradient checkpointing, with sp_overlap.checkpointing "offload"'


def adapt(model):
    torch.manual_seed(0)
    get_peft_model(model, LoraConfig(target_modules=r"model.layers.1.mlp.up_proj", init_lora_weights=False))


def hook_norm(model):
    model.model.layers[1].input_layernorm.register_forward_hook(lambda module, given, output: output * 1.5)


def hook_attention(model):
    model.model.layers[1].self_attn.register_forward_hook(lambda module, given, output: (output[0] * 1.5, None))


def set_up_late(model):
    """Have hooks set up the norm of a layer before its forward, and put it back behind it."""
    layer = model.model.layers[1]
    norm, usual = layer.input_layernorm, layer.input_layernorm.variance_epsilon
    layer.register_forward_pre_hook(lambda *_: setattr(norm, "variance_epsilon", 2.0))
    layer.register_forward_hook(lambda *_: setattr(norm, "variance_epsilon", usual))


def replace_activation(model):
    model.model.layers[1].mlp.act_fn.forward = lambda x: torch.tanh(x)


def scale_residual(model):
    model.model.layers[1].residual_multiplier = 0.5


CHANGES = {
    adapt: "a module in it changed since it was read; call ds_sp_overlap.enable again",
    hook_norm: "LlamaRMSNorm has a forward or a hook of its own",
    hook_attention: "self_attn (LlamaAttention) has a forward or a hook of its own",
    set_up_late: "LlamaDecoderLayer has a forward pre-hook or a backward hook of its own",
    replace_activation: "SiLUActivation has a forward or a hook of its own",
    scale_residual: "residual_multiplier changed since it was read; call ds_sp_overlap.enable again",
}


def changed_later(rank, change):
    """The error, what ran in chains, and what is said, after a change that takes layer 1 out of the block."""
    options, tokens = {**EXACT, "layers": LAYERS}, batches(1)[0]
    if change is scale_residual:
        options["family"] = "granite"
    change(whole := tiny(**options))
    expected = outcome(whole, tokens, 0, 1, None)
    with sequence_parallel_model(2, **options) as (model, group), block(model) as (_, runs), listening() as messages:
        outcome(model, tokens, rank, 2, group)
        change(model)
        errors = [worst(outcome(model, tokens, rank, 2, group), expected) for _ in range(2)]
    return max(errors), runs.forwards[1:], messages


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_layer_that_changes_later_runs_by_itself_and_says_so(change):
    for error, forwards, messages in on_ranks(2, changed_later, change):
        assert error < FP64
        assert forwards == [ran("-", "-")] * 2
        assert messages == [f"sp_overlap: a layer by itself, in no block: model.layers.1: {CHANGES[change]}"]


def leaves(model):
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
    return model


def in_leaves(rank):
    """Where nothing is fetched before it is needed, nor kept."""
    zero = dict(stage=3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0, stage3_max_live_parameters=0)
    train = functools.partial(
        train_run, rank, 2, stage=3, steps=3, layers=LAYERS, prepare=leaves, initializer_range=0.2,
        more_config={"zero_optimization": zero},
    )  # fmt: skip
    stock = train(None)
    with Runs() as runs:
        mine = train({"scope": "block", "head_groups": 1})
    return mine.distance(stock), [ran_in_chains for ran_in_chains in runs.forwards if ran_in_chains]


def test_layers_whose_weights_zero_3_gathers_at_once_run_one_by_one():
    for off, chained in on_ranks(2, in_leaves):
        assert all(off[what] <= FP32[what] for what in FP32) and not chained


def with_dropout(rank):
    """Drop out in attention, each layer under a reentrant checkpoint: the error against scope "layer", and what ran in chains."""
    options, tokens, found = {**EXACT, "layers": LAYERS, "attention_dropout": 0.5}, batches(1)[0], []
    with sequence_parallel_model(2, **options) as (model, group):
        model.enable_input_require_grads()
        with other_layers(model, lambda layers: [Checkpointed(layer, reentrant=True) for layer in layers]):
            for scope in ("layer", "block"):
                with block(model, scope=scope) as (_, runs):
                    outcome(model, tokens, rank, 2, group)
                    torch.manual_seed(rank)
                    found.append(outcome(model, tokens, rank, 2, group))
    return worst(found[1], found[0]), runs.forwards


def test_dropout_under_a_reentrant_checkpoint_is_that_of_its_forward():
    for error, forwards in on_ranks(2, with_dropout):
        assert error < FP64 and not any(forwards), "a layer in a chain, which its checkpoint then computes by itself"


# By timing.

COSTS = {OFF: 9.0, 1: 1.0, 2: 1.5, LAYER: 0.0}  # of a layer; of layers one by one beside that of each


def timed(rank, block_costs, steps=22, **section):
    """What the layers run as in each step, the largest error of any step, and what was said."""
    options, tokens = {**EXACT, "layers": LAYERS}, batches(1)[0]
    whole = outcome(tiny(**options), tokens, 0, 1, None)
    section = {"scope": "auto", "head_groups": "auto", "policy": {"warmup_steps": 8}, **section}
    with (
        sequence_parallel_model(2, **options) as (model, group),
        listening() as messages,
        scripted({**COSTS, BLOCK: block_costs[rank]}),
    ):
        sgd, errors = torch.optim.SGD(model.parameters(), lr=0.0), []
        with block(model, **section) as (report, runs):
            for _ in range(steps):
                errors.append(worst(outcome(model, tokens, rank, 2, group), whole))
                sgd.step()
    said = [message for message in messages if "kept" in message]
    return [len(forward) for forward in runs.forwards], max(errors), said, {layer.got for layer in report.layers}


@pytest.mark.parametrize("costs, kept", [((2.0, 2.0), LAYERS), full((4.0, 4.0), 0), ((2.0, 4.0), 0)])
def test_a_block_is_kept_where_the_slowest_rank_is_faster_with_it(costs, kept):
    """Layers one by one take 2 x 3 x 1 ms. Once G is chosen, both are tried in turn, on all ranks alike."""
    ranks = on_ranks(2, timed, costs)
    assert ranks[0][0] == ranks[1][0]
    for ran_in_chains, error, said, got in ranks:
        assert error < FP64
        assert ran_in_chains[:7] == [0] * 7 and ran_in_chains[-4:] == [kept] * 4
        assert LAYERS in ran_in_chains[7:-4] and 0 in ran_in_chains[7:-4]
        block_ms = f"{2 * max(costs):.2f}"
        assert len(said) == 2 and f"layers one by one 6.00 ms, block {block_ms} ms, forward and backward" in said[1], said
        assert said[1].startswith("sp_overlap: model.layers.0 and the layers behind it, batch 2, about 32 tokens, float64")
        assert said[1].endswith("kept: block" if kept else "kept: layers one by one")
        assert got == {
            "all eight exchanges, G by timing in the first 8 steps, q_proj, k_proj, v_proj, o_proj under them; or block of 3 layers, "
            "C = 4, by timing"
        }


def without_timing(rank):
    return timed(rank, (1.0, 1.0), 2, head_groups=1)[0], timed(rank, (1.0, 1.0), 2, policy={"warmup_steps": 0})[0]


def test_nothing_is_tried_where_nothing_is_timed():
    assert on_ranks(2, without_timing) == [([0, 0], [0, 0])] * 2


# Guards.


def faults_of_change(rank, change):
    error, *_ = changed_later(rank, change)
    return [] if error < FP64 else [f"off by {error}"]


def faults_of_dropout(rank):
    error, forwards = with_dropout(rank)
    return [] if error < FP64 and not any(forwards) else [f"off by {error}, in chains {forwards}"]


def faults_of_leaves(rank):
    off, _ = in_leaves(rank)
    return [f"{what} off by {off[what]}" for what in FP32 if not off[what] <= FP32[what]]


def faults_of_edits(rank):
    return [f"off by {error}" for error in edited(rank, {})[0] if not error < FP64]


def faults_of_timing(rank):
    ran_in_chains, *_ = timed(rank, (2.0, 2.0))
    return [] if ran_in_chains[:7] == [0] * 7 else [f"a block in steps where G was timed: {ran_in_chains}"]


def faults_of_routers(rank):
    error, *_ = recorded_routers(rank)
    return [] if error < FP64 else [f"off by {error}"]


WATCHED = [
    Watched(Guard("nothing is recorded in parts", without="return True"), faults_of_routers, raises=True),
    Watched(Guard("edits through .data", without="if False:"), faults_of_edits),
    Watched(Guard("projections go token by token", without="return ''"), faults_of_rounding),
    Watched(Guard("one thing is timed at a time", without="if self.over:\n    return None"), faults_of_timing),
    Watched(
        Guard("an attention that is not called has no hooks", without="if False:"),
        functools.partial(faults_of_change, change=hook_attention),
    ),
    Watched(Guard("runs first", without="if False:"), functools.partial(faults_of_change, change=set_up_late)),
    Watched(Guard("what was read is what runs", without="if False:"), functools.partial(faults_of_change, change=scale_residual)),
    Watched(Guard("computed again as it was", without="if False:"), faults_of_dropout),
    Watched(Guard("no leaf of ZeRO-3", without="if False:"), faults_of_leaves, raises=True),  # weights are not there
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
