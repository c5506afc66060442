"""Provides the drop-in replacement of DeepSpeed's ``DistributedAttention``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..config import SpOverlapConfig
from ..exchange.sp_group import SPGroup
from ..exchange.transport import Transport
from .arguments import LocalAttention
from .declared import config_for
from .layer import LayerRuntime
from .projected import ProjectedAttention


class DistributedAttention(nn.Module):
    """Replaces ``deepspeed.sequence.layer.DistributedAttention``, with overlap.

    Any number of heads works. Where there are fewer query heads than ranks, ranks share heads
    (Note [Shares] in `shares`); the local attention must then accept ``queries=``. A layer that was
    made without ``config`` and ``transport`` takes the model's ``sp_overlap`` section when `enable`
    is called.

    Args:
        local_attention: Attention over the global sequence with this rank's heads. Where ranks
            share query heads, each call is for one range of this rank's queries, and also gets
            ``queries=(a, b)``: q then holds the tokens a to b of the sequence, and k and v hold all
            tokens. If attention is causal, token t of the sequence attends to keys up to t.
        sequence_process_group: The sp group; None for all ranks, as in DeepSpeed's class.
        scatter_idx: As in DeepSpeed's class; must be 2, the dimension of the heads.
        gather_idx: As in DeepSpeed's class; 0 or 1, the dimension of the sequence.
        sp_stream: The stream for the transfers; None for our own stream, which all layers share.
        num_kv_heads: KV heads before the exchange; None to read the number from the key.
        config: An ``sp_overlap`` section.
        transport: The mover of bytes; None for the transport that ``config`` names.
        name: Name of the layer, for errors and logs.
        heads_alike: Whether the local attention treats all heads alike on all ranks; values for
            each head in a `PerHead` don't matter. If neither this argument nor
            `attention_function` declares that heads are alike, the layer runs in one head group.

    Raises:
        ValueError: for an unsupported ``scatter_idx``, ``gather_idx`` or ``config``.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        config: SpOverlapConfig | dict | None = None,
        transport: Transport | None = None,
        name: str = "attention",
        heads_alike: bool = False,
    ):
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"{name}: scatter_idx must be 2 (heads) and gather_idx 0 or 1 (sequence), got "
                f"{scatter_idx} and {gather_idx}; the exchange back to local sequences is part of "
                "this module"
            )
        self.local_attn, self.num_kv_heads = local_attention, num_kv_heads
        self.scatter_idx, self.gather_idx, self.sp_stream = scatter_idx, gather_idx, sp_stream
        self.heads_alike = heads_alike
        # Whether `enable` leaves the layer's config alone, instead of setting the model's.
        self.has_own_config = config is not None or transport is not None
        parsed = SpOverlapConfig.parse(config or {}).of_own_layer()
        group = sequence_process_group or dist.group.WORLD
        sp_group = SPGroup(group, transport or parsed.transport, sp_stream, **parsed.of_sp_group)
        layer = LayerRuntime(sp_group, config_for(local_attention, parsed, heads_alike), name)
        layer.tells = True
        self._attend = ProjectedAttention(layer)

    @property
    def spg(self) -> Any:
        """Return the sp group."""
        return self._attend.layer.sp_group.group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        sequence_lengths: list[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the global sequence.

        Collective.

        Args:
            query: [b, s/P, h, d] for ``batch_dim_idx`` 0, [s/P, b, h, d] for 1.
            key: As ``query``, with h_kv heads.
            value: As ``key``.
            batch_dim_idx: The dimension of the batch.
            rotary_pos_emb: (cos, sin), each [s, 1, 1, d_rot], d_rot <= d; applied to q and k after
                their exchange. None without RoPE.
            *args: More arguments for the local attention, which is called once per head group. A
                tensor among them must have the same shape on every rank, except for a dimension of
                heads.
            sequence_lengths: Local sequence length of every rank; None if all are the same.
            **kwargs: More keyword arguments for the local attention.

        Returns:
            o in the layout of ``query``; 3-D if the local attention returns 3-D.

        Raises:
            ValueError: for tensors or lengths that don't fit together. In the layer's first call,
                all ranks raise.
        """
        return self._attend.of_module(
            self,
            (query, key, value),
            batch_dim_idx,
            rotary_pos_emb=rotary_pos_emb,
            local=LocalAttention(self.local_attn, args, kwargs),
            sequence_lengths=sequence_lengths,
        )
