"""Compares models with a window of head groups (``"window"``) with the whole sequence in fp64; for ZeRO, see test_deepspeed.py."""

import pytest
import torch

from tests.harness.cases import everything
from tests.harness.models import FP64, SEQ, errors_of

MODELS = [dict(), dict(heads=8, kv_heads=2), dict(heads=8, kv_heads=8), dict(family="qwen3", heads=8, kv_heads=4)]
MODELS += [dict(family="phi3"), dict(family="qwen2"), dict(family="qwen3", attention_bias=True)]
SECTIONS = [{"head_groups": 2, "window": 1}, {"head_groups": 2, "window": 2}]


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


HOW = {  # options of the model and its batch
    "plain": {},
    "packed": dict(lengths=[[10, 22], [3, 13, 1, 15]]),
    "padded": dict(mask=(torch.arange(SEQ) < torch.tensor([[SEQ], [SEQ - 5]])).long()),
    "checkpointed": dict(prepare=checkpointed),
}


@pytest.mark.parametrize("how", HOW)
def test_logits_and_every_gradient_equal_the_whole_sequences(how, rank):
    cases = MODELS[:: 1 if everything() else 2] if how == "plain" else MODELS[1:4:2]
    for options in cases:
        _, *errors = errors_of(rank, options, SECTIONS, reports=(reports := []), **HOW[how])
        assert max(errors) < FP64
        for report in reports:
            assert all("at a time, recomputed in backward" in layer.got for layer in report.layers)
