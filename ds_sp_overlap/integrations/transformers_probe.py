"""transformers: a layer's own forward against what the driver makes of it, on real numbers, before anything is exchanged.

What a forward does is accounted for when it is read. This is the second witness: the first call of one layer of each kind makes q,
k, v and the output twice, from the hidden states, tables and weights that are there, and goes backward once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.self_attention import SelfAttention
from .transformers_modules import attention_functions

EVERY = 100  # calls, with "check": true


@dataclass
class Probed:
    """What layers of a kind were probed: the one that was, and how often it was called since; by whether it trains."""

    where: str = ""
    calls: int = 0

    def is_due(self, where: str, check: bool) -> bool:
        """Whether to probe the layer ``where``, which is called now. The same on every rank."""
        self.where = self.where or where
        if where != self.where:
            return False
        self.calls += 1
        return self.calls == 1 or check and self.calls % EVERY == 0


def difference(
    module: Any, block: SelfAttention, output: Any, forward: Callable, given: dict[str, Any], options: dict[str, Any]
) -> str:
    """Where a layer's own ``forward`` and what ``block`` makes of it differ; empty if they don't.

    output    the output projection
    given     the layer's arguments
    options   what the block's attention is called with, as far as it is read from the layer
    """
    x, tables = given["hidden_states"], given.get("position_embeddings")
    if not x.numel():  # of no tokens, which few forwards take
        return ""
    devices = [x.device] if x.device.type != "cpu" else []
    backward = not x.is_inference() and not any(map(_is_hooked, module.modules()))  # ZeRO-3 and FSDP2 count backwards
    plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # a checkpoint around it counts what is saved
    with torch.random.fork_rng(devices), torch.set_grad_enabled(backward), plain, _nothing_dropped(module):
        leaf = x.detach().requires_grad_(backward)
        made: list[Tensor] = []
        theirs: dict[str, Any] = {}
        with _recording(module, made, theirs):
            out = forward(**{**given, "hidden_states": leaf})[0]
        o, *own = made
        mine = [heads.transpose(1, 2) for heads in block.plainly(leaf, tables)]
        y = output(o.flatten(2))
        own, mine = [*own, out], [*mine, y[0] if isinstance(y, tuple) else y]
        names = ["q", "k", "v", "output"]
        if backward:
            learned = {name: p for name, p in module.named_parameters() if p.requires_grad and not p._backward_hooks and p.is_leaf}
            for name, a, b in zip(names, own, mine):
                if a.requires_grad != b.requires_grad:
                    return f"{name} has a gradient in one of the two alone"
            dys = [torch.randn_like(x) for x in own if x.requires_grad]
            for tensors in (own, mine):
                ends = [x for x in tensors if x.requires_grad]
                tensors += torch.autograd.grad(ends, [leaf, *learned.values()], dys, allow_unused=True)
            names += ["gradient of the hidden states", *(f"gradient of {name}" for name in learned)]
    if other := [name for name in options if name not in theirs or not _equal(options[name], theirs[name])]:
        return f"attention's {other[0]} is {theirs.get(other[0])}, not {options[other[0]]}"
    return next((f"{name}{apart}" for name, a, b in zip(names, own, mine) if (apart := _apart(a, b))), "")


@contextlib.contextmanager
def _nothing_dropped(module: nn.Module) -> Iterator[None]:
    """In the body, dropouts of adapters keep every element: they would draw other numbers in each of the two."""
    drops = [part for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd) and part.training]
    for part in drops:
        part.training = False
    try:
        yield
    finally:
        for part in drops:
            part.training = True


def _is_hooked(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _equal(x: Any, y: Any) -> bool:
    return x is y or not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y


def _apart(own: Tensor | None, mine: Tensor | None) -> str:
    """How much two tensors differ, if it is more than rounding."""
    if own is None or mine is None:
        missing = own is not None and bool(own.any()) or mine is not None and bool(mine.any())
        return " is there for one of the two alone" if missing else ""
    if own.shape != mine.shape or own.dtype != mine.dtype:
        return f" is {list(own.shape)} {own.dtype}, not {list(mine.shape)} {mine.dtype}"
    if not own.numel() or own.is_meta:
        return ""
    error, size = (x.detach().double().norm() for x in (own - mine, own))
    apart = float(error / size) if size else float(error)
    half = own.dtype in (torch.bfloat16, torch.float16)
    rounding = 4 * torch.finfo(own.dtype).eps if half else 256 * torch.finfo(torch.float32).eps  # norms of fp64 may compute in fp32
    return "" if apart <= rounding else f" differs by {apart:.1e}"  # guard: more than rounding


@contextlib.contextmanager
def _recording(module: Any, made: list[Tensor], options: dict[str, Any]) -> Iterator[None]:
    """In the body, attention returns a made-up o; ``made`` is that o, [b, s, h, d], and q, k and v, [b, h, s, d]."""
    functions, name = attention_functions(), module.config._attn_implementation
    before = functions[name]

    def recorder(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **more: Any) -> tuple[Tensor, None]:
        o = torch.randn_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        made.extend((o, q, k, v))
        options.update(more)
        return o, None

    functions[name] = recorder
    try:
        yield
    finally:
        functions[name] = before
