"""Megatron-DeepSpeed: its ``ParallelAttention`` layers, and what keeps its HEAD from a current DeepSpeed.

Known by their form at commit 4efb479d; Megatron is never imported from here. A layer holds, in this order,
``query_key_value`` (rows [all q | all k | all v]), ``dist_attn`` (DeepSpeed's class around the local attention) and
``dense``, whose bias its caller adds; hidden states are [s/P, b, m]. With pull request 415 it holds ``query_linear``,
``key_linear`` and ``value_linear`` instead of the fused projection.

Driven whole, a layer is right where HEAD is not: the attention mask reaches core attention (HEAD passes it as
``batch_dim_idx``), attention may return [s, b, h d], RoPE works sequence first, and KV heads travel before they are
repeated (HEAD asserts that there are as many as query heads).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import traceback
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ..config import SpOverlapConfig
from ..exchange import Channel
from ..layout import Geometry
from ..linear import Forwards
from ..policy import Policy
from ..rotary import Rotary
from ..self_attention import SelfAttention
from . import Layer, driven, rebind
from .deepspeed import DistributedAttention, bind_drop_in

FORWARD = ("hidden_states", "attention_mask", "encoder_output", "inference_params", "rotary_pos_emb")
SPLIT = {"q_proj": "query_linear", "k_proj": "key_linear", "v_proj": "value_linear"}


# What HEAD asks of DeepSpeed.


class _Compression(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``deepspeed.compression.compress``, which HEAD imports and DeepSpeed removed: present, and no more than that.

    Last of all finders, so that a DeepSpeed that has it is left alone, and only in a process that uses Megatron.
    """

    names = ("deepspeed.compression", "deepspeed.compression.compress")
    functions = ("init_compression", "redundancy_clean")

    def find_spec(self, name: str, path: Any, target: Any = None):
        if name not in self.names or "megatron" not in sys.modules:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == self.names[0])

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        if module.__name__ == self.names[1]:
            for function in self.functions:
                setattr(module, function, functools.partial(self._refuse, function))

    @staticmethod
    def _refuse(function: str, *args: Any, **kwargs: Any):
        raise RuntimeError(
            f"deepspeed.compression.compress.{function}: DeepSpeed {deepspeed.__version__} has no compression any more; take "
            '"compression_training" and --compression-training out, or train without sequence parallelism on an older DeepSpeed'
        )


def bridge() -> None:
    """Let Megatron-DeepSpeed be imported beside a DeepSpeed that has dropped what it imports."""
    if not any(isinstance(finder, _Compression) for finder in sys.meta_path):
        sys.meta_path.append(_Compression())


HINTS = {  # what fails at HEAD before, or without, a layer of ours: a piece of the message or of the failing line
    "num_attention_heads % parallel_state.get_sequence_parallel_world_size()": "the query heads must divide by "
    "--ds-sequence-parallel-size; take another size",
    "self.projection_size == self.kv_projection_size": "Megatron-DeepSpeed has no grouped queries here; they work where the "
    'overlap is on: an "sp_overlap" section in the DeepSpeed config, and --ds-sequence-parallel-size above 1',
    "batch_dim_idx": "Megatron-DeepSpeed passes attention_mask where DeepSpeed takes batch_dim_idx; core attention works where "
    'the overlap is on: an "sp_overlap" section in the DeepSpeed config; or take --use-flash-attn-v2',
    "num_local_head, head_dim = input.shape": "DeepSpeed's class wants the heads of attention's output in a dimension of their own; "
    'Triton\'s attention works where the overlap is on: an "sp_overlap" section in the DeepSpeed config',
    "Invalid Grid": "pipeline modules know no sequence parallelism; add --no-pipeline-parallel",
    "save_for_backward can only save variables": "RoPE is recomputed only with --checkpoint-activations "
    "--deepspeed-activation-checkpointing, in place of --recompute-granularity full",
    "Invalid activation recompute method": "--checkpoint-activations needs --deepspeed-activation-checkpointing beside it",
}


