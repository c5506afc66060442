"""Logs messages through DeepSpeed's logger: as warnings on rank 0, at debug level elsewhere."""

import functools
import logging
import os

import torch.distributed as dist

LOGGER = logging.getLogger("DeepSpeed")


def say(message: str, stacklevel: int = 2) -> None:
    """Log a message.

    Rank 0 logs a warning, since DeepSpeed's logger by default passes on nothing below.

    Args:
        message: The message.
        stacklevel: Frames from the logger to the caller whose line is logged.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    LOGGER.log(logging.DEBUG if rank else logging.WARNING, message, stacklevel=stacklevel)


@functools.cache
def warn_once(message: str) -> None:
    """Log a message the first time that this process is asked to."""
    say(message, stacklevel=3)
