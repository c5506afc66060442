"""transformers models on more ranks than heads, where ranks share query heads: against the model on the whole sequence.

In fp64, on 2 and 4 ranks: logits and every gradient on every rank.
"""

import contextlib
import functools
import itertools

import pytest
import torch

import ds_sp_overlap
from tests.harness import flash
from tests.harness.cases import full, singles
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.models import (
    EXACT,
    batches,
    cut,
    document_by_document,
    mean_loss,
    of_all_ranks,
    outcome,
    packed,
    sequence_parallel_model,
    tiny,
    train_run,
    worst,
)
from tests.harness.ranks import on_ranks, refusal
from tests.harness.reference import relative_error

FP64 = 1e-12  # roundings of 1e-16 over two layers, seen below 1e-14
GPT_OSS = dict(family="gpt_oss", num_local_experts=2, num_experts_per_tok=1, sliding_window=5)
MODELS = {
    "llama": dict(heads=2, kv_heads=1),
    "three heads": dict(heads=3, kv_heads=3),
    "norms of q and k": dict(family="qwen3", heads=2),
    "a window": dict(family="mistral", heads=2, kv_heads=1, sliding_window=5),
    "one projection": dict(family="phi3", heads=3, kv_heads=1),
    "at its attention function": dict(family="bitnet", heads=2, kv_heads=1),
    "sinks": dict(**GPT_OSS, heads=2, kv_heads=1),
}
ROWS = {
    "one document": [[32], [32]],
    "packed": [[10, 22], [3, 13, 1, 15]],
    "short ones": [[1, 1, 2, 1, 3, 2, 5, 1, 8, 8], [4] * 8],
}
SECTIONS = {
    "layer": {},
    "block": {"scope": "block", "token_chunks": 2},
    "a window of groups": {"window": 1},
    "kept": {"checkpointing": "keep"},
    "all heads everywhere": {"shares": 4},
}
CHECKPOINTING = {"no checkpoints": None, "reentrant": True, "not reentrant": False}


def made(checkpointing=None, **options):
    """A model in fp64, and whether it attends by flash attention."""
    is_flash = options.get("family") == "gpt_oss"
    model = tiny(**EXACT, head_dim=8, implementation="eager" if is_flash else "sdpa", **options)
    if is_flash:
        torch.manual_seed(7)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.data = 3 * torch.randn(len(parameter), dtype=torch.float64)
        model.config._attn_implementation, model.config._experts_implementation = flash.NAME, "eager"
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.train()
    return model


def against_whole(rank, size, cases):
    """Of each case the error, and what the layers got."""
    tokens, group, figures = batches(1)[0], torch.distributed.group.WORLD, {}
    with flash.flash_attention():
        for case in cases:
            model, rows, section, checkpointing = case
            options, lengths = MODELS[model], ROWS[rows]
            whole = document_by_document(made(**options), tokens, lengths)
            mine = made(CHECKPOINTING[checkpointing], **options)
            report = ds_sp_overlap.enable(mine, {**SECTIONS[section], "on_unsupported": "error"}, group)
            found = outcome(mine, tokens, rank, size, group, packed(lengths))
            ds_sp_overlap.disable(mine)
            figures[case] = worst(found, whole), report.layers[0].got
    return figures


CASES = list(itertools.product(MODELS, ROWS, SECTIONS, CHECKPOINTING))


@pytest.mark.parametrize("size, cases", [(4, singles(CASES)), full(2, CASES)])
def test_models_on_more_ranks_than_heads_equal_the_whole_sequence(size, cases):
    for figures in on_ranks(size, against_whole, size, cases, timeout_s=1500):
        for case, (error, got) in figures.items():
            assert error < FP64, (case, error)
