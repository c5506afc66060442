"""Time whole training steps over NCCL: a transformers LLaMA under DeepSpeed's Ulysses, and overlapped.

    python benchmarks/shared_gpu.py 2 benchmarks/whole_steps.py --out FILE      ranks that share one GPU
    torchrun --nproc-per-node 8 benchmarks/whole_steps.py --out FILE                     a GPU each
    python benchmarks/shared_gpu.py --rehearse 2 benchmarks/whole_steps.py --rehearse

Method. One engine (ZeRO-1, bf16, learning rate 0) runs throughout; ``enable`` and ``disable`` turn the overlap on and off, in turn.
The first step of a turn, and the whole first turn, are not counted. Loss and gradient norm of every variant must equal those of
stock, up to rounding of bf16. Times are medians, of the slowest rank:

    layers ms      forward and backward of the model, after a synchronisation, so that the host is not ahead at the begin
    host ms        the time in which the host queues this forward and backward
    training ms    a training step with the optimizer: three steps without a synchronisation between them, divided by three
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BEGIN = time.monotonic()  # imports take seconds, too

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import AutoModelForCausalLM, LlamaConfig

import ds_sp_overlap
from benchmarks import record
from benchmarks.nccl import shared_by
from benchmarks.profiles import join, synchronise
from ds_sp_overlap.tools.shared_gpu import nccl_version

# (hidden size, query heads, KV heads, intermediate size, layers, tokens of a rank)
MODELS = {
    "8b": (4096, 32, 8, 14336, 4, 8192),
    "1b": (2048, 16, 4, 8192, 8, 4096),
    "rehearsal": (64, 4, 2, 64, 2, 32),
}
TURNS, IN_A_ROW = 4, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="8b")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kernels", nargs="+", choices=["auto", "torch", "compiled"], default=["auto"])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no turn after so many")
    parser.add_argument("--rehearse", action="store_true", help="over gloo on a CPU, small: proves the script alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rehearse:
        args.model, args.groups, args.kernels = "rehearsal", [1, 2], ["auto"]
    return args


class Training:
    """Trains one model on all ranks."""

    def __init__(self, name: str, device: torch.device):
        hidden, heads, kv_heads, mlp, layers, tokens = MODELS[name]
        self.device, self.heads, self.rank, self.size = device, heads, dist.get_rank(), dist.get_world_size()
        self.seq = tokens * self.size
        on_gpu = device.type == "cuda"
        config = LlamaConfig(
            vocab_size=4096, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, max_position_embeddings=self.seq, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", self.size, 1, seq_length_is_variable=True)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": on_gpu},
            "zero_optimization": {"stage": 1},
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
            "sp_overlap": {"enabled": False},
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(model=model, config=settings, mpu=mpu)
        self.group = mpu.get_sequence_parallel_group()
        tokens = torch.randint(4096, (1, self.seq + 1), generator=torch.Generator().manual_seed(5)).to(device)
        whole = tokens[:, :-1], tokens[:, 1:], torch.arange(self.seq, device=device)[None]
        self.ids, self.labels, self.positions = (x.chunk(self.size, 1)[self.rank].contiguous() for x in whole)

    def step(self) -> tuple[float, torch.Tensor]:
        """Run a training step without the optimizer; return the time when all was queued, and this rank's share of the loss."""
        logits = self.engine(input_ids=self.ids, position_ids=self.positions, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.labels.flatten(), reduction="sum") / self.seq
        self.engine.backward(loss)
        return time.perf_counter(), loss.detach().clone()

    def turn(self) -> tuple[list[list[float]], list[float]]:
        """Return [layers, host, training] ms of two measurements, and [loss, gradient norm]."""
        self.step()
        self.engine.step()
        times = []
        for _ in range(2):
            dist.barrier()
            begin = synchronise(self.device)
            queued, _ = self.step()
            layers = synchronise(self.device)
            self.engine.step()
            begin_training = synchronise(self.device)
            for _ in range(IN_A_ROW):
                _, loss = self.step()
                self.engine.step()
            training = (synchronise(self.device) - begin_training) / IN_A_ROW
            times.append([layers - begin, queued - begin, training])
        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(loss)
        return (1e3 * slowest).tolist(), [loss.item(), float(self.engine.get_global_grad_norm())]


def measure(model: str, args: argparse.Namespace, device: torch.device, is_late) -> Iterator[list[dict]]:
    """Yield the rows of one model after each counted turn. Collective."""
    training = Training(model, device)
    variants: dict[str, dict | None] = {"stock": None}
    for kernels in args.kernels:
        for groups in (g for g in args.groups if g <= training.heads // training.size):
            name = f"G = {groups}" + f", kernels {kernels}" * (kernels != "auto")
            variants[name] = {"head_groups": groups, "kernels": kernels, "on_unsupported": "error"}
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    peak, expected = {}, None
    for turn in range(TURNS):
        for name, section in variants.items():
            if is_late():
                continue
            if section is not None:
                ds_sp_overlap.enable(training.engine.module, section, training.group)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took, found = training.turn()
            peak[name] = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
            ds_sp_overlap.disable(training.engine.module)
            expected = expected or found
            for value, wanted in zip(found, expected):
                if abs(value - wanted) > 1e-2 * wanted:
                    raise AssertionError(f"whole_steps: {model}, {name}: loss and gradient norm {found}, stock {expected}")
            times[name] += took if turn else []
        if turn:
            yield rows_of(model, times, peak)
    training.engine.destroy()


def rows_of(model: str, times: dict[str, list[list[float]]], peak: dict[str, float]) -> list[dict]:
    """Return a row for each variant that was measured."""
    _, heads, kv_heads, _, layers, tokens = MODELS[model]
    of = f"{layers} layers, hidden {MODELS[model][0]}, {heads}/{kv_heads} heads, {tokens} tokens a rank"
    rows, stock = [], None
    for name, measured in times.items():
        if not measured:
            continue
        layers_ms, host_ms, training_ms = (statistics.median(column) for column in zip(*measured))
        stock = stock or (layers_ms, training_ms)
        rows.append(
            {
                "model": of, "variant": name, "layers ms": round(layers_ms, 2), "stock / layers": round(stock[0] / layers_ms, 3),
                "host ms": round(host_ms, 2), "training ms": round(training_ms, 2),
                "stock / training": round(stock[1] / training_ms, 3), "peak MiB": round(peak[name]),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    args = arguments()
    device = join(args.rehearse)

    def is_late() -> bool:
        late = torch.tensor(float(time.monotonic() - BEGIN > 60 * args.minutes), device=device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        return bool(late.item())

    if args.rehearse:
        kind = f"REHEARSED: gloo, {dist.get_world_size()} processes on a CPU, no claim about time"
    else:
        kind = f"whole steps, {shared_by(dist.get_world_size())} {torch.cuda.get_device_name()}, NCCL " + ".".join(
            map(str, nccl_version())
        )
    for rows in measure(args.model, args, device, is_late):
        if dist.get_rank() == 0:
            record.write(args.out, rows, kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
