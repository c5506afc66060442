"""Train in a hand-written loop around deepspeed.initialize, with a long sequence that Ulysses splits over all ranks."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

import ds_sp_overlap  # noqa: F401  # after this import, the DeepSpeed config may have a section "sp_overlap"

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny", help='name or folder of a model; "tiny" is one of random weights')
parser.add_argument("--deepspeed_config", required=True, metavar="JSON")
parser.add_argument("--sequence", type=int, default=256, help="a length that the number of ranks divides")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--attention", default="sdpa", help="or flash_attention_2, flash_attention_3")
parser.add_argument("--local_rank", help="given by the deepspeed launcher")
given = parser.parse_args()

deepspeed.init_distributed()
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
set_seed(0)
if given.model == "tiny":  # large weights, so that attention affects the loss from the first step on
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, initializer_range=0.1, attn_implementation=given.attention,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
else:
    model = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation=given.attention)

ds_config = json.loads(Path(given.deepspeed_config).read_text())
ds_config["bf16"] = {"enabled": torch.accelerator.is_available()}
mpu = UlyssesSPAttentionHF.register_with_transformers(model, given.attention, sequence_parallel_size=size, micro_batch_size=1)
engine, *_ = deepspeed.initialize(model=model, config=ds_config, mpu=mpu)
sp_group = mpu.get_sequence_parallel_group()


def sequence(step):
    """Return the token ids [1, s] of a step, the same on all ranks of the sp group. Replace this by your data set."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(1, 4, (1, given.sequence), generator=draw).cumsum(1) % model.config.vocab_size


for step in range(1, given.steps + 1):
    tokens = sequence(step)
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)  # shift labels before the sequence is cut
    positions = torch.arange(given.sequence)[None]  # must restart with each document
    tokens, labels, positions = (x.chunk(size, dim=1)[rank].to(engine.device) for x in (tokens, labels, positions))

    logits = engine(input_ids=tokens, position_ids=positions, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    torch.distributed.all_reduce(count, group=sp_group)
    loss = loss / count.clamp(min=1)  # this rank's share of the mean; DeepSpeed sums gradients over the sp group
    engine.backward(loss)
    engine.step()
    torch.distributed.all_reduce(loss := loss.detach(), group=sp_group)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.9g} grad norm {float(engine.get_global_grad_norm()):.9g}", flush=True)
torch.distributed.destroy_process_group()
