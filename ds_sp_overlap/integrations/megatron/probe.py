"""Megatron-DeepSpeed: an attention layer's own forward against what the driver makes of it
(`probe`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ...attention.self_attention import SelfAttention
from ..inspect import probe


def difference(module: Any, block: SelfAttention, given: dict[str, Any]) -> str:
    """Where the forward of a layer's class and what ``block`` makes of it differ; empty if they
    don't.

    q, k and v are compared as they are before rotation, which is done behind the exchange; KV heads
    as often as they are repeated.

    given   the layer's arguments
    """
    batch_first = module.use_flash_attn and not module.use_flash_attn_triton
    rotary, arguments = (
        given.get("rotary_pos_emb"),
        inspect.signature(type(module).forward).parameters,
    )
    if isinstance(rotary, list):  # which HEAD gives, and can't take
        given = {**given, "rotary_pos_emb": tuple(rotary)}
    given = {argument: x for argument, x in given.items() if argument in arguments}

    def own(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        made: list[Tensor] = []
        with _recording(module, made, given):
            output = type(module).forward(module, **{**given, "hidden_states": x})
        o, *heads = made
        if batch_first:
            heads = [x.transpose(0, 1) for x in heads]
            o = o.transpose(0, 1)
        o = o.flatten(2) if o.dim() == 4 else o
        return o.contiguous(), [*heads, *_told(output)]

    def mine(x: Tensor, o: Tensor) -> list[Tensor]:
        heads = block.plainly(x, ())
        repeats = [block.heads // kind.shape[2] for kind in heads]
        heads = [x.repeat_interleave(n, 2) if n > 1 else x for x, n in zip(heads, repeats)]
        return [*heads, *_told(module.dense(o))]

    names = "q", "k", "v", "output", "bias"
    return probe.difference(module, given["hidden_states"], names, own, mine)


def _told(output: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """What a layer returns: its output, and a bias if it leaves one."""
    return [x for x in output if x is not None]


@contextlib.contextmanager
def _recording(module: Any, made: list[Tensor], given: dict[str, Any]) -> Iterator[None]:
    """In the body ``dist_attn`` returns a made-up o; ``made`` is that o, and q, k and v."""
    of_exchange = vars(module.dist_attn)

    def recorder(q: Tensor, k: Tensor, v: Tensor, dim: Any, *args: Any, **kwargs: Any) -> Tensor:
        told = [x for x in (*args, *kwargs.values()) if x is not None]
        expected = [given.get("rotary_pos_emb"), given.get("attention_mask")]
        if not all(any(x is each for each in expected) for x in told):
            raise ValueError("its forward gives dist_attn what is not known here")
        get_accelerator().synchronize()  # pull request 415 projects on another stream
        made.extend((torch.randn_like(q, memory_format=torch.contiguous_format), q, k, v))
        flat = not module.use_flash_attn or module.use_flash_attn_triton
        return made[0].flatten(2) if flat else made[0]

    before = of_exchange.get("forward")
    of_exchange["forward"] = recorder
    try:
        yield
    finally:
        del of_exchange["forward"]
        if before is not None:
            of_exchange["forward"] = before
