"""Accelerate's handling of a DeepSpeed config that has an ``sp_overlap`` section.

Accelerate fills every "auto" of the config in, and stops at a key that it doesn't know. Its
launcher passes on only some keys of its YAML file. So the section must be kept out of the first,
and the second must be detected.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

# The module of Accelerate that fills in "auto".
PLUGINS = "accelerate.utils.dataclasses"
# Environment variable of Accelerate's launcher: the keys under ``deepspeed_config`` in its YAML.
FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"


def install() -> None:
    """Keep Accelerate from filling in the "auto" values of the ``sp_overlap`` section.

    Called once `PLUGINS` is loaded.
    """
    DeepSpeedPlugin = sys.modules[PLUGINS].DeepSpeedPlugin
    original = DeepSpeedPlugin.fill_match

    @functools.wraps(original)
    def fill_match(plugin: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        if ds_key_long.split(".")[0] != "sp_overlap":
            return original(plugin, ds_key_long, *args, **kwargs)

    DeepSpeedPlugin.fill_match = fill_match


def in_yaml() -> dict[str, Any]:
    """Return the keys under ``deepspeed_config`` of Accelerate's YAML, each with the value None.

    The launcher doesn't pass the values on.
    """
    return dict.fromkeys(filter(None, os.environ.get(FIELDS, "").split(",")))
