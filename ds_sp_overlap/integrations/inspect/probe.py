"""A layer's own forward against what the driver makes of it, on real numbers, before anything is
exchanged.

What a forward does is accounted for when it is read. This is the second witness: the first call of
one layer of each kind makes q, k, v and the output twice, from the hidden states, tables and
weights that are there, and goes backward once. A decoder layer makes its hidden states twice, with
a made-up attention.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...chain.block_layer import BlockLayer
from ...exchange.sp_group import SPGroup

EVERY = 100  # calls, with "check": true


@dataclass
class Probed:
    """What layers of a kind were probed: the one that was, and how often it was called since; by
    whether it trains.
    """

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


def refuse_difference(
    probed: Probed, where: str, module: nn.Module, sp_group: SPGroup, compare: Callable[[], str]
) -> None:
    """Raise RuntimeError, on all ranks, if a layer's own forward does something else than what was
    read of it. Collective.

    compare   says where they differ
    """
    try:
        seen = compare()
    except Exception as error:  # of any kind: the other ranks wait for this one
        seen = f"{type(error).__name__}: {error}"
    found = sp_group.gather(seen, where)
    if any(found):  # guard: the layer's own forward is the judge
        probed.calls = 0  # so that the next call is refused too
        ranks = "; ".join(f"sp rank {rank}: {what}" for rank, what in enumerate(found) if what)
        raise RuntimeError(
            f"{where}: {type(module).__name__} computes something else than what was read of its forward ({ranks}); please report "
            "it, and set sp_overlap.enabled to false until then"
        )


def difference(
    module: nn.Module,
    x: Tensor,
    names: Sequence[str],
    own: Callable[[Tensor], tuple[Tensor, list[Tensor]]],
    mine: Callable[[Tensor, Tensor], list[Tensor]],
) -> str:
    """Say where a layer's own forward and what a block makes of it differ; empty if they don't.

    x      hidden states
    names  of what both make: q, k, v, and what the layer returns
    own    runs the layer's forward on hidden states -> an o that was made up, and what the layer
           made
    mine   hidden states and that o -> what the block makes of them
    """
    names = list(names)
    with _unseen(module, x) as leaf:
        o, theirs = own(leaf)
        ours = mine(leaf, o)
        if len(theirs) != len(ours):
            return f"it returns {len(theirs) - 3} tensors, not {len(ours) - 3}"
        names = names[: len(ours)]
        if leaf.requires_grad:
            for name, a, b in zip(names, theirs, ours):
                if a.requires_grad != b.requires_grad:
                    return f"{name} has a gradient in one of the two alone"
            learned = _learned(module)
            dys = [torch.randn_like(x) for x in theirs if x.requires_grad]
            for tensors in (theirs, ours):
                ends = [x for x in tensors if x.requires_grad]
                tensors += torch.autograd.grad(
                    ends, [leaf, *learned.values()], dys, allow_unused=True
                )
            names += ["gradient of the hidden states", *(f"gradient of {name}" for name in learned)]
    return _first_apart(zip(names, theirs, ours))


def _learned(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of a module whose gradient nobody waits for."""
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and not p._backward_hooks and p.is_leaf}


def _first_apart(ends: Iterable[tuple[str, Tensor | None, Tensor | None]]) -> str:
    """Say which of some tensors, by name, differs first in two ways of making them; empty if none
    does.
    """
    return next((f"{name}{apart}" for name, a, b in ends if (apart := _apart(a, b))), "")


