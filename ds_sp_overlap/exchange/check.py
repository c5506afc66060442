"""Compares every exchange of a layer's first call with a plain exchange: ``sp_overlap.check``.

The plain exchange gathers every tensor on every rank, which is slow, and picks the parts of this
rank. The plain exchange shares no code with pack, unpack and the transport.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rotary import rotate
from ..warn import by_rank
from .copies import blocks_of
from .layout import Side
from .modes import outside_modes
from .sp_group import SPGroup


class Expected(NamedTuple):
    """Holds the tensor that an exchange must deliver, and the tolerance of each element.

    Attributes:
        sp_group: The sp group.
        name: Name of the exchange.
        values: The tensor.
        atol: [as ``values``]. The tolerance: 0, except for an element that is the sum of KV
            gradients of three or more ranks, since the order of summation is not fixed.
        is_rotated: Whether the exchange rotates heads (rotary embedding).
    """

    sp_group: SPGroup
    name: str
    values: Tensor
    atol: Tensor
    is_rotated: bool

    @outside_modes()
    def compare(self, got: Tensor) -> None:
        """Compare the tensor that this rank received with the expected one. Collective.

        `InFlight.finish` calls this in check mode. Sums of replicas and rotated elements have a
        tolerance; other elements must be equal.

        Raises:
            RuntimeError: on all ranks, if some rank received a wrong element.
        """
        # In half precision, both exchanges round a sum of replicas once more at the end.
        half = got.dtype in (torch.float16, torch.bfloat16)
        rtol = torch.finfo(got.dtype).eps if half or self.is_rotated else 0.0
        got, expected = got.double(), self.values.double()
        # Infinities must not make the tolerance of finite elements infinite.
        sizes = expected.abs().nan_to_num(0.0, posinf=0.0)
        allowed = self.atol + rtol * sizes
        # A rotated element is the sum of two products: three roundings, of numbers that are at most
        # sqrt(2) times the largest element of the same head and token.
        if self.is_rotated and expected.numel():
            largest = (self.atol + 3 * rtol * sizes).amax(-1, keepdim=True)
            allowed = allowed + 2**0.5 * largest
        # Accept equal infinities by ``==``, since inf - inf is nan.
        wrong = ~(((got - expected).abs() <= allowed) | (got == expected))
        wrong &= ~(got.isnan() & expected.isnan())
        fault = ""
        if wrong.any():
            fault = f"off by {(got - expected)[wrong].abs().max().item():.3g}"
        if faults := by_rank(self.sp_group.gather(fault, self.name)):
            raise RuntimeError(
                f"{self.name}: sp_overlap.check: the overlapped exchange differs from the plain "
                f'one ({faults}); try sp_overlap.transport "c10d" and kernels "torch", and report '
                "it"
            )


@outside_modes()
def plain_exchange(
    sp_group: SPGroup,
    source: Side,
    target: Side,
    x: Tensor,
    name: str,
    rope: tuple[Tensor, Tensor] | None,
    rope_back: tuple[Tensor, Tensor] | None,
) -> Expected:
    """Return the tensor that the exchange of ``x`` must deliver to this rank, with tolerances.

    `InFlight` calls this in check mode, before the exchange itself. Collective.

    Args:
        sp_group: The sp group.
        source: The side that is sent, which describes ``x``.
        target: The side that is received.
        x: The tensor that this rank sends.
        name: Name of the exchange.
        rope: (cos, sin) by which ``x`` is rotated before the exchange.
        rope_back: (cos, sin) by which the result is rotated back after the exchange.

    Raises:
        RuntimeError: on all ranks, if the exchanges that the ranks are about to launch don't match.
    """
    if rope is not None:
        x = rotate(x, *(table.unsqueeze(-2) for table in rope)).to(x.dtype)
    every = sp_group.gather((name, x.dtype, source, target, x.detach().cpu()), name)
    names, dtypes, sources, targets, tensors = zip(*every)
    sent = [sender.split_sizes for sender in sources]
    received = [receiver.split_sizes for receiver in targets]
    # In ``sent``, rows are senders and columns are receivers; in ``received``, the reverse.
    fits = sent == [list(sizes) for sizes in zip(*received)]
    if not fits or len(set(zip(names, dtypes))) > 1:
        launched = by_rank(
            f"{its_name} {dtype} {list(sent.shape)} -> {list(received.shape)}"
            for its_name, dtype, sent, received, _ in every
        )
        raise RuntimeError(
            f"sp_overlap.check: the ranks launch exchanges that don't fit together ({launched}); "
            "call the same layers in the same order on every rank, with the same config"
        )
    # Replicas (gradients of one KV head from several ranks) are summed in fp32 for half precision,
    # as in `copies.unpack`.
    out = torch.zeros(target.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    sizes, addends = torch.zeros_like(out), torch.zeros_like(out, dtype=torch.int32)
    for peer, (sender, tensor) in enumerate(zip(sources, tensors)):
        totals = [blocks_of(total, target, peer) for total in (out, sizes, addends)]
        # Sum the blocks that several ranks send for one place.
        for block, place, size, count in zip(blocks_of(tensor, sender, sp_group.rank), *totals):
            block = block.reshape(place.shape)
            place.add_(block)
            size.add_(block.abs())
            count.add_(1)
    # The plain sum of n addends and the exchange's sum are each off by at most (n - 1) eps times
    # the sum of the addends' absolute values.
    roundings = torch.where(addends > 2, 2 * (addends - 1), 0)
    atol = roundings * torch.finfo(out.dtype).eps * sizes.nan_to_num(0.0, posinf=0.0)
    if rope_back is not None:
        # Apply the transpose of the rotation, which is the rotation by the opposite angle.
        cos, sin = (table.unsqueeze(-2).cpu() for table in rope_back)
        out = rotate(out, cos, -sin)
    values, is_rotated = out.to(x.device, x.dtype), (rope or rope_back) is not None
    return Expected(sp_group, name, values, atol.to(x.device), is_rotated)
