"""Linear layers by parts: a projection that computes some of its rows.

A layer is driven from outside through its module's own call, so that whatever hangs on that call
(ZeRO-3 gathers a partitioned weight in it) happens as ever; see `call_through`. Weights are saved
for backward as the parameters themselves and cut when they are needed: a saved view would keep a
gathered ZeRO-3 weight alive until backward. Weight gradients reach the parameter through autograd,
once, in the parameter's own shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

# Forwards of linear layers that compute ``x w^T + b`` and nothing else, and what tells of a layer
# whether it leaves b to its caller and returns ``(x w^T, b)``; None for those that return one
# tensor.
Plain = dict[Callable[..., object], Callable[[Any], "bool | None"]]


def _returns_one(module: nn.Module) -> None:
    """Of a layer that returns one tensor."""


PLAIN: Plain = {nn.Linear.forward: _returns_one}
harmless: set[str] = (
    set()
)  # where hooks come from that may see parts of an output, by the beginning of their modules' names
_EVERYWHERE = tuple(  # hooks of all modules
    getattr(nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


_CALLS = (
    nn.Module.__call__,
    nn.ParameterDict.__call__,
    nn.ParameterList.__call__,
)  # the last two only refuse


def can_split(module: nn.Module, plain: Plain = PLAIN) -> bool:
    """Whether ``module`` is a plain linear layer that may be computed in parts.

    Not if its forward was replaced (LoRA, quantised, tensor-parallel layers) or compiled, nor if
    somebody hooked its call, or every module's, and would see parts instead of the output.
    """
    if type(module).forward not in plain or not can_call_through(
        module
    ):  # guard: no forward of its own
        return False
    if type(parameter_of(module, "weight")) not in (
        nn.Parameter,
        Tensor,
    ):  # a quantised or distributed tensor
        return False
    return True


Pure = frozenset[Callable[..., object]]
PURE: Pure = frozenset((nn.LayerNorm.forward, nn.RMSNorm.forward))


def can_recompute(norm: object, pure: Pure = PURE) -> bool:
    """Whether ``norm`` may be computed a second time in backward, and nobody sees: it is a function
    of its input and its parameters.

    pure   forwards that are known to be such

    Not if somebody hooked it, or a parameter of it: that hook would be called for each head group's
    part of the gradient.
    """
    if (
        not isinstance(norm, nn.Module)
        or type(norm).forward not in pure
        or not can_call_through(norm)
    ):  # guard: only known norms
        return False
    if any(
        isinstance(x, Tensor) for x in vars(norm).values()
    ):  # in a parameter's place, as FSDP leaves them
        return False
    return not any(
        parameter._backward_hooks for parameter in norm.parameters()
    )  # guard: its hooks run once


Idle = Callable[[Any], bool]


def _never(hook: Any) -> bool:
    return False


def can_call_through(module: nn.Module, idle: Idle = _never) -> bool:
    """Whether nobody would see, and mind, that a module is called by `call_through`: with other
    inputs, for another output.

    idle   tells of a hook that it does nothing for now
    """
    if (
        "forward" in vars(module) or module._compiled_call_impl is not None
    ):  # guard: a replaced forward runs
        return False
    if type(module).__call__ not in _CALLS:  # guard: a call of its own runs
        return False
    return hooks_are_harmless(module, idle=idle)


def hooks_are_harmless(module: nn.Module, *more: str, idle: Idle = _never) -> bool:
    """Whether nobody hooked a module's call, or every module's, but those that are `harmless`, and
    ``more``.
    """
    hooks = (hook for hooks in _hooks(module) for hook in hooks.values() if not idle(hook))
    names = (getattr(hook, "__module__", "") or "" for hook in hooks)
    return all(
        where.startswith((*harmless, *more)) for where in names
    )  # guard: only harmless hooks


def _hooks(module: nn.Module) -> list[dict]:
    """Hooks on the call of ``module``, kind by kind."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return list(filter(None, own + _EVERYWHERE))  # guard: hooks of all modules


def call_through(modules: list[nn.Module], body: Callable[..., object], *inputs: Tensor) -> Any:
    """Run ``body(*inputs)`` as the forward of all ``modules`` at once, each called exactly once.

    The first module is called, its forward calls the second, and the innermost forward is ``body``:
    inside it every hook has run and every weight is whole. The inputs are what the hooks made of
    them. A call on which nothing hangs is left out.
    """
    if not modules:
        return body(*inputs)
    first, rest = modules[0], modules[1:]
    if not _hooks(first) and type(first).__call__ in _CALLS:
        return call_through(rest, body, *inputs)

    def forward(*args: Tensor) -> Any:
        del vars(first)["forward"]  # guard: given back at once
        return call_through(rest, body, *args)

    vars(first)["forward"] = forward  # an instance attribute, gone again before anything else runs
    try:
        return first(*inputs)
    finally:
        vars(first).pop("forward", None)  # guard: given back after a raise


def without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module over the same parameters and children, whose call runs no hook."""
    copy = object.__new__(type(module))
    hooks: dict[str, Any] = {
        f"_{kind}_hooks": {} for kind in ("forward", "forward_pre", "backward", "backward_pre")
    }
    vars(copy).update(vars(module), **hooks, _compiled_call_impl=None)
    vars(copy).pop("forward", None)
    return copy


def parameter_of(module: nn.Module, name: str) -> Any:
    """A parameter of ``module``; for less of the host's time than ``module.weight``, which looks
    everywhere else first.
    """
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def matrix(x: Tensor) -> Tensor:
    """``x`` [s/P, b, ..] with one dimension for tokens and one for all that belongs to a token."""
    return x.reshape(-1, math.prod(x.shape[2:]))


def batched_pays(x: Tensor, rows: int, dgrad: bool = False) -> bool:
    """Whether one batched GEMM that writes the send buffer takes no longer than one GEMM and a
    pack, for ``rows`` a rank.

    What benchmarks/kernels.py found (benchmarks/results/kernels-cpu-gemm.csv): on CPU in fp32 a
    projection does from 256 rows on, with fewer it takes up to 10 % longer, and so does the output
    projection's dgrad with any. Not measured on any GPU, so not done on one.
    """
    if rows < 256 or dgrad or x.device.type != "cpu":
        return False
    return x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def by_rank(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [tokens, k] times ``weights`` [P, k, n] -> [tokens, P, n], which lies in memory as it
    travels, ``[P, tokens, n]``.
    """
    operands = x.expand(len(weights), -1, -1), weights
    out = torch.bmm(*operands) if bias is None else torch.baddbmm(bias.unsqueeze(1), *operands)
    return out.transpose(0, 1)


def autocast_of(device: torch.device) -> dict[str, Any]:
    """What is in force, for ``torch.autocast`` to bring it back."""
    kind = device.type
    return dict(
        device_type=kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
    )


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
