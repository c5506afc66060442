"""Implements the operations to which `compiler` compiles the steps of a schedule.

The compiler binds the first arguments of an operation. At run time the operation takes the call and
the values that it reads, and returns the values that it writes.
"""

from __future__ import annotations

import math
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


def start(key: Exchanged, launch: partial, name: str, call: Call, *xs: Tensor) -> tuple:
    call.in_flight[key] = launch(call.sp_group, call.where + name, xs, call.checked)
    return ()


def start_beside(key: Exchanged, launch: partial, name: str, call: Call, *xs: Tensor) -> tuple:
    o, do = xs
    return start(key, launch, name, call, o.view(*do.shape), do)


def start_rotated(
    back: bool, key: Exchanged, launch: partial, name: str, call: Call, *xs: Tensor
) -> tuple:
    ropes = (None, call.rope_tables) if back else (call.rope_tables,)
    call.in_flight[key] = launch(call.sp_group, call.where + name, xs, call.checked, *ropes)
    return ()


def finish(key: Exchanged, name: str, call: Call) -> Any:
    in_flight = call.in_flight.pop(key, None)  # guard: the transfer is let go
    if in_flight is None:
        raise never_started(call.where + name)
    received = in_flight.finish()
    return received if len(received) > 1 else received[0]


def _one(values: Sequence[Any]) -> Any:
    """Return ``values``, or the value itself if there is one, as operations return it."""
    return values if len(values) != 1 else values[0]


# Projections of q, k and v.


def cast(call: Call, x: Tensor) -> Tensor:
    return autocast(x)[0]


def reshape(shape: tuple[int, ...], call: Call, x: Tensor) -> Tensor:
    # PyTorch parses sizes given one by one faster than a tuple, by a third of a view's time.
    return x.reshape(*shape)


