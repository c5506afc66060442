"""Train a causal language model with transformers' Trainer, with a long sequence that Ulysses splits over all ranks."""

import argparse
import os

import deepspeed
import torch
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

import ds_sp_overlap  # noqa: F401  # after this import, the DeepSpeed config may have a section "sp_overlap"

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny", help='name or folder of a model; "tiny" is one of random weights')
parser.add_argument("--deepspeed", required=True, metavar="JSON")
parser.add_argument("--output", required=True, metavar="FOLDER")
parser.add_argument("--sequence", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--attention", default="sdpa", help="or flash_attention_2, flash_attention_3")
given = parser.parse_args()

deepspeed.init_distributed()
set_seed(0)
if given.model == "tiny":  # large weights, so that attention affects the loss from the first step on
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, initializer_range=0.1, attn_implementation=given.attention,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
else:
    model = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation=given.attention)

# Your data set goes here. All sequences must have the same length, which must divide by the number of ranks. Labels are shifted for
# you, before the sequence is cut. position_ids restart with each document. This data set has random walks.
draw, vocabulary = torch.Generator().manual_seed(0), model.config.vocab_size
walks = [torch.randint(1, 4, (given.sequence,), generator=draw).cumsum(0) % vocabulary for _ in range(given.steps)]
examples = [{"input_ids": walk, "labels": walk, "position_ids": torch.arange(given.sequence)} for walk in walks]

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=given.output,
        deepspeed=given.deepspeed,
        parallelism_config=ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=int(os.environ["WORLD_SIZE"]),
            sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation=given.attention),
        ),
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        learning_rate=1e-3 if given.model == "tiny" else 1e-5,
        max_steps=given.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
        bf16=torch.accelerator.is_available(),
    ),
    train_dataset=examples,
)
trainer.train()
trainer.save_state()  # trainer_state.json has the loss of every step
