"""Time layers over a slow link between nodes: KV heads that are sent once to each node, and more ranks than heads.

    sudo python benchmarks/nodes.py --out benchmarks/results/nodes

Method. As in `link.py`, but the ranks of a node share a network namespace, whose link is rate-limited; within the node, they don't
use the link. A step is forward and backward of three LLaMA-like layers with an MLP (`stack.py`). Parity before timing: a variant
that gives other outputs or gradients than the first stops the run. All variants run in turn inside one loop, each step after a
barrier.

    stock      DeepSpeed's class, which refuses more ranks than query heads
    today      G = 1; with more ranks than heads, ranks share heads (`sp_overlap.shares`)
    once       "today" with `kv_once_per_node`
    compute    ours with exchanges that take no time; exposed ms is step - compute

The figures are of a rate-limited link, and of ranks that share cores: they compare the sent data, and say nothing about any fabric.
A CPU materialises the mask for a share of the queries, which a GPU does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import link, record  # noqa: E402
from benchmarks.wire import Wire, join  # noqa: E402

ONCE = {"head_groups": 1, "kv_once_per_node": True}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 400], help="Mbit/s of a node")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 2], help="query heads, one table each; one KV head")
    parser.add_argument("--seq", type=int, default=1024, help="global sequence, tokens")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write OUT.csv and OUT.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    from benchmarks.stack import Stack
    from benchmarks.variants import Shape, Silent, check_parity
    from ds_sp_overlap.exchange import sp_group

    join(args.rank, args.ranks, args.per_node)
    sp_group.hostname = lambda: f"node {args.rank // args.per_node}"
    (heads,) = args.heads
    shape = Shape(args.seq, heads, args.width // heads, 1)
    layer = Stack(shape, args.rank, args.ranks, dist.group.WORLD)
    runs = {} if heads < args.ranks else {"stock": layer.stock()}
    runs |= {"today": layer.ours(head_groups=1), "once": layer.ours(**ONCE)}
    expected = layer.step(next(iter(runs.values())))
    for name, run in runs.items():
        check_parity(name, layer.step(run), expected)
    runs["compute"] = layer.ours(Silent(), head_groups=1)
    variants = {name: lambda run=run: layer.step(run) for name, run in runs.items()}
    times, _ = link.measure(variants, args)
    if args.rank == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    if args.rank is not None:
        return work(args)
    rows = []
    with Wire(args.ranks, args.per_node) as wire:
        for heads in args.heads:
            for mbit in args.rates:
                wire.limit(mbit)
                times = wire.run([*sys.argv, "--heads", str(heads)])
                median = {name: statistics.median(values) for name, values in times.items()}
                for name, values in times.items():
                    row = {"query heads": heads, "Mbit/s": mbit, "variant": name, "min ms": min(values), "median ms": median[name]}
                    row |= {"max ms": max(values), "exposed ms": median[name] - median["compute"]}
                    row = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
                    row["today / step"] = round(median["today"] / median[name], 2)
                    row["stock / step"] = round(median["stock"] / median[name], 2) if "stock" in median else ""
                    rows.append(row)
    record.write(args.out, rows, f"{wire.kind}, fp32")


if __name__ == "__main__":
    main()
