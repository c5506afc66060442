"""Decides which modules can be computed part by part, and calls these so that their hooks run.

Note [Calls of modules]
~~~~~~~~~~~~~~~~~~~~~~~
A projection that is computed part by part is still called once: one call surrounds the work on all
parts (`call_through`). So the projection's hooks run as in any call; for instance, ZeRO-3's hooks
gather a partitioned weight. For backward, whole parameters are saved, and backward cuts them. A
saved view of a weight that ZeRO-3 has gathered would keep the whole weight alive until backward.
Autograd passes the gradient to a parameter once, in the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from . import sharded

# The keys are the forwards of linear layers that compute ``x w^T + b`` and nothing else. Some kinds
# of layer return a pair: ``(x w^T, b)`` if the layer leaves b to its caller, else ``(x w^T + b,
# None)``. For such a kind, the value is a function that returns whether a layer leaves b to its
# caller. For a layer that returns one tensor, the value is None, or a function that returns None.
Plain = dict[Callable[..., object], Callable[[Any], bool | None] | None]
PLAIN: Plain = {nn.Linear.forward: None}
# Prefixes of the names of Python modules. Hooks that these modules define work although the output
# is computed part by part. `deepspeed.initialize` adds DeepSpeed.
harmless: set[str] = {sharded.FSDP}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The dicts of the hooks that PyTorch runs on every module's call.
EVERYWHERE = tuple(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
# The ``__call__`` methods that run no code besides hooks and ``forward``. The methods of
# ``ParameterDict`` and ``ParameterList`` run neither: they only raise an error.
_CALLS = (nn.Module.__call__, nn.ParameterDict.__call__, nn.ParameterList.__call__)


def can_split(module: nn.Module, plain: Plain = PLAIN) -> bool:
    """Return whether ``module`` is a plain linear layer that may be computed in parts.

    Returns False if the forward was compiled or replaced (LoRA, quantised, tensor-parallel layers),
    or if a hook would see parts of the output: a hook on this module or on all modules.

    Args:
        module: The module.
        plain: The forwards of plain linear layers.
    """
    kind: Any = type(module)
    if kind.forward not in plain:  # guard: no forward of its own
        return False
    if not can_call_through(module):
        return False
    own, parameters = module.__dict__, module._parameters
    weight = own["weight"] if "weight" in own else parameters.get("weight")
    if weight is not None:
        # A quantised or distributed tensor has another type.
        is_plain = type(weight) in (nn.Parameter, Tensor)
        # A class attribute may hide the parameter: for instance, a property that scales the weight.
        for name in _descriptors(kind):
            if name in parameters:  # guard: what the forward would read
                is_plain = False
    else:
        # A parametrization may compute the weight anew at each access. So check the parameters from
        # which the weight is computed.
        is_plain = all(type(x) in (nn.Parameter, Tensor) for x in module.parameters())
    return is_plain or sharded.is_gathered(module)


@lru_cache(maxsize=1024)
def _descriptors(kind: Any) -> list[str]:
    """Return which of "weight" and "bias" are attributes of a class; cached to save time."""
    return [name for name in ("weight", "bias") if hasattr(kind, name)]


# Forwards of norms that depend only on their input and their parameters.
Pure = frozenset[Callable[..., object]]
PURE: Pure = frozenset((nn.LayerNorm.forward, nn.RMSNorm.forward))


def can_recompute(norm: object, pure: Pure = PURE) -> bool:
    """Return whether backward may recompute ``norm`` without visible side effects.

    Returns False if there is a hook on the norm or one of its parameters. Such a hook would run
    once for each head group, on a part of the output or of the gradient.

    Args:
        norm: A module, or another callable.
        pure: Forwards known to depend only on their input and their parameters.
    """
    if not isinstance(norm, nn.Module) or not can_call_through(norm):
        return False
    if type(norm).forward not in pure:  # guard: only known norms
        return False
    # A tensor that is a plain attribute may replace a parameter, as FSDP's views do.
    # ``parameters()`` does not contain such a tensor.
    if any(isinstance(x, Tensor) for x in vars(norm).values()):
        return False
    return not any(  # guard: its hooks run once
        parameter._backward_hooks for parameter in norm.parameters()
    )


def can_call_through(module: nn.Module) -> bool:
    """Return whether `call_through` may call a module without visible side effects.

    In `call_through`, the module's inputs and output are not those of its own forward.
    """
    is_replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
    if is_replaced:  # guard: a replaced forward runs
        return False
    if type(module).__call__ not in _CALLS:  # guard: a call of its own runs
        return False
    return hooks_are_harmless(module)


def hooks_are_harmless(module: nn.Module) -> bool:
    """Return whether all hooks that a call of ``module`` runs come from ``harmless`` modules."""
    for hooks in hooks_of(module):
        for hook in hooks.values():
            # A hook's `__module__` names the Python module that defines the hook.
            where = getattr(hook, "__module__", "") or ""
            if not where.startswith(tuple(harmless)):  # guard: only harmless hooks
                return False
    return True


def hooks_of(module: nn.Module) -> list[dict]:
    """Return the hooks that a call of ``module`` runs: its own, and those on all modules.

    Returns:
        The dicts of hooks, one for each kind of hook; empty dicts are left out.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(EVERYWHERE):  # guard: hooks of all modules
        hooks += EVERYWHERE
    return list(filter(None, hooks))


