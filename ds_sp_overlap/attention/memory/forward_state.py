"""Restores the state of forward for a recompute: random generators, modes, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Random:
    """Holds the states of the random generators that attention may use.

    Attributes:
        device: The device of attention.
        states: The state of the host's generator; then the state of the device's generator, if the
            device is not the host.
    """

    device: torch.device
    states: list[Tensor]

    @classmethod
    def now(cls, device: torch.device) -> Random:
        """Return the current states of the generators."""
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
        # Even the state of a device's generator is in host memory.
        return [state.numpy().tobytes() for state in self.states]


@contextlib.contextmanager
def drawing_again(before: Random | None) -> Iterator[None]:
    """Run the body with the generators in the states ``before``, to draw the same numbers again.

    Then set the generators back to their current states. ``before`` is None if the first run drew
    no random numbers; then the generators are left alone.
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
    """Return the autocast state, as keywords with which ``torch.autocast`` restores it."""
    kind = device.type
    return dict(
        device_type=kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
    )


@contextlib.contextmanager
def in_modes(modules: Sequence[nn.Module], training: Sequence[bool]) -> Iterator[None]:
    """Run the body with ``module.training`` of each module set to its item of ``training``."""
    before = [module.training for module in modules]
    for module, mode in zip(modules, training):
        module.training = mode  # guard: run again in its mode
    try:
        yield
    finally:
        for module, mode in zip(modules, before):
            module.training = mode  # guard: in the mode of now
