"""``python -m ds_sp_overlap plan``: its arguments, its measuring ranks, its table."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .plan import LayerShape, Plan, Rates, plan


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("layer", "by itself or from --model; single values win over those of the model")
    shape.add_argument("--model", help="a transformers config: name, folder or file")
    shape.add_argument("--hidden", type=_whole, help="model dim")
    shape.add_argument("--heads", type=_whole, help="query heads")
    shape.add_argument("--kv-heads", type=_whole, help="KV heads (default: as many as query heads)")
    shape.add_argument("--head-dim", type=_whole, help="default: hidden / heads")
    shape.add_argument(
        "--intermediate", type=_whole, help="width of a gated MLP that counts towards the layer's time (default: attention alone)"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--seq", type=_whole, required=True, help="global sequence, tokens")
    run.add_argument("--sp", type=_whole, required=True, help="ranks of the sp group, P")
    run.add_argument("--batch", type=_whole, default=1)
    run.add_argument("--dtype-bytes", type=int, choices=(2, 4, 8), default=2, help="of an element that is exchanged (default 2)")
    rates = parser.add_argument_group("rates", "of one GPU; what it reaches, not its data sheet")
    rates.add_argument("--bandwidth", type=_rate, help="GB/s that it sends in an all-to-all while it receives as many")
    rates.add_argument("--tflops", type=_rate, help="TFLOP/s of matrix products")
    rates.add_argument("--attention-tflops", type=_rate, help="TFLOP/s of causal attention (default: --tflops)")
    rates.add_argument("--latency-us", type=_rate, default=20.0, help="of an exchange of nothing (default 20)")
    rates.add_argument(
        "--measure",
        action="store_true",
        help="measure what is not given: on the ranks of torchrun (-m ds_sp_overlap plan ...), else on --sp processes of this machine",
    )


def _layer(args: argparse.Namespace) -> LayerShape:
    """Raises ValueError for what can't be a layer, or is not known."""
    shape = {"hidden": args.hidden, "heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    shape["intermediate"] = args.intermediate
    if args.model is not None:
        from ..integrations.transformers import layer_shape

        try:
            known = layer_shape(args.model)
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {args.model}: no transformers config there: {str(error).splitlines()[0]}") from None
        shape = {key: given or known[key] for key, given in shape.items()}
    missing = [f"--{key}" for key in ("hidden", "heads") if not shape[key]]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing; give them, or --model")
    if shape["head_dim"] is None and shape["hidden"] % shape["heads"]:
        raise ValueError(f"--hidden {shape['hidden']} does not divide by --heads {shape['heads']}; give --head-dim")
    return LayerShape(
        width=shape["hidden"],
        heads=shape["heads"],
        kv_heads=shape["kv_heads"] or shape["heads"],
        head_dim=shape["head_dim"] or shape["hidden"] // shape["heads"],
        seq=args.seq,
        sp_size=args.sp,
        batch=args.batch,
        element_bytes=args.dtype_bytes,
        intermediate=shape["intermediate"] or 0,
    )


def _measuring_rank(rank: int, size: int, init: str, layer: LayerShape, result: str | None) -> Rates:
    """One rank of the measurement; rank 0 saves what was found."""
    import torch
    import torch.distributed as dist

    from . import measure

    local = int(os.environ.get("LOCAL_RANK", rank))
    on_gpu = torch.cuda.device_count() > local and (init == "env://" or torch.cuda.device_count() >= size)
    if on_gpu:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=init, rank=rank, world_size=size)
    found = measure.rates(layer, dist.group.WORLD, torch.device("cuda", local) if on_gpu else torch.device("cpu"))
    if rank == 0 and result is not None:
        torch.save((found.matmul, found.attention, found.wire, found.latency_ms), result)
    dist.destroy_process_group()
    return found


def _measured(layer: LayerShape) -> Rates:
    import torch

    if "WORLD_SIZE" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        if size != layer.sp_size:
            raise ValueError(f"--sp is {layer.sp_size}, but the launcher started {size} ranks; make them the same")
        return _measuring_rank(int(os.environ["RANK"]), size, "env://", layer, None)
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder, "result"))
        arguments = (layer.sp_size, f"file://{Path(folder, 'store')}", layer, result)
        torch.multiprocessing.start_processes(_measuring_rank, arguments, nprocs=layer.sp_size, start_method="forkserver")
        return Rates(*torch.load(result))


def _rates(args: argparse.Namespace, layer: LayerShape) -> Rates:
    missing = [f"--{name}" for name in ("bandwidth", "tflops") if getattr(args, name) is None]
    if missing and not args.measure:
        raise ValueError(f"{' and '.join(missing)} missing; give them, or --measure on the machine itself")
    found: Any = _measured(layer) if args.measure else None  # None only where no rate is missing
    tera: dict[str, Any] = {name: 1e12 * rate if (rate := getattr(args, name)) else None for name in ("tflops", "attention_tflops")}
    return Rates(
        matmul=tera["tflops"] or found.matmul,
        attention=tera["attention_tflops"] or (found.attention if found else tera["tflops"]),
        wire=1e9 * args.bandwidth if args.bandwidth else found.wire,
        latency_ms=found.latency_ms if found else args.latency_us / 1e3,
    )


def describe(layer: LayerShape, rates: Rates, result: Plan) -> str:
    """The answer as text."""
    base = result.results["none"]
    rows = [
        (name, f"{r.step_ms:.3f}", f"{r.step_ms - r.compute_ms:.3f}", f"{r.exposed:.1%}", f"{1 - r.step_ms / base.step_ms:.1%}",
         f"{r.held / 2**20:.1f}")
        for name, r in result.results.items()
    ]  # fmt: skip
    head = ("overlapped exchanges", "step ms", "exposed ms", "exposed", "saves", "buffers MiB")
    what = "layer with its MLP" if layer.intermediate else "attention layer"
    return "\n".join(
        (
            f"one {what}, forward and backward, on one of {layer.sp_size} ranks: {layer.heads} query and {layer.kv_heads} KV heads "
            f"of {layer.head_dim}, model dim {layer.width}, {layer.seq} tokens, batch {layer.batch}",
            f"rates: {rates.matmul / 1e12:.4g} TFLOP/s in matrix products, {rates.attention / 1e12:.4g} in attention, "
            f"{rates.wire / 1e9:.4g} GB/s on the wire, {1e3 * rates.latency_ms:.3g} us an exchange",
            f"a model's arithmetic, not a measurement: {base.compute_ms:.3f} ms of computing, {base.wire_ms:.3f} ms of exchanges",
            tabulate(rows, headers=head, tablefmt="simple", stralign="right"),
            result.advice,
        )
    )


def command(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the plan; argparse's error, with the values, for what can't be planned."""
    try:
        layer = _layer(args)
        rates = _rates(args, layer)
    except ValueError as error:
        parser.error(str(error))
    if int(os.environ.get("RANK", 0)) == 0:
        print(describe(layer, rates, plan(layer, rates)))
    return 0
