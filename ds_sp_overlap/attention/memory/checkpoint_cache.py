"""Saves the results of attention over an activation checkpoint, so that recompute skips attention.

    forward      save o and the log-sum-exp of each layer in the checkpoint's `CheckpointCache`
    recompute    load o and the log-sum-exp, layer after layer in the same order
    backward     the same as without a checkpoint

Note [Order of offloaded checkpoints]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Backward reaches checkpoints in the reverse order of forward. So an offloaded checkpoint links to
the previous offloaded checkpoint, which backward reaches next. The recompute of a checkpoint
prefetches the checkpoint's tensors, most of which are on the device already, and the tensors of the
linked checkpoint.

The device memory of a layer's tensors is freed when the next layer offloads, in the same checkpoint
or the next. By then the copy to the host has overlapped with a whole layer. The tensors of the last
layer stay in device memory, so backward, which begins with this layer, need not wait for a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...profiling.steps import in_backward
from ...warn import warn_once
from .offload import OffloadedTensor
from .saved_views import storage_of

_current: ContextVar[CheckpointPass | None] = ContextVar("checkpoint_pass", default=None)


class CheckpointCache:
    """Holds the tensors that layers in one checkpoint save, in the order of the layers' calls.

    Args:
        offloads: True: every layer in the checkpoint offloads; for a checkpoint that offloads its
            own inputs. False: the config of each layer decides.

    Attributes:
        entries: For each call of a layer, the layer's name and the tree that the call saved. In the
            tree, an `OffloadedTensor` stands for a tensor. For each nested checkpoint, an empty
            name and the nested checkpoint's `CheckpointCache`.
        previous: Returns the checkpoint that was offloaded before this one, or None; see
            Note [Order of offloaded checkpoints].
    """

    previous: Callable[[], CheckpointCache | None] = staticmethod(lambda: None)
    # Returns the checkpoint that was offloaded most recently, or None.
    _most_recent = previous

    def __init__(self, offloads: bool = False) -> None:
        self.offloads = offloads
        self.entries: list[tuple[str, Any]] = []

    def offloaded(self) -> list[OffloadedTensor]:
        """Return the saved tensors that are offloaded."""
        return [x for x in tree_leaves(self.entries) if isinstance(x, OffloadedTensor)]

    def register_as_most_recent(self) -> None:
        """Register this checkpoint as the most recently offloaded one.

        Called whenever a layer in the checkpoint is about to offload.
        """
        most_recent = CheckpointCache._most_recent()
        # The copies of earlier layers, in this or the previous checkpoint, have overlapped with a
        # layer. So free their device memory, see Note [Order of offloaded checkpoints].
        if most_recent is not None:
            for x in most_recent.offloaded():
                x.free()
        if most_recent is not self:
            self.previous = CheckpointCache._most_recent
            CheckpointCache._most_recent = weakref.ref(self)

    def prefetch(self) -> None:
        """Begin to copy the offloaded tensors of this and the previous checkpoint to the device.

        Called when the recompute of this checkpoint loads its first entry.
        """
        # Backward reaches the previous checkpoint next.
        for cache in (self, self.previous()):
            for x in cache.offloaded() if cache else ():
                x.prefetch()


class CheckpointPass:
    """Saves in the forward of a checkpointed function, or loads in its recompute.

    This is a context manager around the function. Every backward through the checkpoint recomputes,
    and torch enters the same object for each recompute. If the function itself runs a backward, a
    recompute may begin in the middle of another pass. So an active object may be entered again.

    Args:
        cache: The cache of the checkpoint.
        is_recompute: Whether the pass is a recompute, which loads; if not, forward, which saves.
    """

    def __init__(self, cache: CheckpointCache, is_recompute: bool):
        self.cache, self.is_recompute = cache, is_recompute
        # The index of the entry that the next `take` returns.
        self._next_entry = 0
        # A stack. Each `__enter__` pushes the pass that was current, and this pass's `_next_entry`.
        self._outer: list[tuple[CheckpointPass | None, int]] = []

    def __enter__(self) -> None:
        self._outer.append((_current.get(), self._next_entry))
        self._next_entry = 0
        _current.set(self)

    def __exit__(self, *_: Any) -> None:
        outer, self._next_entry = self._outer.pop()
        _current.set(outer)

    def put(self, where: str, what: Any, offload: bool, shared: list[Tensor]) -> None:
        """Save a tree for the recompute of a call; called in forward.

        Args:
            where: Name of the layer.
            what: A tree (dicts, lists) of tensors and other objects.
            offload: Whether the layer's config asks to offload the tensors.
            shared: Tensors that stay in device memory in any case. Their views are not offloaded.
        """
        if offload or self.cache.offloads:
            self.cache.register_as_most_recent()
            # To offload a view of a tensor that stays would free no memory.
            stay = set(map(storage_of, shared))
            what = tree_map_only(
                Tensor, lambda x: x if storage_of(x) in stay else OffloadedTensor(x), what
            )
        self.cache.entries.append((where, what))

    def take(self, where: str) -> Any:
        """Load the tree that a call saved in forward; called in recompute, in the order of forward.

        Args:
            where: Name of the layer that loads; empty for a nested checkpoint.

        Returns:
            The tree that `put` saved, with all tensors on their device.

        Raises:
            RuntimeError: if another layer saved the next entry, or there are no more entries.
        """
        entries, index = self.cache.entries, self._next_entry
        saved_by, what = entries[index] if index < len(entries) else ("nothing more", None)
        if saved_by != where:
            raise RuntimeError(
                f"{where or 'a checkpoint inside another'}: called when its checkpoint is computed "
                f"again, where there was {saved_by} in forward; let it do the same both times, or "
                'set sp_overlap.checkpointing to "recompute"'
            )
        if index == 0:
            self.cache.prefetch()
        self._next_entry += 1
        return tree_map_only(OffloadedTensor, OffloadedTensor.get, what)


def keep_attention(offloads: bool = False) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Make layers in an activation checkpoint save the results of attention.

    Pass this function as ``context_fn`` to ``torch.utils.checkpoint.checkpoint(...,
    use_reentrant=False)``; torch calls it once for each forward through a checkpoint. Layers with
    ``"checkpointing": "keep"`` or ``"offload"`` then save o and the log-sum-exp. Recompute runs
    neither the attention nor the exchanges of these layers.

    Args:
        offloads: True: every layer in the checkpoint offloads; for a checkpoint that offloads its
            own inputs. False: the config of each layer decides.

    Returns:
        A context manager for the forward, and one for recompute.
    """
    outer, cache, is_recompute = _current.get(), CheckpointCache(offloads), False
    if outer is not None and outer.is_recompute:
        # In a recompute of the outer checkpoint, the nested checkpoint's forward also recomputes.
        cache, is_recompute = outer.take(""), True
    elif outer is not None:
        # In the outer checkpoint's recompute, the next call of this function takes this cache.
        outer.cache.entries.append(("", cache))
    return CheckpointPass(cache, is_recompute), CheckpointPass(cache, True)


