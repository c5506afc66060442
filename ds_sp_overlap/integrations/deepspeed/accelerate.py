"""Lets Accelerate accept a DeepSpeed config that has an ``sp_overlap`` section.

Accelerate fills in every "auto" of the config, and raises an error for an "auto" under a key that
it doesn't know: `install` makes Accelerate skip the section. Accelerate's launcher drops unknown
keys of its YAML file without a warning: `in_yaml` lists the keys of that file, so that DeepSpeed's
adapter (`initialize`) can raise an error for a section there.
"""

from __future__ import annotations

import functools
import os
from typing import Any

# The module of Accelerate that fills in "auto".
PLUGINS = "accelerate.utils.dataclasses"
# The environment variable in which Accelerate's launcher passes on the names of the keys under
# ``deepspeed_config`` in its YAML file.
FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"


def install(plugins: Any) -> None:
    """Keep Accelerate from filling in the "auto" values of the ``sp_overlap`` section.

    Args:
        plugins: The module `PLUGINS`.
    """
    DeepSpeedPlugin = plugins.DeepSpeedPlugin
    original = DeepSpeedPlugin.fill_match

    @functools.wraps(original)
    def fill_match(plugin: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
        """Fill in ``ds_key_long``, such as "optimizer.params.lr", outside ``sp_overlap``."""
        if ds_key_long.split(".")[0] != "sp_overlap":
            return original(plugin, ds_key_long, *args, **kwargs)

    DeepSpeedPlugin.fill_match = fill_match


def in_yaml() -> dict[str, Any]:
    """Return the keys under ``deepspeed_config`` in Accelerate's YAML file, each mapped to None.

    The values are None since the launcher passes on only the names of the keys. The result is empty
    without the launcher, or without such keys.
    """
    return dict.fromkeys(filter(None, os.environ.get(FIELDS, "").split(",")))
