"""Measure how much an exchange's thread blocks slow down a GPU's kernels, and how long such a block waits for an SM.

    python benchmarks/contention.py --out benchmarks/results/contention        on an NVIDIA GPU
    python benchmarks/contention.py --rehearse                                 the same steps, small, on a CPU: tests the script

Blocks with the footprint of NCCL's (throttled.cu) occupy SMs and move no data, so the slowdown is due to the lost SMs alone.

    alone, beside    ms of a kernel by itself, and while the blocks are there; random data, medians. The same kernel runs before:
                     after a pause of milliseconds, a GPU takes up to 1.5 times as long, until its clock has risen again
    wait             from the begin of a kernel until the first, or the last, block has an SM; the blocks are launched right after
                     the kernel, at high priority

The resulting figures of the GPU go to measured.json, which `python -m ds_sp_overlap plan --gpu h100 --measured FILE` reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.nn.functional as F

from benchmarks import record
from benchmarks.one_gpu import on_device
from ds_sp_overlap.tools.planner.gpu.constants import GPUS

BLOCKS, CLUSTERS = (0, 4, 8, 16, 32), (1, 4)
BEFORE = 3  # runs of a kernel before the timed run; after the first of them, the blocks have their SMs
# (rows, columns, inner dimension) of products in Llama-8B with 8192 tokens: projections, wgrad, a group of heads, the MLP.
PRODUCTS = ((8192, 4096, 4096), (8192, 1024, 4096), (4096, 4096, 8192), (8192, 2048, 4096), (8192, 14336, 4096))
PERSISTENT, PERSISTENT_NS = "persistent on all SMs", 1_000_000
TOKENS, HEADS, HEAD_DIM = 65536, 4, 128  # attention on a rank of Llama-8B at P = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=3.0, help="start no case after so many; say how many are left")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("no CUDA device; --rehearse runs the same steps on a CPU")
    return args


class Device:
    """Times kernels on a GPU, with and without blocks; on a CPU, by the clock and without blocks."""

    def __init__(self, rehearse: bool):
        self.cuda = not rehearse
        self.name = "CPU" if rehearse else torch.cuda.get_device_name()
        self.options = {"device": "cuda" if self.cuda else "cpu", "dtype": torch.bfloat16 if self.cuda else torch.float32}
        if self.cuda:
            self.urgent = torch.cuda.Stream(priority=-1)
            self.times = torch.zeros(1 + max(BLOCKS), dtype=torch.int64, device="cuda")
        self.clusters = CLUSTERS if not self.cuda or torch.cuda.get_device_capability() >= (9, 0) else (1,)

    def hold(self, blocks: int, cluster: int, ns: int) -> None:
        """Queue blocks that occupy their SMs for ``ns`` nanoseconds, on the stream of high priority."""
        with torch.cuda.stream(self.urgent):
            on_device().throttled(None, None, 0, ns, blocks, cluster, self.times[1:].data_ptr())

    def ms(self, run, blocks: int = 0, cluster: int = 1, hold_ms: float = 0.0) -> float:
        """Return the time of ``run`` in ms, while blocks occupy SMs for ``hold_ms``."""
        if not self.cuda:
            begin = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - begin)
        if blocks:
            self.hold(blocks, cluster, int(1e6 * hold_ms))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(BEFORE):
            run()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def wait_us(self, run, blocks: int, cluster: int) -> tuple[float, float]:
        """Return how long the first and the last block wait for an SM, in us, if they are launched after ``run``."""
        if not self.cuda:
            run()
            return 0.0, 0.0
        begun = torch.cuda.Event()
        run()
        on_device().stamp(self.times.data_ptr())
        begun.record()
        run()
        self.urgent.wait_event(begun)
        self.hold(blocks, cluster, 1000)
        torch.cuda.synchronize()
        stamp, *each = self.times[: 1 + blocks].tolist()
        return (min(each) - stamp) / 1e3, (max(each) - stamp) / 1e3


def kernels(device: Device) -> dict[str, tuple]:
    """Return {name of a kernel: (function that runs it, its FLOP)}."""

    def random(*shape):
        return torch.randn(shape, **device.options)

    small = 1 if device.cuda else 64
    found = {}
    for shape in PRODUCTS:
        m, n, k = (size // small for size in shape)
        a, b = random(m, k), random(n, k)
        found[f"product {m} x {n} x {k}"] = (lambda a=a, b=b: F.linear(a, b)), 2 * m * n * k
    tokens = TOKENS // small
    q, k, v, do = (random(1, HEADS, tokens, HEAD_DIM // small or 1).requires_grad_() for _ in range(4))
    flops = 2 * tokens**2 * HEADS * q.shape[-1]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found["attention"] = (lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True)), flops
    found["attention backward"] = (lambda: torch.autograd.grad(o, (q, k, v), do.detach(), retain_graph=True)), 2.5 * flops
    x = random(2**26 // small)
    y = torch.empty_like(x)
    found["copy"] = (lambda: y.copy_(x)), 0
    if device.cuda:
        # Kernels that keep their SMs for a known time. So the time that a block must wait after them is known, too.
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        for name, count in ((PERSISTENT, sms), (f"{PERSISTENT} but 16", sms - 16)):
            found[name] = (lambda count=count: on_device().throttled(None, None, 0, PERSISTENT_NS, count, 1, None)), 0
    return found


def measure(device: Device, args: argparse.Namespace, rows: list[dict]) -> int:
    """Measure all cases, and add them to ``rows``; return the number of cases left out for lack of time."""
    begin, left = time.monotonic(), 0
    runs = kernels(device)
    for run, _ in runs.values():
        for _ in range(3):
            run()
    for blocks in (16, *(each for each in BLOCKS if each != 16)):  # first the number that the package asks for
        for cluster in device.clusters if blocks else (1,):
            for name, (run, flops) in runs.items():
                if time.monotonic() - begin > 60 * args.minutes:
                    left += 1
                    continue
                alone, beside, waits = [], [], []
                for _ in range(args.repeat):
                    alone.append(device.ms(run))
                    # Hold the SMs for twice the time of the runs alone; with blocks, no run has taken more than 1.3 times as long.
                    beside.append(device.ms(run, blocks, cluster, hold_ms=2 * (BEFORE + 1) * alone[-1] + 1))
                    if blocks:
                        waits.append(device.wait_us(run, blocks, cluster))
                by_itself = statistics.median(alone)
                row = {
                    "machine": device.name, "kernel": name, "blocks": blocks, "cluster": cluster, "alone ms": round(by_itself, 4),
                    "TFLOP/s": round(flops / by_itself / 1e9, 1), "beside / alone": round(statistics.median(beside) / by_itself, 3),
                }  # fmt: skip
                for which, index in (("first", 0), ("last", 1)):
                    row[f"{which} block waits us"] = round(statistics.median(wait[index] for wait in waits), 1) if waits else ""
                rows.append(row)
    return left


def launch_us(device: Device) -> float:
    """Return the host's time to launch a small kernel, in us."""
    x = torch.zeros(1, **device.options)
    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(500):
            x.add_(1)
        took = time.perf_counter() - begin
        if device.cuda:
            torch.cuda.synchronize()
    return 1e6 * took / 500


