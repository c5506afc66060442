"""Schedules probes, and describes differences that a probe finds.

To verify the reading of a layer's forward, a probe (`transformers.probe`) runs this forward and its
replacement on the same input, and compares the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...profiling.steps import in_backward

# With ``sp_overlap.check``, a probe is due in every hundredth call.
EVERY = 100
# The result of a comparison if some tensor has no finite number.
UNSEEN = "no number is finite"


@dataclass
class ProbeSchedule:
    """Decides in which calls layers of one kind are probed.

    Attributes:
        where: The name of the only layer that is probed: the first of its kind to be called. Empty
            before the first call.
        calls: The number of calls of this layer; reset to 0 to probe the next call.
    """

    where: str = ""
    calls: int = 0

    def is_due(self, where: str, check: bool, lengths: Sequence[int]) -> bool:
        """Return whether to probe this call, the same on every rank; also count the call.

        Args:
            where: The name of the called layer.
            check: Whether to probe every hundredth call, in addition to the first.
            lengths: [P]. Local sequence length of every rank in this call, in tokens.
        """
        self.where = self.where or where
        # Neither probe nor count a call that a checkpoint recomputes.
        if in_backward():
            return False
        # Don't probe without tokens, which few forwards accept.
        if where != self.where or not min(lengths):
            return False
        self.calls += 1
        return self.calls == 1 or check and self.calls % EVERY == 0


def first_difference(named: dict[str, tuple[Tensor, Tensor]]) -> str:
    """Describe the first pair of tensors that differ, with its name.

    A pair has a result of the layer's own forward and the same result of the replacement. Returns
    "" if no pair differs, or `UNSEEN` if some tensor has no finite number.
    """
    is_seen = True
    for name, (own, driven) in named.items():
        if words := _describe_difference(own, driven):
            return f"{name}{words}"
        if own.numel() and own.is_floating_point() and not own.is_meta:
            is_seen = is_seen and bool(own.detach().isfinite().any())
    return "" if is_seen else UNSEEN


def _describe_difference(own: Tensor, driven: Tensor) -> str:
    """Describe how two tensors differ; empty if they differ by no more than rounding."""
    if own.shape != driven.shape or own.dtype != driven.dtype:
        return f" is {list(own.shape)} {own.dtype}, not {list(driven.shape)} {driven.dtype}"
    if not own.numel() or own.is_meta:
        return ""
    if not own.is_floating_point():
        return "" if torch.equal(own, driven) else " differs"
    # Detach, so that autograd saves nothing: a checkpoint around the module counts saved tensors.
    own, driven = own.detach(), driven.detach()
    # If a number overflows in one tensor, the number in the other must have the same sign, and be
    # at least half of the dtype's largest number.
    limit, finite = torch.finfo(own.dtype).max / 2, own.isfinite() & driven.isfinite()
    unlike = (own.abs() < limit) | (driven.abs() < limit) | (own.sign() * driven.sign() < 0)
    if bool(unlike[~finite].any()):
        return " overflows in one of the two alone"
    own, driven = own.where(finite, 0), driven.where(finite, 0)
    error, size = (own - driven).double().norm(), own.double().norm()
    relative = float(error / (size or 1))
    # Tolerate fp32 rounding even in fp64 tensors, since norms may compute in fp32.
    rounding = max(256 * torch.finfo(torch.float32).eps, 4 * torch.finfo(own.dtype).eps)
    # In autocast, products are rounded to a narrower dtype, although hidden states may be fp32.
    if torch.is_autocast_enabled(own.device.type):
        narrow = torch.get_autocast_dtype(own.device.type)
        rounding = max(rounding, 4 * torch.finfo(narrow).eps)
    if relative <= rounding:
        return ""
    return f" differs by {relative:.1e}"  # guard: more than rounding