def difference_of_block(
    module: Any,
    forward: Callable,
    layer: BlockLayer,
    attention: str,
    given: dict[str, Any],
    asked: dict[str, Any],
    lengths: Sequence[int],
    token_dim: int = 1,
    unused: Collection[str] = (),
) -> str:
    """Say where a decoder layer's own ``forward`` and ``layer`` differ; empty if they don't.

    attention   name of its child
    given       the layer's arguments
    asked       its attention's, beside hidden states
    lengths     local length of every rank
    token_dim   of hidden states
    unused      arguments of its attention that change nothing
    """
    parts = min(2, *lengths)  # of the tokens, every other one: they may not meet
    theirs: dict[str, Any] = {}
    child = getattr(module, attention)
    arguments = list(inspect.signature(type(child).forward).parameters)[2:]

    def attend(hidden_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, None]:
        theirs.update(zip(arguments, args), **more)
        return hidden_states.flip(-1), None

    def in_parts(x: Tensor) -> list[Tensor]:
        x = x.movedim(token_dim, 0)
        return [x[at::parts].movedim(0, token_dim) for at in range(parts)]

    with _unseen(module, given["hidden_states"]) as leaf:
        before, vars(child)["forward"] = vars(child)["forward"], attend
        try:
            own = forward(module, **{**given, "hidden_states": leaf})
        finally:
            vars(child)["forward"] = before
        own = own[0] if isinstance(own, tuple) else own
        own, pieces = torch.cat(in_parts(own), token_dim), []
        for h in in_parts(leaf):
            r = h + layer.norm_in(h).flip(-1)
            pieces.append(_plus(r, layer.mlp(layer.norm_mid(r))))
        mine = torch.cat(pieces, token_dim)
        ends = [("output", own, mine)]
        if leaf.requires_grad:
            dy, alone = torch.randn_like(own), dict(allow_unused=True, materialize_grads=True)
            of_own, of_mine = (torch.autograd.grad(y, leaf, dy, **alone)[0] for y in (own, mine))
            ends.append(("gradient of the hidden states", of_own, of_mine))
    names = (theirs.keys() | asked.keys()).difference(unused)
    if other := [name for name in names if not equal(theirs.get(name), asked.get(name))]:
        return f"{attention} is given another {min(other)}"
    return _first_apart((name, *_of_most(a, b)) for name, a, b in ends)


def _plus(residual: Tensor, output: Any) -> Tensor:
    """``residual`` and the output of an MLP, which may leave its bias to its caller."""
    output, bias = output if isinstance(output, tuple) else (output, None)
    return residual + output if bias is None else residual + (output + bias)


def _of_most(own: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of two tensors but for the sixteenth that differs most: rounding may give a token
    to another expert.
    """
    if own.shape != mine.shape or own.is_meta:
        return own, mine
    own, mine = own.flatten(0, 1), mine.flatten(0, 1)
    most = (own - mine).detach().double().norm(dim=-1).argsort()[: len(own) - len(own) // 16]
    return own[most], mine[most]


@contextlib.contextmanager
def _unseen(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """In the body a module may run with the hidden states that are yielded, a leaf of ``x``, and
    nobody sees; they have a gradient where there may be a backward.
    """
    devices = [x.device] if x.device.type != "cpu" else []
    backward = not x.is_inference() and not any(
        map(_is_hooked, module.modules())
    )  # ZeRO-3 and FSDP2 count backwards
    plain = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x
    )  # a checkpoint around it counts what is saved
    with (
        torch.random.fork_rng(devices),
        torch.set_grad_enabled(backward),
        plain,
        _nothing_dropped(module),
    ):
        yield x.detach().requires_grad_(backward)


@contextlib.contextmanager
def _nothing_dropped(module: nn.Module) -> Iterator[None]:
    """In the body, dropouts of adapters keep every element: they would draw other numbers in each
    of the two.
    """
    drops = [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training
    ]
    for part in drops:
        part.training = False
    try:
        yield
    finally:
        for part in drops:
            part.training = True


def _is_hooked(module: nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def equal(x: Any, y: Any) -> bool:
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
    rounding = (
        4 * torch.finfo(own.dtype).eps if half else 256 * torch.finfo(torch.float32).eps
    )  # norms of fp64 may compute in fp32
    return "" if apart <= rounding else f" differs by {apart:.1e}"  # guard: more than rounding