def figures(rows: list[dict], host_us: float) -> dict[str, float]:
    """Return the figures for `plan --gpu`, by their names in its table."""
    peak = GPUS["h100"]["tflops"].value

    def rate(kind: str) -> float | None:
        return max((row["TFLOP/s"] for row in rows if row["kernel"] == kind or row["kernel"].startswith(f"{kind} ")), default=None)

    forward, backward = (
        max((row["TFLOP/s"] for row in rows if row["kernel"] == kind), default=0) for kind in ("attention", "attention backward")
    )
    # Forward has 2 of 7 products, backward 5.
    attention = 7 / (2 / forward + 5 / backward) if forward and backward else None
    reached = {"gemm_share": rate("product"), "attention_share": attention}
    found = {name: round(value / peak, 4) for name, value in reached.items() if value}
    return {**found, "launch_us": round(host_us, 2)}


def decisions(rows: list[dict]) -> list[str]:
    """Return lines that draw conclusions from the rows."""
    said = []
    for blocks in BLOCKS[1:]:
        of = [row for row in rows if row["blocks"] == blocks and row["kernel"].startswith("product")]
        if not of:
            continue
        plain = statistics.median(row["beside / alone"] for row in of)
        said.append(f"{blocks} blocks: products take {plain:.2f} times as long")
    for kernel in (PERSISTENT, f"{PERSISTENT} but 16", "attention", "attention backward"):
        of = [row for row in rows if row["kernel"] == kernel and row["blocks"]]
        waits = [row["first block waits us"] / 1e3 / row["alone ms"] for row in of]
        if waits:
            said.append(f"a block waits for {max(waits):.0%} of a kernel that was launched before it: {kernel}")
        if kernel == PERSISTENT and waits and min(waits) < 0.8:
            said.append(f"BLIND: a block got an SM behind a kernel that holds all of them, after {min(waits):.0%} of it")
    said += [
        "decide max_ctas: the blocks beside which products stay near their time alone; whether they carry the bandwidth, nccl.sh says",
        "decide the gate: needed, if a block waits for most of a kernel; not needed, if next to nothing",
    ]
    return said


def main() -> None:
    args = arguments()
    device = Device(args.rehearse)
    if args.rehearse:
        args.repeat = 1
    rows = record.Rows(args.out and args.out.with_suffix(".csv"))
    left = measure(device, args, rows)
    kind = "ONE GPU, blocks that move nothing"
    kind += ", REHEARSED ON A CPU: no blocks, no claim about time" if args.rehearse else f", measured on {device.name}"
    said = [f"rehearsed, means nothing: {line}" for line in decisions(rows)] if args.rehearse else decisions(rows)
    notes = [*said, *([f"left out after {args.minutes:g} minutes: {left} cases"] if left else [])]
    record.write(args.out, rows, kind, notes)
    if args.out and not args.rehearse:
        measured = args.out.with_name("measured.json")
        measured.write_text(json.dumps(figures(rows, launch_us(device)), indent=2) + "\n")
        print(f"figures for plan --gpu --measured: {measured}")


if __name__ == "__main__":
    main()
