"""Time one attention layer over a real slow link, from exchanges that take almost no time to twice the time of the arithmetic.

    sudo python benchmarks/link.py --out benchmarks/results/link

Method. The ranks sit in network namespaces behind token buckets (`wire.py`); each has one core, shared with gloo and the
kernel's network stack, and one thread. A step is forward and backward of one layer: projections, exchanges, causal attention,
output projection (`variants.py`). First the layer's arithmetic is timed, then the rate is set so that the eight exchanges
take the wanted multiple of it. Parity before timing: a variant that gives other outputs or gradients than DeepSpeed's class
stops the run. All variants run in turn inside one loop, each step after a barrier; a step takes as long as its slowest rank.

    compute        the fastest of DeepSpeed's class, VeOmni's and ours with each number of groups, with exchanges that take no time
    exchange       the eight exchanges alone, all in flight at once
    limit          max(compute, exchange); exposed ms is step - compute
    phase limit    the limit of forward plus the limit of backward: a forward exchange can't hide behind the backward. Forward has
                   half of the exchange, but only a third of the arithmetic. So near exchange = compute, every schedule of one
                   layer stays at least a sixth above the limit
    side by side   compute and exchange of unrelated data at once: its excess over the limit is the processor time that moving bytes
                   takes from a rank's core; no schedule can avoid it

With --veomni, VeOmni's async Ulysses runs, too, from a checkout of VeOmni: its functions of one layer, unchanged, around the same
attention. Its all-to-all of lists, which gloo lacks, uses the same plain TCP, so that it needs no copy that ours does not need.

The figures are of a rate-limited link. They compare schedules, and say nothing about any fabric. More ranks than cores share
cores: such figures show that the schedule works, and support no claim about time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.wire import PAYLOAD, Wire, join  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0, 2.0], help="exchange / compute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, default=2048, help="global sequence, tokens")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    tried = "https://github.com/ByteDance-Seed/VeOmni, tried at revision d9774494f5d8 (August 2026)"
    parser.add_argument("--veomni", type=Path, metavar="CHECKOUT", help=f"time VeOmni's async Ulysses, too: {tried}")
    parser.add_argument("--no-switches", action="store_true", help="leave out the variants with one switch turned off")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write OUT.csv, OUT.json and OUT.png")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only-compute", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.veomni and not (args.veomni / "veomni").is_dir():
        parser.error(f"--veomni: no folder veomni in {args.veomni}; give a checkout of {tried}")
    return args


def configs(args: argparse.Namespace) -> dict[str, dict]:
    """Return {variant of ours: its ``sp_overlap`` section}."""
    best = max((g for g in args.groups if g <= 2), default=min(args.groups))
    every = {f"G = {g}": {"head_groups": g} for g in args.groups}
    if not args.no_switches:
        every[f"G = {best}, projections off"] = {"head_groups": best, "projections": False}
        every[f"G = {best}, wgrad off"] = {"head_groups": best, "wgrad": False}
    return every


# One rank.


def measure(variants: dict, args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Time the variants in turn.

    Returns for each variant the wall ms of the slowest rank in each step, and the median processor ms of a step in threads other
    than the calling one.
    """
    import torch
    import torch.distributed as dist

    def others_s() -> float:
        return time.process_time() - time.thread_time()

    times: dict[str, list[float]] = {name: [] for name in variants}
    others: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.warmup + args.steps):
        for name, run in variants.items():
            dist.barrier()
            begin, before = time.perf_counter(), others_s()
            run()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            others[name].append((others_s() - before) * 1e3)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn >= args.warmup:
                times[name].append(took.item() * 1e3)
    dist.barrier()
    return times, {name: statistics.median(values) for name, values in others.items()}


def predict(shape, args: argparse.Namespace) -> dict[str, float]:
    """Return the step ms of each schedule, simulated with the rates that the planner measures on this link. Collective."""
    import torch
    import torch.distributed as dist

    from benchmarks.simulated import BASELINE, UPSTREAM, Costs, Rates
    from ds_sp_overlap.schedule import by_head_groups
    from ds_sp_overlap.tools.planner import measure
    from ds_sp_overlap.tools.planner.costs import LayerShape

    layer = LayerShape(
        shape.width,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.seq,
        args.ranks,
        shape.batch,
        shape.dtype.itemsize,
    )
    found = measure.rates(layer, dist.group.WORLD, torch.device("cpu"), tflops=1)
    rates = Rates(1e12 * found["gemm_share"], 1e12 * found["attention_share"], 1e9 * found["wire_gbs"], found["latency_us"] / 1e3)
    one = Costs(layer, rates, 1)
    played = {"DeepSpeed": one.simulate(BASELINE), "five of eight": one.simulate(UPSTREAM)}
    for groups in args.groups:
        costs = Costs(layer, rates, groups)
        played[f"G = {groups}"] = costs.simulate(by_head_groups(costs.geometry.kinds))
    return {name: of.step_ms for name, of in played.items()}