def call_through(modules: list[nn.Module], body: Callable[..., object], *inputs: Tensor) -> Any:
    """Run ``body(*inputs)`` inside calls of all ``modules``, see Note [Calls of modules].

    The calls are nested: the first module's call contains the second's, and so on, and ``body``
    replaces the innermost forward. So when ``body`` runs, all forward pre-hooks have run, and all
    weights are gathered. A module that has neither hooks nor a ``__call__`` of its own is not
    called.

    Args:
        modules: The modules; `can_call_through` must be true for each.
        body: Takes ``inputs``, which pre-hooks may have changed.
        *inputs: The inputs of the first module. Each module passes them on to the next.

    Returns:
        The result of ``body``, which hooks may have changed.
    """
    for index, first in enumerate(modules):
        if hooks_of(first) or type(first).__call__ not in _CALLS:
            rest = modules[index + 1 :]
            break
    else:
        return body(*inputs)

    def forward(*args: Tensor) -> Any:
        del vars(first)["forward"]  # guard: given back at once
        return call_through(rest, body, *args)

    # This instance attribute replaces the module's forward for one call only: the first thing that
    # ``forward`` does is to delete the attribute.
    vars(first)["forward"] = forward
    try:
        return first(*inputs)
    finally:
        vars(first).pop("forward", None)  # guard: given back after a raise


def without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module with the same parameters and children, but without hooks.

    Hooks of the children still run. A ``forward`` that was set on the instance is left out.
    """
    copy = object.__new__(type(module))
    vars(copy).update(vars(module), _compiled_call_impl=None)
    for name in _HOOKS:
        vars(copy)[name] = {}
    vars(copy).pop("forward", None)
    return copy


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return a parameter of ``module``, or the attribute that replaces the parameter.

    This takes the host less time than ``module.weight``, which searches other places first.
    """
    parameters = module._parameters
    # An attribute of the instance has precedence over a parameter.
    if name in parameters and name not in module.__dict__:
        return parameters[name]
    return getattr(module, name)


def autocast(*tensors: Any) -> Sequence[Any]:
    """Cast the operands of a product, such as x and a weight, as autocast would: all but float64.

    Args:
        *tensors: The operands. The first must be a tensor; others may be None.

    Returns:
        The operands in the same order; unchanged if autocast is off.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def products_of(modules: Sequence[nn.Module], plain: Plain) -> list[Tensor | None]:
    """Return weight and bias of each plain linear layer, cast as autocast would cast them.

    The bias is None if the layer has no bias, or leaves the bias to its caller (`Plain`).
    """
    parameters: list[Tensor | None] = []
    for module in modules:
        leaves_bias = plain[type(module).forward]
        has_none = leaves_bias is not None and leaves_bias(module)
        bias = None if has_none else parameter_of(module, "bias")
        parameters += parameter_of(module, "weight"), bias
    return list(autocast(*parameters))


def returned_by(module: nn.Module, plain: Plain, y: Tensor) -> Any:
    """Return ``y`` in the form in which ``module``, a plain linear layer, returns its output.

    The form is y, or (y, bias or None) for a kind of layer that may leave the bias to its caller
    (`Plain`).
    """
    leaves_bias = plain[type(module).forward]
    leaves = None if leaves_bias is None else leaves_bias(module)
    if leaves is None:
        return y
    return y, parameter_of(module, "bias") if leaves else None
