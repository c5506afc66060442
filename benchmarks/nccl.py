"""Check one attention layer on 2 to 8 GPUs over NCCL against the whole sequence, and measure its exposed communication.

nccl.sh starts this script once for each setting of the environment; gpu.sh starts it for ranks that share one GPU. With --rehearse,
it runs over gloo on a CPU, with small shapes.

    parity    output and every gradient in fp64, with each transport; and under ZeRO-3 in fp32
    trace     the order in which exchanges start, equal on all ranks; on a GPU also the share of NCCL's time under other kernels
    exposed   time of a step, minus that of the step whose exchanges take no time; of the slowest rank; medians, variants in turn
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import os
import socket
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import deepspeed
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

from benchmarks import record
from benchmarks.on_gpu import TOLERANCE, whole
from benchmarks.profiles import join, kernels, profiled, synchronise
from benchmarks.variants import Layer, Shape, Silent, check_parity, free_wire
from ds_sp_overlap.tools.shared_gpu import nccl_version

TRANSPORTS = ("auto", "copy_engine")
GROUPS = (1, 2, 4)
ZERO_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    "zero_allow_untested_optimizer": True,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="per GPU")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=int, default=60, help="seconds after which a collective fails")
    parser.add_argument("--first", action="store_true", help="parity and trace as well")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--table", type=Path, metavar="FOLDER", help="print the rows of all settings in one table, and do nothing else"
    )
    args = parser.parse_args()
    if args.rehearse:
        args.tokens, args.heads, args.kv_heads, args.steps = 16, 8, 4, 2
    return args


def shared_by(ranks: int) -> str:
    """Return "2 x" for two ranks with a GPU each, or "2 ranks sharing 1 x". Collective."""
    mine, every = (socket.gethostname(), torch.cuda.current_device()), [None] * ranks
    dist.all_gather_object(every, mine)
    gpus = len(set(every))
    return f"{gpus} x" if gpus == ranks else f"{ranks} ranks sharing {gpus} x"


class Run:
    """Holds the arguments and this rank; rank 0 prints."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = join(args.rehearse, args.timeout)
        self.group = dist.group.WORLD
        self.order, self.queues = (
            os.environ.get(name, "not set") for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS")
        )

    @functools.cached_property
    def machine(self) -> str:
        """Describe the machine of the measurement. The first call is collective."""
        if self.args.rehearse:
            return f"REHEARSED: gloo, {self.size} processes on a CPU, no claim about time"
        nccl = ".".join(map(str, nccl_version()))
        return f"{shared_by(self.size)} {torch.cuda.get_device_name()}, NCCL {nccl}, torch {torch.__version__}"

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def shape(self, dtype: torch.dtype, seq: int, kv_heads: int) -> Shape:
        return Shape(seq, self.args.heads, 8 if self.args.rehearse else 128, kv_heads, 1, dtype, str(self.device))


def usable(run: Run) -> list[str]:
    """Return the transports that work here; the result is equal on all ranks."""
    found = []
    for name in TRANSPORTS:
        layer = Layer(run.shape(torch.float32, 16 * run.size, run.args.kv_heads), run.rank, run.size, run.group)
        try:
            layer.step(layer.ours(head_groups=1, transport=name))
        except (ValueError, RuntimeError) as error:
            run.say(f"transport {name}: {str(error).splitlines()[0]}")
            if name == "auto":
                raise
            continue
        found.append(name)
    return found