def work(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    from benchmarks.variants import Layer, Shape, Silent, check_parity, free_wire

    join(args.rank, args.ranks)
    shape = Shape(args.seq, args.heads, args.head_dim, args.kv_heads or args.heads, args.batch)
    layer = Layer(shape, args.rank, args.ranks, dist.group.WORLD)
    stock, silent = layer.stock(), {g: layer.ours(Silent(), head_groups=g) for g in args.groups}
    others = {"DeepSpeed": stock}
    if args.veomni:
        others["VeOmni"] = layer.veomni(args.veomni)

    def over_free_wire(run):
        with free_wire():
            layer.step(run)

    variants = {
        **{f"compute: {name}": lambda run=run: over_free_wire(run) for name, run in others.items()},
        **{f"compute: G = {g}": lambda run=run: layer.step(run) for g, run in silent.items()},
        "forward": lambda: layer.forward(silent[args.groups[0]]),
    }
    peak, predicted, kept = {}, {}, None
    if not args.only_compute:
        ours = {name: lambda mover=None, config=config: layer.ours(mover, **config) for name, config in configs(args).items()}
        ours["five of eight"] = layer.five_of_eight
        runs = others | {name: make() for name, make in ours.items()}
        runs["G = auto"], kept = layer.auto()
        expected = layer.step(stock)
        for name, run in runs.items():
            check_parity(name, layer.step(run), expected)
        del expected
        with free_wire():  # in one thread, since memory that other threads free would not be seen
            peak = {name: layer.peak_bytes(run) for name, run in others.items()}
            peak |= {name: layer.peak_bytes(make(Silent())) for name, make in ours.items()}
            peak["G = auto"] = layer.peak_bytes(stock if kept == "off" else layer.ours(Silent(), head_groups=kept))
        predicted = predict(shape, args)
        launch = layer.exchanges()

        def side_by_side():
            wait = launch()
            layer.step(silent[args.groups[0]])
            wait()

        variants |= {"exchange": lambda: launch()(), "side by side": side_by_side}
        variants |= {name: lambda run=run: layer.step(run) for name, run in runs.items()}
    times, thread_ms = measure(variants, args)
    if args.rank == 0:
        result = {
            "times_ms": times,
            "wire_bytes": shape.wire_bytes(args.ranks),
            "peak_bytes": peak,
            "thread_ms": thread_ms,
            "plan_ms": predicted,
            "kept": kept,
        }
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


# All ranks.


def rows_of(target: float, mbit: float, result: dict) -> list[dict]:
    times = result["times_ms"]
    alone = min((name for name in times if name.startswith("compute: ")), key=lambda name: statistics.median(times[name]))
    times = {"compute": times[alone], **times}
    median = {name: statistics.median(values) for name, values in times.items()}
    limit = max(median["compute"], median["exchange"])
    half = median["exchange"] / 2
    phases = max(median["forward"], half) + max(median["compute"] - median["forward"], half)
    rows = []
    for name, values in times.items():
        whole = name in result["peak_bytes"]
        rows.append(
            {
                "exchange / compute": round(median["exchange"] / median["compute"], 2),
                "Mbit/s": round(mbit),
                "variant": f"{name} ({alone.removeprefix('compute: ')})" if name == "compute" else name,
                "min ms": round(min(values), 1),
                "median ms": round(median[name], 1),
                "max ms": round(max(values), 1),
                "exposed ms": round(median[name] - median["compute"], 1) if whole else "",
                "exposed share": f"{1 - median['compute'] / median[name]:.1%}" if whole else "",
                "step / limit": round(median[name] / limit, 3) if whole or name == "side by side" else "",
                "step / phase limit": round(median[name] / phases, 3) if whole or name == "side by side" else "",
                "DeepSpeed / step": round(median["DeepSpeed"] / median[name], 2) if whole else "",
                "plan ms": round(result["plan_ms"][name], 1) if name in result["plan_ms"] else "",
                "plan error": f"{result['plan_ms'][name] / median[name] - 1:+.1%}" if name in result["plan_ms"] else "",
                "thread CPU ms": round(result["thread_ms"][name], 1) if name in result["thread_ms"] else "",
                "peak MiB": round(result["peak_bytes"][name] / 2**20, 1) if whole else "",
            }
        )
    return rows


def main() -> None:
    args = arguments()
    if args.rank is not None:
        return work(args)
    from benchmarks import pictures, record

    words, rows, notes = sys.argv, [], []
    if args.veomni:
        asked = ["git", "-c", "safe.directory=*", "-C", args.veomni, "rev-parse", "HEAD"]
        notes.append(f"VeOmni at revision {subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()}")
    with Wire(args.ranks) as wire:
        kind = f"{wire.kind}, fp32"
        wire.limit(10_000)
        alone = wire.run([*words, "--only-compute", "--steps", "5"])
        compute_ms = min(statistics.median(v) for name, v in alone["times_ms"].items() if name.startswith("compute: "))
        bits = alone["wire_bytes"] * 8 / PAYLOAD
        for ratio in args.ratios:
            mbit = bits / (ratio * compute_ms * 1e3)
            wire.limit(mbit)
            result = wire.run(words)
            rows += rows_of(ratio, mbit, result)
            notes.append(
                f"{mbit:.0f} Mbit/s: {result['wire_bytes'] / 1e6:.1f} MB leave a rank in a step, {bits / mbit / 1e3:.0f} ms at "
                f"that rate with its headers, {statistics.median(result['times_ms']['exchange']):.0f} ms measured; G = auto keeps {result['kept']}"
            )
    record.write(args.out, rows, kind, notes)
    if args.out:
        pictures.draw(args.out)


if __name__ == "__main__":
    main()
