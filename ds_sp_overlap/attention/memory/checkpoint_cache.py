"""What is kept of attention over an activation checkpoint, so that it is not run again before its
backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...profiling.steps import in_backward
from .offload import Away

_current: ContextVar[CheckpointPass | None] = ContextVar("kept", default=None)


class _Entry(NamedTuple):
    """
    where    the layer that was called; empty for a checkpoint inside this one
    tensors  each where it is
    rest     what is no tensor
    """

    where: str
    tensors: list[Tensor | Away]
    rest: Any


class CheckpointCache:
    """What is kept for one checkpoint, in the order of calls: of layers, and of checkpoints inside
    it.

    before   the checkpoint whose tensors went away before, and whose backward comes after
    """

    _last: Callable[[], CheckpointCache | None] = staticmethod(
        lambda: None
    )  # whose tensors went away

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.before: Callable[[], CheckpointCache | None] = lambda: None

    def away(self) -> list[Away]:
        return [x for entry in self.entries for x in entry.tensors if isinstance(x, Away)]

    def follow(self) -> None:
        """Be the last whose tensors go away; what went before gives its memory back."""
        if (last := CheckpointCache._last()) is not None:
            for x in last.away():
                x.leave()
        if last is not self:
            self.before, CheckpointCache._last = CheckpointCache._last, weakref.ref(self)

    def come_back(self) -> None:
        """Bring its tensors, and those that will be asked for next."""
        for kept in (self, self.before()):
            for x in kept.away() if kept else ():
                x.bring()


class CheckpointPass:
    """One walk through a checkpoint, the first or ``again``: as often as backward comes by, which
    may be in the middle of the first.
    """

    def __init__(self, kept: CheckpointCache, again: bool):
        self.kept, self.again, self.at = kept, again, 0

    def put(
        self,
        where: str,
        tensors: Any,
        rest: Any,
        offload: bool = False,
        shared: list[Tensor] | None = None,
    ) -> None:
        """Keep ``tensors`` (a tree) and what else there is to know; in host memory unless they are
        part of ``shared``.
        """
        flat, tree = tree_flatten(tensors)
        if offload:
            self.kept.follow()
            stay = {x.untyped_storage().data_ptr() for x in shared or ()}
            flat = [x if x.untyped_storage().data_ptr() in stay else Away(x) for x in flat]
        self.kept.entries.append(_Entry(where, flat, (tree, rest)))

    def take(self, where: str) -> tuple[Any, Any]:
        """The next that was kept, as it was put; here again if it was away.

        Raises RuntimeError where the checkpoint is not computed as it was.
        """
        entries = self.kept.entries
        before = entries[self.at].where if self.at < len(entries) else "nothing more"
        if before != where:
            raise RuntimeError(
                f"{where or 'a checkpoint inside another'}: called when its checkpoint is computed again, where there was {before} in "
                'forward; let it do the same both times, or set sp_overlap.checkpointing to "recompute"'
            )
        if self.at == 0:
            self.kept.come_back()
        _, flat, (tree, rest) = entries[self.at]
        self.at += 1
        return tree_unflatten([x.get() if isinstance(x, Away) else x for x in flat], tree), rest


class _During:
    """The body is the forward of a checkpoint, the first time or again; entered as often as
    backward goes through it.
    """

    def __init__(self, kept: CheckpointCache, again: bool):
        self.kept, self.again = kept, again
        self.before: list[CheckpointPass | None] = []

    def __enter__(self) -> None:
        self.before.append(_current.get())
        _current.set(CheckpointPass(self.kept, self.again))

    def __exit__(self, *_: Any) -> None:
        _current.set(self.before.pop())


def keep_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``: layers
    with ``"checkpointing": "keep"`` or ``"offload"`` keep their o and log-sum-exp over this
    checkpoint.
    """
    around = _current.get()
    if around is not None and around.again:  # a checkpoint in another one that is computed again
        _, kept = around.take("")
        return _During(kept, True), _During(kept, True)
    kept = CheckpointCache()
    if around is not None:
        around.put("", [], kept)
    return _During(kept, False), _During(kept, True)


def current(where: str) -> CheckpointPass | None:
    """The checkpoint around this call, where something may be kept; None where there is none.

    Raises RuntimeError in a checkpoint, computed again, that was not given `keep_attention`.
    """
    checkpoint = _current.get()
    if checkpoint is None and torch.is_grad_enabled() and in_backward():
        raise RuntimeError(
            f"{where}: sp_overlap.checkpointing is to keep attention, but the checkpoint around this layer has nowhere to keep it; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=ds_sp_overlap.keep_attention) (transformers: "
            "gradient_checkpointing_enable({\"use_reentrant\": False}); DeepSpeed's and Megatron's checkpointing has none, "
            'but Megatron\'s layers keep it with sp_overlap.scope "block"), or set sp_overlap.checkpointing to "recompute"'
        )
    return checkpoint
