"""Implements the operations to which `compiler` compiles the steps of a schedule.

The compiler binds the arguments before ``call``. At run time, an operation takes the call and the
values that it reads, and returns the values that it writes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...exchange.exchange import never_started
from ...profiling.ranges import named
from ...relayout.ops import sum_dtype
from ...schedule import Exchanged, Part
from ..memory.recompute import attend_once
from .execution import Call, attend_group, attend_in_pieces, with_kv
from .linear import autocast
from .parts import Pieces
from .slices import Ranges, Run, by_rank, cut_ranges, mm_of_slices


def in_range(label: str, function: Callable[..., Any], call: Call, *values: Any) -> Any:
    with named(call.where, label):
        return function(call, *values)


def matrix(x: Tensor) -> Tensor:
    """Return ``x`` [s/P, b, ..] as a matrix with a row for each token."""
    return x.reshape(-1, math.prod(x.shape[2:]))


_unsafe_view = torch.ops.aten._unsafe_view.default

# Exchanges.


def start(
    key: Exchanged, launch: partial, name: str, rotates: str, call: Call, xs: list[Tensor]
) -> None:
    # ``rotates`` is "rope" or "rope_back", an argument of `InFlight`; "" for no rotation.
    tables = call.rope_tables
    ropes = (tables,) if rotates == "rope" else (None, tables) if rotates else ()
    call.in_flight[key] = launch(call.sp_group, call.where + name, xs, call.checked, *ropes)


def finish(key: Exchanged, name: str, call: Call) -> Sequence[Tensor]:
    in_flight = call.in_flight.pop(key, None)  # guard: the transfer is let go
    if in_flight is None:
        raise never_started(call.where + name)
    return in_flight.finish()


def _sum(so_far: Tensor | None, term: Tensor | None) -> Tensor | None:
    """Return the sum of a gradient's terms so far plus one more term; None stands for zero."""
    # Do not add in place: attention may return the same tensor for two gradients.
    return term if so_far is None else so_far if term is None else so_far + term


# Projections of q, k and v.


def cast(call: Call, x: Tensor) -> Tensor:
    return autocast(x)[0]


def reshape(shape: tuple[int, ...], call: Call, x: Tensor) -> Tensor:
    # PyTorch parses separate sizes faster than a tuple. This saves a third of a view's time.
    return x.reshape(*shape)


