"""Determines the heads and widths of layers that DeepSpeed's AutoTP has cut.

AutoTP replaces ``nn.Linear`` by its own classes, which hold a slice of the weight. AutoTP does not
change the model's config. So the number of heads on a tensor-parallel rank differs from the config,
and follows from the slices.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from .library import whole_shape

# The module that defines AutoTP's classes. If it isn't loaded, no model contains such a class.
_LAYERS = "deepspeed.module_inject.layers"


def cut_layers(module: nn.Module) -> list[Any]:
    """Return the layers in ``module``, including ``module`` itself, that AutoTP cut."""
    return [layer for layer in module.modules() if _is_cut(layer)]


def heads_of_ranks(module: Any) -> list[tuple[int, int]]:
    """Return the numbers of query and KV heads of an attention layer on each tensor-parallel rank.

    Returns:
        A pair (query heads, KV heads) for each tensor-parallel rank; one pair for a layer that
        AutoTP did not cut.
    """
    config, cut = module.config, cut_layers(module)
    heads = config.num_attention_heads
    # A config without a number of KV heads has as many KV heads as query heads.
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # Assume equal slices for fused layers, which don't store the sizes of slices.
    sizes = (1,) * (cut[0].tp_world_size if cut else 1)
    for layer in cut:
        # AutoTP cuts all projections of an attention layer along the same KV heads; take the first.
        if getattr(layer, "_partition_sizes", None):
            sizes = layer._partition_sizes
            break
    return [(heads * size // sum(sizes), kv_heads * size // sum(sizes)) for size in sizes]


def heads_here(module: Any) -> tuple[int, int]:
    """Return the numbers of query and KV heads of an attention layer on this rank."""
    cut = cut_layers(module)
    return heads_of_ranks(module)[cut[0].tp_index if cut else 0]


def out_features(module: Any) -> int | None:
    """Return the number of output features of a module on this rank; None if it is not known."""
    if not _is_parallel(module):
        return getattr(module, "out_features", None)
    if getattr(module, "gather_output", False):
        return sum(module._partition_sizes)
    return whole_shape(module.weight)[0]


def refuse_shared_ranks(model: nn.Module, sp_ranks: list[int]) -> None:
    """Raise ValueError if two ranks of the sp group are in one tensor-parallel group.

    `enable` calls this inside `SPGroup.agree`.

    Args:
        model: The model, whose layers AutoTP may have cut.
        sp_ranks: The global ranks of the sp group.
    """
    for name, layer in model.named_modules():
        if not _is_cut(layer):
            continue
        tp_ranks = dist.get_process_group_ranks(layer.mp_group)
        # Tensor-parallel ranks hold the same tokens; sp ranks hold different tokens.
        if len(set(tp_ranks) & set(sp_ranks)) > 1:
            raise ValueError(
                f"{name} is cut by AutoTP over ranks {tp_ranks}, which hold the same tokens, but "
                f"the sp group has ranks {sp_ranks}, which hold tokens of their own; take the "
                "sp_overlap section out of the DeepSpeed config, and give ds_sp_overlap.enable a "
                "sequence_process_group= with one rank of each tensor-parallel group"
            )


def _is_parallel(layer: Any) -> bool:
    """Return whether the class of a layer is one of AutoTP's."""
    layers = sys.modules.get(_LAYERS)
    return layers is not None and isinstance(layer, layers.TensorParallel_Layer)


def _is_cut(layer: Any) -> bool:
    """Return whether AutoTP cut this layer itself; AutoTP cuts nothing in a group of one rank."""
    return _is_parallel(layer) and layer.is_tp_parallel
