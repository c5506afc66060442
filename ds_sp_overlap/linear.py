"""Linear layers taken apart: a projection that computes some of its rows, an output projection whose wgrad can wait.

A layer is driven from outside through its module's own call, so that whatever hangs on that call (ZeRO-3 gathers a
partitioned weight in it) happens as ever; see `call_through`. Weights are saved for backward as the parameters
themselves and cut when they are needed: a saved view would keep a gathered ZeRO-3 weight alive until backward. Weight
gradients reach the parameter through autograd, once, in the parameter's own shape.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .parts import Gradient, Part, batched, cut, cut_ranges, put_ranges, tokens


Forwards = tuple[Callable[..., object], ...]
PLAIN: Forwards = (nn.Linear.forward,)


def can_take_apart(module: nn.Module, plain: Forwards = PLAIN) -> bool:
    """Whether ``module`` is a plain linear layer that may be computed in parts.

    plain   forwards that are known to compute ``x w^T + b`` and nothing else, possibly leaving b to their caller (below)

    Not if its forward was replaced (LoRA, quantised, tensor-parallel layers), nor if somebody hooked its call and would
    see parts instead of the output; DeepSpeed's own hooks are fine.
    """
    if type(module).forward not in plain or "forward" in vars(module):
        return False
    if type(module.weight) not in (nn.Parameter, Tensor):  # a quantised or distributed tensor
        return False
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return all((getattr(hook, "__module__", "") or "").startswith("deepspeed.") for hook in hooks)


def leaves_bias(module: nn.Module) -> bool | None:
    """Whether the bias is left to the caller, for a linear layer that returns ``(output, bias to add)``; None for others."""
    return getattr(module, "skip_bias_add", None)


def call_through(modules: list[nn.Module], body: Callable[..., object], *inputs: Tensor):
    """Run ``body(*inputs)`` as the forward of all ``modules`` at once, each called exactly once.

    The first module is called, its forward calls the second, and the innermost forward is ``body``: inside it every
    hook has run and every weight is whole. The inputs are what the hooks made of them.
    """
    if not modules:
        return body(*inputs)
    first, rest = modules[0], modules[1:]

    def forward(*args: Tensor):
        del first.forward
        return call_through(rest, body, *args)

    first.forward = forward  # an instance attribute, gone again before anything else runs
    try:
        return first(*inputs)
    finally:
        vars(first).pop("forward", None)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def batched_pays(x: Tensor, rows: int, dgrad: bool = False) -> bool:
    """Whether one batched GEMM that writes the send buffer takes no longer than one GEMM and a pack, for ``rows`` a rank.

    What benchmarks/kernels.py found (benchmarks/results/kernels-cpu-gemm.csv): on CPU in fp32 a projection does from 256 rows on,
    with fewer it takes up to 10 % longer, and so does the output projection's dgrad with any. Not measured on any GPU, so not
    done on one.
    """
    plain = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
    return x.device.type == "cpu" and plain and rows >= 256 and not dgrad


def _by_rank(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., k] times ``weights`` [P, k, n] -> [..., P, n], which lies in memory as it travels, ``[P, ..., n]``."""
    ranks, k, n = weights.shape
    out = x.new_empty(ranks, *x.shape[:-1], n)
    operands = _matrix(x).expand(ranks, -1, k), weights
    flat = out.view(ranks, -1, n)
    torch.bmm(*operands, out=flat) if bias is None else torch.baddbmm(bias.unsqueeze(1), *operands, out=flat)
    return out.movedim(0, -2)


class _LinearRows(torch.autograd.Function):
    """Some rows of a projection.

    x   [..., m]     w   [n, m]   the parameter     b   [n]
    w_r [n_r, m]     the rows of w in part ``index``
    ranks            0: y is [..., n_r]; else [..., ranks, n_r / ranks], the rows of each rank together in memory

    forward   y  = x w_r^T + b_r
    dgrad     dx = dy w_r
    wgrad     dw_r = dy^T x,  db_r = sum dy      left in the `Gradient` of each, and said so to its token
    """

    @staticmethod
    def forward(ctx, x, weight_token, bias_token, weight, bias, index, gradients, ranks):
        ctx.index, ctx.gradients = index, gradients
        ctx.save_for_backward(x, weight)
        rows = gradients[0].parts[index]
        if ranks:
            return _by_rank(x, batched(weight, 0, rows, ranks), None if bias is None else batched(bias, 0, rows, ranks))
        return F.linear(x, cut_ranges(weight, 0, rows), None if bias is None else cut_ranges(bias, 0, rows))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.flatten(x.dim() - 1)
        of_weight, of_bias = ctx.gradients
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = dy @ cut_ranges(weight, 0, of_weight.parts[ctx.index]) if needs_dx else None
        dw = of_weight.leave(ctx.index, _matrix(dy).t() @ _matrix(x)) if needs_dw else None
        db = of_bias.leave(ctx.index, _matrix(dy).sum(0)) if needs_db else None
        return dx, dw, db, None, None, None, None, None


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """What autocast would have done to the operands of a linear layer."""
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


class RowParts:
    """A projection, computed part by part; to be made inside `call_through`.

    x        [..., m]    input
    module   the linear layer
    parts    the rows of each part
    """

    def __init__(self, x: Tensor, module: nn.Linear, parts: list[Part]):
        self.x, self.weight, self.bias = _autocast(x, module.weight, None if leaves_bias(module) else module.bias)
        shapes = self.weight.shape, self.weight.shape[:1]
        self.gradients = tuple(Gradient(shape, 0, parts) for shape in shapes)
        self.tokens = [tokens(parameter, left) for parameter, left in zip((self.weight, self.bias), self.gradients)]

    def part(self, index: int, ranks: int = 0) -> Tensor:
        """Output of the rows of one part, ``[..., n_r]``; ``[..., ranks, n_r / ranks]`` in the memory order of the wire."""
        weight_token, bias_token = (of[index] for of in self.tokens)
        return _LinearRows.apply(self.x, weight_token, bias_token, self.weight, self.bias, index, self.gradients, ranks)


