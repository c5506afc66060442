"""A region of a forward of which autograd keeps nothing: it is run again where backward comes to
it.

    with region.watched(): y = f(x)      what autograd would save is let go
    backward                              f is run again, once, and saves it anew

So far that is an activation checkpoint. Two things are different: the region may be run in several
parts, with other things between them, and a node of its own may have it run again before it waits
for an exchange, which is hidden by that.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..attention.memory.recompute import Random


class _Saved:
    """In place of a tensor that a node saves; ``x`` is there from the second run to the node's
    backward.
    """

    def __init__(self) -> None:
        self.x: Tensor | None = None


class RecomputeRegion(ABC):
    """Lives as long as there is something that it would save; nothing else of a graph may hold it,
    and what it holds.

    where    for errors
    device   that it runs on
    """

    def __init__(self, where: str, device: torch.device):
        self.where, self.device = where, device
        self._saved: list[Callable[[], _Saved | None]] = []
        self._random: list[Random | None] = []  # at the begin of each part, if it draws
        self._autocast: dict[str, Any] = dict(
            device_type=device.type,
            dtype=torch.get_autocast_dtype(device.type),
            enabled=torch.is_autocast_enabled(device.type),
        )
        self._backward = -1

    @abstractmethod
    def run(self) -> None:
        """Do again what was done, `as_before`."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The body is the next part of the region, the first time."""
        before = Random.now(self.device)
        with saved_tensors_hooks(self._leave_out, self._given):
            yield
        self._random.append(None if Random.now(self.device) == before else before)

    @contextlib.contextmanager
    def as_before(self, part: int) -> Iterator[None]:
        """The body is a part of it, run again: with the random numbers of the first time."""
        if (random := self._random[part]) is None:
            yield
            return
        now = Random.now(self.device)
        random.set()  # guard: the same random numbers again
        try:
            yield
        finally:
            now.set()

    def again(self) -> None:
        """Run it again, unless that was done in this backward."""
        if self._backward == (
            now := torch._C._current_graph_task_id()
        ):  # guard: once in a backward
            return
        self._backward, waiting = now, iter(self._saved)

        def give(x: Tensor) -> None:
            if (of := next(waiting, None)) is None:
                raise RuntimeError(
                    f"{self.where}: run again for backward, it saves more than in forward; let it do the same both times"
                )
            if (saved := of()) is not None:
                saved.x = (
                    x.detach()
                )  # a weight of ZeRO-3, too: it goes when the module's call is over

        def refuse(_: Any) -> Tensor:
            raise AssertionError("nobody runs backward through the second run")

        with (
            saved_tensors_hooks(give, refuse),
            torch.enable_grad(),
            torch.autocast(**self._autocast),
        ):
            self.run()

    @property
    def when_needed(self) -> Callable[[], None]:
        """`again`, for nodes of the graph to hold; nothing where backward has come by all that it
        saves.
        """
        alive = weakref.ref(self)

        def again() -> None:
            if (region := alive()) is not None:
                region.again()

        return again

    def precede(self, y: Tensor) -> None:
        """Have this region recomputed in backward before anything that made ``y``, an output of the
        region, is asked for its gradient.

        ZeRO-3 gathers a module's weights for backward when the module's output gets its gradient,
        and lets go of them where the module has been called again.
        """
        recompute = self.when_needed
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(
                lambda _: recompute()
            )  # guard: run again, then gathered for backward

    def _leave_out(self, _: Tensor) -> _Saved:
        saved = _Saved()
        self._saved.append(weakref.ref(saved))  # lives as long as its node
        return saved

    def _given(self, saved: _Saved) -> Tensor:
        if saved.x is None:
            self.again()
        x, saved.x = saved.x, None  # let go with its node
        if x is None:
            raise RuntimeError(
                f"{self.where}: run again for backward, it doesn't save what it saved in forward; let it do the same both times"
            )
        return x
