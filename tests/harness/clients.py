"""Trains for a few steps on each rank of a test, by transformers' Trainer, TRL's SFTTrainer or Accelerate."""

import contextlib
import gc
import itertools
import json
import os
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from peft import LoraConfig, get_peft_model
from transformers import ByT5Tokenizer, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_sp_overlap
from tests.harness.models import BATCH, SEQ, Run, batches, ds_config, forget_sequence_parallel, overlapped_layers, tiny

STEPS = 4
LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
# head_dim is set, since stock Ulysses fails if it is None.
EXPERTS = dict(family="mixtral", num_local_experts=4, output_router_logits=True, head_dim=8)


@contextlib.contextmanager
def fresh():
    """Reset the global state of Accelerate, transformers and DeepSpeed before and after the body."""

    def forget():
        forget_sequence_parallel()
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
        gc.collect()

    forget()
    try:
        yield
    finally:
        forget()


def rows(number, labels=True):
    """Yield the examples of a data set, all of one length."""
    for tokens in batches(number, 1):
        yield {"input_ids": tokens[0], **({"labels": tokens[0].clone(), "position_ids": torch.arange(SEQ)} if labels else {})}


def sp_of_two():
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)


def _trainer(
    client, section, folder, stage=1, lora=False, checkpointing=None, accumulation=1, evaluate=False, moe=False, model=None,
):  # fmt: skip
    """Make a Trainer or an SFTTrainer, sequence parallel over all ranks.

    checkpointing   whether gradient checkpointing is reentrant; None for no checkpointing
    model           a function that makes the model; the default makes a `tiny` model
    """
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({} if section is None else {"sp_overlap": section}),
    }  # fmt: skip
    model = model() if model else tiny(initializer_range=0.2, **(EXPERTS if moe else {}))
    arguments = dict(
        output_dir=folder, deepspeed=config, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, bf16=False,
        gradient_accumulation_steps=accumulation, gradient_checkpointing=checkpointing is not None,
        gradient_checkpointing_kwargs={"use_reentrant": checkpointing} if checkpointing is not None else None,
        parallelism_config=sp_of_two(),
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="steps", save_steps=2, eval_strategy="steps" if evaluate else "no", eval_steps=2,
        per_device_eval_batch_size=BATCH, seed=1,
        ignore_data_skip=True,  # on a resume, Trainer can't skip data of the loader of stock Ulysses
    )  # fmt: skip
    count = STEPS * accumulation * BATCH
    lora = LoraConfig(**LORA, init_lora_weights=False) if lora else None
    if client == "Trainer":
        torch.manual_seed(1)  # for LoRA's weights
        return Trainer(
            model=get_peft_model(model, lora) if lora else model, args=TrainingArguments(**arguments),
            train_dataset=list(rows(count)), eval_dataset=list(rows(BATCH)),
        )  # fmt: skip
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model, args=SFTConfig(**arguments, pad_to_multiple_of=2, dataset_num_proc=None), peft_config=lora,
        train_dataset=Dataset.from_list([{key: x.tolist() for key, x in row.items()} for row in rows(count, False)]),
        eval_dataset=Dataset.from_list([{key: x.tolist() for key, x in row.items()} for row in rows(BATCH, False)]),
        processing_class=ByT5Tokenizer(),
    )  # fmt: skip


def train(rank, client, section, folder, resume=False, **options):
    """Train with a ``client``, "Trainer" or "SFTTrainer"; return a `Run`. Without a ``section``, train with stock Ulysses.

    resume    whether to train the second half once more, from the checkpoint of the first half
    options   further arguments of `_trainer`
    """
    run = Run()
    with fresh():
        for start in [None, f"{folder}/checkpoint-2"] if resume else [None]:
            trainer = _trainer(client, section, folder, **options)
            trainer.train(resume_from_checkpoint=start)
            steps = [entry for entry in trainer.state.log_history if "loss" in entry]
            if start is None:
                run.losses, run.norms = [x["loss"] for x in steps], [float(x["grad_norm"]) for x in steps]
                run.evaluated = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
            else:
                run.resumed = [number for x in steps[2:] for number in (x["loss"], float(x["grad_norm"]))]
            leave(trainer.model, trainer.deepspeed, section)
            forget_sequence_parallel()
    return run


def leave(model, engine, section):
    """Check that both attention layers were overlapped if there is a section; then clean up."""
    assert len(overlapped_layers(model)) == (0 if section is None else 2)
    ds_sp_overlap.disable(model)
    engine.destroy()


def train_with_accelerate(rank, section, stage=2, folder=None, steps=4):
    """Train with Accelerate in a hand-written loop; return the losses. The config is a dict, or a JSON file in ``folder``."""
    config = {**ds_config(stage, optimizer="SGD"), **({} if section is None else {"sp_overlap": section})}
    del config["optimizer"]
    if folder is not None:
        path = Path(folder) / f"{rank}.json"
        path.write_text(json.dumps(config))
        config = str(path)
    model, losses = tiny(initializer_range=0.2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(list(rows(2 * steps * BATCH)), batch_size=BATCH)
    with mock.patch.dict(os.environ, ACCELERATE_USE_DEEPSPEED="true"), fresh():  # `accelerate launch` sets this variable, too
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            parallelism_config=sp_of_two(),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        group = model.mpu.get_sequence_parallel_group()
        for batch in itertools.islice(loader, steps):
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            labels = batch["shift_labels"].flatten()
            share = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
            total, count = share.detach().clone(), (labels != -100).sum()
            for sum_of_ranks in (total, count):
                torch.distributed.all_reduce(sum_of_ranks, group=group)
            accelerator.backward(share / count)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((total / count).item())
        leave(accelerator.unwrap_model(model), model, section)
    return losses
