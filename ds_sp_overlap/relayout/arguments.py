"""Refuses arguments that pack and unpack can't work with.

The messages are those of csrc/ops.cpp: ``ds_sp_overlap.<operator>: what, with the values``.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse(op: str, message: str) -> NoReturn:
    """Raise the ValueError of operator ``op``."""
    raise ValueError(f"ds_sp_overlap.{op}: {message}")


def check_dtype(op: str, tensor: Tensor) -> None:
    """Refuse dtypes that the operators don't know."""
    if tensor.dtype not in DTYPES:
        refuse(op, f"dtype must be float16, bfloat16, float32 or float64, got {_dtype(tensor)}")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_like(op: str, name: str, other: Tensor, first: str, x: Tensor) -> None:
    """Refuse ``other`` unless it has the dtype and the device of ``x``."""
    if other.dtype != x.dtype:
        refuse(op, f"{name} has dtype {_dtype(other)}, {first} has {_dtype(x)}")
    if other.device != x.device:
        refuse(op, f"{name} is on {other.device}, {first} is on {x.device}")


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the address of the first byte, and that behind the last byte."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.element_size() if x.numel() else 0)


def check_apart(op: str, a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    """Refuse tensors that share memory."""
    (a_first, a_last), (b_first, b_last) = _extent(a), _extent(b)
    if a_first < a_last and b_first < b_last and a_first < b_last and b_first < a_last:
        refuse(
            op,
            f"{a_name} {list(a.shape)} and {b_name} {list(b.shape)} share memory; "
            "give an output of its own",
        )


def check_ranges(op: str, starts: list[int], stops: list[int]) -> None:
    """Refuse ranges unless each part has a start and a stop, and there is a part."""
    if len(starts) != len(stops):
        refuse(op, f"{len(starts)} starts and {len(stops)} stops; give one of each a part")
    if not starts:
        refuse(op, "no parts given; there is one a rank, and an sp size of 0 does not exist")


def check_parts(
    op: str, tensor: Tensor, dim: int, starts: list[int], stops: list[int], wire: Tensor
) -> None:
    """Refuse parts that don't lie in the tensor, or a wire that is not exactly as large."""
    size = tensor.shape[dim]
    for start, stop in zip(starts, stops):
        if not 0 <= start <= stop <= size:
            refuse(op, f"part ({start}, {stop}) does not lie in dim {dim} of {list(tensor.shape)}")
    row = math.prod(n for d, n in enumerate(tensor.shape) if d != dim)
    elements = sum(stop - start for start, stop in zip(starts, stops)) * row
    if wire.dim() != 1 or wire.numel() != elements:
        refuse(
            op,
            f"parts {list(zip(starts, stops))} along dim {dim} of {list(tensor.shape)} hold "
            f"{elements} elements, the wire buffer has shape {list(wire.shape)}",
        )
    if not wire.is_contiguous():
        refuse(op, f"the wire buffer must be contiguous, got stride {wire.stride(0)}")


def check_relayout(
    op: str,
    tensor: Tensor,
    tensor_name: str,
    wire: Tensor,
    wire_name: str,
    dim: int,
    starts: list[int],
    stops: list[int],
) -> int:
    """Check the arguments of pack and unpack.

    Args:
        op: The operator.
        tensor: Any shape; cut along ``dim``.
        tensor_name: Name of ``tensor`` in messages.
        wire: Flat, with the elements of all parts.
        wire_name: Name of ``wire`` in messages.
        dim: The dimension of the parts, counted from either end.
        starts: Start of each part.
        stops: Stop of each part.

    Returns:
        ``dim`` counted from the front.

    Raises:
        ValueError: for arguments that don't fit together.
    """
    check_dtype(op, tensor)
    check_like(op, wire_name, wire, tensor_name, tensor)
    check_ranges(op, starts, stops)
    if not -tensor.dim() <= dim < tensor.dim():
        refuse(op, f"dim {dim} does not exist in a tensor of shape {list(tensor.shape)}")
    dim %= tensor.dim()
    check_parts(op, tensor, dim, starts, stops, wire)
    check_apart(op, tensor_name, tensor, wire_name, wire)
    return dim


def check_rotated(
    op: str,
    tensor: Tensor,
    tensor_name: str,
    wire: Tensor,
    wire_name: str,
    cos: Tensor,
    sin: Tensor,
    starts: list[int],
    stops: list[int],
) -> int:
    """Check the arguments of rotate_pack and unpack_rotate_back.

    Args:
        op: The operator.
        tensor: [tokens..., h, d].
        tensor_name: Name of ``tensor`` in messages.
        wire: Flat, with the elements of all parts.
        wire_name: Name of ``wire`` in messages.
        cos: [tokens..., d_rot], or a shape that broadcasts to it.
        sin: As ``cos``.
        starts: First head of each part.
        stops: The head behind each part.

    Returns:
        The dimension of the heads.

    Raises:
        ValueError: for arguments that don't fit together.
    """
    if tensor.dim() < 2:
        refuse(op, f"{tensor_name} must be [tokens..., heads, d], got {list(tensor.shape)}")
    dim = check_relayout(op, tensor, tensor_name, wire, wire_name, -2, starts, stops)
    rot = cos.shape[-1] if cos.dim() else 0
    for which, table in (("cos", cos), ("sin", sin)):
        if table.device != tensor.device:
            refuse(op, f"{which} is on {table.device}, {tensor_name} is on {tensor.device}")
        fp32_for_half = tensor.element_size() == 2 and table.dtype == torch.float32
        if table.dtype != tensor.dtype and not fp32_for_half:
            refuse(
                op,
                f"{which} has dtype {_dtype(table)}, {tensor_name} has {_dtype(tensor)}; "
                "give tables of that dtype, or float32 for half precision",
            )
        if table.dtype != cos.dtype:
            refuse(op, f"cos has dtype {_dtype(cos)}, sin has {_dtype(sin)}")
        fits = 1 <= table.dim() <= tensor.dim() - 1 and table.shape[-1] == rot
        for size, tokens in zip(reversed(table.shape[:-1]), reversed(tensor.shape[:-2])):
            fits = fits and size in (1, tokens)
        if not fits:
            refuse(
                op,
                f"{which} {list(table.shape)} does not broadcast to the tokens of "
                f"{list(tensor.shape)} (expected [tokens..., rot])",
            )
        check_apart(op, which, table, "out", tensor if tensor_name == "out" else wire)
    if rot % 2:
        refuse(op, f"the rotary dims must be even, got {rot}")
    if rot > tensor.shape[-1]:
        refuse(op, f"{rot} rotary dims do not fit head dim {tensor.shape[-1]} of {tensor_name}")
    return dim
