"""Overlaps DeepSpeed's ``DistributedAttention`` and our class of this name, in any model.

The caller of these modules has already projected q, k and v. `_bind` therefore overlaps the
exchanges of q, k, v and o with one another and with attention, and leaves the projections alone.
This file does not import DeepSpeed: if DeepSpeed isn't loaded, no model holds its class.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..attention import drop_in
from ..attention.arguments import LocalAttention
from ..attention.declared import declared, undeclared
from ..attention.layer import LayerRuntime
from ..attention.projected import ProjectedAttention
from ..exchange.sp_group import SPGroup
from .inspect.library import defined_in
from .inspect.tokenwise import has_own_call
from .layers import FoundLayer, OverlapSettings
from .rebinding import Undo, is_ours, rebind

# The module that defines DeepSpeed's class.
STOCK = "deepspeed.sequence.layer"


def is_stock(module: Any) -> bool:
    """Return whether a module is a ``DistributedAttention`` of DeepSpeed."""
    layer = sys.modules.get(STOCK)
    return layer is not None and isinstance(module, layer.DistributedAttention)


def find_group(model: nn.Module) -> Any:
    """Return the sp group of a model's ``DistributedAttention``, DeepSpeed's or ours.

    Returns:
        The group of the first such module that has a group. If no module has one, the sp group of
        DeepSpeed's mesh or mpu, even for a model without such modules. None if DeepSpeed has no sp
        group either, or isn't loaded.
    """
    for module in model.modules():
        if is_drop_in_or_stock(module) and module.spg is not None:
            return module.spg
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        return None
    try:
        return groups._get_sequence_parallel_group()
    # KeyError: there is no mesh with sp ranks. AssertionError: the mpu has made no sp group.
    except (KeyError, AssertionError):
        return None


def is_drop_in_or_stock(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``DistributedAttention`` of DeepSpeed or of ours."""
    return is_stock(module) or isinstance(module, drop_in.DistributedAttention)


def has_drop_in(model: nn.Module) -> bool:
    """Return whether ``model`` has our `DistributedAttention`, which works without a section."""
    return any(isinstance(module, drop_in.DistributedAttention) for module in model.modules())


def find_layers(model: nn.Module, overlap: OverlapSettings) -> list[FoundLayer]:
    """Find the ``DistributedAttention`` modules of ``model``.

    Returns:
        Every such module as a layer, whether it can be overlapped or not.

    Raises:
        ValueError: if the sp group of a module is not the sp group of ``overlap``.
    """
    sp_group, layers = overlap.sp_group, []
    for name, module in model.named_modules():
        # DeepSpeed's AutoSP has replaced this attention by a module that gathers the global
        # sequence. Report the module, and leave it as it is.
        if type(module).__name__ == "UlyssesSPViTAttention":
            inside = tuple(module.modules())[1:]
            lacks = "DeepSpeed's AutoSP exchanges around it"
            layers.append(FoundLayer(name, module, lacks=lacks, inside=inside))
        if not is_drop_in_or_stock(module):
            continue
        own = sp_group.ranks if module.spg is None else dist.get_process_group_ranks(module.spg)
        if own != sp_group.ranks:  # guard: only the same group
            raise ValueError(
                f"{name} was made with an sp group of ranks {own}, and enable() is to use "
                f"ranks {sp_group.ranks}; give both one group"
            )
        if has_own_forward(module):
            layers.append(FoundLayer(name, module, lacks=OWN))
            continue
        settings, reason = settings_for(module, overlap), "the projections belong to its caller"
        layer = found_drop_in(name, module, settings, reason)
        # If a module of our class was made with a config or transport, it already overlaps.
        if getattr(module, "has_own_config", False):
            # Rebind nothing; the undo does nothing either.
            layer.bind = lambda: lambda module: None
            layer.lacks = (
                "made with a config or transport of its own, which the section leaves alone"
            )
        layers.append(layer)
    return layers


