"""Train under FSDP2 (fully_shard), without DeepSpeed's engine, with a long sequence that is split over all ranks."""

import argparse
import os

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

import ds_sp_overlap

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny", help='name or folder of a model; "tiny" is one of random weights')
parser.add_argument("--sequence", type=int, default=256, help="a length that the number of ranks divides")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--attention", default="sdpa", help="or flash_attention_2, flash_attention_3")
parser.add_argument(
    "--overlap", choices=["on", "off"], default="on", help="off: DeepSpeed's own Ulysses exchanges, to compare with"
)
given = parser.parse_args()

on_gpu = torch.accelerator.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
if on_gpu:
    torch.cuda.set_device(device)
torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
sp_group = (
    torch.distributed.group.WORLD
)  # for replicas, take the "sp" dimension of a mesh ("dp", "sp"), and choose this rank's data by its "dp" rank
rank, size = torch.distributed.get_rank(sp_group), torch.distributed.get_world_size(sp_group)
set_seed(0)
if given.model == "tiny":  # large weights, so that attention affects the loss from the first step on
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, initializer_range=0.1, attn_implementation=given.attention,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
else:
    model = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation=given.attention)
model.to(device).train()

if given.overlap == "on":
    report = ds_sp_overlap.enable(model, {}, sp_group)
    if rank == 0:
        print(report, flush=True)
else:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed()
    UlyssesSPAttentionHF.register_with_transformers(model, given.attention, sequence_parallel_size=size, micro_batch_size=1)

policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
for unit in (*model.model.layers, model):  # FSDP gathers one decoder layer at a time
    fully_shard(unit, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def sequence(step):
    """Return the token ids [1, s] of a step, the same on all ranks of the sp group. Replace this by your data set."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(1, 4, (1, given.sequence), generator=draw).cumsum(1) % model.config.vocab_size


for step in range(1, given.steps + 1):
    tokens = sequence(step)
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)  # shift labels before the sequence is cut
    positions = torch.arange(given.sequence)[None]  # must restart with each document
    tokens, labels, positions = (x.chunk(size, dim=1)[rank].to(device) for x in (tokens, labels, positions))

    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    torch.distributed.all_reduce(count, group=sp_group)
    loss = loss / count.clamp(min=1)  # this rank's share of the mean
    (size * loss).backward()  # FSDP averages over all ranks, but gradients of the sp group must be summed
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    torch.distributed.all_reduce(loss := loss.detach(), group=sp_group)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.9g} grad norm {norm.item():.9g}", flush=True)
torch.distributed.destroy_process_group()
