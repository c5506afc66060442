"""Provides one attention layer, and all ways to run it that the benchmarks compare.

stock                 deepspeed.sequence.layer.DistributedAttention between whole projections
five of eight         ours in the order below, with only the overlap of DeepSpeed's PR 5691 and Megatron-DeepSpeed's PR 415
VeOmni                VeOmni's async Ulysses, from a checkout of VeOmni; it waits at once for v, o and dv
ours                  ds_sp_overlap.SelfAttention with a config
compute only          any of these with exchanges that take no time
exchange only         the eight exchanges alone, all in flight at once, waited for in the order of their start
side by side          ours with exchanges that take no time, while the eight exchanges of unrelated data are in flight: the time
                      of a schedule without any dependency on this machine
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import deepspeed.sequence.layer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

import ds_sp_overlap
from ds_sp_overlap.attention.runtime import walk
from ds_sp_overlap.attention.runtime.plan import pieces_of
from ds_sp_overlap.schedule import Op, Schedule, Step

# v is started alone, after the finishes of q and k, and waited for at once.
#
#    forward    Wq >q Wk >k Wv <q <k | >v <v | attention | >o <o | Wo
#    backward   Wo dgrad >do | Wo wgrad | <do attention | >dv <dv | >dk >dq | Wv <dk Wk <dq Wq


@functools.cache
def late_value(schedule: Schedule) -> Schedule:
    start, finish = (Step(op, ("v",), False, 0) for op in (Op.START, Op.FINISH))
    program = [step for step in schedule.forward if step != start]
    program.insert(program.index(finish), start)
    return dataclasses.replace(schedule, forward=tuple(program))


def five_of_eight(schedule: Schedule, *form) -> list:
    """Stand in for `pieces_of`, with a schedule of "five of eight"."""
    return pieces_of(late_value(schedule), *form)


@dataclass(frozen=True)
class Shape:
    """Describes a layer; ``seq`` is the length of the global sequence in tokens, ``heads`` the number of query heads."""

    seq: int
    heads: int
    head_dim: int
    kv_heads: int
    batch: int = 1
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def exchange_elements(self, size: int) -> list[int]:
        """Return the elements that a rank gives to each of the eight exchanges, including the part that stays on the rank."""
        per_head = self.seq // size * self.batch * self.head_dim
        kv_heads = max(self.kv_heads, size)  # a KV head is sent once to each rank that needs it
        return [per_head * n for n in (self.heads, kv_heads, kv_heads, self.heads)] * 2

    def wire_bytes(self, size: int) -> int:
        """Return the bytes that leave a rank in forward and backward."""
        return sum(self.exchange_elements(size)) * (size - 1) // size * self.dtype.itemsize


class Silent:
    """A transport that moves no data."""

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        recv.zero_()
        return self

    def wait(self):
        pass


class Attention(nn.Module):
    """Causal attention of q, k, v [s, b, h, d]; a module, since DeepSpeed's class needs one."""

    def forward(self, q, k, v, queries=None):
        gqa = q.shape[2] != k.shape[2]
        if queries is not None:  # k and v of the tokens that these queries see
            k, v = k[: queries[1]], v[: queries[1]]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        if queries is not None:
            with _disable_current_modes():  # torch can't make this mask in a dispatch mode
                mask = causal_lower_right(q.shape[2], k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa).permute(2, 0, 1, 3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).permute(2, 0, 1, 3)


