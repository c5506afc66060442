"""Measure the host time of one attention layer, forward and backward, against DeepSpeed's: the cost of Python and autograd.

    python benchmarks/host.py --out benchmarks/results/host

Method. One process is rank 0 of P, over torch's "fake" backend, which moves no data. Tensors are so small that arithmetic takes
almost no time; they are on the GPU if there is one. In training, the host runs ahead of the device, so host time matters only if a
layer's kernels take less. Variants run in turn inside one loop. Only shapes are compared before, since received values are
arbitrary.

    stock          projections, DeepSpeed's DistributedAttention, output projection
    drop-in        the same with ds_sp_overlap.DistributedAttention
    G = n          ds_sp_overlap.SelfAttention
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ds_sp_overlap
from benchmarks import instructions, record
from benchmarks.profiles import synchronise
from benchmarks.variants import Layer, Shape


class Local(nn.Module):
    def forward(self, q, k, v):
        return q + k + v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="P")
    parser.add_argument("--heads-per-rank", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4, help="local sequence")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, help="write OUT.csv and OUT.json")
    parser.add_argument("--profile", action="store_true", help="show where the time of the last variant goes")
    parser.add_argument(
        "--instructions", action="store_true", help="count instructions instead, on a GPU's code path (instructions.py)"
    )
    args = parser.parse_args()
    if args.instructions:
        instructions.main([])
        return
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not needed here, and it would be compiled
    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)

    heads = args.ranks * args.heads_per_rank
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(args.ranks * args.tokens, heads, args.head_dim, heads, device=device.type)
    layer = Layer(shape, 0, args.ranks, dist.group.WORLD)
    layer.local = Local()
    x, dy = layer.x.requires_grad_(), layer.dy

    drop_in = ds_sp_overlap.DistributedAttention(Local(), dist.group.WORLD, config={"head_groups": 1})
    variants = {"stock": layer.stock(), "drop-in, G = 1": layer.around(drop_in)}
    variants.update({f"G = {groups}": layer.ours(head_groups=groups) for groups in args.groups})
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.steps + 20):
        for name, run in variants.items():
            start = time.process_time()
            y = run(x)
            y.backward(dy)
            took = time.process_time() - start
            synchronise(device)
            assert y.shape == x.shape, name
            if turn >= 20:
                times[name].append(took * 1e6)
    stock = statistics.median(times["stock"])
    rows = []
    for name, t in times.items():
        median = statistics.median(t)
        row = {"variant": name, "min": min(t), "median": median, "max": max(t), "more than stock": median - stock}
        rows.append({key: value if key == "variant" else round(value) for key, value in row.items()})
    kind = (
        f"processor time of the host for a layer, forward and backward, microseconds; P = {args.ranks}, nothing moved, on {device}"
    )
    record.write(args.out, rows, kind)
    if args.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.enable()
        for _ in range(args.steps):
            run(x).backward(dy)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
