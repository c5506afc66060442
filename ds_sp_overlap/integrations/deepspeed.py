"""DeepSpeed: the ``sp_overlap`` section of its config, its sp group, and its ``DistributedAttention`` modules."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
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

    Raises ImportError for a DeepSpeed whose own sequence parallelism has wrong gradients.
    """
    if Version(Version(deepspeed.__version__).base_version) < Version(OLDEST):
        raise ImportError(
            f"ds_sp_overlap needs DeepSpeed >= {OLDEST}, found {deepspeed.__version__}: before it the gradients of query and "
            f"key under sequence-parallel overlap are wrong (DeepSpeed PR 5691 as merged); pip install 'deepspeed>={OLDEST}'"
        )
    if hasattr(deepspeed.initialize, "__sp_overlap__"):
        return
    original = deepspeed.initialize
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any):
        section = _section(signature.bind(*args, **kwargs).arguments)
        if section is None:
            if from_command_line:
                raise ValueError(f"run --{', --'.join(from_command_line)}: the DeepSpeed config has no sp_overlap section; add one")
            return original(*args, **kwargs)
        if isinstance(section, dict):
            section = {**section, **from_command_line}
        config = SpOverlapConfig.parse(section)  # refused before DeepSpeed starts anything
        result = original(*args, **kwargs)
        engine = result[0]
        report = enable(engine.module, config, gradient_process_group=engine.seq_data_parallel_group)
        if engine.global_rank == 0:
            print(report, flush=True)
        return result

    initialize.__sp_overlap__ = True
    deepspeed.initialize = initialize


def _section(given: dict[str, Any]) -> Any:
    """The ``sp_overlap`` section, from wherever ``deepspeed.initialize`` takes its config; None if there is none."""
    args = given.get("args")
    config = given.get("config") or given.get("config_params") or getattr(args, "deepspeed_config", None)
    config = {} if config is None else config if isinstance(config, dict) else load_ds_config(config)
    return config.get("sp_overlap", megatron_bridge.section(args))


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
    """DeepSpeed's ``DistributedAttention`` modules, whoever calls them. Raises ValueError where one has another sp group."""
    found = []
    for name, module in model.named_modules():
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
