"""Recomputes a region of a forward in backward; autograd saves nothing of the region.

    with region.watched(): y = f(x)      a stand-in is saved in place of each tensor
    backward                             each backward runs f once more, which fills the stand-ins

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

from ..attention.memory.forward_state import Random, autocast_of, drawing_again


class _Saved:
    """Stands for a tensor that a node saves.

    Attributes:
        x: The tensor, from the recomputation until a node reads it in backward; else None.
        form: Shape and dtype of the tensor in forward.
    """

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = None
        self.form = x.shape, x.dtype


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
        # Weak references to the stand-ins, in the order in which forward saved.
        self._saved: list[Callable[[], _Saved | None]] = []
        # For each part, the states of the generators at its beginning; None if it draws nothing.
        self._random: list[Random | None] = []
        self._autocast = autocast_of(device)
        # The id of the backward that recomputed last; -1 for none.
        self._backward = -1

    @abstractmethod
    def run(self) -> None:
        """Compute every part again, in order, each inside `as_before`; `recompute` calls this."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Run the body in forward, as the next part of the region."""
        before = Random.now(self.device)
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._random.append(None if Random.now(self.device) == before else before)

    def as_before(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Run the body as part ``part`` again, with the random numbers of forward."""
        return drawing_again(self._random[part])

    def recompute(self) -> None:
        """Recompute the region, unless this backward has done so.

        Called in backward: by `recompute_if_alive`, or at the latest by `_unpack`.

        Raises:
            RuntimeError: if the second run saves more tensors than the first, or others.
        """
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
                if saved.form != (x.shape, x.dtype):
                    raise RuntimeError(
                        f"{self.where}: run again for backward, it saves {list(x.shape)} in "
                        f"{x.dtype} where forward saved {list(saved.form[0])} in {saved.form[1]}; "
                        "let it do the same both times"
                    )
                # ZeRO-3 takes the memory of a gathered weight from the parameter when the module's
                # call is over; this tensor keeps it.
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
    def recompute_if_alive(self) -> Callable[[], None]:
        """Return `recompute` as a function that nodes of autograd may hold.

        It holds the region weakly, and does nothing once the region is gone: that is when backward
        has used all that the region saved.
        """
        alive = weakref.ref(self)

        def recompute() -> None:
            region = alive()
            if region is not None:
                region.recompute()

        return recompute

    def precede(self, y: Tensor) -> None:
        """Have this region recomputed in backward when ``y``, an output of the region, has its
        gradient, before the node that made ``y`` runs.

        ZeRO-3 gathers a module's weights for backward when the module's output gets its gradient,
        and frees them when a second call of the module ends. So the second call must come first.
        """
        recompute = self.recompute_if_alive
        if y.grad_fn is not None:
            hook = y.grad_fn.register_prehook
            hook(lambda _: recompute())  # guard: run again, then gathered for backward

    def _pack(self, x: Tensor) -> _Saved:
        """Give a node a stand-in in place of a tensor to save (the pack hook)."""
        saved = _Saved(x)
        # The stand-in lives as long as its node.
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        """Give a node the tensor of its stand-in in backward (the unpack hook).

        Each backward of a graph may read the tensor once.

        Raises:
            RuntimeError: if the second run has not saved this tensor, or a backward reads it twice.
        """
        if saved.x is None:
            self.recompute()
        x, saved.x = saved.x, None
        if x is None:
            raise RuntimeError(
                f"{self.where}: run again for backward, it doesn't save what it saved in forward; "
                "let it do the same both times"
            )
        return x
