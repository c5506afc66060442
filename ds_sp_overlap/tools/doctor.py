"""Prints versions, and checks gradients on this machine: ``python -m ds_sp_overlap doctor``.

The self-check runs one overlapped attention layer on P ranks, in fp64. Each rank also runs the same
layer on the whole sequence, without exchanges, and compares output and gradients. A negative
control follows: one exchange delivers values that are wrong by one part in 10^9. If the self-check
does not detect this error, the outcome is BLIND. The self-check uses NCCL if there is a GPU, even
if the ranks must share the GPU (`shared_gpu`), and gloo otherwise.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from ..attention.self_attention import SelfAttention
from ..exchange.streams import CONNECTIONS, one_queue
from ..exchange.transport import C10d, Handle, gather
from ..launch_order import LAUNCH_ORDER
from ..relayout import kernels
from .shared_gpu import lacks, nccl_version, sharing

# The largest relative error that passes; fp64 rounding of a few thousand terms stays below 1e-13.
BOUND = 1e-12
HEADS, KV_HEADS, HEAD_DIM, LOCAL_SEQ, BATCH = 8, 4, 16, 24, 2


def versions() -> str:
    """Return a table of versions, devices and settings."""
    rows = [("python", platform.python_version())]
    packages = "ds_sp_overlap torch deepspeed transformers accelerate peft flash-attn"
    for name in packages.split():
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows.append(("devices", ", ".join(devices) or f"CPU, {os.cpu_count()} cores"))
    rows.append(("compiled kernels", str(kernels.library())))
    rows.append((CONNECTIONS, one_queue() or os.environ.get(CONNECTIONS, "not set")))
    if dist.is_nccl_available():
        rows.append(("NCCL", ".".join(map(str, nccl_version()))))
        order = os.environ.get(LAUNCH_ORDER, "not set")
        if order != "1":
            order += "; set it to 1 for every rank, see docs/correctness.md"
        rows.append((LAUNCH_ORDER, order))
    return tabulate(rows, tablefmt="plain")


class _Faulty(C10d):
    """Delivers dv one part in 10^9 too large; the transport of the negative control."""

    def launch(self, send: Tensor, recv: Tensor, *rest: Any) -> Handle:
        """Launch an exchange; if it is the exchange of dv, its wait adds the fault."""
        work = super().launch(send, recv, *rest)

        def wait() -> None:
            work.wait()
            recv.mul_(1 + 1e-9)

        # The values arrive only with the wait, so add the fault after the wait.
        return SimpleNamespace(wait=wait) if "dv" in rest[-1] else work


def _local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally; q, k, v and o are [b, s, heads, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _projections(device: torch.device) -> nn.ModuleDict:
    """Return q_proj, k_proj, v_proj and o_proj with the same weights on every rank."""
    torch.manual_seed(0)
    width, of_kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    rows = {"q_proj": width, "k_proj": of_kv, "v_proj": of_kv, "o_proj": width}
    linears = {name: nn.Linear(width, of, bias=False) for name, of in rows.items()}
    return nn.ModuleDict(linears).to(device, torch.float64)


def _errors(
    rank: int, size: int, device: torch.device, groups: int, faulty: bool
) -> dict[str, float]:
    """Return, for the output and for each gradient, the largest relative error on any rank.

    Collective. Each rank compares with its own run of the whole sequence, without exchanges.

    Args:
        rank: This rank.
        size: The number of ranks, P.
        device: The device of this rank.
        groups: The number of head groups, G.
        faulty: Whether the exchanges go through `_Faulty`.
    """
    layer = _projections(device)
    # With the same seed, all ranks have the same whole sequence.
    torch.manual_seed(1)
    shape = (2, BATCH, size * LOCAL_SEQ, HEADS * HEAD_DIM)
    whole, cotangent = torch.randn(shape, dtype=torch.float64).to(device)
    whole.requires_grad_()
    q, k, v = (layer[f"{kind}_proj"](whole).unflatten(-1, (-1, HEAD_DIM)) for kind in "qkv")
    expected = layer["o_proj"](_local_attention(q, k, v).flatten(2))
    expected.backward(cotangent)
    plain = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()

    local = slice(rank * LOCAL_SEQ, (rank + 1) * LOCAL_SEQ)
    x = whole.detach()[:, local].clone().requires_grad_()
    attend = SelfAttention(
        local_attention=_local_attention, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        sequence_process_group=dist.group.WORLD, config={"head_groups": groups}, name="doctor",
        heads_alike=True, transport=_Faulty() if faulty else None, **layer,
    )  # fmt: skip
    attend.layer.tells = False
    y = attend(x)
    y.backward(cotangent[:, local])

    pairs = {
        "output": (y.detach(), expected.detach()[:, local]),
        "hidden states": (x.grad, whole.grad[:, local]),
    }
    for name, parameter in layer.named_parameters():
        # Each rank has the weight gradient of its own tokens; sum over the ranks.
        dist.all_reduce(parameter.grad)
        pairs[name] = parameter.grad, plain[name]
    relative = [(got - want).abs().max() / want.abs().max() for got, want in pairs.values()]
    errors = torch.stack(relative).cpu()
    # Gather the errors, since an all-reduce with MAX may lose the NaN of one rank; amax keeps NaN.
    return dict(zip(pairs, torch.stack(gather(errors)).amax(0).tolist()))


def _rank(rank: int, size: int, on_gpu: bool, folder: str) -> None:
    """Run one rank of the self-check in a separate process; rank 0 saves the errors.

    Args:
        rank: This rank.
        size: The number of ranks, P.
        on_gpu: Whether to use NCCL; ranks share GPUs if there are fewer GPUs than ranks.
        folder: The folder of the rendezvous file ``store`` and of the file ``result``. Rank 0
            writes the errors into ``result``, in the form that `verdict` takes.
    """
    # The ranks share the cores of this machine.
    torch.set_num_threads(1)
    backend, device = "gloo", torch.device("cpu")
    if on_gpu:
        backend, device = "nccl", torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    # Run with one head group, and with two unless a rank has a single query head.
    most = min(2, HEADS // size)
    runs = {}
    for groups in range(1, most + 1):
        runs[f"G = {groups}"] = _errors(rank, size, device, groups, faulty=False)
    runs["control"] = _errors(rank, size, device, most, faulty=True)
    if rank == 0:
        torch.save(runs, Path(folder, "result"))
    dist.destroy_process_group()


def verdict(runs: dict[str, dict[str, float]]) -> str:
    """Return PASS, FAIL (a gradient is wrong) or BLIND (the planted fault was not seen).

    Args:
        runs: For each run, its relative errors by name (`_errors`). The run "control" has the
            planted fault.
    """
    for name, errors in runs.items():
        # Not ``any(error > BOUND)``, which would accept NaN.
        if name != "control" and not all(error <= BOUND for error in errors.values()):
            return "FAIL"
    return "PASS" if max(runs["control"].values()) > 10 * BOUND else "BLIND"


def doctor(ranks: int) -> int:
    """Print versions and the outcome of the self-check.

    Args:
        ranks: The number of ranks of the self-check.

    Returns:
        The exit status: 0 if the self-check passed, 1 if it failed, 2 for an invalid number of
        ranks.
    """
    if not 1 <= ranks <= HEADS:
        print(
            f"doctor: --ranks must be between 1 and {HEADS} (the self-check's heads), got {ranks}",
            file=sys.stderr,
        )
        return 2
    print(versions(), flush=True)
    print(f"\nstarting {ranks} ranks for the self-check, in up to a minute", flush=True)
    gpus, where = torch.cuda.device_count(), "gloo on the CPU"
    with contextlib.ExitStack() as stack:
        if gpus >= ranks:
            where = "NCCL, a GPU each"
        elif gpus and (reason := lacks()):
            print(f"\nthe ranks can't share the {gpus} GPU, and run on the CPU: {reason}")
        elif gpus:
            where = f"NCCL, sharing {gpus} GPU {stack.enter_context(sharing())}"
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        torch.multiprocessing.start_processes(
            _rank, (ranks, "NCCL" in where, folder), nprocs=ranks, start_method="forkserver"
        )
        runs = torch.load(Path(folder, "result"))
    columns = {"": list(runs["control"])} | {run: errors.values() for run, errors in runs.items()}
    print(
        f"\ngradient self-check, {ranks} ranks over {where}, fp64: largest relative error against "
        "the whole sequence in one process"
    )
    print(tabulate(columns, "keys", floatfmt=".1e"))
    outcome = verdict(runs)
    print(
        f"{outcome} (bound {BOUND:.0e}; the control delivers dv 1e-9 too large "
        f"and must exceed {10 * BOUND:.0e})"
    )
    return 0 if outcome == "PASS" else 1
