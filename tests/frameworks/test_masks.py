"""Tests features that depend on the whole sequence: padding, windows, chunks, and RoPE that depends on the length; and refusals.

Compares with the model on the whole sequence, as `test_transformers` does.
"""

import functools
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import masking_utils
from transformers.models.llama.modeling_llama import LlamaModel

import ds_sp_overlap
from ds_sp_overlap.integrations.sequence import masks
from ds_sp_overlap.integrations.sequence.positions import Positions
from ds_sp_overlap.integrations.transformers.attention_function import _scaled_by_position
from tests.harness.cases import full, since_transformers, singles
from tests.harness.guards import Watched, notices
from tests.harness.models import (
    BATCH,
    EXACT,
    FP64,
    SEQ,
    assert_right_where_stock_is_wrong,
    batches,
    cut,
    document_by_document,
    errors_of,
    outcome,
    packed,
    sequence_parallel_model,
    tiny,
    worst,
)
from tests.harness.ranks import assert_error, assert_refused, assert_small, refusal

WINDOW = dict(family="qwen2_moe", mlp_only_layers=[0, 1], use_sliding_window=True, sliding_window=5, max_window_layers=1)
LLAMA4 = dict(
    family="llama4_text", head_dim=8, intermediate_size_mlp=48, moe_layers=[], attention_chunk_size=12, no_rope_layers=[1, 0],
    floor_scale=4, layer_types=["chunked_attention", "full_attention"],
)  # fmt: skip
IN_FP32 = {"llama4_text": 1e-6}  # its RoPE is always in fp32; its rounding (6e-8) depends on the length and on the CPU
FIRST = 20  # the length from which RoPE is scaled: above the 16 tokens of a rank, below the 32 of the whole sequence
LONGROPE = dict(
    family="phi3", original_max_position_embeddings=FIRST,
    rope_parameters=dict(rope_type="longrope", rope_theta=1e4, factor=4.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
                         original_max_position_embeddings=FIRST),
)  # fmt: skip
DYNAMIC = dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=FIRST)


RIGHT = functools.partial(assert_right_where_stock_is_wrong, limits=IN_FP32)


@since_transformers("5.1")
def test_windows_and_chunks_that_only_the_mask_knows_are_those_of_the_whole_sequence():
    """Includes Llama 4, with chunks of 12 tokens and a scale by position; its layers don't get position_ids."""
    RIGHT([WINDOW, {**WINDOW, "sliding_window": 20}, LLAMA4])


@since_transformers("5.1")
def test_rope_that_goes_by_length_goes_by_that_of_the_whole_sequence():
    RIGHT([LONGROPE, DYNAMIC, dict(family="qwen2", **DYNAMIC), dict(family="bitnet", **DYNAMIC)])


# Padding.


def mask_of(*rows):
    """Return a mask [b, s] with ones for the real tokens; a row is (first real token, end of the real tokens)."""
    at = torch.arange(SEQ)
    return torch.stack([((at >= first) & (at < stop)).long() for first, stop in rows])


PADDING = {
    "none": mask_of((0, 32), (0, 32)),
    "right": mask_of((0, 32), (0, 11)),
    "left": mask_of((0, 32), (5, 32)),
    "left, beyond a rank": mask_of((21, 32), (5, 32)),
    "both sides": mask_of((3, 30), (17, 20)),
}


def padding(rank, cases):
    """Return {case: errors of stock and of the overlap}; a case is (family, key of `PADDING`, whether positions skip padding)."""
    errors = {}
    for family, which, counted in cases:
        mask = PADDING[which]
        positions = (mask.cumsum(1) - 1).clamp_min(0) if counted else torch.arange(SEQ).expand_as(mask)
        errors[family, which, counted] = errors_of(rank, dict(family=family), [{}], positions=positions, mask=mask)
    return errors


def test_tokens_that_count_see_no_padding(rank):
    """Checks positions that count from the first real token, and positions that count from the first token of the row."""
    cases = singles(itertools.product(("llama", "bitnet"), PADDING, (True, False)))
    for (family, which, counted), (stock, ours) in padding(rank, cases).items():
        assert ours < FP64, (family, which, counted)
        assert ("left" in which or which == "both sides") == (stock > 1e-3), (family, which, counted)


MASKS = {
    "hole": "LlamaForCausalLM: attention_mask has padding between the tokens of a document",
    "4-D": "LlamaForCausalLM: of a sequence that is split over ranks only a 2-D attention_mask [b, s/P]",
    "dict": "LlamaForCausalLM: of a sequence that is split over ranks only a 2-D attention_mask [b, s/P]",
    "of the whole sequence": "LlamaForCausalLM: attention_mask must be [b, s/P], cut over the ranks like input_ids",
    "one rank": "LlamaForCausalLM: sp rank 1: of a sequence that is split over ranks only a 2-D attention_mask",
    "layer": "model.layers.0.self_attn: LlamaAttention is given a mask that is not as transformers' mask functions made it",
}