def multiply(
    dim: int,
    part: Ranges | None,
    run: Run | None,
    form: tuple[int, ...],
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply ``x`` by a part of the rows of a weight (y = x w_g^T) or of its columns (dy w_g).

    Args:
        dim: 0 for rows, 1 for columns.
        part: The rows or columns; None for all.
        run: The rows or columns as a `Run`, to write the product in the layout of the send buffer,
            so that no kernel packs it; None for the plain layout.
        form: The shape of the result.
        call: The call.
        x: A matrix.
        weight: The whole weight.
        bias: The whole bias, or None.
    """
    if run is not None:
        biases = None if bias is None else run.view(bias[None])
        return by_rank(x, run.view(weight, dim), biases).view(*form)
    if part is not None:
        if len(part) > 1:  # see Note [Slices of weights]
            return mm_of_slices(x, weight if dim else weight.t(), part, bias).view(*form)
        weight = cut_ranges(weight, dim, part)
        bias = None if bias is None else cut_ranges(bias, 0, part)
    return (torch.mm(x, weight) if dim else F.linear(x, weight, bias)).view(*form)


def norm_and_rotate(
    part: Part, call: Call, heads: Tensor, tables: list[Tensor], parameters: list[Tensor]
) -> Tensor:
    return call.projections.shape(part, heads, tables, parameters)


def rotate_back(dtype: torch.dtype, call: Call, dy: Tensor, tables: list[Tensor]) -> Tensor:
    # The backward of RoPE needs only the tables, no saved input.
    dx = call.projections.rope.rotate(dy.flatten(2, -2), *tables, back=True)
    return matrix(dx.to(dtype))


def norm_back(
    part: Part,
    call: Call,
    dy: Tensor,
    heads: Tensor,
    tables: list[Tensor],
    parameters: list[Tensor],
    sums: list[Tensor | None],
) -> tuple[Tensor, list[Tensor | None]]:
    """Compute the backward of RoPE and norm, for q or k.

    Args:
        part: The kind, "q" or "k", and the group.
        call: The call.
        dy: The gradient of q or k.
        heads: The input of the norm.
        tables: The tables of RoPE.
        parameters: The parameters of the norm.
        sums: For each parameter, the sum of its gradients over earlier groups, or None.

    Returns:
        The gradient of ``heads``, with a row for each token; and the new sums.
    """
    # Autograd differentiates the norm, which may be any module. So run the norm again, recorded.
    x = heads.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(**call.autocast):  # guard: as in forward
        y = call.projections.shape(part, x, tables, parameters)
    # Frozen parameters get no gradient, even if they were frozen after forward.
    wanted = [place for place, x in enumerate(parameters) if x.requires_grad]
    ends = [x, *map(parameters.__getitem__, wanted)]
    dx, *gradients = torch.autograd.grad(y, ends, dy, allow_unused=True)
    for place, gradient in zip(wanted, gradients):
        if gradient is not None:
            # Sum in fp32: in half precision, each group would round. Autograd casts the sum.
            sums[place] = _sum(sums[place], gradient.to(sum_dtype(gradient.dtype)))
    return matrix(dx), sums


def add_to_dx(
    rows: Ranges | None,
    dtype: torch.dtype,
    rounds: bool,
    call: Call,
    dy: Tensor,
    weight: Tensor,
    dx: Tensor | None,
) -> Tensor:
    part = weight if rows is None else cut_ranges(weight, 0, rows)
    if dx is None:
        product = dy @ part
        # Without autocast the dtypes are equal. Then to skip the cast saves the host time.
        return product if product.dtype == dtype else product.to(dtype)
    if rounds or dx.dtype != dy.dtype:
        dx += dy @ part  # rounds each product, as the replaced layer does
        return dx
    # This is one kernel instead of two, and rounds once instead of twice in half precision.
    return dx.addmm_(dy, part)


# Gradients of parameters.


def sum_rows(dy: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum a transposed gradient, ``dy`` [rows of the weight, tokens], over the tokens."""
    return torch.sum(dy, 1) if out is None else torch.sum(dy, 1, out=out)


def gradient_of_whole(compute: Any, call: Call, dy: Tensor, *rest: Tensor) -> Tensor:
    return compute(dy.t(), *rest)


def put(
    make: Callable[[], Pieces],
    part: Ranges,
    compute: Any,
    call: Call,
    pieces: Pieces | None,
    dy: Tensor,
    *rest: Tensor,
) -> Pieces:
    pieces = pieces or make()
    pieces.put(part, compute, dy.t(), *rest)
    return pieces


def whole(call: Call, pieces: Pieces) -> Tensor | None:
    return pieces.whole()


# The output projection.


def merge(
    columns: Ranges | None,
    call: Call,
    o: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, some = matrix(o), weight if columns is None else cut_ranges(weight, 1, columns)
    if y is None:
        y = F.linear(rows, some, bias)
        # No plain view, since autograd forbids in-place updates of views that a node returns.
        return _unsafe_view(y, (*o.shape[:2], y.shape[1])), rows
    matrix(y).addmm_(rows, some.t())
    return y, rows


# Local attention, in a window.


def _heads(parts: list[Part], call: Call, received: list[Tensor]) -> list[Tensor]:
    """Return q, k and v of a group, given q and the parts of k and v that the group attends to."""
    return received[:1] + with_kv(call.geometry, parts[0][1], dict(zip(parts, received)))


def attend(
    parts: list[Part], needs: list[bool], call: Call, received: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    heads, (_, group) = _heads(parts, call, received), parts[0]
    attend = partial(attend_in_pieces, call, call.attend, group)
    o, call.attended[group], kept = attend_once(attend, heads, needs, call.local)
    return o, kept


def attend_alone(parts: list[Part], call: Call, received: list[Tensor]) -> Tensor:
    return attend_group(call, call.attend, parts[0][1], *_heads(parts, call, received))


def attend_backward(
    parts: list[Part],
    wanted: list[Part],
    call: Call,
    received: list[Tensor],
    kept: list[Tensor],
    do: Tensor,
    o: Tensor | None,
    sums: list[Tensor | None],
) -> list[Tensor | None]:
    """Run the backward of the attention of a group.

    Args:
        parts: The parts that the group attends to: q, then those of k, then those of v.
        wanted: The parts, out of ``parts``, whose gradients are needed.
        call: The call.
        received: The received tensors of ``parts``.
        kept: The tensors that `attend` returned beside o.
        do: The gradient of o.
        o: The output of attention; None if o did not travel with do.
        sums: For each part in ``wanted``, then each tensor in `LocalAttention.learned`: the sum of
            its gradients over earlier groups, or None.

    Returns:
        The new sums.
    """
    leaves = [x.detach().requires_grad_(part in wanted) for part, x in zip(parts, received)]
    with torch.enable_grad():
        joined = _heads(parts, call, leaves)
    heads, group = [x.detach() for x in joined], parts[0][1]
    attend = partial(attend_in_pieces, call, call.attend, group)
    gradients = call.attended[group].backward(attend, heads, o, do, kept, call.local)
    ends, dxs = list[Tensor](), list[Tensor]()
    for end, dx in zip(joined, gradients):
        if end.requires_grad:
            ends.append(end)
            if dx is None:
                # Attention gave no gradient on this rank. Send zeros, since other ranks send theirs.
                dx = torch.zeros_like(end)  # guard: others may exchange one
            dxs.append(dx)
    inputs = [x for x in leaves if x.requires_grad]
    terms = dxs
    if not all(map(operator.is_, ends, inputs)):
        # `_heads` has cut, joined or repeated heads. Autograd computes the backward of this.
        terms = list(torch.autograd.grad(ends, inputs, dxs))
    return list(map(_sum, sums, terms + gradients[3:]))