def project(
    rows: Ranges | None,
    form: tuple[int, ...],
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    if rows is not None and len(rows) > 1:
        # Rows in several slices, see Note [Slices of weights].
        return mm_of_slices(x, weight.t(), rows, bias).view(*form)
    if rows is not None:
        ((start, stop),) = rows
        weight, bias = weight[start:stop], None if bias is None else bias[start:stop]
    return F.linear(x, weight, bias).view(*form)


def project_by_rank(
    rows: Run, form: tuple[int, ...], call: Call, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    # The product writes to the layout of the send buffer, so that nothing packs it.
    biases = None if bias is None else rows.view(bias, 0)
    return by_rank(x, rows.view(weight, 0), biases).view(*form)


def norm_and_rotate(
    part: Part, tables: int, again: bool, call: Call, heads: Tensor, *rest: Tensor
) -> Tensor:
    # In forward each norm uses its own parameters.
    norms = rest[tables:] if again else None
    return call.projections.shape(part, heads, rest[:tables], norms)


def rotate_back(dtype: torch.dtype, call: Call, dy: Tensor, *tables: Tensor) -> Tensor:
    # The backward of a rotation needs only the tables, no saved input.
    return matrix(call.projections.rope.rotate_back(dy.flatten(2, -2), *tables).to(dtype))


def norm_back(
    part: Part,
    table_count: int,
    norm_count: int,
    learned: list[int],
    call: Call,
    dy: Tensor,
    heads: Tensor,
    *rest: Any,
) -> Any:
    """Compute the backward of rotation and norm, for q or k.

    Args:
        part: The kind and the group.
        table_count: The number of tables.
        norm_count: The number of parameters of all norms.
        learned: The indices of the parameters, among those of all norms, that need a gradient.
        call: The call.
        dy: The gradient of q or k.
        heads: The input of the norm.
        *rest: The tables; the parameters of all norms; for each of ``learned`` the sum of its
            gradients over earlier groups, or None.

    Returns:
        The gradient of ``heads``, with a row for each token; and the new sums.
    """
    tables, norms = rest[:table_count], rest[table_count : table_count + norm_count]
    sums = list(rest[table_count + norm_count :])
    # The norm is recomputed under autograd, since it may be any module.
    x = heads.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(**call.autocast):  # guard: as in forward
        y = call.projections.shape(part, x, tables, norms)
    # A parameter that was frozen since forward gets no gradient.
    wanted = [place for place, index in enumerate(learned) if norms[index].requires_grad]
    ends = [x, *(norms[learned[place]] for place in wanted)]
    dx, *gradients = torch.autograd.grad(y, ends, dy, allow_unused=True)
    for place, gradient in zip(wanted, gradients):
        if gradient is not None:
            # Sum in fp32: in half precision each group would round. Autograd casts the result.
            gradient = gradient.to(sum_dtype(gradient.dtype))
            sums[place] = gradient if sums[place] is None else sums[place] + gradient
    return _one((matrix(dx), *sums))


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
        # Without autocast the dtypes are equal; skipping the cast saves the host time.
        return product if product.dtype == dtype else product.to(dtype)
    if rounds or dx.dtype != dy.dtype:
        dx += dy @ part  # rounds each product, as the layer that is replaced does
        return dx
    # One kernel instead of a product and a sum; in half precision one rounding instead of two.
    return dx.addmm_(dy, part)


# Gradients of parameters.


def sum_rows(dy: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum the rows of ``dy``, which is given transposed."""
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
        # Not a plain view: autograd forbids in-place updates of a view that a node returns.
        return _unsafe_view(y, (*o.shape[:2], y.shape[1])), rows
    matrix(y).addmm_(rows, some.t())
    return y, rows


def dgrad_by_rank(
    columns: Run, form: tuple[int, ...], call: Call, dy: Tensor, weight: Tensor
) -> Tensor:
    # The product writes to the layout of the send buffer, so that nothing packs it.
    return by_rank(dy, columns.view(weight)).view(*form)


def dgrad_of_output(
    columns: Ranges | None, form: tuple[int, ...], call: Call, dy: Tensor, weight: Tensor
) -> Tensor:
    # do = dy w_g; w_g is read through views, without a copy.
    if columns is None:
        return torch.mm(dy, weight).view(*form)
    if len(columns) > 1:
        return mm_of_slices(dy, weight, columns).view(*form)
    return torch.mm(dy, cut_ranges(weight, 1, columns)).view(*form)


# Local attention, in a window.


def _heads(
    group: int, keys: list[Part], call: Call, q: Tensor, received: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a group, from q and the received parts ``keys`` of k and v."""
    values, geometry = dict(zip(keys, received)), call.geometry
    return q, with_kv(geometry, "k", group, values), with_kv(geometry, "v", group, values)


def attend(
    group: int, keys: list[Part], needs: list[bool], call: Call, q: Tensor, *received: Tensor
) -> tuple[Tensor, list[Tensor]]:
    attend = partial(attend_in_pieces, call, call.local.attend, group)
    heads = _heads(group, keys, call, q, received)
    o, call.attended[group], kept = attend_once(attend, heads, needs, call.local)
    return o, kept


def attend_alone(group: int, keys: list[Part], call: Call, q: Tensor, *received: Tensor) -> Tensor:
    return attend_group(call, call.local.attend, group, *_heads(group, keys, call, q, received))


def attend_backward(
    group: int,
    keys: list[Part],
    wanted: list[Part],
    call: Call,
    q: Tensor,
    *rest: Any,
) -> Any:
    """Run the backward of the attention of a group.

    Args:
        group: The head group.
        keys: The parts of k and v that the group attends to.
        wanted: The parts whose gradients are needed, in the order of q, k and v.
        call: The call.
        q: q of the group.
        *rest: The received tensors of ``keys``; the tensors that `attend` returned beside o; do; o,
            or None if o was not exchanged again; for each of ``wanted`` and each of
            `LocalAttention.learned`, the sum of its gradients over earlier groups, or None.

    Returns:
        The new sums.
    """
    received, (kept, do, o, *sums) = rest[: len(keys)], rest[len(keys) :]
    heads, values = _heads(group, keys, call, q, received), dict(zip(keys, received))
    attend = partial(attend_in_pieces, call, call.local.attend, group)
    gradients = call.attended[group].backward(attend, heads, o, do, kept, call.local)
    terms: list[Tensor | None] = []
    for kind, dx, x in zip("qkv", gradients, heads):
        parts = [part for part in wanted if part[0] == kind]
        if not parts:
            continue
        if dx is None:
            # Attention gave no gradient on this rank. Send zeros, since other ranks send theirs.
            dx = torch.zeros_like(x)  # guard: others may exchange one
        if kind == "q":
            terms.append(dx)
        else:
            pieces = {part: values[part].detach().requires_grad_() for part in parts}
            terms += _of_pieces(kind, group, dx, pieces, call)
    totals = []
    for so_far, term in zip(sums, terms + gradients[3:]):
        # Not in place: attention may return the same tensor for two gradients.
        both = so_far is not None and term is not None
        totals.append(so_far + term if both else term if so_far is None else so_far)
    return _one(totals)


def _of_pieces(
    kind: str, group: int, dx: Tensor, pieces: dict[Part, Tensor], call: Call
) -> Sequence[Tensor]:
    """Return the gradients of the received pieces from which `with_kv` made k or v of a group.

    Args:
        kind: "k" or "v".
        group: The head group that attended.
        dx: The gradient of what `with_kv` returns.
        pieces: The pieces, as leaves.
        call: The call.
    """
    # Heads may be cut, joined or repeated. Autograd derives how dx returns to the pieces.
    with torch.enable_grad():
        joined = with_kv(call.geometry, kind, group, pieces)
    # If the result is a leaf, it is the one piece itself, and dx is the gradient of the piece.
    return [dx] if joined.is_leaf else torch.autograd.grad(joined, list(pieces.values()), dx)
