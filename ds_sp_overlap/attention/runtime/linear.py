"""Decides which modules can be computed in parts, and calls them so that their hooks still run.

Note [Calls of modules]
~~~~~~~~~~~~~~~~~~~~~~~
A projection of which some rows are computed at a time still has its own call, around all its parts
(`call_through`). So whatever depends on that call happens as ever; for instance, ZeRO-3 gathers a
partitioned weight in it. For backward the parameters themselves are saved, and cut when they are
needed: a saved view would keep a weight that ZeRO-3 has gathered alive until backward. A weight
gradient reaches its parameter through autograd, once, in the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from . import sharded

# Forwards of linear layers that compute ``x w^T + b`` and nothing else. Each has a function that
# tells whether a layer leaves b to its caller and returns ``(x w^T, b)``; None, or a function that
# returns None, for layers that return one tensor.
Plain = dict[Callable[..., object], Callable[[Any], bool | None] | None]
PLAIN: Plain = {nn.Linear.forward: None}
# A hook may see parts of an output if the Python module that defines it has a name that begins with
# one of these; `deepspeed.initialize` adds DeepSpeed.
harmless: set[str] = {sharded.FSDP}
# Hooks of all modules.
EVERYWHERE = tuple(
    getattr(nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
# Calls that run hooks and ``forward`` and nothing else; those of the two containers only refuse.
_CALLS = (nn.Module.__call__, nn.ParameterDict.__call__, nn.ParameterList.__call__)


def can_split(module: nn.Module, plain: Plain = PLAIN) -> bool:
    """Return whether ``module`` is a plain linear layer that may be computed in parts.

    It is not if its forward was replaced (LoRA, quantised, tensor-parallel layers) or compiled, nor
    if a hook on its call, or on every module's call, would see parts instead of the output.

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
        is_plain = type(weight) is nn.Parameter or type(weight) is Tensor
        # The class may put something in front of a parameter, as a property that scales it.
        for name in _descriptors(kind):
            if name in parameters:  # guard: what the forward would read
                is_plain = False
    else:
        # A parametrization may compute another weight in each access, so only what the weight is
        # computed from is looked at.
        is_plain = all(type(x) in (nn.Parameter, Tensor) for x in module.parameters())
    return is_plain or sharded.is_gathered(module)


@lru_cache(maxsize=1024)
def _descriptors(kind: Any) -> list[str]:
    """Return the names of weight and bias that a class has; looked up once, which is slow."""
    return [name for name in ("weight", "bias") if hasattr(kind, name)]


# Forwards of norms that are functions of their input and their parameters alone.
Pure = frozenset[Callable[..., object]]
PURE: Pure = frozenset((nn.LayerNorm.forward, nn.RMSNorm.forward))


def can_recompute(norm: object, pure: Pure = PURE) -> bool:
    """Return whether backward may recompute ``norm`` without anybody noticing.

    It may not if there is a hook on the norm's call, or on a parameter of it: that hook would be
    called for each head group's part of the gradient.

    Args:
        norm: A module, or another callable.
        pure: Forwards that are known to be functions of their input and their parameters.
    """
    if not isinstance(norm, nn.Module) or not can_call_through(norm):
        return False
    if type(norm).forward not in pure:  # guard: only known norms
        return False
    # A tensor stands in the place of a parameter, as FSDP's views do: ``parameters()`` lacks it.
    if any(isinstance(x, Tensor) for x in vars(norm).values()):
        return False
    return not any(  # guard: its hooks run once
        parameter._backward_hooks for parameter in norm.parameters()
    )


def can_call_through(module: nn.Module) -> bool:
    """Return whether `call_through` may call a module without anybody noticing.

    The module is then called with other inputs, for another output.
    """
    is_replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
    if is_replaced:  # guard: a replaced forward runs
        return False
    if type(module).__call__ not in _CALLS:  # guard: a call of its own runs
        return False
    return hooks_are_harmless(module)


def hooks_are_harmless(module: nn.Module) -> bool:
    """Return whether all hooks on a module's call, and on every module's call, are harmless."""
    for hooks in hooks_of(module):
        for hook in hooks.values():
            # A hook's module is the Python module that defines it.
            where = getattr(hook, "__module__", "") or ""
            if not where.startswith(tuple(harmless)):  # guard: only harmless hooks
                return False
    return True


def hooks_of(module: nn.Module) -> list[dict]:
    """Return the hooks that a call of ``module`` runs, its own and every module's.

    Returns:
        A dict of hooks for each kind; kinds without hooks are left out.
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

    Each module is called once: the first one is called, its forward calls the second one, and the
    innermost forward is ``body``. Inside of it all hooks for the begin of a forward have run, and
    all weights are whole. A module that has neither hooks nor a ``__call__`` of its own is not
    called.

    Args:
        modules: The modules, each of which `can_call_through` affirms.
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

    # An attribute of the instance, which is deleted again before anything else runs.
    vars(first)["forward"] = forward
    try:
        return first(*inputs)
    finally:
        vars(first).pop("forward", None)  # guard: given back after a raise


def without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module over the same parameters and children, whose call runs no hook.

    Hooks of the children still run; a ``forward`` that was set on the module is not copied.
    """
    copy = object.__new__(type(module))
    hooks: dict[str, Any] = {
        f"_{kind}_hooks": {} for kind in ("forward", "forward_pre", "backward", "backward_pre")
    }
    vars(copy).update(vars(module), **hooks, _compiled_call_impl=None)
    vars(copy).pop("forward", None)
    return copy


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return a parameter of ``module``, or an attribute in its place.

    Costs the host less than ``module.weight``, which looks everywhere else first.
    """
    parameters = module._parameters
    # An attribute of the instance goes before a parameter.
    if name in parameters and name not in module.__dict__:
        return parameters[name]
    return getattr(module, name)


def autocast(*tensors: Any) -> Sequence[Any]:
    """Cast tensors as autocast casts the operands of a product: all but float64, weights too.

    Args:
        *tensors: The operands, tensors or None, of which the first is not None.

    Returns:
        The operands in their order; unchanged without autocast.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def products_of(
    modules: Sequence[nn.Module], plain: Plain, cast: dict[str, Any]
) -> list[Tensor | None]:
    """Return weight and bias of the product of each plain linear layer, as autocast casts them.

    The bias is None where there is none, or where the layer leaves it to its caller. ``cast`` is the
    autocast state, as keywords of ``torch.autocast``.
    """
    parameters: list[Tensor | None] = []
    for module in modules:
        leaves_bias = plain[type(module).forward]
        has_none = leaves_bias is not None and leaves_bias(module)
        parameters.append(parameter_of(module, "weight"))
        parameters.append(None if has_none else parameter_of(module, "bias"))
    return list(autocast(*parameters)) if cast["enabled"] else parameters


def returned_by(module: nn.Module, plain: Plain, y: Tensor) -> Any:
    """Return what a plain linear layer returns for its product: y; or (y, the bias to add or None),
    where layers of its kind may leave the bias to their caller.
    """
    leaves_bias = plain[type(module).forward]
    leaves = None if leaves_bias is None else leaves_bias(module)
    if leaves is None:
        return y
    return y, parameter_of(module, "bias") if leaves else None
