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


def batched_pays(x: Tensor, rows: int, dgrad: bool = False) -> bool:
    """Return whether a batched GEMM that writes the send buffer pays.

    It pays if it takes no longer than one GEMM and a pack. By benchmarks/kernels.py
    (benchmarks/results/kernels-cpu-gemm.csv), on CPU in fp32: a projection with 256 rows or more
    takes no longer; with fewer rows it takes up to 10 % longer, and so does the output projection's
    dgrad with any number of rows. On a GPU nobody has measured it, and
    it is not done there.

    Args:
        x: The input of the GEMM, for its dtype and device.
        rows: Rows of the weight for each rank.
        dgrad: Whether the GEMM is the output projection's dgrad.
    """
    if rows < 256 or dgrad or x.device.type != "cpu":
        return False
    return x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def by_rank(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` by the weights of each rank, and write the send buffer.

    Args:
        x: [tokens, k].
        weights: [P, k, n].
        bias: [P, n]; None without bias.

    Returns:
        [tokens, P, n], in the memory order of the send buffer, [P, tokens, n].
    """
    operands = x.expand(len(weights), -1, -1), weights
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