def explain(error: BaseException) -> str | None:
    """What to do about an error that Megatron-DeepSpeed is known to raise under sequence parallelism; None for others."""
    frames = traceback.extract_tb(error.__traceback__)
    seen = str(error) + (frames[-1].line or "" if frames else "")
    return next((hint for piece, hint in HINTS.items() if piece in seen), None)


def section(args: Any) -> dict | None:
    """The section that pull request 415's flags stand for, where a script has them and they are set."""
    return {"enabled": True} if getattr(args, "ds_sequence_parallel_overlap_comm", False) else None


# Attention over the whole sequence with this rank's heads.


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, mask: tuple) -> Tensor:
    """q, k, v [s, b, h/P, d] -> o of that shape or [s, b, h/P d], by whichever attention the layer was built with."""
    local = module.dist_attn.local_attn
    flash = module.use_flash_attn and not module.use_flash_attn_triton
    native = getattr(getattr(local, "flash_attn_func", None), "__name__", "") == "flash_attn_varlen_func"
    if k.shape[2] < q.shape[2] and not native:  # every other attention of theirs wants as many KV heads as query heads
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    if flash:
        return local(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
    q, k, v = (x.contiguous() for x in (q, k, v))
    if module.use_flash_attn:
        return local(q, k, v)
    width = local.hidden_size_per_partition  # of all heads of a rank; here there are those of one head group
    local.hidden_size_per_partition = q.shape[2] * q.shape[3]
    try:
        return local(q, k, v, *mask)
    finally:
        local.hidden_size_per_partition = width


def _tables(rotary: Any, rank: int, local_seq: int, sp_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """This rank's positions of cos and sin [s, 1, 1, d].

    RoPE is elementwise, so that before the exchange it gives the same bits as after it, and its time is hidden.
    """
    if rotary is None:
        return None
    if isinstance(rotary, Tensor) or len(rotary) != 2 or not all(isinstance(table, Tensor) for table in rotary):
        raise ValueError(f"rotary_pos_emb must be (cos, sin) of the whole sequence, got {type(rotary).__name__}")
    lengths = [len(table) for table in rotary]
    if min(lengths) < sp_size * local_seq:
        raise ValueError(
            f"rotary_pos_emb has {min(lengths)} positions, the whole sequence {sp_size * local_seq} ({local_seq} on each of "
            f"{sp_size} ranks); give the tables of the whole sequence"
        )
    cos, sin = (table[rank * local_seq : (rank + 1) * local_seq].to(dtype) for table in rotary)
    return cos, sin


def _check_mask(mask: Any, seq: int) -> None:
    if isinstance(mask, Tensor) and list(mask.shape[-2:]) != [seq, seq]:
        raise ValueError(f"attention_mask must cover the whole sequence, [b or 1, 1, {seq}, {seq}], got {list(mask.shape)}")


# Layers.


def _drive(name: str, module: nn.Module, channel: Channel, config: SpOverlapConfig, policy: Policy | None):
    """The block over a layer, and a forward for the layer that calls it."""
    original = module.forward
    flash = module.use_flash_attn and not module.use_flash_attn_triton
    same_heads = module.num_attention_heads == module.num_key_value_heads
    stock_is_right = flash and same_heads and module.num_attention_heads % channel.size == 0
    split = {kind: getattr(module, child) for kind, child in SPLIT.items() if hasattr(module, child)}
    projections = split or {"qkv_proj": module.query_key_value}
    block = SelfAttention(
        local_attention=functools.partial(_attend, module),
        o_proj=module.dense,
        num_heads=module.num_attention_heads,
        num_kv_heads=module.num_key_value_heads,
        head_dim=module.hidden_size_per_attention_head,
        **projections,
        rope=Rotary(lambda tables: tables),
        sequence_process_group=channel.group,
        batch_first=False,
        config=config,
        name=name,
        policy=policy,
        plain=_plain([*projections.values(), module.dense]),
    )

    def forward(
        hidden_states,
        attention_mask=None,
        encoder_output=None,
        inference_params=None,
        rotary_pos_emb=None,
        cpu_offloading=False,  # HEAD tries with it first, and again without where that is a TypeError
    ):
        tables = None
        try:
            if inference_params is not None:
                raise ValueError(
                    "generation with a KV cache does not work on a sequence that is split over ranks; call "
                    "ds_sp_overlap.disable(model) and generate without sequence parallelism"
                )
            _check_mask(None if module.use_flash_attn else attention_mask, channel.size * len(hidden_states))
            tables = _tables(rotary_pos_emb, channel.rank, len(hidden_states), channel.size, hidden_states.dtype)
        except ValueError as error:
            _refuse(block, error)

        def stock(x):
            return original(x, attention_mask, encoder_output, inference_params, rotary_pos_emb)

        instead = stock if policy and stock_is_right else None
        try:
            return block(hidden_states, position_embeddings=tables, mask=(attention_mask,), instead=instead)
        except TypeError as error:  # HEAD would take it for its own and run the layer a second time, on this rank alone
            raise RuntimeError(f"{name}: {error}") from error

    return block, forward


def _refuse(block: SelfAttention, error: ValueError) -> None:
    """Raise on all ranks alike."""

    def describe():
        raise error

    block.layer.call(describe)


def _plain(linears: list[nn.Module]) -> Forwards:
    """Forwards of Megatron's linear layers that compute ``x w^T + b`` and nothing else: of one tensor-parallel rank."""
    forwards = []
    for linear in linears:
        kind, forward = type(linear), type(linear).forward
        own = forward.__module__ == kind.__module__ and forward.__qualname__ == f"{kind.__qualname__}.forward"
        more = ("sequence_parallel", "async_tensor_model_parallel_allreduce", "is_expert_without_slicing")
        if own and kind.__name__ in ("ColumnParallelLinear", "RowParallelLinear"):
            if linear.weight is not None and not any(getattr(linear, what, False) for what in more):
                forwards.append(forward)
    return tuple(forwards)


def _is_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return (
        isinstance(children.get("dist_attn"), DistributedAttention) and "dense" in children and hasattr(module, "layer_number")
    )


def _why_not(module: nn.Module) -> tuple[str, bool]:
    """Why a layer can't be driven whole, and whether its exchanges can be overlapped all the same; ("", True) if it can."""
    children = dict(module.named_children())
    if "query_key_value" not in children and not all(child in children for child in SPLIT.values()):
        return "cross attention", False
    unknown = set(inspect.signature(type(module).forward).parameters) - {"self", *FORWARD}
    if "forward" in vars(module) or unknown:
        return f"its forward is not the known one ({', '.join(sorted(unknown)) or 'replaced'})", True
    if module.num_attention_heads_per_partition != module.num_attention_heads or module.sequence_parallel:
        return "tensor parallelism; the projections belong to it", True
    projections = [children[name] for name in (*SPLIT.values(), "query_key_value", "dense") if name in children]
    if not all(hasattr(projection, "skip_bias_add") for projection in projections):
        return "its projections are not Megatron's", True
    return "", True


def find_layers(model: nn.Module, channel: Channel, config: SpOverlapConfig, policy: Policy | None = None) -> list[Layer]:
    """The ``ParallelAttention`` layers of a model. Raises ValueError where ``head_groups`` is out of range."""
    found = []
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        inside = (module.dist_attn,)
        reason, exchanges = _why_not(module)
        if reason and exchanges:
            bind = functools.partial(bind_drop_in, f"{name}.dist_attn", module.dist_attn, config, policy)
            got = "q, k, v and o, dq, dk, dv and do with one another and with attention"
            found.append(Layer(f"{name}.dist_attn", module.dist_attn, got, reason, bind, inside))
            continue
        if reason:
            found.append(Layer(name, module, "", reason, None, inside))
            continue
        heads, kv_heads = module.num_attention_heads, module.num_key_value_heads
        groups = config.groups_for(heads, channel.size)
        Geometry(channel.size, channel.rank, (0,) * channel.size, 0, heads, kv_heads, groups)  # refuses what can't work
        block, forward = _drive(name, module, channel, config, policy)
        linear = {name: child for name, child in module.named_children() if name != "dist_attn"}
        got, lacks = driven(block, linear, groups, policy)
        bind = functools.partial(rebind, module, forward)
        found.append(Layer(name, module, got, lacks, bind, inside))
    return found