def test_a_mask_that_says_more_than_padding_is_refused_on_every_rank(rank):
    with sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model)
        inputs = cut(batches(1)[0], rank, 2)
        del inputs["labels"]
        hole = torch.ones(BATCH, SEQ).index_fill(1, torch.tensor([7]), 0).chunk(2, 1)[rank]  # on rank 0 alone
        given = {
            "hole": hole,
            "4-D": torch.ones(BATCH, 1, 16, 16, dtype=torch.bool),
            "dict": {"full_attention": None},
            "of the whole sequence": torch.ones(BATCH, SEQ),
            "one rank": torch.ones(BATCH, 1, 16, 16) if rank else None,
            "fine": torch.ones(BATCH, 16) if rank else None,
        }
        said = {name: refusal(model, **inputs, attention_mask=mask, use_cache=False) for name, mask in given.items()}
        layer, hidden = model.model.layers[0].self_attn, torch.zeros(BATCH, 16, 32)
        tables = model.model.rotary_emb(hidden, inputs["position_ids"])
        options = dict(position_embeddings=tables, position_ids=inputs["position_ids"])
        said["layer"] = refusal(layer, hidden, attention_mask=given["4-D"], **options)
    assert_refused(said, MASKS)


def test_a_layer_that_gives_attention_no_mask_where_one_was_made_is_refused(rank):
    """With no mask, transformers attends across documents and to padding. The package does not, so results would be off by 1.5."""
    counted = PADDING["both sides"].cumsum(1).sub(1).clamp_min(0)
    tokens, group = batches(1)[0], torch.distributed.group.WORLD

    def made():
        model = tiny(**EXACT)
        for layer in model.model.layers:
            layer.forward = functools.partial(
                lambda inner, *args, **options: inner(*args, **{**options, "attention_mask": None}), layer.forward
            )
        return model

    whole = outcome(made(), tokens, 0, 1, None)
    for section in ({"head_groups": 1}, {"head_groups": 2}, {"shares": 2}):
        ds_sp_overlap.enable(model := made(), section, group)
        assert worst(outcome(model, tokens, rank, 2, group), whole) < FP64
        for given in ((packed([[10, 22], [3, 13, 16]]), None), (counted, PADDING["both sides"])):
            said = refusal(outcome, model, tokens, rank, 2, group, *given)
            assert_error(said, "LlamaAttention is given no attention_mask, though")
        ds_sp_overlap.disable(model)


def test_a_mask_function_that_says_more_than_windows_and_chunks_is_refused_by_name():
    causal = masking_utils.causal_mask_function
    assert masks.read(causal, 8) == masks.Pattern()
    windowed = masking_utils.and_masks(causal, masking_utils.sliding_window_overlay(5))
    assert [masks.read(windowed, seq) for seq in (5, 6)] == [masks.Pattern(), masks.Pattern(window=5)]
    for function, why in (
        (masking_utils.or_masks(causal, causal), "a mask with or_masks"),
        (masking_utils.and_masks(causal, lambda *_: True), "a mask with .*lambda"),
        (masking_utils.and_masks(masking_utils.sliding_window_overlay(5)), "not causal"),
    ):
        with pytest.raises(ValueError, match=why):
            masks.read(function, 8)


# Layers without an exchange.


def refused_at_enable(rank, families):
    said = {}
    for name, options in families.items():
        options = {"family": name, **options}
        switch = options.pop("switch", None)
        try:
            model = tiny(**options)
        except ValueError:  # the model has no sdpa
            model = tiny(**options, implementation="eager")
        model.config._attn_implementation = switch or model.config._attn_implementation
        said[name] = refusal(ds_sp_overlap.enable, model, {"on_unsupported": "warn"}, torch.distributed.group.WORLD)
    return said


MIXING = {
    "rwkv": (dict(attention_hidden_size=32), "RwkvSelfAttention"),
    "falcon": (dict(), "transformer.h.0.self_attention (FalconAttention, and 1 more) mixes tokens without"),
    "doge": (dict(keep_window_size=8), "model.layers.0.self_attn (DogeAttention, and 1 more) mixes tokens without"),
}
UNFIT = {
    "gpt_oss eager": (dict(family="gpt_oss", num_local_experts=2), 'attention "eager" needs a mask'),
    "bert": (dict(), "BertSelfAttention): its attention is not causal"),
    "bart": (dict(), "BartDecoder takes no position_ids"),
}


