"""Restores what a forward ran with, for what is computed a second time.

That is: random generators, modes of modules, autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Random:
    """States of the generators that attention may draw from.

    Attributes:
        device: The device of attention.
        states: Of the host's generator, and of that of ``device``.
    """

    device: torch.device
    states: list[Tensor]

    @classmethod
    def now(cls, device: torch.device) -> Random:
        """Return the current states."""
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return cls(device, states)

    def set(self) -> None:
        """Set the generators back to these states."""
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            torch.get_device_module(self.device).set_rng_state(self.states[1], self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Random) and self._bytes() == other._bytes()

    def _bytes(self) -> list[bytes]:
        # States lie in host memory, also those of a device.
        return [state.numpy().tobytes() for state in self.states]


@contextlib.contextmanager
def drawing_again(before: Random | None) -> Iterator[None]:
    """Run the body with the random numbers that were drawn from ``before`` on.

    Afterwards the generators are as if the body had drawn none. None leaves them alone: none were
    drawn the first time.
    """
    if before is None:
        yield
        return
    now = Random.now(before.device)
    before.set()  # guard: the same random numbers
    try:
        yield
    finally:
        now.set()  # guard: what is drawn next is as before


def autocast_of(device: torch.device) -> dict[str, Any]:
    """Return the autocast state, as keywords for ``torch.autocast`` to restore the state."""
    kind = device.type
    return dict(
        device_type=kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
    )


@contextlib.contextmanager
def in_modes(modules: Sequence[nn.Module], training: Sequence[bool]) -> Iterator[None]:
    """Run the body with each module in the mode that ``training`` says, True for training."""
    before = [module.training for module in modules]
    for module, mode in zip(modules, training):
        module.training = mode  # guard: run again in its mode
    try:
        yield
    finally:
        # In reverse, since a module may be found twice.
        for module, mode in zip(reversed(modules), reversed(before)):
            module.training = mode  # guard: in the mode of now
