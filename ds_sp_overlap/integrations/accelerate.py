"""Accelerate: what becomes of the ``sp_overlap`` section on its way through it."""

from __future__ import annotations

import functools
import os
from typing import Any

FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"  # what its launcher says of the YAML: names of the keys under ``deepspeed_config``


def install() -> None:
    """Keep the section out of what Accelerate fills in: it stops at an "auto" that it doesn't know."""
    try:
        from accelerate.utils import DeepSpeedPlugin
    except ImportError:
        return
    original = DeepSpeedPlugin.fill_match

    @functools.wraps(original)
    def fill_match(plugin: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        if ds_key_long.split(".")[0] != "sp_overlap":
            return original(plugin, ds_key_long, *args, **kwargs)

    DeepSpeedPlugin.fill_match = fill_match


def in_yaml() -> dict[str, Any]:
    """The keys under ``deepspeed_config`` of the YAML that Accelerate was launched with; their values stay with the launcher."""
    return dict.fromkeys(filter(None, os.environ.get(FIELDS, "").split(",")))
