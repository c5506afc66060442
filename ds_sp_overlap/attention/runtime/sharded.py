"""Finds modules whose parameters FSDP2 (``fully_shard``) shards and gathers.

Note [Units of FSDP2]
~~~~~~~~~~~~~~~~~~~~~
A module that was given to ``fully_shard`` is a unit. Hooks on the unit's call gather all parameters
of the unit, except those of inner units. Before the call a parameter is a `DTensor` of this rank's
part, inside the call a plain parameter. Backward gathers the unit again when the output of the call
gets its gradient. As soon as the inputs of the call have their gradients, FSDP2 reduces the unit's
gradients and frees its gathered parameters. So every use of a unit's parameters must lie in the
graph between inputs and output of the call.

Projections are still called (Note [Calls of modules] in `linear`), so a unit may be a projection,
or a module around the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

# The beginning of the name of the module in which FSDP2 defines its hooks.
FSDP = "torch.distributed.fsdp._fully_shard"
# The modules whose weight is plain inside a call of the unit around the module, and sharded outside
# of the call. `look_for_units` fills this set.
_gathered: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_unit(module: nn.Module) -> bool:
    """Return whether a module is a unit of FSDP2."""
    return hasattr(module, "_get_fsdp_state")


def _gathered_by(unit: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield module and name of each parameter that a unit gathers to a plain parameter.

    A parameter that several modules share is yielded for each of these modules.
    """
    state = unit._get_fsdp_state()
    # Before torch 2.13 a unit has one group, or none.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        for parameter in group.fsdp_params:
            # With tensor parallelism or quantisation, the gathered parameter has another type.
            is_other = hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather")
            if not parameter.is_dtensor and not is_other:
                info = parameter._module_info
                yield info.module, info.param_name
                yield from zip(info.shared_modules, info.shared_param_names)


def look_for_units(model: nn.Module) -> None:
    """Remember the modules of ``model`` whose weights its units gather.

    `enable` calls this, and so does the first forward, since units may be made in between.
    """
    for unit in filter(is_unit, model.modules()):
        _gathered.update(module for module, name in _gathered_by(unit) if name == "weight")


def is_gathered(module: nn.Module) -> bool:
    """Return whether the weight of a module is sharded now, but plain inside a call of its unit."""
    if not (module in _gathered or is_unit(module)):
        return False
    from torch.distributed.tensor import DTensor  # FSDP2 has imported this module already

    return isinstance(module._parameters.get("weight"), DTensor) and (
        module in _gathered or (module, "weight") in _gathered_by(module)
    )


def has_plain_parameters(module: nn.Module) -> bool:
    """Return whether a module's own parameters are plain tensors, or FSDP2's shards of such.

    A quantised parameter has another type. Its product may be scaled by values that depend on all
    tokens of the input.
    """
    parts = (getattr(x, "_local_tensor", x) for x in module.parameters(recurse=False))
    return all(
        type(part) in (nn.Parameter, Tensor) and not hasattr(part, "fsdp_post_all_gather")
        for part in parts
    )
