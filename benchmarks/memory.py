"""Measure the memory of one attention layer in a step, without inputs and weights: stock, ours, a window, checkpointing, kept.

    python benchmarks/memory.py --out benchmarks/results/memory

Method. One process is rank 0 of P over a transport that moves no data; buffers are those of a real one. The profiler reports the
allocations of PyTorch's CPU allocator. Rows have the peak of a step, and the memory between forward and backward without the
output, in units of the layer's local hidden states [s/P, b, m].
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seq", type=int, default=8192, help="global sequence, tokens")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write OUT.csv, OUT.json and OUT.png")
    return parser.parse_args()


def runs_of(layer, most: int) -> dict:
    """Return {name: function that runs the layer}; a rank has ``most`` heads."""
    from torch.utils.checkpoint import checkpoint

    from ds_sp_overlap import keep_attention

    stock, plain = layer.stock(), functools.partial(checkpoint, use_reentrant=False)
    kept = functools.partial(plain, context_fn=keep_attention)
    found = {"DeepSpeed": stock, **{f"G = {g}": layer.ours(head_groups=g) for g in (1, 2, 4)}}
    found |= {f"G = {most}, W = {w}": layer.ours(head_groups=most, window=w) for w in (1, 2, 3)}
    found["DeepSpeed, checkpointed"] = functools.partial(plain, stock)
    found["G = 2, checkpointed"] = functools.partial(plain, layer.ours(head_groups=2))
    found["G = 2, kept"] = functools.partial(kept, layer.ours(head_groups=2, checkpointing="keep"))
    for window in (1, 2):
        run = layer.ours(head_groups=most, window=window, checkpointing="keep")
        found[f"G = {most}, W = {window}, kept"] = functools.partial(kept, run)
    return found


def main() -> None:
    args = arguments()
    from benchmarks import pictures, record
    from benchmarks.one_gpu import Emulated, communication
    from benchmarks.variants import Layer, Shape, Silent, held_over_time

    rows = []
    for what, kv_heads in (("MHA", args.heads), ("GQA 4:1", args.heads // 4)):
        layer = Layer(Shape(args.seq, args.heads, args.head_dim, kv_heads), 0, args.ranks)
        layer.sp_group = Emulated(args.ranks, Silent())
        stock = None
        with communication(args.ranks, Silent()):
            for name, run in runs_of(layer, args.heads // args.ranks).items():
                layer.step(run)
                for parameter in layer.projections.parameters():
                    parameter.grad = None
                peak = max(held_over_time(lambda run=run: layer.step(run))) / layer.x.nbytes
                between = held_over_time(lambda run=run: layer.forward(run))[-1] / layer.x.nbytes - 1  # without the output
                stock = stock or peak
                rows.append(
                    {
                        "heads": what,
                        "variant": name,
                        "peak": round(peak, 2),
                        "of stock's": round(peak / stock, 2),
                        "until backward": round(between, 2),
                    }
                )
    kind = (
        f"one rank of {args.ranks}, played; {args.heads} heads of {args.head_dim}, {args.seq} tokens, fp32, in local hidden states"
    )
    record.write(args.out, rows, kind, [])
    if args.out:
        pictures.draw(args.out)


if __name__ == "__main__":
    main()
