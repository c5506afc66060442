"""DeepSpeed's ``DistributedAttention`` modules, and its sp group."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import nn

from ..attention.drop_in import ProjectedAttention
from ..attention.layer import Layer
from ..exchange.channel import Channel
from .layers import Found, Overlap
from .rebinding import Undo, rebind


def find_group(model: nn.Module) -> Any:
    """The sp group of ``DistributedAttention`` modules in the model, of DeepSpeed's mesh or of its mpu; None if none."""
    for module in model.modules():
        if isinstance(module, DistributedAttention) and module.spg is not None:
            return module.spg
    try:
        return groups._get_sequence_parallel_group()
    except (KeyError, AssertionError):
        return None


def find_layers(model: nn.Module, overlap: Overlap) -> list[Found]:
    """DeepSpeed's ``DistributedAttention`` modules, whoever calls them. Raises ValueError where one has another sp group.

    A layer that AutoSP has wrapped stays as it is: AutoSP gathers the global sequence around attention of its own.
    """
    channel, found = overlap.channel, []
    for name, module in model.named_modules():
        if type(module).__name__ == "UlyssesSPViTAttention":
            inside = tuple(module.modules())[1:]
            found.append(Found(name, module, got="", lacks="DeepSpeed's AutoSP exchanges around it", inside=inside))
        if not isinstance(module, DistributedAttention):
            continue
        own = channel.ranks if module.spg is None else dist.get_process_group_ranks(module.spg)
        if own != channel.ranks:  # guard: only the same group
            raise ValueError(
                f"{name} was made with an sp group of ranks {own}, and enable() is to use ranks {channel.ranks}; give both one group"
            )
        got = "q, k, v, o and dq, dk, dv, do with one another and with attention"
        bind = functools.partial(bind_drop_in, name, module, overlap)
        lacks = overlap.why_not_more("the projections belong to its caller")
        found.append(Found(name, module, got, lacks, bind))
    return found


def bind_drop_in(name: str, module: DistributedAttention, overlap: Overlap) -> Undo:
    """Rebind DeepSpeed's class to the drop-in; returns what undoes it."""
    config, original = overlap.config, module.forward
    channel = Channel(module.spg or overlap.channel.group, config.transport, module.sp_stream, config.kernels)
    attend = ProjectedAttention(Layer(channel, config, name, overlap.policy))
    dims: set[int] = set()
    same_group = module.spg is not None or channel.size == dist.get_world_size()  # None is all ranks to DeepSpeed's class

    def forward(query, key, value, batch_dim_idx, rotary_pos_emb=None, *args, sequence_lengths=None, **kwargs):
        def baseline(q, k, v):
            return original(q, k, v, batch_dim_idx, rotary_pos_emb, *args, **kwargs)

        # What DeepSpeed's class does right; the first call has shown the form of the local attention's output.
        alike = (
            dims == {4}
            and query.dim() == key.dim() == 4
            and isinstance(batch_dim_idx, int)
            and sequence_lengths is None
            and module.sp_stream is None
            and same_group
            and not (query.shape[2] % channel.size or key.shape[2] % channel.size)
            and (rotary_pos_emb is None or not batch_dim_idx)
        )
        batch_first, arrive = attend.translated(query, batch_dim_idx, rotary_pos_emb)
        y = attend(
            module.local_attn, query, key, value, args, kwargs, batch_first=batch_first, num_kv_heads=module.num_kv_heads,
            arrive=arrive, sequence_lengths=sequence_lengths, baseline=baseline if alike else None,
        )  # fmt: skip
        dims.add(y.dim())
        return y

    return rebind(module, forward)
