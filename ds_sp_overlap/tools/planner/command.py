"""Runs ``ds-sp-overlap plan``: reads arguments, measures rates where asked, prints tables."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path

from tabulate import tabulate

from ...exchange.geometry import shares_for
from .costs import WINDOWS, LayerShape, Rates
from .fits import Model, Way, longest
from .gpu.constants import GPUS, Gpu, gpu
from .plan import CLOSE, GROUPS, Plan, plan


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
    run.add_argument("--sp", type=_whole, required=True, help="ranks of the sp group, P")
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
    rates = parser.add_argument_group("rates", "of one GPU; what it reaches, not its data sheet")
    rates.add_argument(
        "--bandwidth",
        type=_positive,
        help="GB/s that it sends in an all-to-all while it receives as many",
    )
    rates.add_argument("--tflops", type=_positive, help="TFLOP/s of matrix products")
    rates.add_argument(
        "--attention-tflops", type=_positive, help="TFLOP/s of causal attention (default: --tflops)"
    )
    rates.add_argument(
        "--latency-us",
        type=_positive,
        help=f"of an exchange of nothing (default {1e3 * Rates.latency_ms:g}, or measured)",
    )
    rates.add_argument(
        "--measure",
        action="store_true",
        help="measure what is not given: on the ranks of torchrun (-m ds_sp_overlap plan ...), "
        "else on --sp processes of this machine",
    )
    on_gpu = parser.add_argument_group(
        "a GPU on paper", "plays what a layer launches on SMs, hardware queues and communicators"
    )
    on_gpu.add_argument(
        "--gpu", choices=list(GPUS), help="rates that are not given come from its table"
    )
    on_gpu.add_argument(
        "--measured",
        type=Path,
        help="figures that win over the table: measured.json of benchmarks/gpu.sh",
    )


def _layer(args: argparse.Namespace) -> LayerShape:
    """Return the layer's shape, from --model and single values.

    Sets ``args.layers`` from --model as well, for `_model`.

    Raises:
        ValueError: if a value is missing, or the values are no layer.
    """
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


def _gpu(args: argparse.Namespace) -> Gpu | None:
    """Return the GPU on paper; None without --gpu.

    Raises:
        ValueError: if --measured can't be used.
    """
    if args.gpu is None:
        if args.measured is not None:
            raise ValueError("--measured is for a GPU on paper; give --gpu, or leave it out")
        return None
    if args.measure:
        raise ValueError(
            "--gpu is for a machine that is not there; leave it out where --measure can measure"
        )
    if args.dtype_bytes != 2:
        raise ValueError(
            f"--gpu knows the rates of elements of 2 bytes, got --dtype-bytes {args.dtype_bytes}; "
            "leave out one of the two"
        )
    try:
        found = gpu(args.gpu, args.measured)
    except OSError as error:
        raise ValueError(f"--measured {args.measured}: {error.strerror}") from None
    found = found.given("given", wire_gbs=args.bandwidth, latency_us=args.latency_us)
    if args.tflops is not None:
        found = found.given("given, as --tflops", gemm_share=args.tflops / found["tflops"])
    if args.attention_tflops is not None:
        share = args.attention_tflops / found["tflops"]
        found = found.given(
            "given, as --attention-tflops", attention_share=share, backward_share=share
        )
    return found


def _rates(args: argparse.Namespace, layer: LayerShape, on_paper: Gpu | None) -> tuple[Rates, str]:
    """Return the rates, and a line with each rate and its source.

    Raises:
        ValueError: if a rate is neither given nor measured.
    """
    if on_paper is not None:
        known = Rates(
            1e12 * on_paper["tflops"] * on_paper["gemm_share"],
            1e12 * on_paper["tflops"] * on_paper["attention_share"],
            1e9 * on_paper["wire_gbs"],
            1e-3 * on_paper["latency_us"],
        )
        return known, f"rates: see figures of {args.gpu} below"
    missing = [f"--{name}" for name in ("bandwidth", "tflops") if getattr(args, name) is None]
    if missing and not args.measure:
        raise ValueError(
            f"{' and '.join(missing)} missing; give them, or --measure on the machine itself"
        )
    found = _measured(layer) if args.measure else None

    def rate(
        option: str, unit: float, measured: str, otherwise: tuple[float, str]
    ) -> tuple[float, str]:
        """Return a rate and its source: given, else measured, else ``otherwise``."""
        if (given := getattr(args, option)) is not None:
            return unit * given, "given"
        return otherwise if found is None else (getattr(found, measured), "measured")

    # Without a default: a rate that is missing is measured, or was refused above.
    matmul = rate("tflops", 1e12, "matmul", (0.0, ""))
    attention = rate("attention_tflops", 1e12, "attention", (matmul[0], "that of matrix products"))
    wire = rate("bandwidth", 1e9, "wire", (0.0, ""))
    latency = rate("latency_us", 1e-3, "latency_ms", (Rates.latency_ms, "assumed"))
    words = (
        f"rates: {matmul[0] / 1e12:.4g} TFLOP/s in matrix products ({matmul[1]}), "
        f"{attention[0] / 1e12:.4g} in attention ({attention[1]}), "
        f"{wire[0] / 1e9:.4g} GB/s on the wire ({wire[1]}), "
        f"{1e3 * latency[0]:.3g} us an exchange ({latency[1]})"
    )
    return Rates(matmul[0], attention[0], wire[0], latency[0]), words


def describe(layer: LayerShape, rates: str, result: Plan) -> str:
    """Return the plan as text, its advice first; ``rates`` is the line about the rates."""
    base = result.results["none"]
    rows = []
    for name, simulated in result.results.items():
        exposed_ms = simulated.step_ms - simulated.compute_ms
        row = {
            "overlapped exchanges": name,
            "step ms": f"{simulated.step_ms:.3f}",
            "limit ms": f"{result.limits[name]:.3f}",
            "exposed ms": f"{exposed_ms:.3f}",
            "exposed": f"{simulated.exposed:.1%}",
            "saves": f"{1 - simulated.step_ms / base.step_ms:.1%}",
            "peak MiB": f"{simulated.peak / 2**20:.1f}",
        }
        rows.append(row)
    what = "layer with its MLP" if layer.intermediate else "attention layer"
    shared = ""
    if layer.shares > 1:
        shared = f", r = {layer.shares} ranks share query heads"
    if layer.heads < layer.sp_size:
        shared += "; DeepSpeed's class can't run, and none is the same without overlap"
    return "\n".join(
        (
            result.advice,
            "",
            f"one {what}, forward and backward, on one of {layer.sp_size} ranks: "
            f"{layer.heads} query and {layer.kv_heads} KV heads of {layer.head_dim}, "
            f"model dim {layer.width}, {layer.seq} tokens, batch {layer.batch}{shared}",
            rates,
            "times are computed from the rates, not measured: "
            f"{base.compute_ms:.3f} ms of computing, {base.wire_ms:.3f} ms of exchanges",
            tabulate(rows, headers="keys", tablefmt="simple", stralign="right"),
            f"of those that take no longer than the shortest ({CLOSE:.0%}) the smallest peak: "
            f"{result.smallest}",
        )
    )


def _describe_fits(layer: LayerShape, model: Model, best: int, gib: float) -> str:
    """Return the table of the longest sequences that fit into ``gib`` GiB.

    ``best`` is the number of head groups that the plan advises.
    """
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


def command(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the plan, under a launcher on rank 0; return the exit status 0.

    Exits with argparse's error where nothing can be planned or measured.
    """
    try:
        layer = _layer(args)
        model = _model(args)
        on_paper = _gpu(args)
        rates, words = _rates(args, layer, on_paper)
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
        found = plan(layer, rates)
        print(describe(layer, words, found))
        if model is not None:
            print(f"\n{_describe_fits(layer, model, found.best, args.memory)}")
        if on_paper is not None:
            # Runs the layer, for which it needs torch.
            from .gpu.expected import describe as describe_gpu

            groups = [g for g in GROUPS if g <= layer.geometry(1).max_groups]
            print(f"\n{describe_gpu(layer, on_paper, groups)}")
    return 0
