"""Time one attention layer under activation checkpointing over a real slow link: stock, ours, a window, a window kept.

    sudo python benchmarks/checkpointed.py --out benchmarks/results/checkpointed

Method. As in `link.py`: ranks in network namespaces behind token buckets, a core each; parity with DeepSpeed's class before timing;
all variants in turn inside one loop; a step, forward and backward, takes as long as its slowest rank. There are two shapes: in one,
attention is a third of the arithmetic of forward; in the other, which is longer and narrower, 80 % (s / (s + 4 m), causal).

    DeepSpeed, checkpointed    DeepSpeed's class inside torch.utils.checkpoint, as transformers' gradient checkpointing does
    G = 2, checkpointed        our layer in such a checkpoint: attention and its four exchanges run again, overlapped
    G = 8, W = 2               a window, which needs no checkpoint: it holds x, o and the log-sum-exp
    G = 8, W = 2, kept         the same window in a checkpoint that saves o and the log-sum-exp

`memory.py` measures the memory of each variant. The figures are of a rate-limited link. They compare schedules, and say nothing
about any fabric.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.link import measure  # noqa: E402
from benchmarks.wire import PAYLOAD, Wire, join  # noqa: E402

SHAPES = {"m = 1024, 2048 tokens": (2048, 16, 64), "m = 256, 4096 tokens": (4096, 8, 32)}  # tokens, heads, head dim


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="exchange / compute of a step without checkpoint"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write OUT.csv and OUT.json")
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only-compute", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    import functools

    import torch.distributed as dist
    from torch.utils.checkpoint import checkpoint

    from benchmarks.variants import Layer, Shape, Silent, check_parity, free_wire
    from ds_sp_overlap import keep_attention

    join(args.rank, args.ranks)
    seq, heads, head_dim = SHAPES[args.shape]
    layer = Layer(Shape(seq, heads, head_dim, heads), args.rank, args.ranks, dist.group.WORLD)
    most = heads // args.ranks

    def checkpointed(run, **options):
        return functools.partial(checkpoint, run, use_reentrant=False, **options)

    def kept(run):
        return checkpointed(run, context_fn=keep_attention)

    ours = {
        "G = 2, checkpointed": ({"head_groups": 2}, checkpointed),
        "G = 4, checkpointed": ({"head_groups": 4}, checkpointed),
        f"G = {most}, W = 1": ({"head_groups": most, "window": 1}, None),
        f"G = {most}, W = 2": ({"head_groups": most, "window": 2}, None),
        f"G = {most}, W = 2, checkpointed": ({"head_groups": most, "window": 2}, checkpointed),
        "G = 2, kept": ({"head_groups": 2, "checkpointing": "keep"}, kept),
        "G = 4, W = 2, kept": ({"head_groups": 4, "window": 2, "checkpointing": "keep"}, kept),
        f"G = {most}, W = 2, kept": ({"head_groups": most, "window": 2, "checkpointing": "keep"}, kept),
    }

    def runs(transport=None) -> dict:
        found = {"DeepSpeed": layer.stock(), "DeepSpeed, checkpointed": checkpointed(layer.stock())}
        for name, (section, dressed) in ours.items():
            run = layer.ours(transport, **section)
            found[name] = run if dressed is None else dressed(run)
        return found

    def alone(run):
        with free_wire():
            layer.step(run)

    silent = runs(Silent())
    variants = {f"free wire: {name}": functools.partial(alone, silent[name]) for name in ("DeepSpeed", "DeepSpeed, checkpointed")}
    if not args.only_compute:
        expected = layer.step(layer.stock())
        over_link = runs()
        for name, run in over_link.items():
            check_parity(name, layer.step(run), expected)
        variants |= {name: functools.partial(layer.step, run) for name, run in over_link.items()}
    times, _ = measure(variants, args)
    if args.rank == 0:
        print(
            json.dumps({"times_ms": times, "wire_bytes": layer.shape.wire_bytes(args.ranks)}),
            flush=True,
        )
    dist.destroy_process_group()


def rows_of(shape: str, ratio: float, mbit: float, result: dict) -> list[dict]:
    median = {name: statistics.median(values) for name, values in result["times_ms"].items()}
    stock = median["DeepSpeed, checkpointed"]
    return [
        {
            "shape": shape,
            "exchange / compute": ratio,
            "Mbit/s": round(mbit),
            "variant": name,
            "min ms": round(min(values), 1),
            "median ms": round(median[name], 1),
            "max ms": round(max(values), 1),
            "step / stock's checkpointed": round(median[name] / stock, 3),
            "stock's checkpointed / step": round(stock / median[name], 2),
        }
        for name, values in result["times_ms"].items()
    ]


def main() -> None:
    args = arguments()
    if args.rank is not None:
        return work(args)
    from benchmarks import record

    rows, notes = [], []
    with Wire(args.ranks) as wire:
        for shape in args.shapes:
            words = [*sys.argv, "--shape", shape]
            wire.limit(10_000)
            alone = wire.run([*words, "--only-compute", "--steps", "5"])
            compute_ms = statistics.median(alone["times_ms"]["free wire: DeepSpeed"])
            bits = alone["wire_bytes"] * 8 / PAYLOAD
            for ratio in args.ratios:
                mbit = bits / (ratio * compute_ms * 1e3)
                wire.limit(mbit)
                rows += rows_of(shape, ratio, mbit, wire.run(words))
            notes.append(
                f"{shape}: {alone['wire_bytes'] / 1e6:.1f} MB leave a rank in a step without checkpoint, {compute_ms:.0f} ms of arithmetic"
            )
    record.write(args.out, rows, f"{wire.kind}, fp32", notes)


if __name__ == "__main__":
    main()
