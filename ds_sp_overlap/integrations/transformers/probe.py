"""transformers: an attention layer's own forward against what the driver makes of it (`probe`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...attention.self_attention import SelfAttention
from ..inspect import probe
from ..inspect.library import attention_functions


def difference(
    module: Any,
    block: SelfAttention,
    output: Any,
    forward: Callable,
    given: dict[str, Any],
    options: dict[str, Any],
) -> str:
    """Where a layer's own ``forward`` and what ``block`` makes of it differ; empty if they don't.

    output    the output projection
    given     the layer's arguments
    options   what the block's attention is called with, as far as it is read from the layer
    """
    tables = given.get("position_embeddings")
    theirs: dict[str, Any] = {}

    def own(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        made: list[Tensor] = []
        with _recording(module, made, theirs):
            out = forward(**{**given, "hidden_states": x})[0]
        return made[0], [*made[1:], out]

    def mine(x: Tensor, o: Tensor) -> list[Tensor]:
        heads = [heads.transpose(1, 2) for heads in block.project_locally(x, tables)]
        y = output(o.flatten(2))
        return [*heads, y[0] if isinstance(y, tuple) else y]

    found = probe.difference(module, given["hidden_states"], ("q", "k", "v", "output"), own, mine)
    if other := [
        name
        for name in options
        if name not in theirs or not probe.equal(options[name], theirs[name])
    ]:
        return f"attention's {other[0]} is {theirs.get(other[0])}, not {options[other[0]]}"
    return found


@contextlib.contextmanager
def _recording(module: Any, made: list[Tensor], options: dict[str, Any]) -> Iterator[None]:
    """In the body, attention returns a made-up o; ``made`` is that o, [b, s, h, d], and q, k and v,
    [b, h, s, d].
    """
    functions, name = attention_functions(), module.config._attn_implementation
    before = functions[name]

    def recorder(
        _: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **more: Any
    ) -> tuple[Tensor, None]:
        o = torch.randn_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        made.extend((o, q, k, v))
        options.update(more)
        return o, None

    functions[name] = recorder
    try:
        yield
    finally:
        functions[name] = before
