"""Fine-tune with TRL's SFTTrainer, with long sequences that Ulysses splits over all ranks: see accelerate.yaml."""

import argparse
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, set_seed
from trl import SFTConfig, SFTTrainer

import ds_sp_overlap  # noqa: F401  # with this import, DS_SP_OVERLAP=1 in the environment switches the overlap on

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny", help='name or folder of a model; "tiny" is one of random weights')
parser.add_argument("--output", required=True, metavar="FOLDER")
parser.add_argument("--sequence", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--attention", default="sdpa", help="or flash_attention_2, flash_attention_3; the same in accelerate.yaml")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--packing", action="store_true", help="pack rows instead of padding them")
given = parser.parse_args()

set_seed(0)
if given.model == "tiny":  # large weights, so that attention affects the loss from the first step on
    tokenizer = ByT5Tokenizer()  # bytes
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, initializer_range=0.1, attn_implementation=given.attention,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
else:
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation=given.attention)

draw = random.Random(0)


def sums():  # rows of different lengths, as in most data sets
    return "; ".join(f"{(a := draw.randrange(99))} + {(b := draw.randrange(99))} = {a + b}" for _ in range(draw.randrange(5, 40)))


trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=given.output,
        max_length=given.sequence,
        # DeepSpeed's loader needs rows of one length that divides by the number of ranks: pad all rows, or pack by "wrapped".
        **({"packing": True, "packing_strategy": "wrapped"} if given.packing else {"pad_to_multiple_of": given.sequence}),
        per_device_train_batch_size=1,
        learning_rate=1e-3 if given.model == "tiny" else 1e-5,
        max_steps=given.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        ddp_backend=None if torch.accelerator.is_available() else "gloo",
        bf16=torch.accelerator.is_available(),
    ),
    train_dataset=Dataset.from_dict({"text": [sums() for _ in range(64)]}),  # your data set goes here, in any of TRL's formats
    processing_class=tokenizer,
    peft_config=LoraConfig(target_modules="all-linear") if given.lora else None,
)
trainer.train()
trainer.save_state()  # trainer_state.json has the loss of every step
