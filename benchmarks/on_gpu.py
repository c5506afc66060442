"""Checks whole layers on one GPU; measures nothing.

python benchmarks/on_gpu.py layer | one | sync | race        --device cpu: the same steps, which test the script alone

layer   two processes that share the GPU and exchange over gloo, against the layer on the whole sequence in one process
one     one rank over NCCL: the package's transports, with communicators that the transports make; then the same step replayed
        from a CUDA graph
sync    forward and backward of a transformers layer, while torch raises for operations that make the host wait for the device
race    exchanges that write NaN first and take a millisecond, against fast exchanges; then the same without waits before the data
        are read, a fault that the check must find (else it is BLIND)
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ds_sp_overlap
from benchmarks.one_gpu import Emulated, on_device
from benchmarks.variants import Layer, Shape, check_parity
from ds_sp_overlap.exchange.sp_group import SPGroup, by_name
from ds_sp_overlap.integrations.sequence.positions import Positions
from ds_sp_overlap.relayout import kernels

TOLERANCE = 1e-12  # relative to the largest element; fp64 sums in another order


def kinds(device: str) -> list[str]:
    """Return the kinds of pack and unpack; `main` prints a line if there are no compiled kernels."""
    return ["torch", "compiled"] if device == "cuda" and kernels.library().cuda else ["torch"]


def shape(device: str, **more) -> Shape:
    return Shape(**{"seq": 256, "heads": 8, "head_dim": 64, "kv_heads": 4, "batch": 2, **more}, dtype=torch.float64, device=device)


def start(backend: str, rank: int, size: int, store) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    dist.init_process_group(backend, rank=rank, world_size=size, store=store)
    deepspeed.init_distributed(backend, dist_init_required=False, verbose=False)


def whole(of: Shape, size: int) -> list[list[torch.Tensor]]:
    """Return for each rank the expected output, gradient of x and of weights, from one process with the whole sequence."""
    ranks = [Layer(of, rank, size) for rank in range(size)]
    alone = Layer(of, 0, 1)
    alone.x, alone.dy = (torch.cat([getattr(rank, name) for rank in ranks]) for name in ("x", "dy"))

    def run(x):
        q, k, v = (alone.projections[f"{kind}_proj"](x).unflatten(-1, (-1, of.head_dim)) for kind in "qkv")
        return alone.projections["o_proj"](alone.local(q, k, v).flatten(2))

    y, dx, *weights = alone.step(run)
    return [[*parts, *weights] for parts in zip(y.chunk(size), dx.chunk(size))]


def _rank_of_layer(rank: int, size: int, device: str, store: str) -> None:
    start("gloo", rank, size, dist.FileStore(store, size))
    for kv_heads in (8, 4, 1):  # as many as query heads; fewer; fewer than ranks
        of = shape(device, kv_heads=kv_heads)
        expected = whole(of, size)[rank]
        for kind in kinds(device):
            for groups in (1, 2, 4):
                layer = Layer(of, rank, size, dist.group.WORLD)
                block = layer.ours(head_groups=groups, kernels=kind)
                for _ in range(3):
                    y, dx, *weights = layer.step(block)
                    for weight in weights:
                        dist.all_reduce(weight)
                    check_parity(f"{kv_heads} KV heads, {kind}, G = {groups}", [y, dx, *weights], expected, TOLERANCE)
        if rank == 0:
            print(f"layer: 8 heads, {kv_heads} KV heads: as on the whole sequence, by {' and '.join(kinds(device))}", flush=True)
    dist.destroy_process_group()


def check_layer(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank_of_layer, (2, device, f"{folder}/store"), nprocs=2)


def replayed(layer: Layer, block) -> list[torch.Tensor]:
    """Run a step without capture, then capture a step in a CUDA graph; return the results of a replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer.step(block)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer.step(block)
    graph.replay()
    return result


def check_one(device: str) -> None:
    start("gloo" if device == "cpu" else "nccl", 0, 1, dist.HashStore())
    group = dist.group.WORLD
    of = shape(device)
    expected = whole(of, 1)[0]
    for name in ("c10d", "auto", "copy_engine"):
        transport = by_name(name, 2)  # 2: for one rank there is no transport
        sp_group = SPGroup(group, transport)
        try:
            transport.prepare(sp_group)
        except ValueError as error:
            print(f"one: {name}: REFUSED: {error}")
            if name != "copy_engine":
                raise
            continue
        try:
            for groups in (1, 4):
                layer = Layer(of, 0, 1, group, sp_group)
                block = layer.ours(head_groups=groups)
                check_parity(f"{name}, G = {groups}", layer.step(block), expected, TOLERANCE)
                if device == "cuda" and name != "copy_engine":
                    check_parity(f"{name}, G = {groups}, replayed", replayed(layer, block), expected, TOLERANCE)
        except RuntimeError as error:
            # NCCL may not support copy engines here; the other transports must work.
            print(f"one: {name}: COULD NOT LAUNCH: {error}")
            if name != "copy_engine":
                raise
            continue
        own = getattr(transport, "group", None)
        print(f"one: {name}: as without exchanges, over {'the sp group' if own in (None, group) else 'a communicator of its own'}")
        print(f"decide the transport: {name} works")
        if device != "cpu" and name == "auto" and own in (None, group):
            sys.exit("one: auto made no communicator of its own")
    dist.destroy_process_group()


