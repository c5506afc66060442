"""Asks NCCL to begin kernels of several communicators in the order of their launch.

See Note [Two communicators] in `exchange.transport`. The import of the package calls this, so that nothing
here imports torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# NCCL reads it once, at the first launch of a process.
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def ask_for_launch_order() -> None:
    """Set `LAUNCH_ORDER`.

    Does nothing where the user has decided, or where NCCL may have read the environment already.
    """
    if LAUNCH_ORDER not in os.environ and not _has_nccl_group():
        os.environ[LAUNCH_ORDER] = "1"


def _has_nccl_group() -> bool:
    """Return whether NCCL carries some group of this process."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return False
    groups = dist.distributed_c10d._world.pg_map
    return any("nccl" in dist.get_backend_config(group) for group in groups)
