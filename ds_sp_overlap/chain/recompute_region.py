"""A region of a forward that is recomputed in backward, and of which autograd saves nothing.

    with region.watched(): y = f(x)      what autograd would save is let go
    backward                             f is run again, once, and its tensors are saved anew

Beyond an activation checkpoint, the region may run in several parts, with other work between them.
A node of autograd may start the recomputation before it waits for an exchange, to hide that
exchange.
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

from ..attention.memory.random_state import Random, drawing_again
from ..attention.runtime.linear import autocast_of


class _Saved:
    """Stands for a tensor that a node saves; has the tensor between the recomputation and the
    node's backward.
    """

    def __init__(self) -> None:
        self.x: Tensor | None = None


class RecomputeRegion(ABC):
    """A part of a forward that can be recomputed.

    Only the hooks of its saved tensors keep it alive: it is freed with the last node that saved
    one. So nothing else in a graph may hold it, or the tensors that it holds.

    Args:
        where: Name of the layer, for errors.
        device: The device that it runs on.
    """

    def __init__(self, where: str, device: torch.device):
        self.where, self.device = where, device
        self._saved: list[Callable[[], _Saved | None]] = []
        # The random numbers at the beginning of each part that draws some.
        self._random: list[Random | None] = []
        self._autocast = autocast_of(device)
        self._backward = -1

    @abstractmethod
    def run(self) -> None:
        """Compute every part again, each inside `as_before`."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run the body as the next part of the region, for the first time."""
        before = Random.now(self.device)
        with saved_tensors_hooks(self._leave_out, self._given):
            yield
        self._random.append(None if Random.now(self.device) == before else before)

    def as_before(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Run the body as a part that is recomputed, with its random numbers of the first time."""
        return drawing_again(self._random[part])

    def recompute(self) -> None:
        """Recompute the region, unless this backward has done so."""
        now = torch._C._current_graph_task_id()
        if self._backward == now:  # guard: once in a backward
            return
        self._backward, waiting = now, iter(self._saved)

        def save_anew(x: Tensor) -> None:
            # Tensors of the two runs belong together by their order alone.
            stand_in = next(waiting, None)
            if stand_in is None:
                raise RuntimeError(
                    f"{self.where}: run again for backward, it saves more than in forward; "
                    "let it do the same both times"
                )
            saved = stand_in()
            # None where the node is gone, and nobody needs the tensor.
            if saved is not None:
                # Keeps the memory of a gathered weight, which ZeRO-3 takes from the parameter when
                # the module's call is over.
                saved.x = x.detach()

        def refuse(_: Any) -> Tensor:
            raise AssertionError("nobody runs backward through the second run")

        with (
            saved_tensors_hooks(save_anew, refuse),
            torch.enable_grad(),
            torch.autocast(**self._autocast),
        ):
            self.run()

    @property
    def when_needed(self) -> Callable[[], None]:
        """`recompute`, for nodes of autograd to hold without holding the region; does nothing once
        backward has used all that the region saves.
        """
        alive = weakref.ref(self)

        def recompute() -> None:
            region = alive()
            if region is not None:
                region.recompute()

        return recompute

    def precede(self, y: Tensor) -> None:
        """Have this region recomputed in backward before anything that made ``y``, an output of the
        region, is asked for its gradient.

        ZeRO-3 gathers a module's weights for backward when the module's output gets its gradient,
        and frees them when a second call of the module ends. So the second call must come first.
        """
        recompute = self.when_needed
        if y.grad_fn is not None:
            hook = y.grad_fn.register_prehook
            hook(lambda _: recompute())  # guard: run again, then gathered for backward

    def _leave_out(self, _: Tensor) -> _Saved:
        saved = _Saved()
        # The stand-in lives as long as its node.
        self._saved.append(weakref.ref(saved))
        return saved

    def _given(self, saved: _Saved) -> Tensor:
        if saved.x is None:
            self.recompute()
        x, saved.x = saved.x, None
        if x is None:
            raise RuntimeError(
                f"{self.where}: run again for backward, it doesn't save what it saved in forward; "
                "let it do the same both times"
            )
        return x