def check_sync(device: str) -> None:
    """Run as rank 0 of 2 over torch's "fake" backend, which moves no data.

    Checks the layers alone: once in a forward, before the layers, the host does read the positions of all ranks.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AutoConfig, AutoModelForCausalLM

    start("fake", 0, 2, FakeStore())
    sizes = dict(vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8)
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=4, max_position_embeddings=1024)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if device == "cpu" else torch.bfloat16).to(device)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)
    x = torch.randn(1, 64, 256, device=device, dtype=model.dtype, requires_grad=True)
    positions = torch.arange(64, device=device)[None]

    def every(self, mine, sent):
        """Return the values of both ranks: the other rank's positions follow this rank's, and all else is equal."""
        rows = np.zeros((2, len(mine) + self._room), dtype=np.int64)
        rows[:, : len(mine)] = mine
        if sent.numel() <= self._room:
            for rank, row in enumerate(rows):
                row[len(mine) : len(mine) + sent.numel()] = sent.cpu().numpy().ravel() + 2 * 64 * rank
        return rows

    def strictly(strict):
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("error" if strict else "default")

    def step(strict=False):
        hooks = []
        for layer in model.model.layers if strict else ():
            hooks += [
                layer.register_forward_pre_hook(lambda *_: strictly(True)),
                layer.register_forward_hook(lambda *_: strictly(False)),
            ]
        loss = model(inputs_embeds=x, position_ids=positions, use_cache=False).logits.sum()
        strictly(strict)
        loss.backward()
        strictly(False)
        for hook in hooks:
            hook.remove()

    if device != "cpu":
        strictly(True)
        try:
            torch.ones(1, device=device).item()
            sys.exit("sync: BLIND: item() was let through")
        except RuntimeError:
            strictly(False)
    for kind in kinds(device):
        for groups in (1, 2):
            options = {"head_groups": groups, "kernels": kind}
            with mock.patch.object(Positions, "_every", every):
                report = ds_sp_overlap.enable(model, options, mpu.get_sequence_parallel_group())
                step()  # the first step compares the ranks, and makes buffers and streams
                step(strict=True)
                ds_sp_overlap.disable(model)
            print(f"sync: {kind}, G = {groups}: the host waits for nothing; {str(report).splitlines()[0]}")
    dist.destroy_process_group()


class Prompt:
    """A transport as if every rank sent this rank's data."""

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        recv.copy_(send.view(recv.shape))
        return self

    def wait(self):
        pass


class Slow(Prompt):
    """A `Prompt` that takes a millisecond, with NaN in the receive buffer until then. On a CPU, it copies in the wait.

    ordered   False plants a fault: no stream waits for the copy
    """

    BLOCKS = 4

    def __init__(self, ordered: bool = True):
        self.ordered = ordered
        self.astray = None if torch.accelerator.current_accelerator() is None else torch.Stream()

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        recv.fill_(math.nan)
        send = send.view(recv.shape)
        if not send.is_cuda:
            slow = Prompt()
            slow.wait = lambda: self.ordered and recv.copy_(send)
            return slow
        if self.ordered:
            self.copy(send, recv)
            return self
        self.astray.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.astray):
            self.copy(send, recv)
        self.kept = [*getattr(self, "kept", []), send, recv]  # keep the buffers alive, so that the missing wait is the only fault
        return self

    def copy(self, send, recv):
        n_bytes = send.numel() * send.element_size()
        on_device().throttled(recv.data_ptr(), send.data_ptr(), n_bytes, 1_000_000, self.BLOCKS, 1, None)


def check_race(device: str) -> None:
    size, of = 4, shape(device, seq=512)

    def outcome(transport, groups, kind):
        layer = Layer(of, 0, size, sp_group=Emulated(size, transport))
        layer.sp_group.kernels = kind
        block = layer.ours(head_groups=groups, kernels=kind)
        for _ in range(3):  # later steps reuse memory that earlier steps freed
            result = layer.step(block)
        return result

    for kind in kinds(device):
        for groups in (1, 2):
            name = f"race: {kind}, G = {groups}"
            expected = outcome(Prompt(), groups, kind)
            check_parity(name, outcome(Slow(), groups, kind), expected, TOLERANCE)
            try:
                check_parity(name, outcome(Slow(ordered=False), groups, kind), expected, TOLERANCE)
            except AssertionError:
                print(f"{name}: as with prompt exchanges, and the planted fault is seen")
            else:
                sys.exit(f"{name}: BLIND: exchanges that nobody waits for gave the right result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = {"layer": check_layer, "one": check_one, "sync": check_sync, "race": check_race}
    parser.add_argument("check", choices=checks)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu runs the same steps")
    if args.device == "cuda" and not kernels.library().cuda:
        print(f"WITHOUT compiled kernels: {kernels.library().reason}")
    os.environ.setdefault("LOCAL_RANK", "0")
    warnings.filterwarnings("once")
    checks[args.check](args.device)
    print(
        f"{args.check}: PASSED on {args.device}" + (": a rehearsal, which proves the script alone" if args.device == "cpu" else "")
    )


if __name__ == "__main__":
    main()
