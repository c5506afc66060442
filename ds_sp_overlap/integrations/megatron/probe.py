"""Megatron-DeepSpeed: compares an attention layer's own forward with its driver (`probe`)."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from ...attention.self_attention import SelfAttention
from ..inspect import probe


def is_batch_first(module: Any) -> bool:
    """Return whether a layer's local attention takes [b, s, h, d]: flash attention, not Triton's."""
    return module.use_flash_attn and not module.use_flash_attn_triton


def difference(module: Any, block: SelfAttention, x: Tensor, others: tuple) -> str:
    """Compare the forward of a layer's class with ``block``.

    Nothing is exchanged.

    Args:
        module: The layer, with as many KV heads as query heads.
        block: What drives it.
        x: [s/P, b, m]. The hidden states.
        others: The layer's arguments behind them; RoPE's tables are the last.

    Returns:
        The first difference, in words; empty if there is none.
    """
    *rest, tables = others
    # HEAD passes a list, which its own forward rejects.
    others = (*rest, tuple(tables) if isinstance(tables, list) else tables)

    def run_own(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the made-up o, [s/P, b, h d]; q, k, v, and what the layer returned."""
        recorded: list[Tensor] = []
        # The call of ``dist_attn`` looks up this attribute, which may be there already.
        attributes = vars(module.dist_attn)
        before = attributes.get("forward")
        attributes["forward"] = functools.partial(_made_up, module, recorded)
        try:
            output = type(module).forward(module, x, *others)
        finally:
            del attributes["forward"]
            if before is not None:
                attributes["forward"] = before
        if is_batch_first(module):
            recorded = [heads.transpose(0, 1) for heads in recorded]
        o, *heads = recorded
        return o.flatten(2).contiguous(), [*heads, *_without_none(output)]

    def run_driven(x: Tensor, o: Tensor) -> list[Tensor]:
        """Return q, k, v of the block, and the output projection of ``o``."""
        # Before rotation, which the layer's own forward leaves to ``dist_attn``.
        return [*block.project_locally(x, ()), *_without_none(module.dense(o))]

    names = "q", "k", "v", "output", "bias"
    return probe.difference(module, x, names, run_own=run_own, run_driven=run_driven)


def _without_none(output: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Return the output of a layer, and the bias if the layer leaves one to its caller."""
    return [x for x in output if x is not None]


def _made_up(
    module: Any, recorded: list[Tensor], q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Return a made-up o in place of ``dist_attn``; append o, q, k and v to ``recorded``.

    All are in the layout in which the layer calls ``dist_attn``.
    """
    # Pull request 415 projects q, k and v on another stream, which may not be done with them.
    sys.modules["deepspeed.accelerator"].get_accelerator().synchronize()
    o = torch.randn_like(q, memory_format=torch.contiguous_format)
    recorded.extend((o, q, k, v))
    return o if is_batch_first(module) else o.flatten(2)
