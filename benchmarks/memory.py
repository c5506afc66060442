"""Say what one attention layer holds in a step, over its inputs and weights: stock, ours, a window, under checkpointing, kept.

    python benchmarks/memory.py --out benchmarks/results/memory

Method. One process plays rank 0 of P over a wire that moves nothing: buffers are as with a real one. Allocations of PyTorch's CPU
allocator are read from its profiler, in units of the layer's local hidden states [s/P, b, m]: the most of a step, and what lives
between forward and backward beside the output. The picture shows both shapes' steps of stock and of the window.
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
    """Ways to run a layer of ``most`` heads a rank, by name."""
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


def plot(series: dict[str, dict[str, list[float]]], path: Path, ranks: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(series), figsize=(4.5 * len(series), 3.5), sharey=True)
    for axes, (heads, of_heads) in zip(panels, series.items()):
        for name, values in of_heads.items():
            axes.plot([at / len(values) for at in range(len(values))], values, label=name, linewidth=1)
        axes.set_title(heads, fontsize=10)
        axes.set_xlabel("allocations of a step, in their order")
        axes.legend(fontsize=8)
    panels[0].set_ylabel("held, local hidden states")
    figure.suptitle(f"One attention layer on one of {ranks} ranks, forward and backward, over inputs and weights", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments()
    from benchmarks import record
    from benchmarks.one_gpu import Emulated, communication
    from benchmarks.variants import Layer, Shape, Silent, held_over_time

    rows, series = [], {}
    for what, kv_heads in (("MHA", args.heads), ("GQA 4:1", args.heads // 4)):
        layer = Layer(Shape(args.seq, args.heads, args.head_dim, kv_heads), 0, args.ranks)
        layer.sp_group = Emulated(args.ranks, Silent())
        stock = None
        with communication(args.ranks, Silent()):
            for name, run in runs_of(layer, args.heads // args.ranks).items():
                layer.step(run)
                for parameter in layer.projections.parameters():
                    parameter.grad = None
                step = [held / layer.x.nbytes for held in held_over_time(lambda run=run: layer.step(run))]
                between = held_over_time(lambda run=run: layer.forward(run))[-1] / layer.x.nbytes - 1  # without the output
                peak = max(step)
                stock = stock or peak
                if name == "DeepSpeed" or "W" in name and "kept" not in name:
                    series.setdefault(what, {})[name] = step
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
        plot(series, args.out.with_suffix(".png"), args.ranks)


if __name__ == "__main__":
    main()
