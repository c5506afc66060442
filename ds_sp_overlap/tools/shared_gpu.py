"""Lets several ranks share one GPU over NCCL, for the self-check and for tests on one GPU.

NCCL refuses a second rank on a GPU, unless its version is 2.30 or later and the environment
variable `SHARING` is set. Kernels of several processes run at the same time only under CUDA's
multi-process service (MPS), which `sharing` starts and ends. Without MPS the processes take turns:
an all-to-all of 16 MiB took 4.2 ms instead of 0.23 ms (H100). If a process under MPS is killed, all
other processes under MPS fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from unittest import mock

import torch

SHARING, OLDEST_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30)
MPS = "nvidia-cuda-mps-control"


def nccl_version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL, which may differ from the version in torch's build."""
    try:
        # By this name, the loader finds the library that is already loaded.
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return torch.cuda.nccl.version()  # NCCL is linked into torch's own library.
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def lacks() -> str:
    """Explain why ranks can't share a GPU here, and name a remedy; return "" if they can."""
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
    """Let processes that the body of ``with`` starts share a GPU; yield how, in words."""
    with tempfile.TemporaryDirectory() as folder:
        # With folders of their own, the ranks get an MPS daemon that no other process uses.
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
