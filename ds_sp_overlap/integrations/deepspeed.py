"""DeepSpeed: the ``sp_overlap`` section of its config."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.comm
from deepspeed.comm.comm import comms_logger
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from packaging.version import Version

from ..attention import linear
from ..config import SpOverlapConfig
from ..exchange import transport
from ..say import say_once
from . import megatron_bridge
from .registry import enable

OLDEST = "0.19.7"
from_command_line: dict[str, Any] = {}  # keys of ``python -m ds_sp_overlap run``, which go before those of the section


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
    transport.all_to_all = _all_to_all
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


def _all_to_all(recv, send, recv_sizes, send_sizes, group, name, async_op):
    """Through ``deepspeed.comm`` while its comms logger wants to see it."""
    if not comms_logger.enabled:
        return transport.plain_all_to_all(recv, send, recv_sizes, send_sizes, group, name, async_op)
    return deepspeed.comm.all_to_all_single(recv, send, recv_sizes, send_sizes, group=group, async_op=True, log_name=name)


def _asked_for(given: dict[str, Any]) -> SpOverlapConfig | None:
    """What the config among the arguments asks for; None where it has no section. Raises ValueError for one that is not valid."""
    section = _section(given)
    if section is None:
        if from_command_line:
            raise ValueError(f"run --{', --'.join(from_command_line)}: the DeepSpeed config has no sp_overlap section; add one")
        return None
    config = SpOverlapConfig.parse({**section, **from_command_line} if isinstance(section, dict) else section)
    if config.enabled and "autosp" in ((_config(given).get("compile") or {}).get("passes") or []):
        raise ValueError('sp_overlap: compile.passes has "autosp", which exchanges by itself; take it or sp_overlap out')
    return config


def _config(given: dict[str, Any]) -> dict:
    """The DeepSpeed config, from wherever ``deepspeed.initialize`` takes it."""
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    return {} if config is None else config if isinstance(config, dict) else load_ds_config(config)


def _section(given: dict[str, Any]) -> Any:
    """The ``sp_overlap`` section; None if there is none."""
    config = _config(given)
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
        meant = re.match("(ds|deepspeed)?spoverlap", name) or typo
        if meant and str(key)[0].isalpha() and (within or key != "sp_overlap"):  # "_sp_overlap" was commented out
            yield within + key
        elif isinstance(value, dict) and not meant:
            yield from _misplaced(value, f"{within}{key}.")


def _honour(config: SpOverlapConfig | None, engine: DeepSpeedEngine) -> None:
    """Overlap the model of an engine as asked for. Collective."""
    if config is None:
        if (size := getattr(engine, "sequence_parallel_size", 1)) > 1:
            say_once(
                f"sp_overlap: sequence parallelism is on (sp size {size}) and ds_sp_overlap imported, but the "
                'DeepSpeed config has no "sp_overlap" section: nothing is overlapped. Add "sp_overlap": {} at its top level, or call '
                "ds_sp_overlap.enable(engine.module)"
            )
        return
    report = enable(engine.module, config, gradient_process_group=engine.seq_data_parallel_group)
    if engine.global_rank == 0:
        print(report, flush=True)
