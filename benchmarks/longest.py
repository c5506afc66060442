"""Find the longest sequence that fits on a GPU, by the peak memory of a training step: with DeepSpeed (ALST) and with ours.

    python benchmarks/longest.py --memory 79 --out benchmarks/results/longest_h100      on one GPU, in two minutes
    python benchmarks/longest.py --rehearse                                             on a CPU, small: peaks in X

Method. One process is rank 0 of P over a transport that moves no data; buffers and kernels are those of a real one. Two real
decoder layers of a Llama, checkpointed, stand for all layers: their weights are those that ZeRO-3 has gathered and prefetched. The
inputs of layers are on the host, which takes no time here. This rank's share of weights, gradients and optimizer states is one
block of memory. Of the loss, which is computed in tiles of tokens, only the memory is allocated. Above --real tokens, attention is
a stand-in that allocates the memory of flash attention, without its arithmetic. The peak of a step grows linearly with the tokens,
so the peaks of two lengths give the longest one. It is run, and so is a length 3 % above, which must not fit.

X is the size of a rank's hidden states, [s/P, m] in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import deepspeed.runtime.sequence_parallel.ulysses_sp as alst  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig, LlamaModel, modeling_utils  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

import ds_sp_overlap  # noqa: E402
from benchmarks import record  # noqa: E402
from benchmarks.one_gpu import Emulated, Waiting, communication  # noqa: E402
from benchmarks.variants import Silent, held_over_time  # noqa: E402
from ds_sp_overlap.attention import self_attention  # noqa: E402
from ds_sp_overlap.integrations import registry  # noqa: E402
from ds_sp_overlap.integrations.sequence.positions import Positions  # noqa: E402

RECOMPUTED = {"window": 1, "checkpointing": "recompute"}
WAYS: dict[str, dict | None] = {
    "ALST": None,  # with ALST's TiledMLP
    "ALST, Liger's norms": None,
    "G = 1, tiles": {"head_groups": 1, "tiles": "auto"},
    "W = 1, recomputed": RECOMPUTED,
    "W = 1": {"window": 1},  # attention is saved; on the host if the inputs of layers are
    "W = 2": {"window": 2},
    "W = 1, no tiles": {**RECOMPUTED, "tiles": None},
    "G = 1": {"head_groups": 1},
    "ALST, the model as it is": None,
}


class Model(NamedTuple):
    """Describes a Llama on P ranks."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    parameters: float = 8.03e9
    vocabulary: int = 128256
    layers: int = 2
    ranks: int = 8


REHEARSAL = Model(hidden=128, heads=16, kv_heads=4, intermediate=320, parameters=0, vocabulary=64, layers=1, ranks=2)


