"""Optimizer steps of this process: one hook, for all who want to know."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener:
    """A bound method that is called whenever an optimizer of this process has stepped; its object is not kept alive for it."""

    _all: set[Listener] = set()
    _hook: Any = None  # of all listeners; None where there are none

    def __init__(self, method: Callable[[], None]):
        self.method = weakref.WeakMethod(method)
        Listener._all.add(self)
        if Listener._hook is None:
            Listener._hook = register_optimizer_step_post_hook(Listener._tell)
        weakref.finalize(method.__self__, self.remove)  # type: ignore[attr-defined]  # a bound method has it

    @staticmethod
    def _tell(*_: Any) -> None:
        for listener in list(Listener._all):
            if (method := listener.method()) is not None:
                method()

    def remove(self) -> None:
        Listener._all.discard(self)
        if not Listener._all and Listener._hook is not None:
            Listener._hook.remove()
            Listener._hook = None


def in_backward() -> bool:
    """Whether this thread runs a backward; a layer that is called there is a checkpointed one, computed again."""
    return torch._C._current_graph_task_id() != -1


class OptimizerSteps:
    """Counts optimizer steps, alike on every rank that looks at the count between steps and steps its optimizers alike.

    The count moves at the first look after an optimizer has stepped, and never during backward: there a checkpointed
    layer is computed again and must find what its first computation found. However often optimizers step in between
    (ZeRO-3 steps once a sub-group), the count moves by one.
    """

    def __init__(self) -> None:
        self._count, self._stepped = 0, False
        self._hook = Listener(self._note)

    def _note(self) -> None:
        self._stepped = True

    def now(self) -> int:
        if self._stepped and not in_backward():
            self._stepped, self._count = False, self._count + 1
        return self._count

    def close(self) -> None:
        """Count no further."""
        self._hook.remove()
