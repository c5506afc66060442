"""Asks NCCL to start the kernels of several communicators in the order of their launch.

See Note [Two communicators] in `exchange.transport`. Importing the package runs this file, so the
file must not import torch.
"""

from __future__ import annotations

import os
import sys

# An environment variable that NCCL reads once, at the first launch of a process.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def ask_for_launch_order() -> None:
    """Set the environment variable `LAUNCH_ORDER` to 1.

    Does nothing if the user has set the variable, or if NCCL may have read the environment already.
    """
    if LAUNCH_ORDER not in os.environ and not _has_nccl_group():
        os.environ[LAUNCH_ORDER] = "1"


def _has_nccl_group() -> bool:
    """Return whether some process group of this process uses NCCL."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return False
    groups = dist.distributed_c10d._world.pg_map
    return any("nccl" in dist.get_backend_config(group) for group in groups)
