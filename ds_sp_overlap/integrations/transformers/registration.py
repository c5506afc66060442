"""Lets stock Ulysses be registered for head counts that only this package can split.

Accelerate, Trainer and TRL call ``UlyssesSPAttentionHF.register_with_transformers``, before there
is a model to overlap. The call raises an error for head counts that the sp size does not divide.
`install` makes the registration return its mpu anyway. If a layer is not overlapped, its first
attention then raises DeepSpeed's error.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

# For each instance of stock Ulysses that can't exchange, DeepSpeed's error message.
_refusals = weakref.WeakKeyDictionary[nn.Module, str]()


def refusal_of(stock: Any) -> str | None:
    """Return DeepSpeed's reason why an instance of stock Ulysses can't exchange; None if it can."""
    return _refusals.get(stock)


def _refuse(stock: Any, module: nn.Module) -> None:
    """Raise ValueError if ``stock`` should exchange for ``module``, but can't.

    Called before each attention of stock Ulysses.
    """
    is_off = stock.disable_in_eval and not module.training
    if stock in _refusals and not is_off:  # guard: no exchange of heads that don't divide
        raise ValueError(
            f"sp_overlap: {_refusals[stock]}, says DeepSpeed's own Ulysses; the overlap takes any "
            'number of heads: add "sp_overlap": {} to the DeepSpeed config, or call '
            "ds_sp_overlap.enable(model)"
        )


def install() -> None:
    """Defer DeepSpeed's error for head counts from the registration to the first attention.

    ``__init__`` and ``forward`` of ``UlyssesSPAttentionHF`` are replaced. Called once, by
    `integrations.deepspeed.initialize.install`.
    """
    try:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    except ImportError:  # einops is missing, so nobody can register stock Ulysses
        return
    original_init, original_forward = UlyssesSPAttentionHF.__init__, UlyssesSPAttentionHF.forward
    signature = inspect.signature(original_init)

    @functools.wraps(original_init)
    def __init__(stock: Any, *args: Any, **kwargs: Any) -> None:
        try:
            return original_init(stock, *args, **kwargs)
        except ValueError as error:
            bound = signature.bind(stock, *args, **kwargs)
            arguments = bound.arguments
            size = dist.get_world_size(arguments["process_group"])
            heads, kv_heads = arguments["attn_head_count"], arguments["kv_head_count"]
            reason = str(error)
        # Run the constructor again, with head counts that it supports; any other error is raised
        # again. Then set the true counts. Some attributes stay wrong, but only stock's own exchange
        # needs these.
        arguments["attn_head_count"] = arguments["kv_head_count"] = size
        original_init(*bound.args, **bound.kwargs)
        stock.attn_head_count, stock.global_kv_head_count = heads, kv_heads
        _refusals[stock] = reason

    @functools.wraps(original_forward)
    def forward(stock: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(stock, module)
        return original_forward(stock, module, *args, **kwargs)

    UlyssesSPAttentionHF.__init__, UlyssesSPAttentionHF.forward = __init__, forward
