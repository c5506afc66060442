"""Train one LLaMA with and without the overlap, and compare the difference with the noise of training itself.

    python benchmarks/convergence/run.py                        two CPU processes, about seven minutes
    python benchmarks/convergence/run.py --plant-error 1e-4     the same with a fault in one exchange: must FAIL

On GPUs, through the launcher. Every --sp ranks share a sequence; these groups of ranks are data parallel:

    deepspeed --num_gpus 8 benchmarks/convergence/run.py --sp 8 --model 1b --seq 16384
    deepspeed --num_gpus 8 benchmarks/convergence/run.py --sp 8 --model 7b --seq 65536 --zero 3 --checkpointing \\
        --dtypes bf16 --skip "sp = 1"

With more ranks than query heads, which stock Ulysses refuses, all variants are compared with one rank:

    python benchmarks/convergence/run.py --sp 4 --model few --dtypes fp32

Variants run one after another on the same ranks. Each starts from the same seed, reads the same text (the sources of Python's
standard library, as bytes), and goes through deepspeed.initialize:

    stock               stock Ulysses over --sp ranks; all other variants are compared with it
    stock, again        a second run of stock: bit-identical on a deterministic device
    stock, split batch  each batch as two microbatches, gradients accumulated                                | the noise
    stock, split sums   each linear layer sums its products in two halves, as a row-parallel layer does      | floor
    sp = 1              without sequence parallelism; the same batch, spread over the ranks by whole sequences
    G = n               overlapped: stock with "sp_overlap": {"head_groups": n} in its config
    G = 2, r = P        with more ranks than heads: every rank has both heads, and 1/P of the queries
    window, kept        up to four head groups, two at a time, under activation checkpointing that saves attention

The noise runs change only the order of additions. A run of G = n counts the exchanges that the package launched, and stops the
benchmark if one of the eight is missing in any layer or step. Results: curves.csv, verdict.md, curves.png, environment.json. The
last line is PASS or FAIL. Exit code 0: every judged variant is within the bound of verdict.py. The variant sp = 1, and variants
that are compared with it, are judged in fp32 only: for sp = 1, DeepSpeed reduces bf16 gradients in another precision.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import json
import math
import os
import platform
import re
import sys
import threading
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.convergence import verdict  # noqa: E402
from benchmarks.convergence.training import MODELS, NOISE, Variant, text, train, variants


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/convergence"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2], help="head groups G to try")
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--seq", type=int, default=256, help="global sequence, tokens")
    parser.add_argument("--batch", type=int, help="sequences a step of each sp group; default: least multiple of 2 and --sp")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=1, help="ZeRO stage (0 keeps no grad norm in fp32)")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--skip", nargs="+", default=[], metavar="VARIANT", help='for instance "sp = 1" where it has no room')
    parser.add_argument("--plant-error", type=float, default=0.0, metavar="E",
                        help="negative control: in the runs G = n, send v of layer 0 as v * (1 + E)")  # fmt: skip
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = parser.parse_args(argv)
    heads = MODELS[args.model][3] // args.sp
    # The batch must divide by two for "split batch", and by the ranks for "sp = 1".
    least = math.lcm(2, args.sp) if heads else 2 * args.sp
    args.batch = args.batch or least
    if args.batch % least:
        parser.error(f"--batch must be a multiple of {least} at --sp {args.sp}, got {args.batch}")
    names = [variant.name for variant in variants(args.groups, heads, args.sp)]
    if unknown := set(args.skip) - set(names[1:]):
        parser.error(f"--skip: no variant {sorted(unknown)} that can be left out; there are {names[1:]}")
    if not set(NOISE).intersection(names) - set(args.skip):
        parser.error(f"--skip: one of {NOISE} must stay, there is no noise floor without")
    return args


@contextlib.contextmanager
def told(what: str, every_s: float = 30.0):
    """Print ``what`` at once, and the seconds since then every ``every_s`` seconds while the body runs."""
    print(what, flush=True)
    begin, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(every_s):
            print(f"  for {time.monotonic() - begin:.0f} s", flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def work(args: argparse.Namespace) -> bool:
    """Train every variant on this rank, and report on rank 0; return on every rank whether all judged variants passed."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed uses old names of torch's collectives
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))  # DeepSpeed's CPU accelerator reads it
    what = "importing DeepSpeed and joining the ranks; in a new environment DeepSpeed compiles an op, one to five minutes"
    with told(what) if os.environ["RANK"] == "0" else contextlib.nullcontext():
        import deepspeed
        import torch.distributed as dist
        from tqdm import tqdm

        deepspeed.init_distributed(verbose=False)
    first, world = dist.get_rank() == 0, dist.get_world_size()
    if world % args.sp:
        raise ValueError(f"--sp must divide the number of ranks, got {args.sp} and {world}")
    begin, corpus = time.monotonic(), text()
    heads = MODELS[args.model][3] // args.sp
    chosen = [variant for variant in variants(args.groups, heads, args.sp) if variant.name not in args.skip]
    runs: dict[str, dict[str, verdict.Run]] = {}
    # Without smoothing, the remaining time is estimated from the mean of all steps.
    with tqdm(total=len(args.dtypes) * len(chosen) * args.steps, unit="step", smoothing=0, disable=not first) as progress:
        progress.set_description("building the first model")

        def advance() -> None:
            if first and not progress.n:  # else the preparation would count as a slow step
                progress.start_t, progress.initial = time.time(), 1
            progress.update()

        for dtype in args.dtypes:
            runs[dtype], reference = {}, None
            for variant in chosen:
                progress.set_description(f"{dtype} {variant.name}")
                curve, before, after = train(variant, dtype, corpus, args, advance)
                reference = reference or (before, after)
                runs[dtype][variant.name] = verdict.Run(curve, verdict.distance(after, *reference) if first else 0.0)
    outcome = [report(args, runs, corpus, time.monotonic() - begin) if first else None]
    dist.broadcast_object_list(outcome, src=0)
    dist.destroy_process_group()
    if first:
        print(outcome[0], flush=True)
    return outcome[0].startswith("PASS")


