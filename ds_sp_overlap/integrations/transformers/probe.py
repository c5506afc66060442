"""transformers: compares an attention layer's own forward with its driver (`inspect.probe`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...attention.self_attention import SelfAttention
from ..inspect import probe
from ..inspect.library import attention_functions

# The most tokens that are compared: of all tokens of a long sequence, the comparison would hold more
# than a training step does.
TOKENS = 512


def difference(
    module: Any,
    block: SelfAttention,
    output: Any,
    forward: Callable,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> str:
    """Compare a layer's own forward with ``block``, on the first `TOKENS` of this rank's tokens.

    All tokens are compared where the arguments can't be cut, or the first tokens differ. `Driven`
    compares in the first call of one layer of each kind, before anything is exchanged.

    Args:
        module: The layer.
        block: What drives it.
        output: Its output projection.
        forward: Its own forward.
        arguments: The layer's arguments by name.
        options: The keywords of the block's attention that were read from the layer.

    Returns:
        The first difference, in words; empty if there is none.
    """
    compare = functools.partial(_difference, module, block, output, forward, options)
    size = arguments["hidden_states"].shape[1]
    if size > TOKENS:
        first = {name: _cut(value, size) for name, value in arguments.items()}
        # Of any kind: an argument that was cut, and should not be, says nothing of the layer.
        with contextlib.suppress(Exception):
            if not compare(first):
                return ""
    return compare(arguments)


def _cut(value: Any, size: int) -> Any:
    """Return the first tokens of an argument; the argument itself if no dim has ``size`` tokens."""
    if isinstance(value, tuple):
        return tuple(_cut(part, size) for part in value)
    if isinstance(value, Tensor) and size in value.shape:
        return value.narrow(value.shape.index(size), 0, TOKENS)
    return value


def _difference(
    module: Any,
    block: SelfAttention,
    output: Any,
    forward: Callable,
    options: dict[str, Any],
    arguments: dict[str, Any],
) -> str:
    """Compare a layer's own forward with ``block``, on the tokens of the arguments."""
    tables = arguments.get("position_embeddings")
    own_options: dict[str, Any] = {}

    def run_own(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the made-up o; and q, k, v and the output of the layer's own forward."""
        recorded: list[Tensor] = []
        functions, name = attention_functions(), module.config._attn_implementation
        before = functions[name]
        functions[name] = functools.partial(_made_up, recorded, own_options)
        try:
            y = forward(**{**arguments, "hidden_states": x})[0]
        finally:
            functions[name] = before
        o, *heads = recorded
        return o, [*heads, y]

    def run_driven(x: Tensor, o: Tensor) -> list[Tensor]:
        """Return q, k, v and the output that the block makes of the same o."""
        # An attention function is given [b, h, s, d].
        heads = [heads.transpose(1, 2) for heads in block.project_locally(x, tables)]
        y = output(o.flatten(2))
        return [*heads, y[0] if isinstance(y, tuple) else y]

    names = "q", "k", "v", "output"
    hidden = arguments["hidden_states"]
    text = probe.difference(module, hidden, names, run_own=run_own, run_driven=run_driven)
    # The layer must give its attention all that was read, with these values.
    for name, value in options.items():
        if name not in own_options or not probe.equal(value, own_options[name]):
            return f"attention's {name} is {own_options.get(name)}, not {value}"
    return text


def _made_up(
    recorded: list[Tensor],
    options: dict[str, Any],
    _: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return a made-up o [b, s, h, d] in place of attention.

    Appends o, q, k and v to ``recorded``, and adds the keywords of attention to ``options``.
    """
    o = torch.randn_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    recorded.extend((o, q, k, v))
    options.update(more)
    return o, None
