"""DeepSpeed: the ``sp_overlap`` section of its config."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.comm
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from packaging.version import Version

from ..attention import linear
from ..config import SpOverlapConfig
from ..exchange import transport
from ..say import say_once
from . import accelerate, megatron_bridge
from .registry import enable, find_group

OLDEST = "0.19.7"
VARIABLE = "DS_SP_OVERLAP"  # the section, or 1 or 0, for who has no JSON to write it into; its keys go before those of the section
from_command_line: dict[str, Any] = {}  # keys of ``python -m ds_sp_overlap run``, which go before all others


def install() -> None:
    """Make ``deepspeed.initialize`` honour the ``sp_overlap`` section. Without the section nothing changes.

    An engine that is made without it (the function was imported by name before this package was) honours the section too.
    Raises ImportError for a DeepSpeed whose own sequence parallelism has wrong gradients.
    """
    if Version(Version(deepspeed.__version__).base_version) < Version(OLDEST):
        raise ImportError(
            f"ds_sp_overlap needs DeepSpeed >= {OLDEST}, found {deepspeed.__version__}: before it the gradients of query and "
            f"key under sequence-parallel overlap are wrong (DeepSpeed PR 5691 as merged); pip install 'deepspeed>={OLDEST}'"
        )
    if hasattr(deepspeed.initialize, "__sp_overlap__"):
        return
    linear.harmless.add("deepspeed.")  # ZeRO-3 gathers weights in its hooks
    transport.log = transport.Log(comms_logger, _all_to_all)
    original, make = deepspeed.initialize, DeepSpeedEngine.__init__
    given, made_of = inspect.signature(original), inspect.signature(make)
    ours: list[bool] = []  # calls of `initialize` that are on their way

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        config = _asked_for(given.bind(*args, **kwargs).arguments)  # refused before DeepSpeed starts anything
        ours.append(True)
        try:
            result = original(*args, **kwargs)
        finally:
            ours.pop()
        _honour(config, result[0])
        return result

    @functools.wraps(make)
    def __init__(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        if ours:
            return make(engine, *args, **kwargs)
        arguments = made_of.bind(engine, *args, **kwargs).arguments
        config = _asked_for({**arguments, "config": arguments["config_class"]._param_dict})
        make(engine, *args, **kwargs)
        _honour(config, engine)

    initialize.__sp_overlap__ = True  # type: ignore[attr-defined]  # a mark on a function
    deepspeed.initialize, DeepSpeedEngine.__init__ = initialize, __init__
    accelerate.install()


def _all_to_all(recv, send, recv_sizes, send_sizes, group, name):
    """Through ``deepspeed.comm``, whose comms logger wants to see it."""
    return deepspeed.comm.all_to_all_single(recv, send, recv_sizes, send_sizes, group=group, async_op=True, log_name=name)


def _asked_for(given: dict[str, Any]) -> SpOverlapConfig | None:
    """What the config among the arguments, the environment and the command line ask for; None where none does.

    Raises ValueError for what is not valid.
    """
    section, variable = _section(given), _variable()
    if section is None and variable is None:
        if from_command_line:
            raise ValueError(
                f"run --{', --'.join(from_command_line)}: the DeepSpeed config has no sp_overlap section; add one, or set {VARIABLE}=1"
            )
        return None
    if None not in (section, variable):
        say_once(f"sp_overlap: {VARIABLE}={os.environ[VARIABLE]} goes before the section of the DeepSpeed config, key by key")
    keys = SpOverlapConfig.parse({} if section is None else section).model_dump(exclude_unset=True)
    config = SpOverlapConfig.parse({**keys, **(variable or {}), **from_command_line})
    if config.enabled and "autosp" in ((_config(given).get("compile") or {}).get("passes") or []):
        raise ValueError('sp_overlap: compile.passes has "autosp", which exchanges by itself; take it or sp_overlap out')
    return config


def _variable() -> dict[str, Any] | None:
    """The keys that the environment variable gives; None where it is not set."""
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0", "1"):
        return {"enabled": text == "1"} if text else None
    try:
        section = json.loads(text)
    except ValueError:
        section = text
    if not isinstance(section, dict):
        raise ValueError(f'environment variable {VARIABLE} must be 1, 0 or a section such as {{"head_groups": 2}}, got {text!r}')
    try:
        SpOverlapConfig.parse(section)
    except ValueError as error:
        raise ValueError(f"environment variable {VARIABLE}: {error}") from None
    return {"enabled": True, **section}


def _config(given: dict[str, Any]) -> dict:
    """The DeepSpeed config, from wherever ``deepspeed.initialize`` takes it."""
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    return {} if config is None else config if isinstance(config, dict) else load_ds_config(config)


def _section(given: dict[str, Any]) -> Any:
    """The ``sp_overlap`` section; None if there is none."""
    config = _config(given)
    if lost := next(_misplaced(accelerate.in_yaml(), "deepspeed_config."), None):
        raise ValueError(
            f'Accelerate YAML: "{lost}" goes no further than the launcher, which passes on keys of its own alone; take it out and set '
            f"{VARIABLE} in the environment to the section (or to 1), or put the section into the file of deepspeed_config_file"
        )
    if misplaced := next(_misplaced(config), None):
        raise ValueError(
            f'DeepSpeed config: nobody reads "{misplaced}"; the section is called "sp_overlap" and belongs at the top level of the '
            'config (to switch it off give it "enabled": false)'
        )
    return config.get("sp_overlap", megatron_bridge.section(given.get("args")))


def _misplaced(config: dict[str, Any], within: str = "") -> Iterator[str]:
    """Keys that can only mean the section, under another name or in a section of DeepSpeed's."""
    for key, value in config.items():
        name = re.sub("[^a-z]", "", str(key).lower())
        typo = name.startswith("sp") and difflib.SequenceMatcher(None, name, "spoverlap").ratio() > 0.85
        meant = re.match("(ds|deepspeed)?(sp|sequenceparallel|ulysses)overlap", name) or typo
        if meant and str(key)[0].isalpha() and (within or key != "sp_overlap"):  # "_sp_overlap" was commented out
            yield within + key
        elif isinstance(value, dict) and not meant:
            yield from _misplaced(value, f"{within}{key}.")