class WholeRows:
    """The same for a layer that can't be taken apart: called whole, when its first part is asked for, and then cut."""

    def __init__(self, x: Tensor, module: nn.Module, parts: list[Part]):
        self.x, self.module, self.parts = x, module, parts
        self.outputs: tuple[Tensor, ...] | None = None

    def part(self, index: int) -> Tensor:
        if self.outputs is None:
            y = self.module(self.x)
            self.outputs = cut(y if leaves_bias(self.module) is None else y[0], self.x.dim() - 1, self.parts)
        return self.outputs[index]


class _Wgrad(torch.autograd.Function):
    """The wgrad of an output projection, as a node of its own.

    Created before the inputs are finished, hence run after the exchanges of their gradients have been started.

    backward   dw[:, c] = dy^T o_c for every part c,  db = sum dy      from what `_OutputPart.backward` left
    """

    @staticmethod
    def forward(ctx, weight, bias, left):
        ctx.shape, ctx.left = weight.shape, left
        ctx.has_bias = bias is not None
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        left = list(ctx.left.items())[::-1]
        ctx.left.clear()
        dw = db = None
        if ctx.has_bias and ctx.needs_input_grad[1]:
            db = _matrix(left[0][1][1]).sum(0)
        while ctx.needs_input_grad[0] and left:
            columns, (product, _) = left.pop()
            piece = product()
            del product  # and with it the part's input, before there is more to hold
            if columns == ((0, ctx.shape[1]),):
                dw = piece
                continue
            dw = piece.new_empty(ctx.shape) if dw is None else dw
            put_ranges(dw, 1, columns, piece, add=False)
            del piece
        return dw, db, None


class _OutputPart(torch.autograd.Function):
    """One head group's share of an output projection, added to that of the groups before it.

    o_c  [..., k_c]     this group's heads      w  [m, k]   the parameter, w_c = w[:, c] its columns for them
    acc  [..., m]       the sum so far, updated in place; None for the first
    ranks               0: do_c is [..., k_c]; else o_c and do_c are [..., ranks, k_c / ranks], the columns of each rank
                        together in the memory of do_c

    forward   acc + o_c w_c^T  (+ b with the first)
    dgrad     do_c = dy w_c,  d acc = dy
    wgrad     left to `_Wgrad`: its operands are ``left`` there, in a dict of this call
    """

    @staticmethod
    def forward(ctx, o, acc, token, weight, bias, columns, left, defer, ranks):
        ctx.columns, ctx.left, ctx.defer, ctx.ranks = columns, left, defer, ranks
        o = o.flatten(-2) if ranks else o
        ctx.save_for_backward(o, weight)
        operands = _matrix(o), cut_ranges(weight, 1, columns).t()
        if acc is not None:
            acc.view(-1, acc.shape[-1]).addmm_(*operands)
            ctx.mark_dirty(acc)
            return acc
        acc = o.new_empty(*o.shape[:-1], weight.shape[0])  # no view, so that it may be updated in place
        out = acc.view(-1, acc.shape[-1])
        torch.mm(*operands, out=out) if bias is None else torch.addmm(bias, *operands, out=out)
        return acc

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        o, weight = ctx.saved_tensors
        do = None
        if ctx.needs_input_grad[0] and ctx.ranks:
            do = _by_rank(dy, batched(weight, 1, ctx.columns, ctx.ranks))
        elif ctx.needs_input_grad[0]:
            do = dy @ cut_ranges(weight, 1, ctx.columns)
        if ctx.needs_input_grad[2]:

            def product():
                return _matrix(dy).t() @ _matrix(o)

            if not ctx.defer:
                done = product()
                product = lambda: done  # noqa: E731
            # Under its columns: what a backward left that never reached `_Wgrad` is replaced, not added to.
            ctx.left[ctx.columns] = product, dy
        token = dy.new_empty(0) if ctx.needs_input_grad[2] else None
        return do, dy if ctx.needs_input_grad[1] else None, token, None, None, None, None, None, None


class OutputParts:
    """An output projection summed over head groups; to be made inside `call_through`, before the groups are finished.

    module   the linear layer, weight ``[m, k]``
    defer    whether the wgrad waits for its node (``sp_overlap.wgrad``) or is computed with the dgrad
    ranks    0, or the ranks whose columns lie together in the memory of the inputs' gradients
    """

    def __init__(self, module: nn.Linear, like: Tensor, defer: bool = True, ranks: int = 0):
        self.module = module
        _, self.weight, self.bias = _autocast(like, module.weight, None if leaves_bias(module) else module.bias)
        self.left: dict = {}
        self.defer, self.ranks = defer, ranks
        self.token = _Wgrad.apply(self.weight, self.bias, self.left)
        self.sum: Tensor | None = None

    def add(self, o: Tensor, columns: Part) -> None:
        """Add the share of the heads in ``o`` ``[..., k_c]``, whose columns of the weight are ``columns``."""
        (o,) = _autocast(o)
        self.sum = _OutputPart.apply(
            o, self.sum, self.token, self.weight, self.bias, columns, self.left, self.defer, self.ranks
        )

    @property
    def output(self) -> Tensor | tuple[Tensor, Tensor | None]:
        """What the module returns."""
        leaves = leaves_bias(self.module)
        return self.sum if leaves is None else (self.sum, self.module.bias if leaves else None)
