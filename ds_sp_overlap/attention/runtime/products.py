"""Operands and results of products: the tokens as rows, the send buffer, autocast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor


def matrix(x: Tensor) -> Tensor:
    """Return ``x`` [s/P, b, ..] as a matrix with a row for each token."""
    return x.reshape(-1, math.prod(x.shape[2:]))


# Devices without a kernel for batched products of half precision into views: they may take a hundred
# times as long as one product. A recording for a GPU, which is made on a CPU, empties the set.
unbatched = {"cpu"}


def batched_is_slow(x: Tensor) -> bool:
    """Return whether batched products with ``x`` are slow: half precision on such a device."""
    if x.device.type not in unbatched or x.dtype == torch.float64:
        return False
    return x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type)


def by_rank(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` by the weights of each rank, and write the send buffer.

    Args:
        x: [tokens, k].
        weights: [P, k, n].
        bias: [P, n]; None without bias.

    Returns:
        [tokens, P, n], in the memory order of the send buffer, [P, tokens, n].
    """
    operands = x.expand(weights.size(0), -1, -1), weights
    out = torch.bmm(*operands) if bias is None else torch.baddbmm(bias.unsqueeze(1), *operands)
    return out.transpose(0, 1)


@overload
def autocast(*tensors: Tensor) -> Sequence[Tensor]: ...


@overload
def autocast(*tensors: Tensor | None) -> Sequence[Tensor | None]: ...


def autocast(*tensors: Any) -> Sequence[Any]:
    """Cast tensors as autocast casts the operands of a product: all but float64, weights too.

    Args:
        *tensors: The operands, of which the first is not None.

    Returns:
        The operands in their order; unchanged without autocast.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