def _agree(config: SpOverlapConfig | None, group: Any) -> None:
    """Raise ValueError, on all ranks of the group, where they ask for different things. Collective."""
    asked = [""] * dist.get_world_size(group)
    dist.all_gather_object(asked, "nothing" if config is None else repr(config), group=group)
    if other := next((rank for rank, theirs in enumerate(asked) if theirs != asked[0]), None):
        first, differs = (f"rank {dist.get_global_rank(group, rank)}: {asked[rank]}" for rank in (0, other))
        raise ValueError(
            f"sp_overlap: the ranks ask for different things ({first}; {differs}); give all nodes the same config, and the same "
            f"{VARIABLE}, which the deepspeed launcher passes on to other nodes only out of a file .deepspeed_env"
        )


def _honour(config: SpOverlapConfig | None, engine: DeepSpeedEngine) -> None:
    """Overlap the model of an engine as asked for. Collective."""
    size = getattr(engine, "sequence_parallel_size", 1)
    if size == 1 and (group := find_group(engine.module)) is not None:  # of layers that DeepSpeed wasn't told of
        size = dist.get_world_size(group)
    if size > 1:
        _agree(config, engine.seq_data_parallel_group)
    if config is None:
        if size > 1:
            say_once(
                f"sp_overlap: sequence parallelism is on (sp size {size}) and ds_sp_overlap imported, but the "
                'DeepSpeed config has no "sp_overlap" section: nothing is overlapped. Add "sp_overlap": {} at its top level, set '
                f"{VARIABLE}=1, or call ds_sp_overlap.enable(engine.module)"
            )
        return
    report = enable(engine.module, config, gradient_process_group=engine.seq_data_parallel_group)
    if engine.global_rank == 0:
        print(report, flush=True)
