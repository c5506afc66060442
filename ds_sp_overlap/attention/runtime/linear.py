"""Decides which modules can be computed in parts, and calls them so that their hooks still run.

Note [Calls of modules]
~~~~~~~~~~~~~~~~~~~~~~~
A projection that is computed part by part is still called once, around all its parts
(`call_through`). So its hooks run as in any call; for instance, ZeRO-3's hooks gather a partitioned
weight. For backward the parameters themselves are saved, and cut when they are needed: a saved view
of a weight that ZeRO-3 has gathered would keep the whole weight alive until backward. Autograd
passes the gradient to the parameter once, in the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from . import sharded

# Forwards of linear layers that compute ``x w^T + b`` and nothing else. Some kinds of layer return
# a pair: ``(x w^T, b)`` if the layer leaves b to its caller, else ``(x w^T + b, None)``. For these
# kinds, the entry is a function that returns whether a layer leaves b to its caller. For layers
# that return one tensor, the entry is None, or the function returns None.
Plain = dict[Callable[..., object], Callable[[Any], bool | None] | None]
PLAIN: Plain = {nn.Linear.forward: None}
# Prefixes of the names of Python modules. Hooks from these modules are known to work if a call
# computes only parts of the output. `deepspeed.initialize` adds DeepSpeed.
harmless: set[str] = {sharded.FSDP}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The dicts of the hooks that PyTorch runs on every module's call.
EVERYWHERE = tuple(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
# The ``__call__`` methods that run no code besides hooks and ``forward``. The methods of
# ``ParameterDict`` and ``ParameterList`` run neither: they only raise an error.
_CALLS = (nn.Module.__call__, nn.ParameterDict.__call__, nn.ParameterList.__call__)


def can_split(module: nn.Module, plain: Plain = PLAIN) -> bool:
    """Return whether ``module`` is a plain linear layer that may be computed in parts.

    Returns False if the forward was replaced (LoRA, quantised, tensor-parallel layers) or compiled,
    or if a hook on the module's call, or on every module's call, would see parts of the output.

    Args:
        module: The module.
        plain: Forwards that may be computed in parts.
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
        # A class attribute may hide the parameter, for instance a property that scales it.
        for name in _descriptors(kind):
            if name in parameters:  # guard: what the forward would read
                is_plain = False
    else:
        # A parametrization may compute a new weight at each access, so check the parameters that it
        # computes the weight from.
        is_plain = all(type(x) in (nn.Parameter, Tensor) for x in module.parameters())
    return is_plain or sharded.is_gathered(module)


@lru_cache(maxsize=1024)
def _descriptors(kind: Any) -> list[str]:
    """Return those of "weight" and "bias" that are attributes of a class; cached to save time."""
    return [name for name in ("weight", "bias") if hasattr(kind, name)]


# Forwards of norms that are functions of their input and their parameters alone.
Pure = frozenset[Callable[..., object]]
PURE: Pure = frozenset((nn.LayerNorm.forward, nn.RMSNorm.forward))


def can_recompute(norm: object, pure: Pure = PURE) -> bool:
    """Return whether backward may recompute ``norm`` with no visible side effect.

    Returns False if the norm's call, or one of its parameters, has a hook: the hook would run once
    for each head group, on a part of the output or of the gradient.

    Args:
        norm: A module, or another callable.
        pure: Forwards that are known to be functions of their input and their parameters.
    """
    if not isinstance(norm, nn.Module) or not can_call_through(norm):
        return False
    if type(norm).forward not in pure:  # guard: only known norms
        return False
    # A tensor attribute may replace a parameter, as FSDP's views do. ``parameters()`` does not
    # contain such a tensor.
    if any(isinstance(x, Tensor) for x in vars(norm).values()):
        return False
    return not any(  # guard: its hooks run once
        parameter._backward_hooks for parameter in norm.parameters()
    )


def can_call_through(module: nn.Module) -> bool:
    """Return whether `call_through` may call a module with no visible side effect.

    `call_through` calls the module with other inputs than usual, for another output.
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
            # `__module__` of a hook names the Python module that defines the hook.
            where = getattr(hook, "__module__", "") or ""
            if not where.startswith(tuple(harmless)):  # guard: only harmless hooks
                return False
    return True


def hooks_of(module: nn.Module) -> list[dict]:
    """Return the hooks that a call of ``module`` runs: its own, and those of every module's call.

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
    """Run ``body(*inputs)`` as the forward of all ``modules``, see Note [Calls of modules].

    Each module is called once: the forward of the first module calls the second, and so on; the
    innermost forward is ``body``. When ``body`` runs, all forward pre-hooks have run and all
    weights are gathered. A module that has neither hooks nor a ``__call__`` of its own is not
    called.

    Args:
        modules: The modules; `can_call_through` must be true for each.
        body: Takes ``inputs`` as the hooks have changed them.
        *inputs: The inputs of the first module; each module passes them on to the next.

    Returns:
        The result of ``body``, as the hooks have changed it.
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

    # The instance attribute replaces the module's forward for one call: ``forward`` first deletes
    # the attribute.
    vars(first)["forward"] = forward
    try:
        return first(*inputs)
    finally:
        vars(first).pop("forward", None)  # guard: given back after a raise


def without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module with the same parameters and children, but without hooks.

    Hooks of the children still run. A ``forward`` that was set on the instance is not copied.
    """
    copy = object.__new__(type(module))
    vars(copy).update(vars(module), _compiled_call_impl=None)
    for name in _HOOKS:
        vars(copy)[name] = {}
    vars(copy).pop("forward", None)
    return copy


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return a parameter of ``module``, or the attribute that replaces the parameter.

    Takes the host less time than ``module.weight``, which looks in other places first.
    """
    parameters = module._parameters
    # Python finds an attribute of the instance before a parameter.
    if name in parameters and name not in module.__dict__:
        return parameters[name]
    return getattr(module, name)


def autocast(*tensors: Any) -> Sequence[Any]:
    """Cast tensors, also weights, as autocast casts the operands of a product: all but float64.

    Args:
        *tensors: The operands. The first must be a tensor; others may be None.

    Returns:
        The operands in their order; unchanged without autocast.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def products_of(modules: Sequence[nn.Module], plain: Plain) -> list[Tensor | None]:
    """Return weight and bias of each plain linear layer, cast as autocast would cast them.

    The bias is None if the layer has none, or leaves it to its caller (`Plain`).
    """
    parameters: list[Tensor | None] = []
    for module in modules:
        leaves_bias = plain[type(module).forward]
        has_none = leaves_bias is not None and leaves_bias(module)
        bias = None if has_none else parameter_of(module, "bias")
        parameters += parameter_of(module, "weight"), bias
    return list(autocast(*parameters))


def returned_by(module: nn.Module, plain: Plain, y: Tensor) -> Any:
    """Return ``y`` in the form in which a plain linear layer returns its output (`Plain`).

    This is y; or, for a kind of layer that may leave the bias to its caller, (y, bias or None).
    """
    leaves_bias = plain[type(module).forward]
    leaves = None if leaves_bias is None else leaves_bias(module)
    if leaves is None:
        return y
    return y, parameter_of(module, "bias") if leaves else None
