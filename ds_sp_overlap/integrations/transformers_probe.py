"""transformers: a layer's own forward against what the driver makes of it, on real numbers, before anything is exchanged.

What a forward does is accounted for when it is read. This is the second witness: the first call of one layer of each kind makes q,
k, v and the output twice, from the hidden states, tables and weights that are there, and goes backward once. A decoder layer makes
its hidden states twice, with a made-up attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.block_layer import BlockLayer
from ..attention.self_attention import SelfAttention
from ..exchange.channel import Channel
from .transformers_labels import UNUSED
from .transformers_modules import attention_functions

EVERY = 100  # calls, with "check": true


@dataclass
class Probed:
    """What layers of a kind were probed: the one that was, and how often it was called since; by whether it trains."""

    where: str = ""
    calls: int = 0

    def is_due(self, where: str, check: bool, lengths: Sequence[int]) -> bool:
        """Say whether to probe the layer ``where``; the same on every rank.

        lengths   local length of every rank in this call
        """
        self.where = self.where or where
        if where != self.where or not min(lengths):  # few forwards take no tokens
            return False
        self.calls += 1
        return self.calls == 1 or check and self.calls % EVERY == 0


def refuse_difference(probed: Probed, where: str, module: nn.Module, channel: Channel, compare: Callable[[], str]) -> None:
    """Raise RuntimeError, on all ranks, if a layer's own forward does something else than what was read of it. Collective.

    compare   says where they differ
    """
    try:
        seen = compare()
    except Exception as error:  # of any kind: the other ranks wait for this one
        seen = f"{type(error).__name__}: {error}"
    found = channel.gather(seen, where)
    if any(found):  # guard: the layer's own forward is the judge
        probed.calls = 0  # so that the next call is refused too
        ranks = "; ".join(f"sp rank {rank}: {what}" for rank, what in enumerate(found) if what)
        raise RuntimeError(
            f"{where}: {type(module).__name__} computes something else than what was read of its forward ({ranks}); please report "
            "it, and set sp_overlap.enabled to false until then"
        )


def difference(
    module: Any, block: SelfAttention, output: Any, forward: Callable, given: dict[str, Any], options: dict[str, Any]
) -> str:
    """Where a layer's own ``forward`` and what ``block`` makes of it differ; empty if they don't.

    output    the output projection
    given     the layer's arguments
    options   what the block's attention is called with, as far as it is read from the layer
    """
    tables = given.get("position_embeddings")
    with _unseen(module, given["hidden_states"]) as leaf:
        made: list[Tensor] = []
        theirs: dict[str, Any] = {}
        with _recording(module, made, theirs):
            out = forward(**{**given, "hidden_states": leaf})[0]
        o, *own = made
        mine = [heads.transpose(1, 2) for heads in block.plainly(leaf, tables)]
        y = output(o.flatten(2))
        own, mine = [*own, out], [*mine, y[0] if isinstance(y, tuple) else y]
        names = ["q", "k", "v", "output"]
        if leaf.requires_grad:
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


def difference_of_block(
    module: Any,
    forward: Callable,
    layer: BlockLayer,
    attention: str,
    given: dict[str, Any],
    asked: dict[str, Any],
    lengths: Sequence[int],
) -> str:
    """Say where a decoder layer's own ``forward`` and ``layer`` differ; empty if they don't.

    attention   name of its child
    given       the layer's arguments
    asked       its attention's, beside hidden states
    lengths     local length of every rank
    """
    parts = min(2, *lengths)  # of the tokens, every other one: they may not meet
    theirs: dict[str, Any] = {}

    def attend(hidden_states: Tensor, **more: Any) -> tuple[Tensor, None]:
        theirs.update(more)
        return hidden_states.flip(-1), None

    with _unseen(module, given["hidden_states"]) as leaf:
        of_attention = vars(getattr(module, attention))
        before, of_attention["forward"] = of_attention["forward"], attend
        try:
            own = forward(module, **{**given, "hidden_states": leaf})
        finally:
            of_attention["forward"] = before
        own = own[0] if isinstance(own, tuple) else own
        own, pieces = torch.cat([own[:, at::parts] for at in range(parts)], 1), []
        for h in (leaf[:, at::parts] for at in range(parts)):
            r = h + layer.norm_in(h).flip(-1)
            pieces.append(r + layer.mlp(layer.norm_mid(r)))
        mine = torch.cat(pieces, 1)
        ends = [("output", own, mine)]
        if leaf.requires_grad:
            dy = torch.randn_like(own)
            of_own, of_mine = (torch.autograd.grad(y, leaf, dy, allow_unused=True, materialize_grads=True)[0] for y in (own, mine))
            ends.append(("gradient of the hidden states", of_own, of_mine))
    names = (theirs.keys() | asked.keys()).difference(UNUSED)
    if other := [name for name in names if not _equal(theirs.get(name), asked.get(name))]:
        return f"{attention} is given another {min(other)}"
    return next((f"{name}{apart}" for name, a, b in ends if (apart := _apart(*_of_most(a, b)))), "")


def _of_most(own: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of two tensors but for the sixteenth that differs most: rounding may give a token to another expert."""
    if own.shape != mine.shape or own.is_meta:
        return own, mine
    own, mine = own.flatten(0, 1), mine.flatten(0, 1)
    most = (own - mine).detach().double().norm(dim=-1).argsort()[: len(own) - len(own) // 16]
    return own[most], mine[most]


@contextlib.contextmanager
def _unseen(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """In the body a module may run with the hidden states that are yielded, a leaf of ``x``, and nobody sees; they have a gradient
    where there may be a backward."""
    devices = [x.device] if x.device.type != "cpu" else []
    backward = not x.is_inference() and not any(map(_is_hooked, module.modules()))  # ZeRO-3 and FSDP2 count backwards
    plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # a checkpoint around it counts what is saved
    with torch.random.fork_rng(devices), torch.set_grad_enabled(backward), plain, _nothing_dropped(module):
        yield x.detach().requires_grad_(backward)


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
