"""Megatron-DeepSpeed: compares an attention layer's own forward with its driver (`probe`)."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...attention.self_attention import SelfAttention
from ..inspect import probe


def difference(module: Any, block: SelfAttention, arguments: dict[str, Any]) -> str:
    """Compare the forward of a layer's class with ``block``.

    Nothing is exchanged.

    Args:
        module: The layer.
        block: What drives it.
        arguments: The layer's arguments by name; hidden states are [s/P, b, m].

    Returns:
        The first difference, in words; empty if there is none.
    """
    batch_first = module.use_flash_attn and not module.use_flash_attn_triton
    parameters = inspect.signature(type(module).forward).parameters
    arguments = {name: x for name, x in arguments.items() if name in parameters}
    # HEAD passes a list, which its own forward rejects.
    if isinstance(arguments.get("rotary_pos_emb"), list):
        arguments["rotary_pos_emb"] = tuple(arguments["rotary_pos_emb"])

    def run_own(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the made-up o, [s/P, b, h d]; q, k, v, and what the layer returned."""
        recorded: list[Tensor] = []
        with _recording(module, recorded, arguments):
            output = type(module).forward(module, **{**arguments, "hidden_states": x})
        # Flash attention is given [b, s/P, h, d].
        if batch_first:
            recorded = [heads.transpose(0, 1) for heads in recorded]
        o, *heads = recorded
        o = o.flatten(2) if o.dim() == 4 else o
        return o.contiguous(), [*heads, *_without_none(output)]

    def run_driven(x: Tensor, o: Tensor) -> list[Tensor]:
        """Return q, k, v of the block without rotation, and the output projection of ``o``."""
        results = []
        # Before rotation, which the layer's own forward leaves to ``dist_attn``.
        for heads in block.project_locally(x, ()):
            # The layer's own forward repeats KV heads for the query heads.
            repeats = block.heads // heads.shape[2]
            results.append(heads.repeat_interleave(repeats, 2) if repeats > 1 else heads)
        return [*results, *_without_none(module.dense(o))]

    names = "q", "k", "v", "output", "bias"
    hidden = arguments["hidden_states"]
    return probe.difference(module, hidden, names, run_own=run_own, run_driven=run_driven)


def _without_none(output: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Return the output of a layer, and the bias if the layer leaves one to its caller."""
    return [x for x in output if x is not None]


@contextlib.contextmanager
def _recording(module: Any, recorded: list[Tensor], arguments: dict[str, Any]) -> Iterator[None]:
    """Let ``dist_attn`` return a made-up o in the body, and append o, q, k and v to ``recorded``.

    Args:
        module: The layer.
        recorded: An empty list. Receives that o, then q, k and v, all in the layout in which the
            layer calls ``dist_attn``: [b, s/P, h, d] for flash attention, else [s/P, b, h, d].
        arguments: The layer's arguments by name; ``dist_attn`` may be given the tables and the mask
            among them.
    """
    attributes = vars(module.dist_attn)

    def recorder(q: Tensor, k: Tensor, v: Tensor, dim: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for the forward of ``dist_attn``; raise ValueError for arguments of others."""
        expected = [arguments.get("rotary_pos_emb"), arguments.get("attention_mask")]
        for x in (*args, *kwargs.values()):
            if x is not None and not any(x is argument for argument in expected):
                raise ValueError("its forward gives dist_attn what is not known here")
        # Pull request 415 projects q, k and v on another stream, which may not be done with them.
        sys.modules["deepspeed.accelerator"].get_accelerator().synchronize()
        o = torch.randn_like(q, memory_format=torch.contiguous_format)
        recorded.extend((o, q, k, v))
        flat = not module.use_flash_attn or module.use_flash_attn_triton
        return o.flatten(2) if flat else o

    # The module's call looks up this attribute, and ``dist_attn`` may have been given one before.
    forward_before = attributes.get("forward")
    attributes["forward"] = recorder
    try:
        yield
    finally:
        del attributes["forward"]
        if forward_before is not None:
            attributes["forward"] = forward_before
