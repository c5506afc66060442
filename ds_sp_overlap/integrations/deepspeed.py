"""DeepSpeed: the ``sp_overlap`` section of its config, its sp group, and its ``DistributedAttention`` modules."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import re
from typing import Any, Iterator

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups, log_dist
from packaging.version import Version
from torch import nn

from ..attention import ProjectedAttention, drop_in_forward
from ..channel import Channel
from ..config import SpOverlapConfig
from ..policy import Policy
from . import Layer, enable, megatron_bridge, rebind

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
    original, make = deepspeed.initialize, DeepSpeedEngine.__init__
    given, made_of = inspect.signature(original), inspect.signature(make)
    ours: list[bool] = []  # calls of `initialize` that are on their way

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any):
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

    initialize.__sp_overlap__ = True
    deepspeed.initialize, DeepSpeedEngine.__init__ = initialize, __init__


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
            _say_once(
                f"sp_overlap: sequence parallelism is on (sp size {size}) and ds_sp_overlap imported, but the "
                'DeepSpeed config has no "sp_overlap" section: nothing is overlapped. Add "sp_overlap": {} at its top level, or call '
                "ds_sp_overlap.enable(engine.module)"
            )
        return
    report = enable(engine.module, config, gradient_process_group=engine.seq_data_parallel_group)
    if engine.global_rank == 0:
        print(report, flush=True)


@functools.cache
def _say_once(message: str) -> None:
    log_dist(message, ranks=[0], level=logging.WARNING)


def find_group(model: nn.Module) -> Any:
    """The sp group of ``DistributedAttention`` modules in the model, of DeepSpeed's mesh or of its mpu; None if none."""
    for module in model.modules():
        if isinstance(module, DistributedAttention) and module.spg is not None:
            return module.spg
    try:
        return groups._get_sequence_parallel_group()
    except (KeyError, AssertionError):
        return None


def find_layers(model: nn.Module, channel: Channel, config: SpOverlapConfig, policy: Policy | None = None) -> list[Layer]:
    """DeepSpeed's ``DistributedAttention`` modules, whoever calls them. Raises ValueError where one has another sp group.

    What AutoSP has wrapped stays AutoSP's: it gathers the whole sequence around attention of its own.
    """
    found = []
    for name, module in model.named_modules():
        if type(module).__name__ == "UlyssesSPViTAttention":
            inside = tuple(module.modules())[1:]
            found.append(Layer(name, module, got="", lacks="DeepSpeed's AutoSP exchanges around it", inside=inside))
        if not isinstance(module, DistributedAttention):
            continue
        own = channel.ranks if module.spg is None else dist.get_process_group_ranks(module.spg)
        if own != channel.ranks:
            raise ValueError(
                f"{name} was made with an sp group of ranks {own}, and enable() is to use ranks {channel.ranks}; give both one group"
            )
        got = "q, k, v, o and dq, dk, dv, do with one another and with attention"
        bind = functools.partial(bind_drop_in, name, module, channel, config, policy)
        found.append(Layer(name, module, got, "the projections belong to its caller", bind))
    return found


def bind_drop_in(name: str, module: DistributedAttention, channel: Channel, config: SpOverlapConfig, policy: Policy | None):
    """Rebind DeepSpeed's class to the drop-in; returns what undoes it."""
    channel = Channel(module.spg or channel.group, config.transport, module.sp_stream, config.kernels)
    attend, original, dims = ProjectedAttention(channel, config, name, policy), module.forward, set()
    same_group = module.spg is not None or channel.size == dist.get_world_size()  # None is all ranks to DeepSpeed's class

    def forward(query, key, value, batch_dim_idx, rotary_pos_emb=None, *args, sequence_lengths=None, **kwargs):
        def instead(q, k, v):
            return original(q, k, v, batch_dim_idx, rotary_pos_emb, *args, **kwargs)

        # What DeepSpeed's class does right; the first call has shown the form of the local attention's output.
        alike = (
            dims == {4}
            and query.dim() == key.dim() == 4
            and isinstance(batch_dim_idx, int)
            and sequence_lengths is None
            and module.sp_stream is None
            and same_group
            and not (query.shape[2] % channel.size or key.shape[2] % channel.size)
            and (rotary_pos_emb is None or not batch_dim_idx)
        )
        y = drop_in_forward(
            attend, module.local_attn, module.num_kv_heads, query, key, value, batch_dim_idx, rotary_pos_emb, *args,
            sequence_lengths=sequence_lengths, instead=instead if alike else None, **kwargs,
        )  # fmt: skip
        dims.add(y.dim())
        return y

    return rebind(module, forward)
