"""Layers that DeepSpeed's AutoTP has cut, of which a tensor-parallel rank holds a slice.

AutoTP puts classes of its own in the place of ``nn.Linear`` and leaves the model's config as it is.
So the heads of a tensor-parallel rank are those of its slices, and not those of the config.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .library import whole_shape

# The module of AutoTP's classes. A model can hold one only if that is loaded.
_LAYERS = "deepspeed.module_inject.layers"


def is_cut(module: nn.Module) -> bool:
    """Return whether AutoTP cut a layer of ``module``."""
    return bool(_cut_layers(module))


def heads_of_ranks(module: Any) -> list[tuple[int, int]]:
    """Return the query and KV heads of an attention layer on each tensor-parallel rank.

    Pairs (query heads, KV heads), by tensor-parallel rank; one pair for a layer that AutoTP did not
    cut.
    """
    config, cut = module.config, _cut_layers(module)
    heads = config.num_attention_heads
    # A config that gives no KV heads has as many as query heads.
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # If no layer tells the sizes of the slices (fused layers don't), the slices are equal.
    sizes: Sequence[int] = (1,) * (cut[0].tp_world_size if cut else 1)
    for layer in cut:
        # AutoTP cuts all layers of an attention along the same KV heads, so one of them is enough.
        if getattr(layer, "_partition_sizes", None):
            sizes = layer._partition_sizes
            break
    return [(heads * size // sum(sizes), kv_heads * size // sum(sizes)) for size in sizes]


def heads_here(module: Any) -> tuple[int, int]:
    """Return the query and KV heads of an attention layer on this tensor-parallel rank."""
    cut = _cut_layers(module)
    return heads_of_ranks(module)[cut[0].tp_index if cut else 0]


def out_features(module: Any) -> int | None:
    """Return how many features a module returns on this rank; None if the module doesn't tell."""
    if not _is_parallel(module):
        return getattr(module, "out_features", None)
    if getattr(module, "gather_output", False):
        return sum(module._partition_sizes)
    return whole_shape(module.weight)[0]


def refuse_shared_ranks(model: nn.Module, sp_ranks: list[int]) -> None:
    """Raise ValueError if two ranks of the sp group are in one tensor-parallel group.

    `enable` calls this while the ranks agree.

    Args:
        model: The model, of which AutoTP may have cut layers.
        sp_ranks: The ranks of the world in the sp group.
    """
    for name, layer in model.named_modules():
        if not _is_cut(layer):
            continue
        tp_ranks = dist.get_process_group_ranks(layer.mp_group)
        # Tensor-parallel ranks compute with the same tokens, sp ranks with tokens of their own.
        if len(set(tp_ranks) & set(sp_ranks)) > 1:
            raise ValueError(
                f"{name} is cut by AutoTP over ranks {tp_ranks}, which hold the same tokens, but "
                f"the sp group has ranks {sp_ranks}, which hold tokens of their own; take the "
                "sp_overlap section out of the DeepSpeed config, and give ds_sp_overlap.enable a "
                "sequence_process_group= with one rank of each tensor-parallel group"
            )


def _is_parallel(layer: Any) -> bool:
    """Return whether a layer is of a class of AutoTP."""
    layers = sys.modules.get(_LAYERS)
    return layers is not None and isinstance(layer, layers.TensorParallel_Layer)


def _is_cut(layer: Any) -> bool:
    """Return whether AutoTP cut this very layer, which it does not in a group of one rank."""
    return _is_parallel(layer) and layer.is_tp_parallel


def _cut_layers(module: nn.Module) -> list[Any]:
    """Return the layers in ``module``, itself included, that AutoTP cut."""
    return [layer for layer in module.modules() if _is_cut(layer)]
