"""Logs messages through DeepSpeed's logger: on rank 0 to be seen, on others at debug level."""

import functools
import logging
import os
import sys

import torch.distributed as dist

LOGGER = logging.getLogger("DeepSpeed")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def say(message: str, stacklevel: int = 2) -> None:
    """Log a message, as a warning on rank 0.

    Args:
        message: The message.
        stacklevel: Frames from the logger to the caller whose line is logged.
    """
    # DeepSpeed's logger by default passes on nothing below a warning.
    LOGGER.log(logging.DEBUG if _rank() else logging.WARNING, message, stacklevel=stacklevel)


def inform(message: str) -> None:
    """Log information that a user must see on rank 0."""
    if _rank():
        LOGGER.debug(message, stacklevel=2)
    elif LOGGER.isEnabledFor(logging.WARNING):
        caller = sys._getframe(1)
        file, function = caller.f_code.co_filename, caller.f_code.co_name
        # With the number of a warning, since DeepSpeed's logger by default passes on nothing below,
        # and with the name INFO.
        record = LOGGER.makeRecord(
            LOGGER.name, logging.WARNING, file, caller.f_lineno, message, (), None, function
        )
        record.levelname = logging.getLevelName(logging.INFO)
        LOGGER.handle(record)


@functools.cache
def warn_once(message: str) -> None:
    """Log a message the first time that this process is asked to."""
    say(message, stacklevel=3)
