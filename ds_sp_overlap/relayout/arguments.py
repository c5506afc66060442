"""What the operators refuse, with the same words as csrc/ops.cpp: ``ds_sp_overlap.<operator>: what, with the values``."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse(op: str, message: str) -> NoReturn:
    raise ValueError(f"ds_sp_overlap.{op}: {message}")


def check_dtype(op: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        refuse(op, f"dtype must be float16, bfloat16, float32 or float64, got {_dtype(tensor)}")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_like(op: str, name: str, other: Tensor, first: str, x: Tensor) -> None:
    """``other`` has the dtype and the device of ``x``."""
    if other.dtype != x.dtype:
        refuse(op, f"{name} has dtype {_dtype(other)}, {first} has {_dtype(x)}")
    if other.device != x.device:
        refuse(op, f"{name} is on {other.device}, {first} is on {x.device}")


def _extent(x: Tensor) -> tuple[int, int]:
    """Bytes from the first to behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + ((last + 1) * x.element_size() if x.numel() else 0)


def check_apart(op: str, a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    """No byte belongs to both."""
    (a_first, a_last), (b_first, b_last) = _extent(a), _extent(b)
    if a_first < a_last and b_first < b_last and a_first < b_last and b_first < a_last:
        refuse(
            op, f"{a_name} {list(a.shape)} and {b_name} {list(b.shape)} share memory; give an output of its own"
        )  # fmt: skip


def check_ranges(op: str, starts: list[int], stops: list[int], tensors: int = 1) -> None:
    """A start and a stop for each part, at least one part, for each tensor the same number."""
    if len(starts) != len(stops) or len(starts) % tensors:
        each = ", for each tensor the same number" if tensors > 1 else ""
        refuse(op, f"{len(starts)} starts and {len(stops)} stops; give one of each a part{each}")
    if not starts:
        refuse(op, "no parts given; there is one a rank, and an sp size of 0 does not exist")


def check_parts(op: str, tensor: Tensor, dim: int, starts: list[int], stops: list[int], wire: Tensor) -> None:
    """The parts lie in the tensor, and the wire has room for exactly them."""
    size = tensor.shape[dim]
    for start, stop in zip(starts, stops):
        if not 0 <= start <= stop <= size:
            refuse(op, f"part ({start}, {stop}) does not lie in dim {dim} of {list(tensor.shape)}")
    row = math.prod(n for d, n in enumerate(tensor.shape) if d != dim)
    elements = sum(stop - start for start, stop in zip(starts, stops)) * row
    if wire.dim() != 1 or wire.numel() != elements:
        refuse(
            op,
            f"parts {list(zip(starts, stops))} along dim {dim} of {list(tensor.shape)} hold {elements} elements, the wire "
            f"buffer has shape {list(wire.shape)}",
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
    """Arguments of pack and unpack; returns ``dim`` counted from the front."""
    check_dtype(op, tensor)
    check_like(op, wire_name, wire, tensor_name, tensor)
    check_ranges(op, starts, stops)
    if not -tensor.dim() <= dim < tensor.dim():
        refuse(op, f"dim {dim} does not exist in a tensor of shape {list(tensor.shape)}")
    dim %= tensor.dim()
    check_parts(op, tensor, dim, starts, stops, wire)
    check_apart(op, tensor_name, tensor, wire_name, wire)
    return dim


def check_qkv(op, tensors, name, wires, wire_name, bias, cos, sin, rotated, starts, stops) -> None:
    """Arguments of pack_qkv and unpack_qkv."""
    if not 1 <= len(tensors) <= 3:
        refuse(op, f"{len(tensors)} tensors; give 1 to 3 (q, k, v)")
    if len(wires) != len(tensors):
        refuse(op, f"{len(tensors)} tensors in {name} and {len(wires)} in {wire_name}")
    if bias and len(bias) != len(tensors):
        refuse(op, f"{len(bias)} biases for {len(tensors)} tensors")
    if not 0 <= rotated <= len(tensors):
        refuse(op, f"rotated must be between 0 and {len(tensors)}, got {rotated}")
    check_ranges(op, starts, stops, len(tensors))
    check_dtype(op, tensors[0])
    ranks, first = len(starts) // len(tensors), list(tensors[0].shape)
    for j, (x, wire) in enumerate(zip(tensors, wires)):
        check_like(op, name, x, name, tensors[0])
        check_like(op, wire_name, wire, name, tensors[0])
        if x.dim() < 2:
            refuse(op, f"{name}[{j}] must be [tokens..., heads, d], got {list(x.shape)}")
        if list(x.shape[:-2]) != first[:-2]:
            refuse(op, f"{name}[{j}] {list(x.shape)} and {name}[0] {first} have other tokens")
        mine = slice(j * ranks, (j + 1) * ranks)
        check_parts(op, x, x.dim() - 2, starts[mine], stops[mine], wire)
        for other in wires:
            check_apart(op, name, x, wire_name, other)
        if bias and bias[j] is not None:
            check_like(op, "bias", bias[j], name, tensors[0])
            if bias[j].numel() != x.shape[-2] * x.shape[-1]:
                refuse(op, f"bias[{j}] {list(bias[j].shape)} does not have one element a head and dim of {list(x.shape)}")
            if not bias[j].is_contiguous():
                refuse(op, f"bias[{j}] must be contiguous")
            check_apart(op, "bias", bias[j], wire_name, wire)
    if (cos is None) != (sin is None):
        refuse(op, "cos and sin belong together; give both or neither")
    if cos is not None:
        _check_tables(op, tensors, name, wires, cos, sin, rotated)


def _check_tables(op, tensors, name, wires, cos, sin, rotated) -> None:
    x = tensors[0]
    rot = cos.shape[-1] if cos.dim() else 0
    for which, table in (("cos", cos), ("sin", sin)):
        if table.device != x.device:
            refuse(op, f"{which} is on {table.device}, {name} is on {x.device}")
        if table.dtype != x.dtype and not (x.element_size() == 2 and table.dtype == torch.float32):
            refuse(
                op,
                f"{which} has dtype {_dtype(table)}, {name} has {_dtype(x)}; give tables of that dtype, or float32 for half "
                "precision",
            )
        if table.dtype != cos.dtype:
            refuse(op, f"cos has dtype {_dtype(cos)}, sin has {_dtype(sin)}")
        own = table.shape
        fits = 1 <= len(own) <= x.dim() - 1 and own[-1] == rot
        if not fits or any(n not in (1, tokens) for n, tokens in zip(reversed(own[:-1]), reversed(x.shape[:-2]))):
            refuse(
                op,
                f"{which} {list(own)} does not broadcast to the tokens of {list(x.shape)} (expected [tokens..., rot])",
            )
        for other in tensors if name == "out" else wires:
            check_apart(op, which, table, "out", other)
    if rot % 2:
        refuse(op, f"the rotary dims must be even, got {rot}")
    for j, tensor in enumerate(tensors[:rotated]):
        if rot > tensor.shape[-1]:
            refuse(op, f"{rot} rotary dims do not fit head dim {tensor.shape[-1]} of {name}[{j}]")
