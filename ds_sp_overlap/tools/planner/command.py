"""Runs ``ds-sp-overlap plan``: reads arguments, measures rates on request, prints tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from ...exchange.geometry import shares_for
from .costs import WINDOWS, LayerShape, Way
from .gpu.constants import GPUS, Gpu, gpu

if TYPE_CHECKING:  # This import loads torch.
    from .plan import Row


def _whole(text: str) -> int:
    """Parse a whole number of at least 1: 65536, 64k or 1m."""
    found = re.fullmatch(r"(0*[1-9]\d*)([km]?)", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1, or one such as 64k (65536) or 1m, got {text!r}"
        )
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2]]


def _positive(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return value


def _bandwidth(text: str) -> float:
    """Parse a bandwidth such as 45, 50GB/s or 400Gbit/s; return GB/s."""
    number = text.removesuffix("Gbit/s").removesuffix("GB/s")
    value = _positive(number)
    # Such a large number without a unit may be meant in Gbit/s.
    if number == text and value >= 100:
        raise argparse.ArgumentTypeError(
            f"{text} of what? Write 400Gbit/s, or 50GB/s, which is as much"
        )
    return value / 8 if text.endswith("Gbit/s") else value


def _tflops(text: str) -> float:
    """Parse a number of TFLOP/s."""
    value = _positive(text)
    # Such a large number may be meant in FLOP/s.
    if value >= 10_000:
        raise argparse.ArgumentTypeError(
            f"{text} TFLOP/s? A GPU has hundreds; did you mean {value / 1e12:g}?"
        )
    return value


OPTIONS: dict[str, list[tuple[str, Any, str]]] = {
    "layer, by itself or from --model; single values win over those of the model": [
        ("--model", str, "a transformers config: name, folder or file"),
        ("--hidden", _whole, "model dim"),
        ("--heads", _whole, "query heads"),
        ("--kv-heads", _whole, "KV heads (default: as many as query heads)"),
        ("--head-dim", _whole, "default: hidden / heads"),
        ("--intermediate", _whole, "width of a gated MLP (default: attention alone)"),
    ],
    "run": [
        ("--seq", _whole, "global sequence, tokens: 65536 or 64k, 1m (of 1024)"),
        ("--sp", _whole, "ranks of the sp group, P"),
        ("--nodes", _whole, "with --gpus-per-node, in place of --sp: which sp size?"),
        ("--gpus-per-node", _whole, "GPUs of a node"),
        ("--shares", _whole, "ranks that share query heads, r (default: as training chooses)"),
        ("--batch", _whole, "default 1"),
    ],
    "memory: the longest sequence that fits, of a model, by itself or from --model": [
        ("--memory", _positive, "GiB of a GPU that PyTorch can use: 79 of an H100 of 80 GB"),
        ("--layers", _whole, "layers of the model"),
        ("--params", _positive, "parameters in billions: 8.03"),
    ],
    "rates; those that are not given are --gpu's, see docs/planning.md": [
        ("--bandwidth", _bandwidth, "that a GPU sends in an all-to-all while it receives as much: "
         "45 (GB/s), 50GB/s, 400Gbit/s; with --nodes, between nodes"),
        ("--tflops", _tflops, "TFLOP/s that matrix products reach"),
        ("--attention-tflops", _tflops, "TFLOP/s that causal attention reaches"),
        ("--latency-us", _positive, "of an exchange of nothing"),
        ("--measured", Path, "figures that --measure or benchmarks/gpu.sh wrote"),
    ],
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for flag, kind, text in options:
            group.add_argument(flag, type=kind, help=text)
    group.add_argument("--gpu", choices=GPUS, default="h100", help="default h100")
    group.add_argument(
        "--measure",
        type=Path,
        nargs="?",
        const=Path("measured.json"),
        metavar="FILE",
        help="measure these rates and write them to FILE (measured.json), for --measured: on the "
        "ranks of torchrun (-m ds_sp_overlap plan ...), else on --sp ranks of this machine",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _complete(args: argparse.Namespace) -> None:
    """Fill in the values of --model, and check that all values are given and fit together.

    Raises:
        ValueError: if a value is missing, or values contradict each other.
    """
    # All numbers are above 0.
    is_cluster, of_one = args.nodes or args.gpus_per_node, args.sp or args.measure
    if is_cluster and (of_one or not (args.nodes and args.gpus_per_node)):
        raise ValueError("--nodes and --gpus-per-node go together, in place of --sp and --measure")
    if args.model is not None:
        from ...integrations.transformers.layers import shape_and_model

        try:
            known, args.made = shape_and_model(args.model)
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(
                f"--model {args.model}: no transformers config there: {str(error).splitlines()[0]}"
            ) from None
        known["params"] = sum(p.numel() for p in args.made.parameters()) / 1e9
        # Values that are given as options override those of the model.
        for key, value in known.items():
            setattr(args, key, getattr(args, key) or value)
    needed = ["seq", "hidden", "heads"] if is_cluster else ["seq", "sp", "hidden", "heads"]
    needed += ["layers", "params"] if args.memory else []
    missing = [f"--{key}" for key in needed if not getattr(args, key)]
    if missing:
        remedy = "give them, or --model"
        if args.model is not None:
            remedy = "the model's config has none (a model without attention?); give them"
        raise ValueError(f"{' and '.join(missing)} missing; {remedy}")
    if args.sp == 1:
        raise ValueError("--sp 1 exchanges nothing; give the ranks of the sp group, at least 2")
    if not args.head_dim and args.hidden % args.heads:
        raise ValueError(
            f"--hidden {args.hidden} does not divide by --heads {args.heads}; give --head-dim"
        )


def _layer(args: argparse.Namespace, sp_size: int) -> LayerShape:
    """Return the layer's shape; raise ValueError if it can't be split over ``sp_size`` ranks."""
    kv_heads = args.kv_heads or args.heads
    return LayerShape(
        width=args.hidden,
        heads=args.heads,
        kv_heads=kv_heads,
        head_dim=args.head_dim or args.hidden // args.heads,
        seq=args.seq,
        sp_size=sp_size,
        batch=args.batch or 1,
        intermediate=args.intermediate or 0,
        shares=args.shares or shares_for(sp_size, args.heads, kv_heads),
    )


def _measured(layer: LayerShape, tflops: float) -> dict[str, float]:
    """Measure the figures of a GPU on the ranks that a launcher started. Collective.

    Args:
        layer: The shape of the layer.
        tflops: The peak of the GPU, in TFLOP/s.

    Raises:
        ValueError: if the launcher did not start ``layer.sp_size`` ranks.
    """
    import torch
    import torch.distributed as dist

    from . import measure

    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0))
    if size != layer.sp_size:
        raise ValueError(
            f"--sp is {layer.sp_size}, but the launcher started {size} ranks; make them the same"
        )
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    found = measure.rates(layer, dist.group.WORLD, device, tflops)
    dist.destroy_process_group()
    return found


def _gpu(args: argparse.Namespace) -> Gpu:
    """Return the GPU of ``--gpu``; measured and given figures replace those of the table.

    Raises:
        ValueError: if the file of --measured can't be used.
    """
    found = gpu(args.gpu, args.measured)
    if args.measure:
        values = _measured(_layer(args, args.sp), found["tflops"])
        if os.environ["RANK"] == "0":
            args.measure.write_text(json.dumps(values, indent=1))
        found = found.given(f"measured, {args.measure}", **values)
    return found.given(
        "given",
        wire_gbs=args.bandwidth,
        latency_us=args.latency_us,
        gemm_share=args.tflops and args.tflops / found["tflops"],
        attention_share=args.attention_tflops and args.attention_tflops / found["tflops"],
    )


def describe(layer: LayerShape, on: Gpu, name: str, rows: Sequence[Row]) -> str:
    """Return the plan as text, without its verdict.

    Args:
        layer: The shape of the layer.
        on: The GPU.
        name: The name of the GPU in `GPUS`.
        rows: The variants; the first variant is without our overlap.
    """
    base, cells = rows[0], []
    for row in rows:
        cell = {
            "": row.variant,
            "ms": row.step_ms,
            "times": base.step_ms / row.step_ms,
            "exposed ms": row.exposed_ms,
            "host ms": row.host_ms,
            "GPU waits for it": row.starved_ms,
            "peak MiB": row.peak_bytes / 2**20,
        }
        if base.whole_ms and row.whole_ms:
            cell["whole layer ms"] = row.whole_ms
            cell["its times"] = base.whole_ms / row.whole_ms
        cells.append(cell)
    shared = f", r = {layer.shares} ranks share query heads" if layer.shares > 1 else ""
    known = [(key, k) for key, k in on.known.items() if k != GPUS[name][key]]
    given = "".join(f"; {key} {k.value:.4g} ({k.source})" for key, k in known)
    unfit = "" if base.variant == "stock" else ", which can't split these heads"
    return (
        f"one attention layer, forward and backward, on one of {layer.sp_size} ranks: "
        f"{layer.heads} query and {layer.kv_heads} KV heads of {layer.head_dim}, "
        f"model dim {layer.width}, {layer.seq} tokens, batch {layer.batch}{shared}\n"
        f"played, not measured, on one {name} with {on['wire_gbs']:.4g} GB/s to the other ranks "
        f"and {on['tflops'] * on['gemm_share']:.4g} TFLOP/s in products; "
        f"figures with sources: docs/planning.md{given}\n"
        f"{tabulate(cells, 'keys', floatfmt='.2f')}\n"
        "times: of the first row's; exposed: what a wire that costs nothing would save; stock "
        f"is DeepSpeed's class{unfit}; five of eight what its pull requests 5691 and 415 overlap"
    )


def _longest(args: argparse.Namespace, layer: LayerShape, way: Way) -> dict[str, int]:
    """Return the longest sequence that fits, in tokens, for each treatment of activations."""
    from .fits import Model, longest

    model = Model(args.layers, int(1e9 * args.params))
    return longest(layer, model, way, int(args.memory * 2**30))


def _describe_fits(args: argparse.Namespace, layer: LayerShape, best: Way) -> str:
    """Return the table of the longest sequences that fit; ``best`` is the fastest `Way`."""
    rows = []
    for way in (Way(0), best, *WINDOWS):
        if way.groups <= layer.geometry(1).max_groups:
            found = _longest(args, layer, way).items()
            rows.append({"": str(way)} | {name: f"{tokens // 1024:,}k" for name, tokens in found})
    return (
        f"longest sequence that fits into {args.memory:g} GiB with {args.layers} layers, "
        f"{args.params:.3g} billion parameters under ZeRO-3 over {layer.sp_size} "
        "ranks, loss and MLP in tiles, k = 1024 tokens, by what is done with activations; "
        "arithmetic, not a measurement\n"
        f"{tabulate(rows, 'keys', stralign='right', missingval='-')}"
    )


def _sizes(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Return advice on the sp size for a cluster, and a table row for each possible sp size.

    The best sp size has the most tokens per second and GPU.
    """
    from .plan import best_of, decides_ms, plan

    world, reason, on = args.nodes * args.gpus_per_node, "there is one", _gpu(args)
    rows: list[dict[str, Any]] = []
    for size in (size for size in range(2, world + 1) if world % size == 0):
        try:
            layer = _layer(args, size)
        except ValueError as error:
            reason = str(error)
            continue
        here = on
        if size <= args.gpus_per_node:
            here = on.given("a node", wire_gbs=GPUS[args.gpu]["wire_gbs"].value)
        elif not args.bandwidth:
            raise ValueError("--nodes needs --bandwidth, that of a GPU to other nodes")
        best = best_of(plan(layer, here, with_all=False))
        ms = decides_ms(best)
        speed = {"ms": round(ms, 2), "tokens/s a GPU": round(1e3 * layer.seq / size / ms)}
        rows.append({"sp": size, "GB/s": here["wire_gbs"], "best": best.variant, **speed})
        if args.memory:
            most = _longest(args, layer, Way(best.groups))["checkpointed"]
            rows[-1]["fits"] = "yes" if most >= layer.seq else "no"
    if not rows:
        raise ValueError(f"no sp size of {world} GPUs: {reason}")
    fitting = [row for row in rows if row.get("fits") != "no"]
    if not fitting:
        return "no sp size: the sequence fits into none of them", rows
    best_row = max(fitting, key=lambda row: row["tokens/s a GPU"])
    unknown = "" if args.memory else "; --memory says which of them fit"
    advice = f"sp size {best_row['sp']}, with {best_row['best']}: most tokens a second{unknown}"
    return advice, rows


