"""Measures the rates for `plan`: matrix products, causal attention, an all-to-all.

The planner and benchmarks/link.py call `rates`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .costs import LayerShape, Rates

# The most tokens of attention that are timed. Beyond, its rate hardly changes, but its time does.
LONGEST = 8192
# How often everything is timed.
RUNS = 9


def _seconds(run: Callable[[], Any], group: Any, device: torch.device) -> float:
    """Return the median time of ``run`` in seconds, on the slowest rank; collective over ``group``.

    Synchronises the device.
    """

    def finished() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    times = []
    for _ in range(RUNS):
        # No rank's time includes the wait for a late rank.
        if group is not None:
            dist.barrier(group)
        begin = finished()
        run()
        times.append(finished() - begin)
    # The first runs take longer.
    took = torch.tensor(statistics.median(times[2:]), dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    return took.item()


def rates(layer: LayerShape, group: Any, device: torch.device) -> Rates:
    """Measure the rates with the shapes of a layer.

    Projections: the product of a rank's tokens with a square weight. Attention: forward and
    backward of the rank's heads, over at most `LONGEST` tokens. Wire: the exchange of q, and an
    exchange of one element per peer.

    Collective over ``group``; the slowest rank decides, so that all ranks return the same.

    Args:
        layer: Shape of the layer.
        group: The sp group; None for one rank.
        device: The device to measure.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[layer.element_bytes]
    options: dict[str, Any] = dict(dtype=dtype, device=device)
    tokens = layer.seq // layer.sp_size * layer.batch
    x = torch.randn(tokens, layer.width, **options)
    weight = torch.randn(layer.width, layer.width, **options)
    matmul = 2 * tokens * layer.width**2 / _seconds(lambda: F.linear(x, weight), group, device)

    seq, heads = min(layer.seq, LONGEST), max(layer.heads // layer.sp_size, 1)
    kv_heads = max(layer.kv_heads // layer.sp_size, 1)
    # Attention must divide query heads by KV heads; where a rank's don't, it has one for each.
    if heads % kv_heads:
        kv_heads = heads
    q, k, v = (
        torch.randn(layer.batch, n, seq, layer.head_dim, **options, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    do = torch.randn_like(q)

    def attend() -> None:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(o, (q, k, v), do)

    # Causal: two products in forward over half of s x s, and 2.5 times as much in backward.
    flops = 3.5 * 2 * seq**2 * layer.batch * heads * layer.head_dim
    attention = flops / _seconds(attend, group, device)
    if group is None or layer.sp_size == 1:
        return Rates(matmul, attention, float("inf"), 0.0)

    def exchange_s(elements: int) -> float:
        send = torch.zeros(elements * layer.sp_size, **options)
        recv = torch.empty_like(send)
        return _seconds(lambda: dist.all_to_all_single(recv, send, group=group), group, device)

    per_peer = tokens * layer.heads // layer.sp_size * layer.head_dim
    latency, whole = exchange_s(1), exchange_s(per_peer)
    # A rank sends nothing to itself.
    wire = (layer.sp_size - 1) * per_peer * layer.element_bytes / max(whole - latency, 1e-9)
    return Rates(matmul, attention, wire, 1e3 * latency)
