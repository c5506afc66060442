"""Runs a script on several ranks that share one GPU, over NCCL.

    python -m ds_sp_overlap.tools.shared_gpu RANKS SCRIPT ARGS...

This tests training over NCCL on a machine with one GPU; it makes nothing faster. Before version
2.30, NCCL refuses a second rank on a GPU; later versions accept it if `SHARING` is set. Every rank
has ``LOCAL_RANK=0``.

Kernels of several processes run at the same time only under CUDA's multi-process service (MPS).
This script starts the service for the ranks, and ends it after them. Without MPS the processes take
turns: an all-to-all of 16 MiB took 4.2 ms instead of 0.23 ms (H100). If a process under MPS is
killed, the others fail.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

import torch

SHARING, OLDEST_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30)
MPS = "nvidia-cuda-mps-control"


def nccl_version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL; torch reports the version that it was built with."""
    try:
        # By this name, the loader finds the library that is already loaded.
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return torch.cuda.nccl.version()  # NCCL is linked into torch's own library.
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def lacks() -> str:
    """Return why ranks can't share a GPU here, and what to do; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    version = nccl_version()
    if version[:2] >= OLDEST_NCCL:
        return ""
    package = f"nvidia-nccl-cu{(torch.version.cuda or '13').split('.')[0]}"
    return (
        f"several ranks on one GPU need NCCL 2.30, and {'.'.join(map(str, version))} is loaded; "
        f"pip install --no-deps --target DIR '{package}>=2.30', and start again with "
        "LD_PRELOAD=DIR/nvidia/nccl/lib/libnccl.so.2"
    )


@contextlib.contextmanager
def sharing() -> Iterator[str]:
    """Let processes that are started in the body share a GPU; yield a description."""
    with tempfile.TemporaryDirectory() as folder:
        # A separate MPS daemon, only for the ranks.
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        given = {SHARING: "1", **dict.fromkeys(names, folder)}
        has_mps = shutil.which(MPS) is not None
        with mock.patch.dict(os.environ, given):
            if has_mps:
                has_mps = subprocess.run([MPS, "-d"]).returncode == 0
            try:
                yield "under MPS" if has_mps else "WITHOUT MPS, so that they take turns"
            finally:
                if has_mps:
                    subprocess.run([MPS], input="quit -t 5\n", text=True, stdout=subprocess.DEVNULL)


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
    # By default, torchrun looks its own host up, which fails without a name server.
    torchrun += ["--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    if ranks > 1:
        torchrun.append(f"--redirects={','.join(f'{rank}:1' for rank in range(1, ranks))}")
    # Only DeepSpeed's CPU accelerator reads LOCAL_SIZE.
    rank = ["env", "LOCAL_RANK=0", f"LOCAL_SIZE={ranks}", sys.executable]
    return subprocess.call(["timeout", f"{seconds:g}"] + torchrun + rank + command)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ds_sp_overlap.tools.shared_gpu")
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
