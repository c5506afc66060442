"""Runs ``ds-sp-overlap plan``: reads arguments, measures rates where asked, prints tables."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from ...exchange.geometry import shares_for
from .costs import WINDOWS, LayerShape, Rates
from .gpu.constants import GPUS, Gpu, gpu

if TYPE_CHECKING:  # They load torch.
    from .fits import Model
    from .plan import Row

# GB/s of a bandwidth's units.
UNITS = {
    "GB/s": 1.0,
    "MB/s": 1e-3,
    "Gbit/s": 1 / 8,
    "Mbit/s": 1e-3 / 8,
    "Gb/s": 1 / 8,
    "Gbps": 1 / 8,
}
# A number without a unit may be meant in another one from here on: GB/s, TFLOP/s.
MANY_GBS, MANY_TFLOPS = 100, 10_000


def _whole(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _tokens(text: str) -> int:
    """Read a number of tokens: 65536, 64k or 1m."""
    digits, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in ("k", "m") else (text, "")
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1, or one such as 64k (65536) or 1m, got {text!r}"
        )
    return int(digits) * {"": 1, "k": 1024, "m": 1024**2}[unit]


def _positive(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return value


def _bandwidth(text: str) -> float:
    """Read a bandwidth in GB/s: 45, 50GB/s, 400Gbit/s."""
    found = re.fullmatch(rf"(.+?)\s*({'|'.join(UNITS)})", text)
    if found is not None:
        return _positive(found[1]) * UNITS[found[2]]
    value = _positive(text)
    if value >= MANY_GBS:
        gigabits = value if value < 1e6 else 8e-9 * value
        raise argparse.ArgumentTypeError(
            f"{text} of what? Write {gigabits:g}Gbit/s, which is {gigabits / 8:g} GB/s, or "
            f"{gigabits:g}GB/s"
        )
    return value


def _tflops(text: str) -> float:
    """Read a number of TFLOP/s."""
    value = _positive(text)
    if value >= MANY_TFLOPS:
        raise argparse.ArgumentTypeError(
            f"{text} TFLOP/s? A GPU has hundreds; did you mean {value / 1e12:g}?"
        )
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan`` to its parser."""
    shape = parser.add_argument_group(
        "layer", "by itself or from --model; single values win over those of the model"
    )
    shape.add_argument("--model", help="a transformers config: name, folder or file")
    shape.add_argument("--hidden", type=_whole, help="model dim")
    shape.add_argument("--heads", type=_whole, help="query heads")
    shape.add_argument("--kv-heads", type=_whole, help="KV heads (default: as many as query heads)")
    shape.add_argument("--head-dim", type=_whole, help="default: hidden / heads")
    shape.add_argument(
        "--intermediate",
        type=_whole,
        help="width of a gated MLP that counts towards the layer's time (default: attention alone)",
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--seq",
        type=_tokens,
        required=True,
        help="global sequence, tokens: 65536 or 64k, 1m (of 1024)",
    )
    run.add_argument("--sp", type=_whole, help="ranks of the sp group, P")
    run.add_argument(
        "--nodes", type=_whole, help="with --gpus-per-node, in place of --sp: which sp size?"
    )
    run.add_argument("--gpus-per-node", type=_whole)
    run.add_argument(
        "--shares",
        type=_whole,
        help="ranks that share their query heads, r (default: as training chooses)",
    )
    run.add_argument("--batch", type=_whole, default=1)
    run.add_argument(
        "--dtype-bytes",
        type=int,
        choices=(2, 4, 8),
        default=2,
        help="of an element that is exchanged (default 2)",
    )
    fits = parser.add_argument_group(
        "memory", "prints the longest sequence that fits; of a model, by itself or from --model"
    )
    fits.add_argument(
        "--memory", type=_positive, help="GiB of a GPU that PyTorch can use: 79 of an H100 of 80 GB"
    )
    fits.add_argument("--layers", type=_whole)
    fits.add_argument("--params", type=_positive, help="parameters in billions: 8.03")
    rates = parser.add_argument_group(
        "rates", "figures that are not given are those of --gpu, see docs/planning.md"
    )
    rates.add_argument("--gpu", choices=list(GPUS), default="h100", help="default h100")
    rates.add_argument(
        "--bandwidth",
        type=_bandwidth,
        help="that a GPU sends in an all-to-all while it receives as much: 45 (GB/s), 50GB/s, "
        "400Gbit/s; with --nodes, between nodes",
    )
    rates.add_argument("--tflops", type=_tflops, help="TFLOP/s that matrix products reach")
    rates.add_argument(
        "--attention-tflops", type=_tflops, help="TFLOP/s that causal attention reaches"
    )
    rates.add_argument("--latency-us", type=_positive, help="of an exchange of nothing")
    rates.add_argument(
        "--measure",
        type=Path,
        nargs="?",
        const=Path("measured.json"),
        metavar="FILE",
        help="measure these rates and write them to FILE (measured.json), for --measured: on the "
        "ranks of torchrun (-m ds_sp_overlap plan ...), else on --sp processes of this machine",
    )
    rates.add_argument(
        "--measured", type=Path, help="figures that --measure or benchmarks/gpu.sh wrote"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _layer(args: argparse.Namespace) -> LayerShape:
    """Return the layer's shape, from --model and single values.

    Sets ``args.layers`` from --model as well, for `_model`.

    Raises:
        ValueError: if a value is missing, or the values are no layer.
    """
    if args.sp is None:
        raise ValueError(
            "--sp missing: the ranks of the sp group; or give --nodes, --gpus-per-node"
        )
    if args.sp == 1:
        raise ValueError("--sp 1 exchanges nothing; give the ranks of the sp group, at least 2")
    shape = {
        "hidden": args.hidden,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_dim": args.head_dim,
    }
    shape["intermediate"] = args.intermediate
    if args.model is not None:
        from ...integrations.transformers.layers import layer_shape

        try:
            known = layer_shape(args.model)
        except ImportError:
            raise ValueError(
                "--model reads a transformers config; pip install transformers, or give --hidden "
                "and --heads"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--model {args.model}: no transformers config there: {str(error).splitlines()[0]}"
            ) from None
        # Single values win over those of the model.
        shape = {key: given or known[key] for key, given in shape.items()}
        args.layers = args.layers or known["layers"]
    missing = [f"--{key}" for key in ("hidden", "heads") if not shape[key]]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing; give them, or --model")
    if shape["head_dim"] is None and shape["hidden"] % shape["heads"]:
        raise ValueError(
            f"--hidden {shape['hidden']} does not divide by --heads {shape['heads']}; "
            "give --head-dim"
        )
    heads, kv_heads = shape["heads"], shape["kv_heads"] or shape["heads"]
    return LayerShape(
        width=shape["hidden"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shape["head_dim"] or shape["hidden"] // shape["heads"],
        seq=args.seq,
        sp_size=args.sp,
        batch=args.batch,
        element_bytes=args.dtype_bytes,
        intermediate=shape["intermediate"] or 0,
        shares=args.shares or shares_for(args.sp, heads, kv_heads),
    )


def _model(args: argparse.Namespace) -> Model | None:
    """Return the model for --memory; None without --memory.

    Raises:
        ValueError: if the model is not given.
    """
    from .fits import Model

    if args.memory is None:
        return None
    if args.params is None and args.model is not None:
        from ...integrations.transformers.layers import parameters

        return Model(args.layers, parameters(args.model))
    missing = [f"--{name}" for name in ("layers", "params") if getattr(args, name) is None]
    if missing:
        raise ValueError(f"--memory needs {' and '.join(missing)}; give them, or --model")
    return Model(args.layers, int(1e9 * args.params))


def _measuring_rank(
    rank: int, size: int, init: str, layer: LayerShape, result: str | None
) -> Rates:
    """Measure the rates on one rank, collectively; rank 0 saves them to a file.

    Args:
        rank: This rank.
        size: The number of ranks, P.
        init: The ``init_method`` of the process group; "env://" on ranks of a launcher.
        layer: Shape of the layer.
        result: The file; None to save nothing.

    Returns:
        The rates, the same on every rank.
    """
    import torch
    import torch.distributed as dist

    from . import measure

    local = int(os.environ.get("LOCAL_RANK", rank))
    # Processes of this machine need a GPU each; a launcher's ranks may be on several machines.
    on_gpu = torch.cuda.device_count() > local and (
        init == "env://" or torch.cuda.device_count() >= size
    )
    if on_gpu:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=init, rank=rank, world_size=size
    )
    found = measure.rates(
        layer, dist.group.WORLD, torch.device("cuda", local) if on_gpu else torch.device("cpu")
    )
    if rank == 0 and result is not None:
        torch.save((found.matmul, found.attention, found.wire, found.latency_ms), result)
    dist.destroy_process_group()
    return found


def _launched() -> tuple[int, int] | None:
    """Return this rank and the number of ranks, as a launcher sets them; None without launcher."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def _measured(layer: LayerShape) -> Rates:
    """Measure the rates on the launcher's ranks, or on processes that are started here.

    Raises:
        ValueError: if the launcher started another number of ranks.
        RuntimeError: if a process that was started here failed.
    """
    import torch

    if (launched := _launched()) is not None:
        rank, size = launched
        if size != layer.sp_size:
            raise ValueError(
                f"--sp is {layer.sp_size}, but the launcher started {size} ranks; "
                "make them the same"
            )
        return _measuring_rank(rank, size, "env://", layer, None)
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder, "result"))
        arguments = (layer.sp_size, f"file://{Path(folder, 'store')}", layer, result)
        try:
            torch.multiprocessing.start_processes(
                _measuring_rank, arguments, nprocs=layer.sp_size, start_method="forkserver"
            )
        except (
            torch.multiprocessing.ProcessExitedException,
            torch.multiprocessing.ProcessRaisedException,
        ) as error:
            raise RuntimeError(str(error)) from None
        return Rates(*torch.load(result))


def _gpu(args: argparse.Namespace, layer: LayerShape) -> Gpu:
    """Return the GPU, with what is measured or given in place of its table's figures.

    Raises:
        ValueError: if --measured can't be used, or a figure is missing.
        RuntimeError: if --measure failed.
    """
    try:
        found = gpu(args.gpu, args.measured)
    except OSError as error:
        raise ValueError(f"--measured {args.measured}: {error.strerror}") from None
    if args.measure is not None:
        rates, peak = _measured(layer), 1e12 * found["tflops"]
        values = {
            "gemm_share": rates.matmul / peak,
            "attention_share": rates.attention / peak,
            "backward_share": rates.attention / peak,
            "wire_gbs": rates.wire / 1e9,
            "latency_us": 1e3 * rates.latency_ms,
        }
        args.measure.write_text(json.dumps(values, indent=1))
        found = found.given(f"measured, {args.measure}", **values)
    elif layer.element_bytes != 2 and not (args.measured or args.tflops):
        raise ValueError(
            f"--gpu knows the rates of elements of 2 bytes, got --dtype-bytes "
            f"{layer.element_bytes}; give --tflops, or --measure"
        )
    share = None if args.tflops is None else args.tflops / found["tflops"]
    attention = args.attention_tflops and args.attention_tflops / found["tflops"]
    return found.given(
        "given",
        wire_gbs=args.bandwidth,
        latency_us=args.latency_us,
        gemm_share=share,
        attention_share=attention,
        backward_share=attention,
    )


def describe(layer: LayerShape, on: Gpu, name: str, rows: Sequence[Row], advice: str) -> str:
    """Return the plan as text, its advice first; ``name`` is that of the GPU."""
    base = rows[0]
    cells = []
    for row in rows:
        cell = {
            "": row.variant,
            "ms": f"{row.step_ms:.2f}",
            "times": f"{base.step_ms / row.step_ms:.2f}",
            "exposed ms": f"{row.exposed_ms:.2f}",
            "exposed": f"{row.exposed_ms / row.step_ms:.1%}",
            "host ms": f"{row.host_ms:.2f}",
            "GPU waits for it": f"{row.starved_ms:.2f}",
            "peak MiB": f"{row.peak_bytes / 2**20:.1f}",
        }
        if base.whole_ms is not None:
            whole = row.whole_ms
            cell["whole layer ms"] = "" if whole is None else f"{whole:.2f}"
            cell["times "] = "" if whole is None else f"{base.whole_ms / whole:.2f}"
        cells.append(cell)
    shared = f", r = {layer.shares} ranks share query heads" if layer.shares > 1 else ""
    without = (
        ""
        if base.variant == "stock"
        else (
            f"\nDeepSpeed's class can't split {layer.heads} query and {layer.kv_heads} KV heads over "
            f"{layer.sp_size} ranks; times is over our layer without overlap"
        )
    )
    given = [
        f"{key} {k.value:.4g} ({k.source})" for key, k in on.known.items() if k != GPUS[name][key]
    ]
    return "\n".join(
        (
            advice,
            "",
            f"one attention layer, forward and backward, on one of {layer.sp_size} ranks: "
            f"{layer.heads} query and {layer.kv_heads} KV heads of {layer.head_dim}, "
            f"model dim {layer.width}, {layer.seq} tokens, batch {layer.batch}{shared}",
            f"played, not measured, on one {name} with {on['wire_gbs']:.4g} GB/s to the other ranks "
            f"and {on['tflops'] * on['gemm_share']:.4g} TFLOP/s in products; "
            + "; ".join(["figures with sources: docs/planning.md", *given])
            + without,
            tabulate(cells, headers="keys", tablefmt="simple", stralign="right"),
            "times: of the first row's; exposed: what a wire that costs nothing would save; stock "
            "is DeepSpeed's class, five of eight what its pull requests 5691 and 415 overlap",
        )
    )


def _describe_fits(layer: LayerShape, model: Model, best: int, gib: float) -> str:
    """Return the table of the longest sequences that fit into ``gib`` GiB.

    ``best`` is the number of head groups that the plan advises.
    """
    from .fits import Way, longest

    windows = [Way(*window) for window in WINDOWS if window[0] <= layer.geometry(1).max_groups]
    names = ("all kept", "checkpointed", "keep", "inputs on host", "offload")
    rows = []
    for way in (Way(0), Way(best), *windows):
        tokens = longest(layer, model, way, int(gib * 2**30))
        rows.append(
            (way, *(f"{tokens[name] // 1024:,}k" if name in tokens else "-" for name in names))
        )
    return "\n".join(
        (
            f"longest sequence that fits into {gib:g} GiB with {model.layers} layers, "
            f"{model.parameters / 1e9:.3g} billion parameters under ZeRO-3 over {layer.sp_size} "
            "ranks, loss and MLP in tiles, k = 1024 tokens, by what is done with activations; "
            "arithmetic, not a measurement",
            tabulate(rows, headers=("", *names), tablefmt="simple", stralign="right"),
        )
    )


def _sizes(args: argparse.Namespace) -> tuple[str, list[dict[str, object]]]:
    """Return which sp size of a cluster to take, and a row for each that is possible.

    Sequences are many, so that what counts is how many tokens a GPU computes in a second.
    """
    from .fits import Way, longest
    from .plan import best_of, plan

    world, rows = args.nodes * args.gpus_per_node, []
    for size in range(2, world + 1):
        if world % size:
            continue
        args.sp = size
        try:
            layer = _layer(args)
        except ValueError as error:
            reason = str(error)
            continue
        network = size > args.gpus_per_node
        if network and args.bandwidth is None:
            raise ValueError("--nodes needs --bandwidth, that of a GPU to other nodes")
        on = _gpu(args, layer)
        on = on if network else on.given("a node", wire_gbs=GPUS[args.gpu]["wire_gbs"].value)
        played = plan(layer, on, with_all=False)
        best = best_of(played)
        ms = best.step_ms if best.whole_ms is None else best.whole_ms
        row: dict[str, object] = {"sp": size, "GB/s": on["wire_gbs"], "best": best.variant}
        row |= {"ms": round(ms, 2), "tokens/s a GPU": round(1e3 * layer.seq / size / ms)}
        if (model := _model(args)) is not None:
            most = longest(layer, model, Way(best.groups), int(args.memory * 2**30))
            row["fits"] = "yes" if most["checkpointed"] >= layer.seq else "no"
        rows.append(row)
    if not rows:
        raise ValueError(f"no sp size of {world} GPUs: {reason}")
    fitting = [row for row in rows if row.get("fits") != "no"]
    if not fitting:
        return "no sp size: the sequence fits into none of them", rows
    best_row = max(fitting, key=lambda row: int(str(row["tokens/s a GPU"])))
    unknown = "" if "fits" in best_row else "; --memory says which of them fit"
    advice = f"sp size {best_row['sp']}, with {best_row['best']}: most tokens a second{unknown}"
    return advice, rows


def command(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the plan, under a launcher on rank 0; return the exit status 0.

    Exits with argparse's error where nothing can be planned or measured.
    """
    try:
        if args.nodes is not None or args.gpus_per_node is not None:
            if None in (args.nodes, args.gpus_per_node) or args.sp is not None:
                raise ValueError("--nodes and --gpus-per-node go together, in place of --sp")
            advice, sizes = _sizes(args)
            table = tabulate(sizes, headers="keys", tablefmt="simple", stralign="right")
            print(
                json.dumps({"sp": sizes, "verdict": advice})
                if args.json
                else f"{advice}\n\n{table}"
            )
            return 0
        layer = _layer(args)
        model = _model(args)
        on = _gpu(args, layer)
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        # Ranks could not be started, or could not exchange.
        parser.error(
            f"--measure failed: {str(error).strip().splitlines()[-1]}; "
            "give --bandwidth and --tflops instead"
        )
    # A launcher's ranks all find the same; one of them prints it.
    if (_launched() or (0, 1))[0] == 0:
        # It loads torch.
        from .plan import ours_of, plan, verdict

        rows = plan(layer, on)
        advice = verdict(rows)
        if args.json:
            print(json.dumps({"layer": [asdict(row) for row in rows], "verdict": advice}))
            return 0
        print(describe(layer, on, args.gpu, rows, advice))
        if model is not None:
            fastest = min(ours_of(rows), key=lambda row: row.step_ms)
            print(f"\n{_describe_fits(layer, model, fastest.groups, args.memory)}")
    return 0