def report(args: argparse.Namespace, runs: dict[str, dict[str, verdict.Run]], corpus, took_s: float) -> str:
    """Write and print all results; return the last line, which says whether all judged variants passed."""
    import deepspeed
    import torch
    import transformers

    import ds_sp_overlap

    first, *others = variants(args.groups, MODELS[args.model][3] // args.sp, args.sp)

    def how(variant: Variant, dtype: str) -> str:
        if variant.name in NOISE or variant.name == f"{first.name}, again":
            return "noise"
        return "judged" if variant.sp == first.sp or dtype == "fp32" else "shown"

    roles = {dtype: {v.name: how(v, dtype) for v in others if v.name in runs[dtype]} for dtype in runs}
    rows = [row for dtype in runs for row in verdict.judge(dtype, runs[dtype], roles[dtype], args.steps)]
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("dtype", "variant", "step", "loss", "grad_norm"))
        for dtype, of_dtype in runs.items():
            for name, run in of_dtype.items():
                writer.writerows((dtype, name, step, *point) for step, point in enumerate(run.curve.tolist()))
    page = verdict.page(runs, rows)
    (args.out / "verdict.md").write_text(page)
    verdict.plot(args.out / "curves.png", runs, roles)
    accelerator = deepspeed.accelerator.get_accelerator()
    environment = {
        "command": "python benchmarks/convergence/run.py " + " ".join(sys.argv[1:]),
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "took_s": round(took_s, 1),
        "ranks": torch.distributed.get_world_size(),
        "backend": torch.distributed.get_backend(),
        "device": accelerator.device_name() if accelerator.device_name() == "cpu" else torch.cuda.get_device_name(),
        "cpu": "".join(re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[:1]),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (torch, deepspeed, transformers, ds_sp_overlap)},
        "text": {"bytes": len(corpus), "sha256": hashlib.sha256(corpus).hexdigest()},
    }
    (args.out / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    print(f"\n{page}\n{took_s:.0f} s; {args.out}/: curves.csv, verdict.md, curves.png, environment.json", flush=True)
    return verdict.summary(rows)


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:  # a launcher started this rank
        sys.exit(not work(args))
    print("trains the same model in several ways, and compares the loss curves", flush=True)
    import torch
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    print(f"starting {args.sp} ranks", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if torch.cuda.device_count() < args.sp:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = LaunchConfig(1, 1, args.sp, run_id="convergence", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    sys.exit(not elastic_launch(config, work)(args)[0])


if __name__ == "__main__":
    main()
