"""The output end of a layer, one node of autograd: finishes of o with their projection. See `projections`, the other end."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..exchange.exchange import Node, refuse_second_derivatives
from ..exchange.geometry import Geometry
from .execution import Call, finish_output
from .linear import autocast, by_rank, matrix, parameter_of
from .slices import Parts, Pieces, batched, cutter, parts_of


class OutputProjection:
    """The output projection of o, one group after another; shared by forward and backward of a node.

    w [m, k], w_g = w[:, c_g] its columns for a group
    """

    def __init__(self, call: Call, shape: torch.Size):
        self.call, self.shape = call, shape
        self.columns = _columns(call.geometry, shape[1] // call.geometry.heads)

    def merging(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor | None, int, Tensor], tuple[Tensor, Tensor]]:
        """What makes y + o_g w_g^T of y and o of a group, or b + o_g w_g^T for the first; with o [tokens, k_g] as it was multiplied."""
        cut, is_cast = cutter(weight.t(), 0, self.columns), torch.is_autocast_enabled(weight.device.type)

        def merge(y: Tensor | None, group: int, o: Tensor) -> tuple[Tensor, Tensor]:
            tokens, o = o.shape[:2], matrix(o)
            if is_cast:
                (o,) = autocast(o)
            operands = o, cut(self.columns[group])
            if y is not None:
                matrix(y).addmm_(*operands)
                return y, o
            y = o.new_empty(*tokens, weight.shape[0])  # no view, so that the caller may update it in place
            torch.mm(*operands, out=matrix(y)) if bias is None else torch.addmm(bias, *operands, out=matrix(y))
            return y, o

        return merge

    def dgrads(self, dy: Tensor, weight: Tensor) -> Callable[[int, int], Tensor]:
        """What makes do_g = dy w_g, [s/P, b, h_g, d], of a group and d."""
        rows, cut = matrix(dy), cutter(weight, 1, self.columns)

        def dgrad(group: int, head_dim: int) -> Tensor:
            if "o" in self.call.by_rank:
                do = by_rank(rows, batched(weight, 1, self.columns[group], self.call.geometry.sp_size))
            else:
                do = torch.mm(rows, cut(self.columns[group]))
            return do.view(*dy.shape[:2], *do.shape[1:-1], do.shape[-1] // head_dim, head_dim)

        return dgrad

    def pieces(self, late: bool = False) -> Pieces:
        """Of dw."""
        return Pieces(self.shape, 1, self.columns, late=late)


@lru_cache(maxsize=4096)
def _columns(geometry: Geometry, head_dim: int) -> Parts:
    return parts_of(*(geometry.elements_of("o", group, 0, head_dim) for group in range(geometry.groups)))


class _FinishOutput(Node):
    """The output projection of o of all groups.

    w [m, k]     b [m]

    forward    y = b + sum of o_g w_g^T, each finished in its turn
    backward   do_g = dy w_g started, last group first;  then, under their exchanges, dw[:, c_g] = dy^T o_g,  db = sum dy
    """

    @staticmethod
    def forward(ctx, call: Call, weight: Tensor, bias: Tensor | None, *tokens: Tensor):
        outputs: dict[int, Tensor] = {}
        y: Tensor | None = None
        output = OutputProjection(call, weight.shape)
        ctx.call, ctx.output, merge_into = call, output, output.merging(weight, bias)

        def merge(group: int, o: Tensor) -> None:
            nonlocal y
            y, outputs[group] = merge_into(y, group, o)

        finish_output(call, {("o", group): token for group, token in enumerate(tokens)}, merge)
        of_weight, _, *of_tokens = ctx.needs_input_grad[1:]
        ctx.save_for_backward(weight if any(of_tokens) else None, *((outputs[group] for group in call.groups) if of_weight else ()))
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivatives(ctx.call.where)
        call, output, (weight, *outputs) = ctx.call, ctx.output, ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: `outputs` has them, and lets go of each after its use
        of_weight, of_bias, *of_tokens = ctx.needs_input_grad[1:]
        dw, rows = output.pieces(), matrix(dy)
        columns = rows.t()
        dgrad: Any = any(of_tokens) and output.dgrads(dy, weight)
        computed: dict[int, Tensor] = {}
        for act, _, group, _ in call.schedule.backward_of_output:  # guard: the wgrad comes last
            if act == "wgrad" and of_weight:
                dw.put(output.columns[group], torch.mm, columns, outputs[group])
                outputs[group] = None
            elif act == "dgrad" and of_tokens[group]:
                computed[group] = dgrad(group, call.exchanges["o", group].layout.target.shape[-1])
            elif act == "start" and of_tokens[group]:
                call.exchanges["o", group].start_gradient([computed.pop(group)])
        db = rows.sum(0) if of_bias else None
        token = dy.new_empty(0)
        return None, dw.whole(), db, *(token if needed else None for needed in of_tokens)


def finish_projected(call: Call, module: nn.Linear, leaves: bool | None, *tokens: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
    """Walk the section of the output, with the tokens of the groups and ``module``; returns what it returns.

    leaves   whether that is ``(y, bias to add)``, None for y alone

    To be called inside `linear.call_through`.
    """
    bias = parameter_of(module, "bias")
    y = _FinishOutput.apply(call, *autocast(parameter_of(module, "weight"), None if leaves else bias), *tokens)
    return y if leaves is None else (y, bias if leaves else None)