class Layer:
    """The layer of one rank, sequence first: projections, hidden states, and a cotangent of the output.

    group      the sp group; None if one process emulates a rank
    sp_group   the emulated sp group; None with a real one
    """

    def __init__(self, shape: Shape, rank: int, size: int, group=None, sp_group=None):
        self.shape, self.size, self.group, self.sp_group = shape, size, group, sp_group
        self.local = Attention()
        torch.manual_seed(0)
        rows = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        options = dict(bias=False, dtype=shape.dtype, device=shape.device)
        self.projections = nn.ModuleDict(
            {f"{kind}_proj": nn.Linear(shape.width, n * shape.head_dim, **options) for kind, n in rows.items()}
        )
        self.projections["o_proj"] = nn.Linear(shape.width, shape.width, **options)
        torch.manual_seed(1 + rank)
        sizes = (shape.seq // size, shape.batch, shape.width)
        self.x, self.dy = (torch.randn(sizes, dtype=shape.dtype, device=shape.device) for _ in range(2))

    def step(self, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Run one forward and backward; return the output and all gradients."""
        for parameter in self.projections.parameters():
            parameter.grad = None
        x = self.x.detach().requires_grad_()
        y = run(x)
        y.backward(self.dy)
        return [y.detach(), x.grad, *(p.grad for p in self.projections.parameters())]

    def forward(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the forward alone; return the output with its graph."""
        return run(self.x.detach().requires_grad_())

    def stock(self) -> Callable[[Tensor], Tensor]:
        return self.around(deepspeed.sequence.layer.DistributedAttention(self.local, self.group))

    def around(self, attend: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a run with whole projections around ``attend``, which is called like DeepSpeed's class."""

        def run(x):
            q, k, v = (self.projections[f"{kind}_proj"](x).unflatten(-1, (-1, self.shape.head_dim)) for kind in "qkv")
            if k.shape[2] < self.size:  # DeepSpeed's class refuses this; repeat heads as its adapter for transformers does
                k, v = (heads.repeat_interleave(self.size // k.shape[2], 2) for heads in (k, v))
            return self.projections["o_proj"](attend(q, k, v, 1).flatten(2))

        return run

    def ours(self, transport=None, q_norm=None, **config) -> ds_sp_overlap.SelfAttention:
        shape = self.shape
        block = ds_sp_overlap.SelfAttention(
            local_attention=self.local, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            sequence_process_group=self.group, batch_first=False, config=config, transport=transport, name="layer",
            heads_alike=True, q_norm=q_norm, **self.projections,
        )  # fmt: skip
        if self.sp_group is not None:
            block.layer.sp_group = self.sp_group
        return block

    def five_of_eight(self, transport=None) -> Callable[[Tensor], Tensor]:
        block = self.ours(
            transport, q_norm=lambda q: q, head_groups=1
        )  # with a norm that is no module, projections are called whole

        def run(x):
            with mock.patch.object(walk, "pieces_of", five_of_eight):
                return block(x)

        return run

    def veomni(self, checkout: Path) -> Callable[[Tensor], Tensor]:
        theirs = load_veomni(checkout, self.group)
        weights = {kind: self.projections[f"{kind}_proj"].weight for kind in "qkvo"}
        axes = dict(seq_dimension=1, head_dimension=2, unpadded_dim_size=self.shape.seq)

        def run(x):  # batch first inside; with one row, each transpose is a view of contiguous memory
            qkv = theirs.async_ulysses_qkv_projection(
                x.transpose(0, 1), q_weight=weights["q"], k_weight=weights["k"], v_weight=weights["v"],
                head_dim=self.shape.head_dim, **axes,
            )  # fmt: skip
            o = self.local(*(t.transpose(0, 1) for t in qkv)).transpose(0, 1)
            return theirs.async_ulysses_output_projection(o, proj_weight=weights["o"], **axes).transpose(0, 1)

        return run

    def auto(self) -> tuple[Callable[[Tensor], Tensor], int | str]:
        """Run the trials of ``"head_groups": "auto"``, with stock as a candidate; return the run, and the choice."""
        block, stock = self.ours(head_groups="auto"), self.stock()
        still = torch.optim.SGD(self.projections.parameters(), lr=0.0)  # the policy counts optimizer steps
        trials = block.layer.policy.trials

        def run(x):
            return block(x, baseline=stock)

        while not trials or any(trial.chosen is None for trial in trials.values()):
            self.step(run)
            still.step()
        return run, next(iter(trials.values())).chosen

    def peak_bytes(self, run: Callable[[Tensor], Tensor]) -> int:
        """Return the peak bytes of a step without inputs and weights: activations, buffers, gradients."""
        self.step(run)
        for parameter in self.projections.parameters():
            parameter.grad = None
        return peak_bytes(lambda: self.step(run))

    def exchange_elements(self) -> list[int]:
        return self.shape.exchange_elements(self.size)

    def exchanges(self) -> Callable[[], Callable[[], None]]:
        """Return a function that launches the eight exchanges of unrelated data, and returns a function that waits for them."""
        options = dict(dtype=self.shape.dtype, device=self.shape.device)
        buffers = [(torch.randn(n, **options), torch.empty(n, **options)) for n in self.exchange_elements()]

        def launch():
            works = [dist.all_to_all_single(recv, send, group=self.group, async_op=True) for send, recv in buffers]

            def wait():
                for work in works:
                    work.wait()

            return wait

        return launch


ASYNC_ULYSSES = "veomni.distributed.sequence_parallel.async_ulysses"  # in VeOmni


def load_veomni(checkout: Path, group) -> ModuleType:
    """Import VeOmni's async Ulysses, over ``group``.

    Its parent packages are empty stand-ins, since their own files patch kernels and load models.
    """
    sequence_parallel = ASYNC_ULYSSES.rpartition(".")[0]
    for name in ("veomni", "veomni.utils", "veomni.distributed", sequence_parallel):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
    importlib.import_module(f"{sequence_parallel}.comm").set_ulysses_sequence_parallel_group(group)
    return importlib.import_module(ASYNC_ULYSSES)


@contextlib.contextmanager
def free_wire():
    """Let the exchanges of DeepSpeed's class and of VeOmni's take no time while the body runs."""

    def all_to_all_single(output, *args, **kwargs):
        output.zero_()

    def all_to_all(outputs, *args, **kwargs):
        for output in outputs:
            output.zero_()
        return Silent()

    stock = mock.patch.object(deepspeed.sequence.layer.dist, "all_to_all_single", all_to_all_single)
    with stock, mock.patch.object(dist, "all_to_all", all_to_all):
        yield


def check_parity(name: str, got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Raise AssertionError if a variant gives other results than expected.

    The default tolerance is for fp32 sums in another order: a few units in the last place of the largest element.
    """
    for mine, theirs in zip(got, expected):
        bound = tolerance * theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound, msg=lambda m: f"{name}: {m}")


def held_over_time(run: Callable[[], object]) -> list[int]:
    """Return the bytes of PyTorch's CPU allocator after each allocation or release in ``run``, minus those held before.

    The last number is the memory of the result. The profiler reports allocations of the calling thread, which on a CPU is also the
    thread of backward.
    """
    gc.collect()  # else cycles of an earlier run would be freed during this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()  # noqa: F841 (kept)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return list(itertools.accumulate((event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())), initial=0))


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of ``run``."""
    return max(held_over_time(run))


def held_bytes(run: Callable[[], object]) -> int:
    """Return the bytes that the result of ``run`` holds."""
    return held_over_time(run)[-1]
