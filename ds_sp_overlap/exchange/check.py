"""``sp_overlap.check``: compare every exchange of the first step with a plain one.

The plain exchange gathers everything everywhere and picks; it shares no code with pack, unpack or the transport.
Expensive, and meant to be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rotary import rotate
from .channel import Channel
from .layout import Layout, Side


def plain_exchange(
    channel: Channel,
    layout: Layout,
    x: Tensor,
    name: str,
    rope: tuple[Tensor, Tensor] | None,
    rope_back: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """What the exchange of ``x`` must deliver to this rank; x rotated by ``rope`` before it, the result by ``rope_back`` after it.

    Collective. Raises RuntimeError on all ranks if they are about to launch exchanges that don't fit together.
    """
    if rope is not None:
        x = rotate(x, *(table.unsqueeze(-2) for table in rope)).to(x.dtype)
    every = channel.gather((name, x.dtype, layout, x.detach().cpu()), name)
    fits = all(
        sender.source.split_sizes[to] == receiver.target.split_sizes[rank]
        for rank, (_, _, sender, _) in enumerate(every)
        for to, (_, _, receiver, _) in enumerate(every)
    )
    if not fits or len({(other, dtype) for other, dtype, _, _ in every}) > 1:
        seen = "; ".join(
            f"sp rank {rank}: {other} {dtype} {list(what.source.shape)} -> {list(what.target.shape)}"
            for rank, (other, dtype, what, _) in enumerate(every)
        )
        raise RuntimeError(
            f"sp_overlap.check: the ranks launch exchanges that don't fit together ({seen}); call the same layers in "
            "the same order on every rank, with the same config"
        )
    target = layout.target
    out = torch.zeros(target.shape, dtype=x.dtype)
    for (start, stop), (_, _, sender, tensor) in zip(target.parts, every):
        begin, end = sender.source.parts[channel.rank]
        place = out.narrow(target.dim, start, stop - start)
        place.add_(tensor.narrow(sender.source.dim, begin, end - begin).reshape(place.shape))
    if rope_back is not None:  # the transpose of a rotation is the rotation by the opposite angle
        cos, sin = (table.unsqueeze(-2).cpu() for table in rope_back)
        out = rotate(out, cos, -sin).to(out.dtype)
    return out.to(x.device)


def compare(channel: Channel, got: Tensor, expected: Tensor, name: str, rotated: bool, target: Side) -> None:
    """Raise RuntimeError on all ranks, naming the exchange, if one of them received anything else.

    Bit for bit, but for sums of replicas in half precision, whose order of rounding is not fixed, and for rotation, of which
    each element is two products and a sum: three roundings of numbers no larger than sqrt(2) times the largest.

    target   what was written of ``got``
    """
    if not target.covers:
        got, expected = (
            torch.cat([x.narrow(target.dim, start, stop - start) for start, stop in target.parts], target.dim)
            for x in (got, expected)
        )
    half = got.dtype in (torch.float16, torch.bfloat16)
    rtol = torch.finfo(got.dtype).eps if half or rotated else 0.0
    atol = 3 * 2**0.5 * rtol * expected.abs().max().item() if rotated and expected.numel() else rtol
    fine = torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    worst = 0.0 if fine else (got - expected).abs().max().item()
    faults = [(rank, error) for rank, (ok, error) in enumerate(channel.gather((fine, worst), name)) if not ok]
    if faults:
        seen = ", ".join(f"sp rank {rank} by {error:.3g}" for rank, error in faults)
        raise RuntimeError(
            f"{name}: sp_overlap.check: the overlapped exchange differs from the plain one ({seen}); "
            'try sp_overlap.transport "c10d" and kernels "torch", and report it'
        )
