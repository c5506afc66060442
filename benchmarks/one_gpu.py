"""Measure a layer on one GPU with an EMULATED network: one process is rank 0 of P, with the true shapes of its kernels.

    python benchmarks/one_gpu.py --out benchmarks/results/one_gpu        on an NVIDIA GPU
    python benchmarks/one_gpu.py --rehearse                              the same steps on a CPU, small: tests the script alone

No data leave the device. An exchange takes the time that its bytes would take at the given bandwidth. Every figure is emulated.

    E0   only waits, on the side stream: needs almost no SM, and no memory traffic but that of the received data (needs nvcc)
    E1   copies the bytes that would be sent to pinned host memory and back, at the rate of the bus, not at the given bandwidth
    E2   copies these bytes by a kernel of --blocks resident blocks, at the given bandwidth (needs nvcc)

Variants are those of `variants.py`, and stock ALST (UlyssesSPAttentionHF). Received data don't come from another rank, so results
can't be compared here; link.py and the tests compare them for the same code. Received data are random, since arithmetic on zeros
takes less power.

    compute       the fastest variant with exchanges that take no time; exposed = step - compute; limit = max(compute, exchange)
    contention    time that exchanges add to the kernels of the compute stream;  idle = step - time of all these kernels
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import deepspeed.runtime.sequence_parallel.ulysses_sp as alst  # noqa: E402
import deepspeed.sequence.layer as stock_layer  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks import record  # noqa: E402
from benchmarks.profiles import kernels, profiled, synchronise  # noqa: E402
from benchmarks.variants import Layer, Shape  # noqa: E402
from ds_sp_overlap.exchange.sp_group import SPGroup  # noqa: E402
from ds_sp_overlap.exchange.streams import SideStream, accelerator  # noqa: E402

MODELS = {"7b": (32, 32, 128), "8b": (32, 8, 128), "70b": (64, 8, 128), "rehearsal": (8, 4, 16)}  # query heads, KV heads, head dim


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["7b", "70b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="per GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[45, 340], help="GB/s that a GPU sends")
    parser.add_argument("--transports", nargs="+", choices=["E0", "E1", "E2"], default=["E0", "E1", "E2"])
    parser.add_argument("--blocks", type=int, default=16, help="of E2")
    parser.add_argument("--longest", type=int, default=262144, help="skip global sequences beyond this many tokens")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after so many; say which are left")
    parser.add_argument("--trace", action="store_true", help="leave a profiler's trace of each G beside --out")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rehearse:
        args.models, args.tokens, args.ranks, args.bandwidth, args.steps = ["rehearsal"], [32], [4], [0.02], 2
        args.transports = ["E0", "E1"]
    elif not torch.cuda.is_available():
        parser.error("no CUDA device; --rehearse runs the same steps on a CPU")
    return args


# Transports.


class _Handle:
    def __init__(self, wait=lambda: None):
        self.wait = wait


_random: dict[tuple, torch.Tensor] = {}


def appear(recv) -> None:
    """Fill ``recv`` with random data, which are drawn once for each size."""
    key = recv.shape, recv.dtype, recv.device
    if key not in _random:
        _random[key] = torch.randn_like(recv)
    recv.copy_(_random[key])


class Free:
    """A transport that takes no time: fills the receive buffer, and moves no data."""

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        appear(recv)
        return _Handle()


def remote_bytes(recv, recv_sizes) -> int:
    return (recv.numel() - recv_sizes[0]) * recv.element_size()


class OnDevice(NamedTuple):
    """The functions of throttled.cu, compiled; each queues its kernel on the current stream."""

    waiting: Callable
    throttled: Callable
    stamp: Callable


@functools.cache
def on_device() -> OnDevice:
    if shutil.which("nvcc") is None:
        sys.exit("benchmarks/one_gpu.py: E0 and E2 compile a kernel and need nvcc; leave them out with --transports E1")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "throttled.so")
        source = Path(__file__).with_name("throttled.cu")
        compiler = ["nvcc", "-O3", "-shared", "-Xcompiler", "-fPIC", "-arch=native", str(source), "-o", str(library)]
        subprocess.run(compiler, check=True)
        loaded = ctypes.CDLL(str(library))

    def checked(function, *types):
        function.argtypes = [*types, ctypes.c_void_p]

        def call(*given):
            if failed := function(*given, torch.cuda.current_stream().cuda_stream):
                raise RuntimeError(f"{function.__name__}{given}: CUDA error {failed}")

        return call

    pointer, number, count = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    return OnDevice(
        waiting=checked(loaded.waiting, number),
        throttled=checked(loaded.throttled, pointer, pointer, number, number, count, count, pointer),
        stamp=checked(loaded.stamp, pointer),
    )


class Waiting:
    """E0: waits for the time of an exchange; on CUDA in a kernel that reads the clock, on a CPU in ``wait``."""

    def __init__(self, bandwidth: float, device: torch.device):
        self.rate, self.cuda, self.free_at = bandwidth * 1e9, device.type == "cuda", 0.0

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        seconds = remote_bytes(recv, recv_sizes) / self.rate
        if self.cuda:
            on_device().waiting(int(1e9 * seconds))
            appear(recv)
            return _Handle()
        appear(recv)
        done = self.free_at = max(self.free_at, time.perf_counter()) + seconds
        return _Handle(lambda: time.sleep(max(0.0, done - time.perf_counter())))


class Pinned:
    """E1: copies to pinned host memory and back."""

    def __init__(self, bandwidth: float, device: torch.device):
        self.cuda, self.host = device.type == "cuda", {}

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        send, recv = send.view(-1), recv.view(-1)
        appear(recv[: recv_sizes[0]])
        away, come = send[send_sizes[0] :], recv[recv_sizes[0] :]
        count = max(away.numel(), come.numel())
        key = count, send.dtype
        if key not in self.host:  # exchanges of one size can share it, since they run one after another
            self.host[key] = torch.randn(count, dtype=send.dtype, pin_memory=self.cuda)
        self.host[key][: away.numel()].copy_(away, non_blocking=True)
        come.copy_(self.host[key][: come.numel()], non_blocking=True)
        return _Handle()


class Throttled:
    """E2: copies by a throttled kernel."""

    def __init__(self, bandwidth: float, device: torch.device, blocks: int):
        self.rate, self.blocks = bandwidth * 1e9, blocks
        self.cluster = 4 if torch.cuda.get_device_capability() >= (9, 0) and blocks % 4 == 0 else 1

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        count = remote_bytes(recv, recv_sizes)
        source = send if send.numel() * send.element_size() >= count else recv  # a KV head may be received more often than sent
        on_device().throttled(
            recv.data_ptr(), source.data_ptr(), count, int(1e9 * count / self.rate), self.blocks, self.cluster, None
        )
        appear(recv.view(-1)[recv.numel() - recv_sizes[0] :])
        return _Handle()


# Rank 0 of P, alone.


class Emulated(SPGroup):
    """Stands for an sp group of ``size`` ranks in one process, which is rank 0; all ranks agree with rank 0."""

    def __init__(self, size: int, transport):
        super().__init__(None, transport)
        self.kernels = self._choose_kernels()  # while the size is still one
        self.size = size
        self.calls.EVERY = sys.maxsize  # no other rank to compare calls with

    def streams(self, device):
        if device.type != "cpu" and device not in self.sides:
            self.sides[device] = SideStream(accelerator(device.type), device)
        return super().streams(device)

    def gather(self, what, where=""):
        return [what] * self.size


class _Group:
    group_name = "emulated"


@contextlib.contextmanager
def communication(size: int, transport):
    """Let DeepSpeed's modules exchange over ``transport`` while the body runs, on the compute stream, as over NCCL."""

    class Communication:
        get_world_size = staticmethod(lambda group=None: size)
        get_rank = staticmethod(lambda group=None: 0)

        @staticmethod
        def all_to_all_single(output, input, *args, group=None, async_op=False):
            sizes = [output.numel() // size] * size
            transport.launch(input.reshape(-1), output.view(-1), sizes, sizes, group, "stock").wait()

        @staticmethod
        def all_gather(parts, x, group=None):
            for part in parts:
                part.copy_(x)

    with mock.patch.object(stock_layer, "dist", Communication), mock.patch.object(alst, "dist", Communication):
        yield


def alst_layer(layer: Layer, size: int):
    shape = layer.shape

    def attend(module, q, k, v, mask, **kwargs):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return o.transpose(1, 2), None

    ulysses = alst.UlyssesSPAttentionHF(
        attend, shape.batch, shape.heads, shape.head_dim, shape.kv_heads, 1, _Group(),
        local_seq_length=shape.seq // size, global_seq_length=shape.seq,
    )  # fmt: skip
    ids = torch.arange(shape.seq // size, device=shape.device).expand(shape.batch, -1)

    def run(x):
        q, k, v = (layer.projections[f"{kind}_proj"](x).unflatten(-1, (-1, shape.head_dim)).permute(1, 2, 0, 3) for kind in "qkv")
        o, _ = ulysses(ulysses, q, k, v, None, position_ids=ids)
        return layer.projections["o_proj"](o.transpose(0, 1))

    return run


# Measuring.


def timed(variants: dict, device: torch.device, args: argparse.Namespace) -> dict[str, float]:
    """Return {variant: median ms}; variants run in turn inside one loop."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.warmup + args.steps):
        for name, run in variants.items():
            begin = synchronise(device)
            run()
            times[name].append(1e3 * (synchronise(device) - begin))
    return {name: statistics.median(values[args.warmup :]) for name, values in times.items()}


def kernel_ms(run, device: torch.device) -> float:
    """Return the ms of all kernels except those that emulate the network."""
    network = ("wait_ns", "throttled_copy", "Memcpy DtoH", "Memcpy HtoD")
    ran = kernels(profiled(run, device).profiler.kineto_results.events())
    return sum(kernel.duration_ns() for kernel in ran if not any(word in kernel.name() for word in network)) / 1e6


def case(args: argparse.Namespace, model: str, tokens: int, size: int, bandwidth: float, device: torch.device):
    """Measure one case; yield its rows."""
    heads, kv_heads, head_dim = MODELS[model]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = Shape(tokens * size, heads, head_dim, kv_heads, 1, dtype, device.type)
    layer = Layer(shape, 0, size)
    groups = [g for g in (1, 2, 4) if g <= heads // size]

    def variants(transport):
        """Return {name: function that runs a step over the transport}."""
        sp_group = layer.sp_group = Emulated(size, transport)
        stock = {"ALST": alst_layer(layer, size)}
        if kv_heads % size == 0:  # else DeepSpeed's class refuses the KV heads
            stock["DeepSpeed"] = layer.stock()
        ours = {"five of eight": layer.five_of_eight(), **{f"G = {g}": layer.ours(head_groups=g) for g in groups}}
        assert sp_group.group is None
        return {name: lambda run=run: layer.step(run) for name, run in {**stock, **ours}.items()}

    makers = {"E0": Waiting, "E1": Pinned, "E2": lambda *a: Throttled(*a, args.blocks)}
    transports = {name: makers[name](bandwidth, device) for name in args.transports}
    for label, transport in transports.items():
        with communication(size, Free()):
            alone = variants(Free())
            compute = timed(alone, device, args)
            busy = {name: kernel_ms(run, device) for name, run in alone.items()} if device.type == "cuda" else {}
        with communication(size, transport):
            beside = variants(transport)

            def exchange():
                handles = []
                for count in shape.exchange_elements(size):
                    part = [count // size] * size
                    send, recv = (torch.randn(count, dtype=dtype, device=device) for _ in range(2))
                    handles.append(transport.launch(send, recv, part, part, None, "exchange"))
                for handle in handles:
                    handle.wait()

            took = timed({"exchange": exchange, **beside}, device, args)
            exchange_ms, compute_ms = took.pop("exchange"), min(compute.values())
            for name, run in beside.items():
                if args.trace and args.out and name in (f"G = {g}" for g in groups):
                    trace = f"{args.out}-{tokens}-{bandwidth:g}-G{name[4:]}.json.gz"
                    profiled(run, device).export_chrome_trace(trace)
                if device.type == "cuda":
                    for parameter in layer.projections.parameters():
                        parameter.grad = None
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()
                    run()
                    peak = torch.cuda.max_memory_allocated() - held
                    busy_beside = kernel_ms(run, device)
                yield {
                    "emulated": f"{label}, {bandwidth:g} GB/s",
                    "model": model,
                    "tokens per GPU": tokens,
                    "P": size,
                    "variant": name,
                    "step ms": round(took[name], 3),
                    "compute ms": round(compute_ms, 3),
                    "exchange ms": round(exchange_ms, 3),
                    "exposed ms": round(took[name] - compute_ms, 3),
                    "exposed share": f"{1 - compute_ms / took[name]:.1%}",
                    "step / limit": round(took[name] / max(compute_ms, exchange_ms), 3),
                    "contention ms": round(busy_beside - busy[name], 3) if busy else "",
                    "idle ms": round(took[name] - busy_beside, 3) if busy else "",
                    "peak MiB": round(peak / 2**20, 1) if busy else "",
                }


def main() -> None:
    args = arguments()
    device = torch.device("cpu" if args.rehearse else "cuda")
    rows = record.Rows(args.out and args.out.with_suffix(".csv"))
    left, begin = [], time.monotonic()
    for model in args.models:
        for tokens in args.tokens:
            for size in args.ranks:
                if tokens * size > args.longest or size > MODELS[model][0]:
                    continue
                for bandwidth in args.bandwidth:
                    what = f"{model}, {tokens} tokens, P = {size}, {bandwidth:g} GB/s"
                    if time.monotonic() - begin > 60 * args.minutes:
                        left.append(what)
                        continue
                    for row in case(args, model, tokens, size, bandwidth, device):
                        rows.append(row)
                    print(f"{time.monotonic() - begin:5.0f} s  {what}", flush=True)
    fastest: dict[str, dict] = {}
    for row in rows:
        where = f"{row['model']}, {row['tokens per GPU']} tokens per GPU, P = {row['P']}, {row['emulated']}"
        if row["variant"].startswith("G = ") and row["step ms"] <= fastest.get(where, row)["step ms"]:
            fastest[where] = row
    said = "rehearsed, means nothing: decide" if args.rehearse else "decide"
    notes = [
        f"{said} head_groups, {where} (emulated): {row['variant']}, {row['exposed ms']} ms exposed"
        for where, row in fastest.items()
    ]
    kind = "EMULATED network, one process as rank 0 of P"
    kind += ", REHEARSED ON A CPU: no claim about time" if args.rehearse else ""
    record.write(args.out, rows, kind, notes + [f"left out after {args.minutes:g} minutes: {what}" for what in left])


if __name__ == "__main__":
    main()