def check(run: Run, transports: list[str]) -> None:
    """Compare with the layer on the whole sequence in one process."""
    for kv_heads in sorted({run.args.kv_heads, run.args.heads, 1}):
        of = run.shape(torch.float64, 32 * run.size, kv_heads)
        expected = whole(of, run.size)[run.rank]
        for name in transports:
            for groups in (g for g in GROUPS if g <= of.heads // run.size):
                layer = Layer(of, run.rank, run.size, run.group)
                y, dx, *weights = layer.step(layer.ours(head_groups=groups, transport=name))
                for weight in weights:
                    dist.all_reduce(weight)
                check_parity(f"{kv_heads} KV heads, {name}, G = {groups}", [y, dx, *weights], expected, TOLERANCE)
        run.say(f"parity: {of.heads} heads, {kv_heads} KV heads, fp64: as on the whole sequence, by {' and '.join(transports)}")


class Trained(nn.Module):
    def __init__(self, layer: Layer):
        super().__init__()
        self.projections = layer.projections
        self.run = [layer.ours(head_groups=2 if layer.shape.heads // layer.size > 1 else 1)]  # a list: no submodule

    def forward(self, x):
        return self.run[0](x)


def check_zero3(run: Run) -> None:
    """Compare gradients under ZeRO-3, from the second step on: in the first, ZeRO-3 learns the order of the modules.

    In fp32, the limit for sums in another order is 1e-5 of the largest element; a mistake gives more than 1e-3.
    """
    of = run.shape(torch.float32, 32 * run.size, run.args.kv_heads)
    _, _, *expected = whole(of, run.size)[run.rank]
    layer = Layer(of, run.rank, run.size, run.group)
    engine, *_ = deepspeed.initialize(model=Trained(layer), config=ZERO_3)
    for _ in range(3):
        y = engine(layer.x.clone().requires_grad_())
        engine.backward((y * layer.dy).sum())
        # ZeRO averages over the ranks.
        got = [run.size * deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
        engine.step()
    check_parity("ZeRO-3", got, expected)
    engine.destroy()
    run.say("parity: under ZeRO-3, fp32: gradients as on the whole sequence")


def trace(run: Run) -> None:
    """Check that exchanges start in the same order on all ranks."""
    of = run.shape(torch.float32 if run.args.rehearse else torch.bfloat16, run.args.tokens * run.size, run.args.kv_heads)
    layer = Layer(of, run.rank, run.size, run.group)
    groups = 2 if of.heads // run.size > 1 else 1
    block = layer.ours(head_groups=groups)
    for _ in range(3):
        layer.step(block)
    profile = profiled(lambda: layer.step(block), run.device)
    if run.args.out and run.rank == 0:
        profile.export_chrome_trace(str(run.args.out / "trace.json.gz"))
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    ranges = [event.name() for event in events if event.device_type() == torch.profiler.DeviceType.CPU]  # the GPU has them too
    starts = [name.split()[1] for name in ranges if name.startswith("layer ") and name.endswith(" start")]
    every = [None] * run.size
    dist.all_gather_object(every, starts)
    if any(of_rank != starts for of_rank in every) or len(starts) < 8:
        raise AssertionError(f"trace: the ranks start other exchanges, or too few: {every}")
    run.say(f"trace: G = {groups}, alike on all ranks: starts {' '.join(starts)}")
    if run.device.type == "cuda":
        ran = kernels(events)
        moving = [(e.start_ns(), e.end_ns()) for e in ran if "nccl" in e.name()]
        others = [(e.start_ns(), e.end_ns()) for e in ran if "nccl" not in e.name()]
        # Kernels of the compute stream don't overlap with one another.
        under = sum(max(0, min(end, stop) - max(begin, start)) for begin, end in moving for start, stop in others)
        run.say(f"trace: {under / max(sum(end - begin for begin, end in moving), 1):.0%} of NCCL's time lies under other kernels")


def variants(run: Run, transport: str) -> dict[str, tuple]:
    """Return {name: (layer, step, the same step with exchanges that take no time)}."""
    of = run.shape(torch.float32 if run.args.rehearse else torch.bfloat16, run.args.tokens * run.size, run.args.kv_heads)
    layer = Layer(of, run.rank, run.size, run.group)

    found = {}
    if of.kv_heads % run.size == 0:
        stock = layer.stock()
        found["stock"] = layer, stock, stock  # `free_wire` makes its exchanges free
    for groups in (g for g in GROUPS if g <= of.heads // run.size):
        options = {"head_groups": groups}
        found[f"G = {groups}"] = layer, layer.ours(**options, transport=transport), layer.ours(Silent(), **options)
    return found


def step_ms(run: Run, layer: Layer, attend) -> float:
    dist.barrier()
    begin = synchronise(run.device)
    layer.step(attend)
    took = torch.tensor(1e3 * (synchronise(run.device) - begin), device=run.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def measure(run: Run, transport: str, rows: list[dict]) -> None:
    steps = variants(run, transport)
    times: dict[tuple[str, bool], list[float]] = {}
    for turn in range(3 + run.args.steps):
        for name, (layer, attend, free) in steps.items():
            for is_free in (False, True):
                with free_wire() if is_free and free is attend else contextlib.nullcontext():
                    took = step_ms(run, layer, free if is_free else attend)
                if turn >= 3:
                    times.setdefault((name, is_free), []).append(took)
    for name in steps:
        step, free = (statistics.median(times[name, is_free]) for is_free in (False, True))
        rows.append(
            {
                "measured on": run.machine, "launch order": run.order, "queues": run.queues, "transport": transport,
                "variant": name, "step ms": round(step, 3), "free wire ms": round(free, 3), "exposed ms": round(step - free, 3),
            }
        )  # fmt: skip


def main() -> None:
    args = arguments()
    if args.table:
        rows = []
        for file in sorted(args.table.glob("setting-*.csv")):
            with file.open() as lines:
                rows += csv.DictReader(lines)
        print(tabulate(rows, headers="keys", tablefmt="github"))
        return
    run = Run(args)
    run.say(run.machine)
    transports = usable(run)
    if args.first:
        check(run, transports)
        check_zero3(run)
        trace(run)
    out = args.out and args.out / f"setting-order{run.order}-queues{run.queues}.csv"
    rows = record.Rows(out if run.rank == 0 else None)
    for transport in transports:
        measure(run, transport, rows)
    run.say(f"{len(rows)} rows")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
