"""The two ends of a layer, each one node of autograd: projections with the starts of q, k, v; finishes of o with their projection.

Their forward runs the schedule's program as it is, without a graph; their backward is its mirror image, written out:

    _StartInputs    forward    Wq >q Wk >k Wv >v               backward    <dv Wv <dk Wk <dq Wq
    _FinishOutput   forward    <o Wo                           backward    Wo dgrad >do | Wo wgrad

One node instead of many: each costs the host time in every step, dx is summed in place, and a parameter's gradient is
delivered once, in the same order for every number of head groups. A layer that has more between projection and exchange
than a `Rotary` is built of the nodes in `linear` and `exchange`.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor, nn

from .exchange import refuse_second_derivatives
from .linear import autocast, by_rank, leaves_bias, matrix, projected_rows
from .parts import Part, batched, cut_ranges, join_pieces, put_ranges
from .rotary import rotate, rotate_back
from .schedule import Call, Merge, Project


class Rows(NamedTuple):
    """Where a part of q, k or v comes from: rows of a linear layer; those of each of ``ranks`` together in memory, if not 0."""

    module: nn.Linear
    rows: Part
    ranks: int = 0


class _StartInputs(torch.autograd.Function):
    """Tokens of q, k and v of all groups, whose rows are ``parts``.

    x [.., m]     parameters   w [n, m] and b [n] of each linear layer, the weight for a part at its place in ``places``

    forward    x_r = x w_r^T + b_r, rotated and started, for every part r
    backward   dx_r finished and rotated back, last part first;  dx += dx_r w_r,  dw_r = dx_r^T x,  db_r = sum dx_r
    """

    @staticmethod
    def forward(ctx, call: Call, parts, places, head_dim, tables, program, x, *parameters):
        ctx.call, ctx.parts, ctx.places = call, parts, places
        ctx.set_materialize_grads(False)
        of_x, *of_parameters = ctx.needs_input_grad[6:]
        # Only what some gradient reads: dx the weights, and dw x.
        ctx.shapes, ctx.dtype = [None if p is None else p.shape for p in parameters], x.dtype
        weights = (p if of_x and at % 2 == 0 else None for at, p in enumerate(parameters))
        ctx.save_for_backward(x if any(of_parameters[::2]) else None, *weights, *tables)

        def project(kind: str, group: int) -> Tensor:
            (_, rows, ranks), at = parts[kind, group], places[kind, group]
            y = projected_rows(x, parameters[at], parameters[at + 1], rows, ranks)
            heads = y.view(*y.shape[:-1], y.shape[-1] // head_dim, head_dim)
            if kind == "v" or not tables:
                return heads
            if ranks:  # rotated in the order of memory, which stays as it is
                return rotate(heads.movedim(2, 0), *tables).movedim(0, 2)
            return rotate(heads, *tables)

        tokens = program(project)
        if not of_x:
            still = [token for token, at in zip(tokens, places.values()) if not any(of_parameters[at : at + 2])]
            ctx.mark_non_differentiable(*still)
        return tuple(tokens)

    @staticmethod
    def backward(ctx, *tokens):
        call, (x, *saved) = ctx.call, ctx.saved_tensors
        of_x, *of_parameters = ctx.needs_input_grad[6:]
        parameters, tables = saved[: len(of_parameters)], saved[len(of_parameters) :]
        pieces: list[list[tuple[Part, Tensor]]] = [[] for _ in parameters]
        dx = None
        for token, (what, (_, rows, _)) in reversed(list(zip(tokens, ctx.parts.items()))):
            if token is None:
                continue
            at = ctx.places[what]
            dy = call.exchanges[what].collect_gradient().flatten(2, -2)
            if tables and what[0] != "v":
                dy = rotate_back(dy, *tables).to(ctx.dtype)
            dy = dy.flatten(2)
            if of_x:
                weight = cut_ranges(parameters[at], 0, rows)
                if dx is None:
                    dx = dy @ weight
                elif len(call.groups) == 1 or dx.dtype != dy.dtype:
                    dx += dy @ weight  # rounds as the layer that it replaces does
                else:
                    matrix(dx).addmm_(matrix(dy), weight)
            if of_parameters[at]:
                pieces[at].append((rows, matrix(dy).t() @ matrix(x)))
            if of_parameters[at + 1]:
                pieces[at + 1].append((rows, matrix(dy).sum(0)))
            del dy  # before the next one is unpacked
        gradients = []
        for shape, left in zip(ctx.shapes, pieces):
            gradients.append(join_pieces(shape, 0, left))
            left.clear()
        return None, None, None, None, None, None, dx, *gradients


def start_inputs(
    call: Call,
    x: Tensor,
    parts: dict[tuple[str, int], Rows],
    head_dim: int,
    tables: tuple[Tensor, ...],
    program: Callable[[Project], list[Tensor]],
) -> tuple[Tensor, ...]:
    """Run ``program`` with projections of ``x`` [.., m], part by part; to be called inside `linear.call_through`.

    parts    of q, k and v, by kind and group, in the order of their starts
    tables   (cos, sin) [.., 1, d_rot] by which q and k are rotated before they start, without a gradient; or empty
    """
    modules = list(dict.fromkeys(part.module for part in parts.values()))
    places = {what: 2 * modules.index(part.module) for what, part in parts.items()}
    parameters = autocast(x, *(p for m in modules for p in (m.weight, None if leaves_bias(m) else m.bias)))
    return _StartInputs.apply(call, parts, places, head_dim, tables, program, *parameters)


class _FinishOutput(torch.autograd.Function):
    """The output projection of o of all groups.

    w [m, k], w_g = w[:, c_g] its columns for a group     b [m]

    forward    y = b + sum of o_g w_g^T, each finished in its turn
    backward   do_g = dy w_g started, last group first;  then, under their exchanges, dw[:, c_g] = dy^T o_g,  db = sum dy
    """

    @staticmethod
    def forward(ctx, call: Call, program: Callable[[list[Tensor], Merge], None], defer: bool, weight, bias, *tokens):
        outputs: list[Tensor] = []
        y = None
        ctx.call, ctx.defer, ctx.columns = call, defer, []

        def merge(group: int, o: Tensor) -> None:
            nonlocal y
            columns = call.geometry.elements_of("o", group, 0, o.shape[-1])
            (o,) = autocast(o.flatten(2))
            ctx.columns.append(columns)
            outputs.append(o)
            operands = matrix(o), cut_ranges(weight, 1, columns).t()
            if y is not None:
                matrix(y).addmm_(*operands)
                return
            y = o.new_empty(*o.shape[:-1], weight.shape[0])  # no view, so that the caller may update it in place
            torch.mm(*operands, out=matrix(y)) if bias is None else torch.addmm(bias, *operands, out=matrix(y))

        program(list(tokens), merge)
        of_weight, _, *of_tokens = ctx.needs_input_grad[3:]
        ctx.shape = weight.shape
        ctx.save_for_backward(weight if any(of_tokens) else None, *(outputs if of_weight else ()))
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivatives(ctx.call.where)
        call, (weight, *outputs) = ctx.call, ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: `outputs` has them, and lets go of each after its use
        of_weight, of_bias, *of_tokens = ctx.needs_input_grad[3:]
        dw = None

        def wgrad(group: int) -> None:
            nonlocal dw
            if not of_weight:
                return
            piece = matrix(dy).t() @ matrix(outputs[group])
            outputs[group] = None
            if len(outputs) == 1:
                dw = piece
                return
            dw = piece.new_empty(ctx.shape) if dw is None else dw
            put_ranges(dw, 1, ctx.columns[group], piece, add=False)

        def dgrad(group: int, head_dim: int) -> Tensor:
            columns = ctx.columns[group]
            if "o" in call.by_rank:
                do = by_rank(dy, batched(weight, 1, columns, call.geometry.sp_size))
            else:
                do = dy @ cut_ranges(weight, 1, columns)
            return do.unflatten(-1, (-1, head_dim))

        for group in reversed(call.groups):
            if not ctx.defer:
                wgrad(group)
            if of_tokens[group]:
                exchange = call.exchanges["o", group]
                exchange.launch_gradient(dgrad(group, exchange.layout.target.shape[-1]))  # which keeps no more than it sends
        if ctx.defer:
            for group in call.groups:
                wgrad(group)
        db = matrix(dy).sum(0) if of_bias else None
        tokens = (dy.new_empty(0) if needed else None for needed in of_tokens)
        return None, None, None, dw, db, *tokens


def finish_output(
    call: Call, module: nn.Linear, defer: bool, tokens: tuple[Tensor, ...], program: Callable[[list[Tensor], Merge], None]
) -> Tensor | tuple[Tensor, Tensor | None]:
    """What ``module`` returns for o of all groups, which ``program`` finishes; to be called inside `linear.call_through`.

    defer   whether the wgrad waits until the gradients of all groups have been started (``sp_overlap.wgrad``)
    """
    leaves = leaves_bias(module)
    weight, bias = autocast(module.weight, None if leaves else module.bias)
    y = _FinishOutput.apply(call, program, defer, weight, bias, *tokens)
    return y if leaves is None else (y, module.bias if leaves else None)