def command(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the plan and return the exit status; under a launcher, only rank 0 prints.

    Exits with argparse's error if nothing can be planned or measured.
    """
    is_launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    try:
        # Imports may print text; keep this text out of the plan's output.
        with contextlib.redirect_stdout(sys.stderr):
            _complete(args)
            if args.measure and not is_launched:
                _layer(args, args.sp)  # Raise an error now, before ranks are started.
                launcher = "torch.distributed.run", "--standalone", f"--nproc-per-node={args.sp}"
                words = [sys.executable, "-m", *launcher, "-m", "ds_sp_overlap", *sys.argv[1:]]
                return subprocess.run(words).returncode
            found, text = _planned(args)
    except ValueError as error:
        parser.error(str(error))
    # All ranks of a launcher compute the same plan, so only rank 0 prints.
    if not is_launched or os.environ["RANK"] == "0":
        print(json.dumps(found) if args.json else f"{found['verdict']}\n\n{text}")
    return 0


def _planned(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the plan as a dict for JSON, and as text without the verdict.

    Raises:
        ValueError: if nothing can be planned or measured.
    """
    if args.nodes:
        advice, sizes = _sizes(args)
        return {"sp": sizes, "verdict": advice}, tabulate(sizes, "keys")
    # This import loads torch.
    from .plan import decides_ms, hybrid, ours_of, plan, verdict

    layer, on = _layer(args, args.sp), _gpu(args)
    rows = plan(layer, on)
    text = describe(layer, on, args.gpu, rows)
    if args.memory:
        fastest = min(ours_of(rows), key=decides_ms)
        text += f"\n\n{_describe_fits(args, layer, Way(fastest.groups))}"
    found = {"layer": [asdict(row) for row in rows], "verdict": verdict(rows)}
    if args.model is not None and (parts := hybrid(layer, on, args.made, rows)):
        found["hybrid"] = parts
        text += (
            "\n\nlayers of a step that mix tokens, those of a kind together; no mixer is measured: "
            "its convolution and scan are taken for copies of their tensors\n"
            f"{tabulate(parts, 'keys', floatfmt='.2f')}"
        )
    return found, text