def current_pass(where: str, where_possible: bool = False) -> CheckpointPass | None:
    """Return the pass of the checkpoint around the call of a layer; None without a checkpoint.

    Layers whose config asks to save attention call this function.

    Args:
        where: Name of the layer, for errors.
        where_possible: Whether to warn once, instead of raising, if the checkpoint can't save.

    Raises:
        RuntimeError: in the recompute of a checkpoint that does not use `keep_attention`, unless
            ``where_possible``.
    """
    checkpoint = _current.get()
    if checkpoint is None and torch.is_grad_enabled() and in_backward():
        if where_possible:
            warn_once(
                "sp_overlap: attention is computed again in backward, since the activation "
                "checkpoint around it can't keep it: torch.utils.checkpoint.checkpoint(..., "
                "use_reentrant=False, context_fn=ds_sp_overlap.keep_attention) can"
            )
            return None
        raise RuntimeError(
            f"{where}: sp_overlap.checkpointing is to keep attention, but the checkpoint around "
            "this layer has nowhere to keep it; use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False, context_fn=ds_sp_overlap.keep_attention) (transformers: "
            "gradient_checkpointing_enable({\"use_reentrant\": False}); DeepSpeed's and Megatron's "
            'checkpointing has none), or set sp_overlap.checkpointing to "recompute"'
        )
    return checkpoint