@since_transformers("5.1")
@pytest.mark.parametrize("cases", [MIXING, UNFIT], ids=["mixing", "unfit"])
def test_layers_that_nobody_exchanges_are_refused_by_name_whatever_on_unsupported_says(cases, rank):
    messages = {family: message for family, (_, message) in cases.items()}
    assert_refused(refused_at_enable(rank, {family: options for family, (options, _) in cases.items()}), messages)


def test_a_model_of_which_nobody_can_tell_whether_it_takes_tokens_is_refused(rank):
    """Else its layers would be taken for those of an image model, in which each rank attends alone."""
    forward = LlamaModel.forward
    with mock.patch.object(LlamaModel, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs)):
        with sequence_parallel_model(2) as (model, _):
            _, said = refusal(ds_sp_overlap.enable, model, {"on_unsupported": "warn"})
    assert "self_attn (LlamaAttention): the forward of LlamaModel takes *args" in said


# One global sequence for one forward.

LAYOUTS = [[[32], [32]], [[10, 22], [3, 13, 16]], [[5, 27], [32]]]


def steps_of_their_own(rank, how, options):
    """Return the gradient errors of two checkpointed forwards with different documents, and one backward of the summed losses.

    how   "new tensors": new position_ids in each forward; "one buffer": both forwards use the same memory; "one rank's buffer":
          only rank 1 does
    """
    steps, buffer = batches(2), torch.empty(BATCH, 16, dtype=torch.long)
    alone = tiny(**EXACT, **options)
    expected = None
    for tokens, lengths in zip(steps, LAYOUTS[1:]):
        found = document_by_document(alone, tokens, lengths)
        found.pop("logits")
        expected = found if expected is None else {name: expected[name] + x for name, x in found.items()}
    errors = []
    for reentrant in (True, False):
        counted = mock.patch.object(Positions, "gather", autospec=True, side_effect=Positions.gather)
        with sequence_parallel_model(2, **EXACT, **options) as (model, group), counted as gathers:
            ds_sp_overlap.enable(model)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.train()
            loss = 0
            for tokens, lengths in zip(steps, LAYOUTS[1:]):
                inputs = cut(tokens, rank, 2, packed(lengths))
                positions = inputs["position_ids"]
                if how == "one buffer" or (how == "one rank's buffer" and rank):
                    buffer.numpy()[...] = positions.numpy()  # autograd's version counter doesn't see it
                    positions = buffer
                logits = model(input_ids=inputs["input_ids"], position_ids=positions, use_cache=False).logits
                loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
            loss.backward()
            assert gathers.call_count == 2, "positions are gathered once a forward: by no layer, and not in backward"
            found = {name: p.grad for name, p in model.named_parameters()}
            for gradient in found.values():
                torch.distributed.all_reduce(gradient, group=group)
            errors.append(worst(found, expected))
    return errors


@pytest.mark.parametrize("how", ["new tensors", "one buffer", "one rank's buffer"])
def test_each_forward_and_its_recomputation_go_by_the_documents_of_that_forward(how, rank):
    assert_small(steps_of_their_own(rank, how, {}), FP64)


def test_recomputed_layers_that_are_never_handed_position_ids_find_their_sequence(rank):
    options = {**LLAMA4, "attention_chunk_size": 64, "attn_temperature_tuning": False}
    assert_small(steps_of_their_own(rank, "new tensors", options), IN_FP32["llama4_text"])


def test_placeholders_that_nobody_holds_are_let_go_whatever_the_attention_implementation():
    found = masks.Masks()
    found.placeholder((1, 4), SimpleNamespace(device=torch.device("cpu")))
    assert len(found._placeholders) == 1
    with found.for_layers("the model", None, "one without masks"):
        assert not found._placeholders


def test_llama_4s_factors_by_position_are_exchanged_without_a_rounding_of_their_own():
    """Rounding of a factor changes all elements of a token alike; rounding of q changes its elements at random."""
    layer = SimpleNamespace(attn_temperature_tuning=True, use_rope=False, floor_scale=4, attn_scale=0.1)
    sequence = SimpleNamespace(lengths=[64, 64])

    def factors(positions):
        return (torch.log1p(torch.floor((positions + 1.0) / 4)) * 0.1 + 1)[:, None, None]

    q, here = torch.randn(1, 64, 16, 1024, generator=torch.Generator().manual_seed(0)), torch.arange(64.0)
    of_layer = (q.bfloat16() * factors(here)).to(torch.bfloat16)
    want = q.bfloat16().float() * factors(here + 64)
    got = _scaled_by_position(layer, of_layer, sequence, rank=1).float()
    off = ((got - want) * want).sum((0, 2, 3)) / (want**2).sum((0, 2, 3))
    # Each element was rounded twice, by up to 2^-9 each; in the mean of 16384 elements, this is far less. A rounded factor would
    # stay in the mean: 2^-7 here.
    assert off.abs().max() < 2**-11