class StandIn(TorchDispatchMode):
    """Replaces flash attention: allocates its output, log-sum-exp and the buffers of its backward, without arithmetic."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "").split(".")[0]
        if name == "_scaled_dot_product_flash_attention":
            q, k, v, *rest = args
            _, _, cum_q, cum_k, _, _, *random = function(*(x[:, :, :128] for x in (q, k, v)), *rest, **(kwargs or {}))
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
            return torch.empty_like(q.transpose(1, 2)).transpose(1, 2), lse, cum_q, cum_k, q.shape[2], k.shape[2], *random
        if name == "_scaled_dot_product_flash_attention_backward":
            _, q, k, v = args[:4]
            work = [torch.empty(q.shape, dtype=torch.float32, device=q.device), q.new_empty(q.shape[:3], dtype=torch.float32)]
            if q.shape[1] != k.shape[1]:  # dk and dv of each query head, which are summed afterwards
                work += [torch.empty_like(q), torch.empty_like(q)]
            dq, dk, dv = (torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
            del work
            return dq, dk, dv
        return function(*args, **(kwargs or {}))


class Nowhere(torch.autograd.graph.saved_tensors_hooks):
    """Stands for host memory: drops saved tensors, and gives zeros of the same shape back."""

    def __init__(self, **_):
        super().__init__(lambda x: (x.shape, x.dtype, x.device), lambda what: torch.zeros(what[0], dtype=what[1], device=what[2]))


class _Group:
    group_name = "emulated"


@contextlib.contextmanager
def alone(size: int, transport):
    """Run the body as rank 0 of ``size`` ranks, each with an equal part of one sequence."""

    def every(self, header, values):
        positions = values.cpu().numpy()
        of_rank = [np.concatenate([header, (positions + 2 * rank * positions.shape[-1]).ravel()]) for rank in range(size)]
        room = max(len(header) + self._room, len(of_rank[0]))
        return np.stack([np.pad(row, (0, room - len(row))) for row in of_rank]).astype(np.int64)

    def emulated(*args, **kwargs):
        return Emulated(size, transport)

    patches = [mock.patch.object(module, "SPGroup", emulated) for module in (registry, self_attention)]
    patches.append(mock.patch.object(modeling_utils, "save_on_cpu", Nowhere))
    with patches[0], patches[1], patches[2], mock.patch.object(Positions, "_every", every), communication(size, transport):
        yield


@contextlib.contextmanager
def running(way: str, net: LlamaModel, model: Model, tokens: int):
    """Set up ``net`` for one of `WAYS`, with ``tokens`` on this rank, while the body runs."""
    section = WAYS[way]
    with contextlib.ExitStack() as stack:
        if section is not None:
            ds_sp_overlap.enable(net, section, _Group())
            stack.callback(ds_sp_overlap.disable, net)
        else:
            attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
            width = model.hidden // model.heads
            lengths = dict(local_seq_length=tokens, global_seq_length=tokens * model.ranks)
            ulysses = alst.UlyssesSPAttentionHF(attend, 1, model.heads, width, model.kv_heads, 1, _Group(), **lengths)
            ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda module, q, k, v, mask, **more: ulysses(module, q, k, v, None, **more)
            stack.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, "sdpa", attend)
        if way == "ALST, Liger's norms":
            from liger_kernel.transformers import LigerRMSNorm

            stack.enter_context(mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", LigerRMSNorm.forward))
            for module in net.modules():
                if isinstance(module, modeling_llama.LlamaRMSNorm):
                    vars(module).update(offset=0.0, casting_mode="llama", in_place=True, row_mode=None)
        if way in ("ALST", "ALST, Liger's norms"):
            mlp = modeling_llama.LlamaMLP.forward
            shards = max(1, -(-tokens // model.hidden))  # the number that ALST's settings use

            def forward(self, x):
                return alst.TiledMLP.apply(mlp, self, x, shards, list(self.parameters()))

            stack.enter_context(mock.patch.object(modeling_llama.LlamaMLP, "forward", forward))
        yield


def step(net: LlamaModel, model: Model, tokens: int, device: torch.device, standing_in: bool) -> None:
    """Run forward, loss and backward of one microbatch with one sequence."""
    options = dict(dtype=torch.bfloat16, device=device)
    x = torch.zeros(1, tokens, model.hidden, **options).requires_grad_()
    positions = torch.arange(tokens, device=device)[None]
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        if standing_in:
            stack.enter_context(StandIn())
        y = net(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state
        dy = torch.zeros_like(y)
        # The LM head and its gradient, and the logits of a tile and their gradient.
        loss = [torch.empty(2, model.vocabulary, model.hidden, **options)]
        loss.append(torch.empty(2, min(tokens, 1024), model.vocabulary, device=device))
        del loss
        y.backward(dy)
    net.zero_grad(set_to_none=True)


class Measure:
    """Measures the peaks of a model's steps."""

    def __init__(self, model: Model, device: torch.device):
        self.model, self.device = model, device
        config = LlamaConfig(
            vocab_size=8, hidden_size=model.hidden, intermediate_size=model.intermediate, num_hidden_layers=model.layers,
            num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, max_position_embeddings=2**24, pad_token_id=0,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        with torch.device(device):
            self.net = LlamaModel(config).bfloat16().train()
        self.on_gpu = device.type == "cuda"
        if not self.on_gpu:
            self.net.norm = torch.nn.Identity()  # a single layer: on a GPU, inputs of layers are on the host
        self.net.gradient_checkpointing_enable({"use_reentrant": False}, **({"offload": True} if self.on_gpu else {}))
        states = int(16 * model.parameters / model.ranks)
        self.states = torch.empty(states, dtype=torch.uint8, device=device)

    def x_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.model.hidden

    def peak(self, way: str, tokens: int, standing_in: bool = False) -> tuple[int, int]:
        """Return the peak of allocated bytes in a step, and the bytes reserved after it.

        On a CPU, the peak is counted without weights and inputs, and the second number is 0.
        """
        run = functools.partial(step, self.net, self.model, tokens, self.device, standing_in)
        with alone(self.model.ranks, Silent()), running(way, self.net, self.model, tokens):
            if not self.on_gpu:
                # Without oneDNN: on processors without bf16 products, it allocates results in fp32.
                with torch.backends.mkldnn.flags(enabled=False):
                    run()
                    return max(held_over_time(run)) - self.x_bytes(tokens), 0  # without dy, which `step` makes
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def longest(self, way: str, memory: int) -> dict:
        """Compute a way's longest sequence from the peaks of two lengths, and run it; a length 3 % above must not fit."""
        size, quantum = self.model.ranks, 1024
        lengths = [2**20 // size, 2**21 // size]
        (first, _), (second, reserved) = (self.peak(way, tokens, standing_in=True) for tokens in lengths)
        slope = (second - first) / (lengths[1] - lengths[0])
        tokens = int(lengths[0] + (memory - first) / slope) // quantum * quantum
        fits = self.fits(way, tokens, memory)
        beyond = self.fits(way, int(1.03 * tokens) // quantum * quantum + quantum, memory)
        row = {"way": way, "longest, k tokens": tokens * size // 1024, "X a token": round(slope / self.x_bytes(1), 2)}
        return row | {
            "fits": fits,
            "3 % more": beyond,
            "GiB at 2M": round(second / 2**30, 1),
            "reserved": round(reserved / 2**30, 1),
        }

    def fits(self, way: str, tokens: int, memory: int) -> bool:
        try:
            return self.peak(way, tokens, standing_in=True)[0] <= memory
        except torch.OutOfMemoryError:
            self.net.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            return False

    def seconds(self, ways: list[str], seq: int, bandwidth: float) -> dict[str, float]:
        """Return {way: seconds of a step with real attention}, the better of two steps; ways run in turn."""
        tokens, found = seq // self.model.ranks, dict.fromkeys(ways, float("inf"))
        transport = Waiting(bandwidth, self.device) if bandwidth else Silent()
        for turn in range(3):
            for way in ways:
                with alone(self.model.ranks, transport), running(way, self.net, self.model, tokens):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    step(self.net, self.model, tokens, self.device, standing_in=False)
                    torch.cuda.synchronize()
                    if turn:
                        found[way] = min(found[way], time.perf_counter() - begin)
        return found


def in_x(model: Model, tokens: int, ways: list[str]) -> dict[str, float]:
    """Return {way: peak of a layer's step on a CPU, in X}.

    The peak is the difference between ``tokens`` and half of them, so that weights don't count.
    """
    measure, found = Measure(model, torch.device("cpu")), {}
    for way in ways:
        (some, _), (all_, _) = (measure.peak(way, length) for length in (tokens // 2, tokens))
        found[way] = (all_ - some) / measure.x_bytes(tokens // 2)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=79, help="GiB that PyTorch can use")
    parser.add_argument("--times", type=int, nargs="*", default=[2**18], help="global sequences whose steps are timed")
    parser.add_argument("--bandwidth", type=float, default=300, help="GB/s of the emulated wire of --times; needs nvcc, 0: no wire")
    parser.add_argument("--seq", type=int, default=16384, help="of --rehearse")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after so many")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("no CUDA device; --rehearse runs on a CPU")
    if importlib.util.find_spec("liger_kernel") is None or args.rehearse:  # its kernels need a GPU
        args.ways = [way for way in args.ways if "Liger" not in way]
    return args


def main() -> None:
    args, begin = arguments(), time.monotonic()
    if args.rehearse:
        peaks = in_x(REHEARSAL, args.seq // REHEARSAL.ranks, args.ways)
        rows = [{"way": way, "peak": round(peak, 2)} for way, peak in peaks.items()]
        record.write(args.out, rows, "peaks of one decoder layer's step in local hidden states, bf16, on a CPU", [])
        return
    model, notes = Model(), []
    rows = record.Rows(args.out.with_suffix(".csv") if args.out else None)
    measure = Measure(model, torch.device("cuda"))
    bandwidth = args.bandwidth if shutil.which("nvcc") and Path(__file__).with_name("throttled.cu").exists() else 0
    compared = [way for way in ("ALST", "W = 1") if way in args.ways]
    for way in compared:
        real, stood_in = (measure.peak(way, 2**18 // model.ranks, standing_in)[0] / 2**30 for standing_in in (False, True))
        notes.append(f"{way} at 256K tokens: {real:.2f} GiB with real attention, {stood_in:.2f} with the stand-in")
        print(f"longest: {notes[-1]}", flush=True)
    for way in args.ways:
        if time.monotonic() - begin > 60 * args.minutes:
            notes.append(f"left out for time: {way}")
            continue
        rows.append(measure.longest(way, int(args.memory * 2**30)))
        print(f"longest: {rows[-1]}", flush=True)
    for seq in args.times if time.monotonic() - begin < 60 * args.minutes else ():
        took = measure.seconds([way for way in ("ALST", "G = 1, tiles", "W = 1") if way in args.ways], seq, bandwidth)
        words = ", ".join(f"{way} {1e3 * t:.0f}" for way, t in took.items())
        notes.append(f"ms of a step of two layers at {seq // 1024}K tokens over {bandwidth:g} GB/s (0: no wire): {words}")
        print(f"longest: {notes[-1]}", flush=True)
    kind = f"Llama-8B's layers on one GPU as rank 0 of {model.ranks}, {args.memory:g} GiB, ZeRO-3, inputs of layers on the host"
    record.write(args.out, rows, kind, notes)


if __name__ == "__main__":
    main()
