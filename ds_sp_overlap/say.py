"""Warnings that are said once."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def say_once(message: str) -> None:
    """Warn, the first time."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=3)
