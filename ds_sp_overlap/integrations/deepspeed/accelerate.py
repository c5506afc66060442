"""Accelerate's handling of a DeepSpeed config that has an ``sp_overlap`` section.

Accelerate fills in every "auto" of the config, and stops at a key that it doesn't know: `install`
keeps it off the section. Its launcher passes on only some keys of its YAML file: a section there
would be lost without a word, so `in_yaml` lists the keys in which it is looked for.
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

    The package has this called once `PLUGINS` is loaded (`after_import`).
    """
    DeepSpeedPlugin = sys.modules[PLUGINS].DeepSpeedPlugin
    original = DeepSpeedPlugin.fill_match

    @functools.wraps(original)
    def fill_match(plugin: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        """Fill in the key ``ds_key_long``, such as "optimizer.params.lr", unless it is ours."""
        if ds_key_long.split(".")[0] != "sp_overlap":
            return original(plugin, ds_key_long, *args, **kwargs)

    DeepSpeedPlugin.fill_match = fill_match


def in_yaml() -> dict[str, Any]:
    """Return the keys under ``deepspeed_config`` of Accelerate's YAML, each with the value None.

    The launcher passes on the names alone. Empty if the launcher is not used, or has no such keys.
    """
    return dict.fromkeys(filter(None, os.environ.get(FIELDS, "").split(",")))
