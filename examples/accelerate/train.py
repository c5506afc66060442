"""Train with Accelerate in a hand-written loop; Ulysses splits a long sequence over all ranks: see accelerate.yaml, ds.json."""

import argparse

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from deepspeed.utils import groups
from transformers import AutoModelForCausalLM, LlamaConfig

import ds_sp_overlap  # noqa: F401  # after this import, the DeepSpeed config may have a section "sp_overlap"

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny", help='name or folder of a model; "tiny" is one of random weights')
parser.add_argument("--sequence", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--attention", default="sdpa", help="or flash_attention_2, flash_attention_3; the same in accelerate.yaml")
given = parser.parse_args()

on_cpu = not torch.accelerator.is_available()
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu else [])
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

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if given.model == "tiny" else 1e-5)
loader = torch.utils.data.DataLoader(examples, batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
sp_group = groups._get_sequence_parallel_group()  # `prepare` has made the group

for step, batch in enumerate(loader, 1):
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    labels = batch["shift_labels"].flatten()  # of this rank's slice, as the logits
    loss, count = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum"), (labels != -100).sum()
    torch.distributed.all_reduce(count, group=sp_group)
    loss = loss / count.clamp(min=1)  # this rank's share of the mean; DeepSpeed sums gradients over the sp group
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    torch.distributed.all_reduce(loss := loss.detach(), group=sp_group)
    accelerator.print(f"step {step}: loss {loss.item():.9g} grad norm {float(model.get_global_grad_norm()):.9g}")
accelerator.end_training()
