"""Measures the rates for `plan`: matrix products, causal attention, an all-to-all.

The planner and benchmarks/link.py use this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from .costs import LayerShape

# The largest number of tokens with which attention is timed. With more tokens the rate hardly
# changes, but the time grows.
LONGEST = 8192
# The number of timed runs of each operation, after a warmup.
RUNS = 9


def rates(layer: LayerShape, group: Any, device: torch.device, tflops: float) -> dict[str, float]:
    """Measure figures of a GPU (`gpu.constants`) with the shapes of a layer.

    Times the product of a rank's tokens with a square weight; attention, forward and backward, with
    the rank's heads over at most `LONGEST` tokens; the exchange of q; and an exchange of one
    element per peer. Each time is the mean of `RUNS` runs on the slowest rank.

    Collective over ``group``; all ranks return the same.

    Args:
        layer: The shape of the layer.
        group: The sp group.
        device: The device to measure.
        tflops: The peak of the GPU in TFLOP/s; some figures are shares of it.

    Returns:
        The figures, by their names in `gpu.constants`.
    """

    def seconds(run: Callable[[], Any]) -> float:
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        # Begin together, so that no rank's time includes the wait for a late rank.
        dist.barrier(group)
        took = torch.tensor(timer.timeit(RUNS).mean, dtype=torch.float64, device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
        return took.item()

    peak = 1e12 * tflops
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[layer.element_bytes]
    options: dict[str, Any] = dict(dtype=dtype, device=device)
    tokens = layer.seq // layer.sp_size * layer.batch
    x = torch.randn(tokens, layer.width, **options)
    weight = torch.randn(layer.width, layer.width, **options)
    matmul = 2 * tokens * layer.width**2 / seconds(lambda: F.linear(x, weight))

    seq, heads = min(layer.seq, LONGEST), max(layer.heads // layer.sp_size, 1)
    # torch's attention needs a number of KV heads that divides the number of query heads. If the
    # heads of a rank don't divide, take fewer KV heads.
    kv_heads = math.gcd(heads, max(layer.kv_heads // layer.sp_size, 1))
    q, k, v = (
        torch.randn(layer.batch, n, seq, layer.head_dim, **options, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    do = torch.randn_like(q)

    def attend() -> None:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(o, (q, k, v), do)

    # Causal attention: two products over half of s x s in forward; 2.5 times as much in backward.
    flops = 3.5 * 2 * seq**2 * layer.batch * heads * layer.head_dim
    attention = flops / seconds(attend)

    def exchange_s(elements: int) -> float:
        send = torch.zeros(elements * layer.sp_size, **options)
        recv = torch.empty_like(send)
        return seconds(lambda: dist.all_to_all_single(recv, send, group=group))

    per_peer = tokens * layer.heads // layer.sp_size * layer.head_dim
    latency, whole = exchange_s(1), exchange_s(per_peer)
    # A rank sends nothing to itself: count only the other ranks.
    moved_bytes = (layer.sp_size - 1) * per_peer * layer.element_bytes
    return {
        "gemm_share": matmul / peak,
        "attention_share": attention / peak,
        "wire_gbs": moved_bytes / max(whole - latency, 1e-9) / 1e9,
        "latency_us": 1e6 * latency,
    }