def assert_right_inside_another(rank, options):
    """Run one model inside of another model's forward, with different documents and one ``enable``; assert that both are right."""
    group = torch.distributed.group.WORLD
    (one_tokens, other_tokens), (one_rows, other_rows) = batches(2), ([[10, 22], [32]], [[32], [5, 27]])
    if "rope_parameters" in options:  # this RoPE depends on the length of the row, not of a document
        one_rows = other_rows = [[32], [32]]
    expected = [
        document_by_document(tiny(**EXACT, **options, seed=seed), tokens, rows)
        for seed, tokens, rows in ((0, one_tokens, one_rows), (1, other_tokens, other_rows))
    ]
    one, other = (tiny(**EXACT, **options, seed=seed) for seed in (0, 1))
    ds_sp_overlap.enable(torch.nn.ModuleList([one, other]), {"head_groups": 2}, group)
    found = []

    def run_the_other(*_):
        found.append(outcome(other, other_tokens, rank, 2, group, packed(other_rows)))

    # Before the inner model of ``one``, whose forward then needs the positions that ``one`` has gathered.
    one.model.register_forward_pre_hook(run_the_other)
    with mock.patch.object(Positions, "gather", autospec=True, side_effect=Positions.gather) as gathers:
        found.append(outcome(one, one_tokens, rank, 2, group, packed(one_rows)))
    assert_small([worst(*pair) for pair in zip(found, reversed(expected), strict=True)], FP64)
    assert gathers.call_count == 2, "each model gathers once, and the outer one goes on as it was"


INSIDE = {
    "layers": {},
    "layers at their function": dict(family="bitnet"),
    "a rotary embedding that goes by the length": DYNAMIC,
}


@pytest.mark.parametrize("what", INSIDE)
def test_a_model_that_is_called_while_another_one_runs_goes_by_its_own_documents(what, rank):
    assert_right_inside_another(rank, INSIDE[what])


# Many documents.

MANY = {
    "padding of one token each": [[20] + [1] * 12, [1] * 31 + [1]],
    "short ones": [[2, 3, 1, 2, 4, 3, 1, 1, 2, 13], [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2]],
    "one token": [[1] * 16 + [16], [32]],
}


@since_transformers("5.1")
@pytest.mark.parametrize(
    "options", [{}, dict(family="mistral", sliding_window=2), full(dict(family="bitnet", kv_heads=1))], ids=str
)
def test_many_short_documents_are_right_and_take_few_calls(options, rank):
    """Two layers have two head groups each. A row of 32 tokens has up to 8 long documents, and further ones of 2 to 4 tokens."""
    tokens, attention = batches(1)[0], "scaled_dot_product_attention"
    for name, lengths in MANY.items():
        alone = document_by_document(tiny(**EXACT, **options), tokens, lengths)
        with sequence_parallel_model(2, **EXACT, **options) as (model, group):
            ds_sp_overlap.enable(model, {"head_groups": 2})
            outcome(model, tokens, rank, 2, group, packed(lengths))  # the first call makes more calls of attention
            functional = torch.nn.functional
            with mock.patch.object(functional, attention, wraps=getattr(functional, attention)) as sdpa:
                assert worst(outcome(model, tokens, rank, 2, group, packed(lengths)), alone) < FP64, name
            assert 0 < sdpa.call_count <= 2 * 2 * (3 + 2) < 2 * 2 * sum(map(len, lengths)), name


# Guards.


def overlapped(rank, options):
    return errors_of(rank, options)[1:]


def padded(rank):
    return [ours for _, ours in padding(rank, [("llama", "left", False)]).values()]


LONGEST = "largest = torch.full_like(position_ids[..., :1], position_ids.max().item())"
LAST_PLACEHOLDER = "placeholder = list(self._placeholders.values())[-1]"
WATCHED = [
    Watched("windows are read", "pass", functools.partial(overlapped, options=WINDOW)),
    Watched("the longest of all ranks", LONGEST, functools.partial(overlapped, options=LONGROPE)),
    Watched("padding is a document", "if False:", padded),
    Watched(
        "the mask that was made is given",
        "if sequence.padded:",
        test_a_layer_that_gives_attention_no_mask_where_one_was_made_is_refused,
    ),
    Watched("not another model", "has_gathered = outer is not None", functools.partial(assert_right_inside_another, options={})),
    # The checkpoint then recomputes another graph than that of forward.
    Watched(
        "of its own forward", LAST_PLACEHOLDER, functools.partial(steps_of_their_own, how="new tensors", options={}), raises=True
    ),
]


test_the_suite_notices_without_the_guard = since_transformers("5.1")(notices(*WATCHED))
