"""Finds modules whose parameters FSDP2 (``fully_shard``) shards and gathers.

Note [Units of FSDP2]
~~~~~~~~~~~~~~~~~~~~~
A module that was passed to ``fully_shard`` is a unit. Hooks on the unit's call gather all
parameters of the unit, except those of inner units. Before the call, a parameter is a `DTensor`
with this rank's part. Inside the call, the parameter is plain. Backward gathers the unit again when
the output of the call gets its gradient. As soon as the inputs of the call have their gradients,
FSDP2 reduces the unit's gradients and frees its gathered parameters. So in the graph, every use of
a unit's parameters must lie between inputs and output of the call.

A unit may be a module around the layer, or a projection: a projection is called even if computed
part by part (Note [Calls of modules] in `linear`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

# The prefix of the names of the Python modules that define FSDP2's hooks.
FSDP = "torch.distributed.fsdp._fully_shard"
# The modules whose weight is sharded, but plain inside a call of the unit that contains the module.
# `look_for_units` fills this set.
_gathered: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_unit(module: nn.Module) -> bool:
    """Return whether a module is a unit of FSDP2."""
    return hasattr(module, "_get_fsdp_state")


def _gathered_by(unit: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the module and the name of each parameter that is plain once its unit has gathered it.

    A parameter that several modules share is yielded for each of these modules.
    """
    state = unit._get_fsdp_state()
    # Before torch 2.13 a unit has one group, or none.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        for parameter in group.fsdp_params:
            # With tensor parallelism or quantisation, a gathered parameter is not plain.
            is_other = hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather")
            if not parameter.is_dtensor and not is_other:
                info = parameter._module_info
                yield info.module, info.param_name
                yield from zip(info.shared_modules, info.shared_param_names)


def look_for_units(model: nn.Module) -> None:
    """Remember the modules of ``model`` whose weights are gathered by units.

    `enable` calls this function. The first forward calls it again, since units may be made between.
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
    """Return whether a module's own parameters are plain tensors, or FSDP2's shards of plain ones.

    A quantised parameter has another type. A product with such a parameter may be scaled by values
    that depend on all tokens of the input.
    """
    parts = (getattr(x, "_local_tensor", x) for x in module.parameters(recurse=False))
    return all(
        type(part) in (nn.Parameter, Tensor) and not hasattr(part, "fsdp_post_all_gather")
        for part in parts
    )
