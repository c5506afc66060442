"""Warnings that are said once."""

import functools
import warnings


@functools.cache
def say_once(message: str) -> None:
    """Warn, the first time."""
    warnings.warn(message, stacklevel=3)