def found_drop_in(name: str, module: Any, settings: OverlapSettings, reason: str) -> FoundLayer:
    """Return a ``DistributedAttention`` as a layer whose exchanges are overlapped.

    Args:
        name: The module's name.
        module: The ``DistributedAttention``.
        settings: The settings of this layer (`settings_for`).
        reason: Why only the exchanges are overlapped.
    """
    got = "q, k, v, o and dq, dk, dv, do with one another and with attention"
    bind = functools.partial(_bind, name, module, settings)
    return FoundLayer(name, module, got, settings.why_not_more(reason), bind=bind)


def settings_for(
    module: Any, overlap: OverlapSettings, heads_alike: bool = False
) -> OverlapSettings:
    """Return the settings of a ``DistributedAttention``.

    The settings have one head group unless local attention is known to treat all heads alike.

    Args:
        module: The ``DistributedAttention``.
        overlap: The settings of the model's layers.
        heads_alike: Whether the caller knows that local attention treats all heads alike.
    """
    known = declared(module.local_attn)
    heads_alike |= getattr(module, "heads_alike", False)
    if heads_alike or (known is not None and known.heads_alike):
        return overlap
    return overlap.in_one_group(undeclared(module.local_attn))


OWN = "its forward is not DeepSpeed's"


def has_own_forward(module: Any) -> bool:
    """Return whether a call of a ``DistributedAttention`` runs third-party code."""
    # Somebody has set a forward on the module, or its class defines ``__call__``.
    if "forward" in vars(module) and not is_ours(module) or has_own_call(module):
        return True
    # Anything else is the forward of a fork or a subclass.
    where = defined_in(type(module).forward)
    return where not in (STOCK, drop_in.__name__)  # guard: a fork's exchange stays its own


def _bind(name: str, module: Any, overlap: OverlapSettings) -> Undo:
    """Rebind one ``DistributedAttention``, DeepSpeed's or ours, to overlap as the section asks.

    `enable` calls this once for each such layer.

    Args:
        name: The module's name, for errors and logs.
        module: The module; its new forward takes the same arguments.
        overlap: The settings of this layer.

    Returns:
        The function that undoes the rebinding.
    """
    config = overlap.config
    group = module.spg or overlap.sp_group.group
    sp_group = SPGroup(group, config.transport, module.sp_stream, **config.of_sp_group)
    is_ours_too = isinstance(module, drop_in.DistributedAttention)
    attend = ProjectedAttention(LayerRuntime(sp_group, config, name, overlap.policy))
    # Without a group, DeepSpeed's class takes all ranks; our sp group may have fewer ranks.
    same_group = module.spg is not None or sp_group.size == dist.get_world_size()
    # The numbers of dimensions of all outputs so far.
    output_dims = set[int]()

    def forward(
        own,
        query,
        key,
        value,
        batch_dim_idx,
        rotary_pos_emb=None,
        *args,
        sequence_lengths=None,
        **kwargs,
    ):
        """Attend over the global sequence; replaces the module's forward. Collective."""

        # The policy may time DeepSpeed's forward only in calls that DeepSpeed's forward computes
        # correctly. The number of dimensions of the output is known after the first call.
        comparable = (
            not is_ours_too
            and output_dims == {4}
            and query.dim() == key.dim() == 4
            and isinstance(batch_dim_idx, int)
            and sequence_lengths is None
            and module.sp_stream is None
            and same_group
            and not (query.shape[2] % sp_group.size or key.shape[2] % sp_group.size)
            and (rotary_pos_emb is None or not batch_dim_idx)
        )

        def stock(*qkv: Tensor) -> Tensor:
            return own(*qkv, batch_dim_idx, rotary_pos_emb, *args, **kwargs)

        output = attend.of_module(
            module,
            (query, key, value),
            batch_dim_idx,
            rotary_pos_emb=rotary_pos_emb,
            local=LocalAttention(module.local_attn, args, kwargs),
            sequence_lengths=sequence_lengths,
            baseline=stock if comparable else None,
        )
        output_dims.add(output.dim())
        return output

    return rebind(module, forward)
