"""Linear layers by parts: a projection that computes some of its rows.

A layer is driven from outside through its module's own call, so that whatever hangs on that call (ZeRO-3 gathers a
partitioned weight in it) happens as ever; see `call_through`. Weights are saved for backward as the parameters
themselves and cut when they are needed: a saved view would keep a gathered ZeRO-3 weight alive until backward. Weight
gradients reach the parameter through autograd, once, in the parameter's own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .slices import Ranges, batched, cut_ranges

# Forwards of linear layers that compute ``x w^T + b`` and nothing else, and what tells of a layer whether it leaves b to its caller
# and returns ``(x w^T, b)``; None for those that return one tensor.
Plain = dict[Callable[..., object], Callable[[Any], "bool | None"]]


def _returns_one(module: nn.Module) -> None:
    """Of a layer that returns one tensor."""


PLAIN: Plain = {nn.Linear.forward: _returns_one}
harmless: set[str] = set()  # where hooks come from that may see parts of an output, by the beginning of their modules' names
_EVERYWHERE = tuple(  # hooks of all modules
    getattr(nn.modules.module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def can_split(module: nn.Module, plain: Plain = PLAIN) -> bool:
    """Whether ``module`` is a plain linear layer that may be computed in parts.

    Not if its forward was replaced (LoRA, quantised, tensor-parallel layers) or compiled, nor if somebody hooked its call, or
    every module's, and would see parts instead of the output.
    """
    if type(module).forward not in plain or not can_call_through(module):  # guard: no forward of its own
        return False
    if type(module.weight) not in (nn.Parameter, Tensor):  # a quantised or distributed tensor
        return False
    return True


Pure = frozenset[Callable[..., object]]
PURE: Pure = frozenset((nn.LayerNorm.forward, nn.RMSNorm.forward))


def can_compute_again(norm: object, pure: Pure = PURE) -> bool:
    """Whether ``norm`` may be computed a second time in backward, and nobody sees: it is a function of its input and its parameters.

    pure   forwards that are known to be such

    Not if somebody hooked it, or a parameter of it: that hook would be called for each head group's part of the gradient.
    """
    if not isinstance(norm, nn.Module) or type(norm).forward not in pure or not can_call_through(norm):  # guard: only known norms
        return False
    if any(isinstance(x, Tensor) for x in vars(norm).values()):  # in a parameter's place, as FSDP leaves them
        return False
    return not any(parameter._backward_hooks for parameter in norm.parameters())  # guard: its hooks run once


def can_call_through(module: nn.Module) -> bool:
    """Whether nobody would see, and mind, that a module is called by `call_through`: with other inputs, for another output."""
    if "forward" in vars(module) or module._compiled_call_impl is not None:  # guard: a replaced forward runs
        return False
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks, *_EVERYWHERE
    if not any(kinds):
        return True
    hooks = (getattr(hook, "__module__", "") or "" for hooks in kinds for hook in hooks.values())  # guard: hooks of all modules
    return all(where.startswith(tuple(harmless)) for where in hooks)  # guard: only harmless hooks


def call_through(modules: list[nn.Module], body: Callable[..., object], *inputs: Tensor) -> Any:
    """Run ``body(*inputs)`` as the forward of all ``modules`` at once, each called exactly once.

    The first module is called, its forward calls the second, and the innermost forward is ``body``: inside it every
    hook has run and every weight is whole. The inputs are what the hooks made of them.
    """
    if not modules:
        return body(*inputs)
    first, rest = modules[0], modules[1:]

    def forward(*args: Tensor) -> Any:
        del vars(first)["forward"]  # guard: given back at once
        return call_through(rest, body, *args)

    vars(first)["forward"] = forward  # an instance attribute, gone again before anything else runs
    try:
        return first(*inputs)
    finally:
        vars(first).pop("forward", None)  # guard: given back after a raise


def matrix(x: Tensor) -> Tensor:
    """``x`` [.., k] with one dimension for all the others."""
    return x.reshape(-1, x.shape[-1])


def batched_pays(x: Tensor, rows: int, dgrad: bool = False) -> bool:
    """Whether one batched GEMM that writes the send buffer takes no longer than one GEMM and a pack, for ``rows`` a rank.

    What benchmarks/kernels.py found (benchmarks/results/kernels-cpu-gemm.csv): on CPU in fp32 a projection does from 256 rows on,
    with fewer it takes up to 10 % longer, and so does the output projection's dgrad with any. Not measured on any GPU, so not
    done on one.
    """
    if rows < 256 or dgrad or x.device.type != "cpu":
        return False
    return x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def by_rank(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., k] times ``weights`` [P, k, n] -> [..., P, n], which lies in memory as it travels, ``[P, ..., n]``."""
    ranks, k, n = weights.shape
    out = x.new_empty(ranks, *x.shape[:-1], n)
    operands = matrix(x).expand(ranks, -1, k), weights
    flat = out.view(ranks, -1, n)
    torch.bmm(*operands, out=flat) if bias is None else torch.baddbmm(bias.unsqueeze(1), *operands, out=flat)
    return out.movedim(0, -2)


def projected_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Ranges, ranks: int = 0) -> Tensor:
    """``x`` [.., m] times some rows of ``weight`` [n, m], ``[.., n_r]``; ``[.., ranks, n_r / ranks]`` as it travels, if ranks."""
    if ranks:
        return by_rank(x, batched(weight, 0, rows, ranks), None if bias is None else batched(bias, 0, rows, ranks))
    return F.linear(x, cut_ranges(weight, 0, rows), None if bias is None else cut_ranges(bias, 0, rows))


@overload
def autocast(*tensors: Tensor) -> Sequence[Tensor]: ...


@overload
def autocast(*tensors: Tensor | None) -> Sequence[Tensor | None]: ...


def autocast(*tensors: Any) -> Sequence[Any]:
    """What autocast would have done to the operands of a linear layer; the first is not None."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
