"""Makes the mistakes of README's table of messages; tests that every rank says the message of the table."""

import functools
import logging
import subprocess
import sys

import accelerate
import deepspeed
import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

import ds_sp_overlap
from tests.harness.listening import listening
from tests.harness.models import (
    batches,
    cut,
    ds_config,
    engine_of,
    forgetting,
    sequence_parallel,
    sequence_parallel_model,
    tiny,
)
from tests.harness.pages import ROOT, code, read
from tests.harness.ranks import on_ranks, refusal

SECTION = {"head_groups": 1}


def made(rank, stage=0, **more):
    """Make an engine for a model with stock Ulysses, as a hand-written loop does; clean up afterwards."""
    config = ds_config(stage, **more)
    if stage == 3:
        del config["zero_optimization"]["reduce_scatter"]
    with engine_of(tiny(), config):
        pass


def forward(rank, overlap=True, positions=True, local=False, **options):
    """Run the forward of a model, overlapped or with stock Ulysses alone."""
    with sequence_parallel_model(2, **options) as (model, _):
        if overlap:
            ds_sp_overlap.enable(model, SECTION)
        inputs = cut(batches(1)[0], rank, 2)
        ids, whole = inputs["input_ids"], inputs["position_ids"]
        try:
            model(input_ids=ids, position_ids=(whole - whole[:, :1] if local else whole) if positions else None, use_cache=False)
        finally:
            ds_sp_overlap.disable(model)


def loaded(rank, length, **more):
    row = torch.arange(length)[None]
    batch = {"input_ids": row, "labels": row, "position_ids": row, **more}
    return UlyssesSPDataLoaderAdapter([batch], rank, torch.distributed.group.WORLD, 2, torch.device("cpu"))


def no_mpu(rank):
    deepspeed.initialize(model=tiny(), config=ds_config(0, sp_overlap=SECTION))


def eager(rank):
    with sequence_parallel_model(2) as (model, _):
        model.config._attn_implementation = "eager"
        ds_sp_overlap.enable(model, SECTION, torch.distributed.group.WORLD)


def generate(rank):
    with sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, SECTION)
        try:
            model.generate(batches(1)[0][:1, :8], max_new_tokens=2)
        finally:
            ds_sp_overlap.disable(model)


def rows_of_unequal_length(rank):
    next(loaded(rank, 8 + 2 * rank))


def packed_by_best_fit(rank):
    next(loaded(rank, 8, cu_seq_lens_q=torch.tensor([0, 8])))


def resume(rank):
    next(iter(accelerate.skip_first_batches(loaded(rank, 8), 1)))


def two_models(rank):
    with forgetting():
        for seed in (0, 1):
            sequence_parallel(tiny(seed=seed), 2)


MISTAKES = {
    'has no "sp_overlap" section': made,
    "nobody reads": functools.partial(made, sp_overlaps=SECTION),
    "unknown key": functools.partial(made, sp_overlap={"head_group": 2}),
    "no sequence-parallel group": no_mpu,
    "sequence parallelism needs position_ids": functools.partial(forward, positions=False),
    "position_ids start anew": functools.partial(forward, local=True),
    "ZeRO-3 with reduce_scatter": functools.partial(made, stage=3, sp_overlap=SECTION),
    "says DeepSpeed's own Ulysses": functools.partial(forward, overlap=False, heads=3, kv_heads=3),
    "needs a mask of the whole sequence": eager,
    "generation with a KV cache": generate,
    "invalid tensor size at index": rows_of_unequal_length,
    "tuple index out of range": packed_by_best_fit,
    "'UlyssesSPDataLoaderAdapter'": resume,
    "sequence parallel group is already": two_models,
}
ELSEWHERE = {  # messages tested in frameworks/test_masks.py, training/test_faults.py and frameworks/test_deepspeed.py
    "mixes tokens", "failed on sp rank", "DeepSpeed does not sum gradients", "the ranks ask for different",
}  # fmt: skip


def table():
    rows = next(rows for _, rows in read(ROOT / "README.md").tables if rows[0][0].content == "message")
    return [code(message)[0] for message, _ in rows[1:]]


def said(rank, mistake):
    """Make a mistake; return the error message on this rank, or the warnings if there is no error."""
    with listening(logging.WARNING) as messages:
        error = refusal(MISTAKES[mistake], rank)
    return "\n".join(messages if error is None else [error[1]])


def test_each_message_of_the_readme_is_provoked():
    explained = [start for message in table() for start in (*MISTAKES, *ELSEWHERE) if message.startswith(start)]
    assert sorted(explained) == sorted([*MISTAKES, *ELSEWHERE]) and len(explained) == len(table())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_the_message_of_the_readme(mistake):
    """If a message of DeepSpeed (0.19.8) no longer comes, DeepSpeed has changed: change README and docs/loss_and_gradients.md."""
    (message,) = (message for message in table() if message.startswith(mistake))
    heard = on_ranks(2, said, mistake)
    warned = mistake in ('has no "sp_overlap" section', "ZeRO-3 with reduce_scatter")  # rank 0 warns for all ranks
    for text in heard[: 1 if warned else 2]:
        assert all(piece.strip() in text for piece in message.split("...")), text


def by_a_trainer(rank, caller, trainer):
    """Make an engine that accumulates two batches, as if a trainer's method made it; return the error, or the warnings.

    caller    the name of the module with the method
    trainer   the name of the trainer's class
    """
    kind = type(trainer, (), {"__module__": "trl.trainer"})
    names = {"self": kind(), "__name__": caller, "make": lambda: made(rank, accumulation=2, sp_overlap=SECTION)}
    with listening(logging.WARNING) as messages:
        error = refusal(eval, "make()", names)
    return [str(error)] if error else messages


def test_the_trainer_is_told_that_it_weighs_accumulated_batches_alike():
    said, _ = on_ranks(2, by_a_trainer, "transformers.trainer", "SFTTrainer")
    assert any("(sp size 2) the Trainer weighs each of 2 accumulated batches alike" in message for message in said), said
    assert not any("accumulated" in message for message in on_ranks(2, by_a_trainer, "a_loop_of_ones_own", "SFTTrainer")[0])


def test_a_trainer_that_knows_nothing_of_a_split_sequence_is_refused_on_every_rank():
    for (said,) in on_ranks(2, by_a_trainer, "transformers.trainer", "DPOTrainer"):
        assert "ValueError" in said and "TRL's DPOTrainer computes its loss from whole rows" in said


WITHOUT_THE_IMPORT = """
import sys
import deepspeed
config = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "sp_overlap": {"head_groups": 1}})
assert config._param_dict["sp_overlap"] and "ds_sp_overlap" not in sys.modules
"""


def test_an_import_that_is_missing_is_told_by_nothing_but_the_missing_line():
    """Stock DeepSpeed (0.19.8) accepts an unknown section without a message. If it refuses one day, change README."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "sp_overlap" not in done.stdout + done.stderr
