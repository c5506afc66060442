"""Tests statements of README and docs about DeepSpeed (0.19.8) itself that no other test checks; the package is not used.

If a test fails, DeepSpeed has changed: then change the page that makes the statement.
"""

from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from deepspeed.sequence.layer import DistributedAttention, single_all_to_all
from torch.utils.checkpoint import checkpoint

from tests.harness.families import tiny_model
from tests.harness.models import ds_config, engine_of, forgetting, sequence_parallel, tiny
from tests.harness.ranks import refusal
from tests.harness.reference import relative_error, sequence_first_attention
from tests.harness.sweep import in_double
from tests.harness.whole import inputs_of, tokens_of

# docs/correctness.md: what DeepSpeed's own overlap gets wrong or refuses.


def plainly(attend, q, k, v):
    return attend(q(), k(), v()).square().sum()


def without_gradients(attend, q, k, v):
    with torch.no_grad():
        attend(q(), k(), v())


def checkpointed(attend, q, k, v):
    return checkpoint(lambda _: attend(q(), k(), v()), torch.zeros((), requires_grad=True), use_reentrant=True).square().sum()


def called_twice(attend, q, k, v):
    first, second = ((q(), k(), v()) for _ in range(2))
    return attend(*first).square().sum() + attend(*second).pow(3).sum()


def key_is_value(attend, q, k, v):
    return attend(q(), (shared := k()), shared).square().sum()


def query_in_another_loss(attend, q, k, v):
    return attend((query := q()), k(), v()).square().sum() + query.pow(3).sum()


@pytest.mark.parametrize(
    "use, heads, kv_heads, trained, outcome",
    [
        (plainly, 4, 4, "qkv", "right"),
        (called_twice, 4, 4, "qkv", "wrong"),
        (key_is_value, 4, 4, "qkv", "wrong"),
        (query_in_another_loss, 4, 4, "qkv", "wrong"),
        (without_gradients, 4, 4, "qkv", "refused"),
        (checkpointed, 4, 4, "qkv", "refused"),
        (plainly, 4, 4, "kv", "refused"),
        (plainly, 4, 1, "qkv", "refused without it, too"),
    ],
)
def test_deepspeeds_own_overlap_gets_wrong_or_refuses_what_the_docs_say(use, heads, kv_heads, trained, outcome, rank):
    x = torch.randn(6, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    found = {}
    for stream in (None, mock.Mock()):
        torch.manual_seed(5)
        weights = {name: torch.randn(8, 4 * (heads if name == "q" else kv_heads), dtype=torch.float64) for name in "qkv"}
        for name in trained:
            weights[name].requires_grad_()
        made = [lambda name=name: (x @ weights[name]).unflatten(-1, (-1, 4)) for name in "qkv"]
        with mock.patch.multiple(get_accelerator(), default_stream=lambda *_: stream, current_stream=lambda *_: stream):
            layer = DistributedAttention(sequence_first_attention, torch.distributed.group.WORLD, sp_stream=stream)

            def run(layer=layer, made=made):
                loss = use(lambda q, k, v: layer(q, k, v, 1), *made)
                if loss is not None:
                    loss.backward()

            said = refusal(run)
        found[stream is not None] = said, [weights[name].grad for name in trained]
    (without, expected), (said, gradients) = found[False], found[True]
    pairs = [] if said else zip(gradients, expected, strict=True)
    error = max((relative_error(a, b) for a, b in pairs if b is not None), default=0.0)
    assert (without is not None) == (outcome == "refused without it, too")
    assert (said is not None) == outcome.startswith("refused")
    assert (error > 1e-3) == (outcome == "wrong")


def test_deepspeeds_own_overlap_refuses_heads_that_do_not_divide(rank):
    assert refusal(single_all_to_all, torch.zeros(6, 1, 3, 4), 2, 0, 1, torch.distributed.group.WORLD, True, {}, "dq", 3) == (
        "AssertionError",
        "uneven head sp does not support async op",
    )


# docs/loss_and_gradients.md.


def test_the_loader_neither_makes_position_ids_nor_pads(rank):
    uneven, without = "seqlen=9 isn't divisible by sp-size=2", "requires `position_ids` in every dataloader batch"
    for length, left_out, words in ((8, (), "None"), (9, (), uneven), (8, ("position_ids",), without)):
        row = torch.arange(length)[None]
        batch = {key: row for key in ("input_ids", "labels", "position_ids") if key not in left_out}
        loader = UlyssesSPDataLoaderAdapter([batch], rank, torch.distributed.group.WORLD, 2, torch.device("cpu"))
        assert words in str(refusal(next, loader))


def test_gradients_in_bf16_are_reduced_in_fp32_over_an_sp_group(rank):
    with engine_of(tiny(dtype=torch.bfloat16), ds_config(1, dtype=torch.bfloat16)) as (engine, _):
        assert engine.communication_data_type == torch.float32


# docs/features.md.


def test_a_delta_net_begins_with_an_empty_state_on_every_rank(rank):
    with in_double():
        model, tokens = tiny_model("qwen3_next"), tokens_of(32)
        inputs, _ = inputs_of(tokens, [16, 16], rank)
        whole = model(input_ids=tokens).logits.split(16, 1)[rank]
        with forgetting(), torch.no_grad():
            sequence_parallel(model, 2)
            off = (model.train()(**inputs, use_cache=False).logits - whole).abs().max()
    assert off > 1e-3 if rank else off < 1e-12
