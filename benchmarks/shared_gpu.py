"""Runs a script on several ranks that share one GPU, over NCCL.

    python benchmarks/shared_gpu.py RANKS SCRIPT ARGS...

This tests training over NCCL on a machine with one GPU; it makes nothing faster. Every rank has ``LOCAL_RANK=0``.
ds_sp_overlap/tools/shared_gpu.py lists the requirements.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ds_sp_overlap.tools.shared_gpu import lacks, nccl_version, sharing


def run(ranks: int, command: list[str], seconds: float) -> int:
    """Run a Python script on every rank, by torchrun.

    Prints the output of rank 0, and the errors of all ranks.

    Args:
        ranks: The number of ranks.
        command: The script and its arguments.
        seconds: The time limit, in seconds.

    Returns:
        The exit status: 124 after the time limit, 1 if a rank failed, 0 if all succeeded.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    # By default, torchrun looks up the address of its host, which fails without a name server.
    torchrun += ["--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    if ranks > 1:
        torchrun.append(f"--redirects={','.join(f'{rank}:1' for rank in range(1, ranks))}")
    # Only DeepSpeed's CPU accelerator reads LOCAL_SIZE.
    rank = ["env", "LOCAL_RANK=0", f"LOCAL_SIZE={ranks}", sys.executable]
    return subprocess.call(["timeout", f"{seconds:g}"] + torchrun + rank + command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python script with arguments")
    parser.add_argument("--seconds", type=float, default=600, help="end the ranks after so long")
    parser.add_argument("--rehearse", action="store_true", help="over gloo: shares no GPU")
    args = parser.parse_args()
    if args.rehearse:
        return run(args.ranks, args.script, args.seconds)
    if reason := lacks():
        print(f"shared_gpu: {reason}", file=sys.stderr)
        return 1
    with sharing() as how:
        version = ".".join(map(str, nccl_version()))
        print(f"{args.ranks} ranks share one GPU, {how}, over NCCL {version}", flush=True)
        return run(args.ranks, args.script, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
