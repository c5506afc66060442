"""Logs messages through the logger ``ds_sp_overlap``; ranks other than 0 log at debug level.

If the user has set no handler, the logger prints messages of level INFO and above. After
``logging.getLogger("ds_sp_overlap").setLevel(logging.WARNING)``, the logger prints only warnings.
"""

import functools
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

LOGGER = logging.getLogger("ds_sp_overlap")


class _Console(logging.Handler):
    """Prints messages on standard output, warnings with the level in front."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message in one piece, since the ranks share standard output."""
        level = f"[{record.levelname}] " if record.levelno >= logging.WARNING else ""
        # While a progress bar of tqdm is shown, the cursor is at the end of its line.
        bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
        newline = "\n" if len(bars) else ""
        sys.stdout.write(f"{newline}{level}{record.getMessage()}\n")
        sys.stdout.flush()


# If the user has set a handler or a level before this import, keep it.
if not LOGGER.handlers:
    LOGGER.addHandler(_Console())
    LOGGER.propagate = False
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)


def by_rank(texts: Iterable[Any]) -> str:
    """Join the texts of the sp ranks for an error message; leave out ranks with an empty text."""
    return "; ".join(f"sp rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def say(message: str, stacklevel: int = 2) -> None:
    """Log a message: as a warning on rank 0, at debug level on other ranks.

    Args:
        message: The message.
        stacklevel: The number of frames from the logger up to the caller whose line is logged.
    """
    LOGGER.log(logging.DEBUG if _rank() else logging.WARNING, message, stacklevel=stacklevel)


def inform(message: str) -> None:
    """Log a message at level INFO on rank 0."""
    LOGGER.log(logging.DEBUG if _rank() else logging.INFO, message, stacklevel=2)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning; a later call with the same message does nothing."""
    say(message, stacklevel=3)
