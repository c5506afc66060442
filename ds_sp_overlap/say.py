"""What the package says in passing: through DeepSpeed's logger, on rank 0. The other ranks say it at debug level."""

import functools
import logging
import os

import torch.distributed as dist

LOGGER = logging.getLogger("DeepSpeed")


def say(message: str, stacklevel: int = 2) -> None:
    """Log a message, on rank 0 as a warning: DeepSpeed's logger passes on nothing below unless it is told to."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    LOGGER.log(logging.DEBUG if rank else logging.WARNING, message, stacklevel=stacklevel)


@functools.cache
def say_once(message: str) -> None:
    """Say it the first time."""
    say(message, stacklevel=3)
