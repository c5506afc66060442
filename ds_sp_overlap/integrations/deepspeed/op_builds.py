"""Locks of op builds: a run that was killed leaves one, and later runs wait for it without a word.

DeepSpeed compiles ops at first use, through torch. The first process to make a file ``lock`` beside
the op builds the op. The others wait until that file is gone.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

from torch.utils.file_baton import FileBaton

from ...warn import say

# Seconds of waiting that are passed over in silence.
PATIENCE_S = 10.0
# The longest that a build takes, also where other processes share the cores.
BUILD_MIN = 10


def remedy(lock: Path) -> str:
    """Return a sentence on what to do about a lock; for the doctor and for a process that waits."""
    try:
        minutes = (time.time() - lock.stat().st_mtime) / 60
    except OSError:
        return f"{lock} is gone"
    return (
        f"{lock} (made {minutes:.0f} min ago): another rank or process compiles "
        f"{lock.parent.name}, which takes minutes; a lock of more than {BUILD_MIN} min was left by "
        "a run that was killed: delete the file then"
    )


def locks() -> list[Path]:
    """Return the locks in torch's folder of extensions, whether a build is running or not."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def install() -> None:
    """Make a process that waits for a lock say so after `PATIENCE_S`, and then wait on.

    Wraps the method by which torch waits; a second call does nothing.
    """
    wait = FileBaton.wait
    if hasattr(wait, "__sp_overlap__"):
        return

    @functools.wraps(wait)
    def wait_and_say(baton: Any) -> None:
        def say_so() -> None:
            say(f"sp_overlap: waiting for a lock: {remedy(Path(baton.lock_file_path))}")

        timer = threading.Timer(PATIENCE_S, say_so)
        # A process that ends does not wait for the timer.
        timer.daemon = True
        timer.start()
        try:
            wait(baton)
        finally:
            timer.cancel()

    wait_and_say.__sp_overlap__ = True  # type: ignore[attr-defined]  # a mark on a function
    FileBaton.wait = wait_and_say  # type: ignore[method-assign, assignment]
