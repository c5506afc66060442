"""Megatron-DeepSpeed: its ``ParallelAttention`` layers.

Known by the names of their children at commit 4efb479d, and driven whole if all that their forward
does is accounted for (`megatron.reading`); Megatron is never imported from here. A layer holds
``query_key_value`` (rows [all q | all k | all v]), ``dist_attn`` (DeepSpeed's class around the local
attention) and ``dense``, whose bias its caller adds; hidden states are [s/P, b, m]. With pull
request 415 it holds ``query_linear``, ``key_linear`` and ``value_linear`` instead of the fused
projection.

Driven whole, a layer is right where HEAD is not: the attention mask reaches core attention (HEAD
passes it as ``batch_dim_idx``), attention may return [s, b, h d], RoPE works sequence first, and KV
heads travel before they are repeated (HEAD asserts that there are as many as query heads).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.runtime.linear import Plain
from ...attention.self_attention import SelfAttention
from ...profiling.steps import in_backward
from ...rotary import Rotary
from ..chains import ChainedLayer, ForwardPasses, find_chains
from ..distributed_attention import OWN, DistributedAttention, bind_drop_in, has_own_forward
from ..inspect.accounting import Unknown
from ..inspect.attention import Reader
from ..inspect.probe import refuse_difference
from ..layers import FoundLayer, HostModule, OverlapSettings
from ..rebinding import rebind
from .decoder_layer import Asked, ParallelTransformerLayer, around, list_of
from .probe import difference
from .reading import AttentionReader

SPLIT = {"q_proj": "query_linear", "k_proj": "key_linear", "v_proj": "value_linear"}


# Attention over the whole sequence with this rank's heads.


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *, mask: tuple) -> Tensor:
    """q, k, v [s, b, h/P, d] -> o of that shape or [s, b, h/P d], by whichever attention the layer
    was built with.
    """
    local = module.dist_attn.local_attn
    flash = module.use_flash_attn and not module.use_flash_attn_triton
    native = (
        getattr(getattr(local, "flash_attn_func", None), "__name__", "") == "flash_attn_varlen_func"
    )
    if (
        k.shape[2] < q.shape[2] and not native
    ):  # every other attention of theirs wants as many KV heads as query heads
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    if flash:
        return local(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
    q, k, v = (x.contiguous() for x in (q, k, v))
    if module.use_flash_attn:
        return local(q, k, v)
    width = local.hidden_size_per_partition  # of all heads of a rank; q has those of one head group
    local.hidden_size_per_partition = q.shape[2] * q.shape[3]
    try:
        return local(q, k, v, *mask)
    finally:
        local.hidden_size_per_partition = width


def _tables(
    rotary: Any, rank: int, local_seq: int, sp_size: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """This rank's positions of cos and sin [s, 1, 1, d_rot]; nothing for a model without RoPE.

    RoPE is elementwise: before the exchange the bits are the same as behind it, and the time is
    hidden.
    """
    if rotary is None:
        return ()
    if (
        isinstance(rotary, Tensor)
        or len(rotary) != 2
        or not all(isinstance(table, Tensor) for table in rotary)
    ):
        raise ValueError(
            f"rotary_pos_emb must be (cos, sin) of the whole sequence, got {type(rotary).__name__}"
        )
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
        raise ValueError(
            f"attention_mask must cover the whole sequence, [b or 1, 1, {seq}, {seq}], got {list(mask.shape)}"
        )


# Layers.


class _Driven(NamedTuple):
    """A layer that is driven whole.

    forward   takes the place of the layer's
    ask       arguments of the layer by name, and what was made already for others of the same
              forward of the model -> keywords of the block's call
    """

    block: SelfAttention
    forward: Callable
    ask: Asked


def _drive(name: str, module: Any, reader: AttentionReader, overlap: OverlapSettings) -> _Driven:
    """The block over a layer, and a forward for the layer that calls it."""
    original, sp_group = module.forward, overlap.sp_group
    flash = module.use_flash_attn and not module.use_flash_attn_triton
    same_heads = module.num_attention_heads == module.num_key_value_heads
    stock_is_right = flash and same_heads and module.num_attention_heads % sp_group.size == 0
    split = {
        kind: getattr(module, child) for kind, child in SPLIT.items() if hasattr(module, child)
    }
    projections = split or {"qkv_proj": module.query_key_value}
    block = SelfAttention(
        local_attention=functools.partial(_attend, module),
        o_proj=module.dense,
        num_heads=module.num_attention_heads,
        num_kv_heads=module.num_key_value_heads,
        head_dim=module.hidden_size_per_attention_head,
        **projections,
        rope=Rotary(lambda tables: tables or None, partial=True),  # --rotary-percent
        sequence_process_group=sp_group.group,
        batch_first=False,
        config=overlap.config,
        name=name,
        policy=overlap.policy,
        plain=_plain([*projections.values(), module.dense]),
        heads_alike=True,
    )

    def ask(given: dict[str, Any], made: dict) -> dict[str, Any]:
        hidden, mask, rotary = (
            given["hidden_states"],
            given.get("attention_mask"),
            given.get("rotary_pos_emb"),
        )
        error: Exception | None = None
        try:
            reader.now(module)
            if given.get("inference_params") is not None:
                raise ValueError(
                    "generation with a KV cache does not work on a sequence that is split over ranks; call "
                    "ds_sp_overlap.disable(model) and generate without sequence parallelism"
                )
            _check_mask(None if module.use_flash_attn else mask, sp_group.size * len(hidden))
            of = (
                (*map(id, rotary), len(hidden), hidden.dtype)
                if isinstance(rotary, (tuple, list))
                else id(rotary)
            )
            if of not in made:  # alike for all layers, which are known to be given the same by that
                made[of] = (
                    rotary,
                    _tables(rotary, sp_group.rank, len(hidden), sp_group.size, hidden.dtype),
                )
        except (RuntimeError, ValueError) as raised:
            error = raised
        alike = (
            error is None and not reader.reading.refuses
        )  # else there is nothing to compare with
        _probe(name, module, reader, block, given, overlap, alike)
        if error is not None:
            block.layer.refuse(error)
        return dict(position_embeddings=made[of][1], mask=(mask,))

    def forward(
        hidden_states,
        attention_mask=None,
        encoder_output=None,
        inference_params=None,
        rotary_pos_emb=None,
        cpu_offloading=False,  # HEAD gives it first, and calls again without it after a TypeError
    ):
        given = dict(
            hidden_states=hidden_states, attention_mask=attention_mask, encoder_output=encoder_output,
            inference_params=inference_params, rotary_pos_emb=rotary_pos_emb,
        )  # fmt: skip
        asked = ask(given, {})

        def stock(x):
            return original(x, attention_mask, encoder_output, inference_params, rotary_pos_emb)

        baseline = stock if overlap.policy and stock_is_right else None
        try:
            return block(hidden_states, baseline=baseline, **asked)
        except (
            TypeError
        ) as error:  # HEAD would take this one for its own and call again, on this rank alone
            raise RuntimeError(f"{name}: {error}") from error

    return _Driven(block, forward, ask)


def _probe(
    name: str,
    module: Any,
    reader: AttentionReader,
    block: SelfAttention,
    given: dict[str, Any],
    overlap: OverlapSettings,
    alike: bool,
) -> None:
    """Raise RuntimeError, on all ranks, if the layer, ``given`` this, does something else than what
    was read. Collective.

    alike   whether its own forward takes what it is given, as far as is known
    """
    sp_group, lengths = overlap.sp_group, [len(given["hidden_states"])] * overlap.sp_group.size
    if in_backward() or not reader.probed.is_due(name, overlap.config.check, lengths):
        return
    compare = functools.partial(difference, module, block, given) if alike else str
    refuse_difference(reader.probed, name, module, sp_group, compare)


def _plain(linears: list[nn.Module]) -> Plain:
    """Forwards of Megatron's linear layers that compute ``x w^T + b`` and nothing else: of one
    tensor-parallel rank.
    """
    plain: Plain = {}
    for linear in linears:
        kind, forward = type(linear), type(linear).forward
        own = (
            forward.__module__ == kind.__module__
            and forward.__qualname__ == f"{kind.__qualname__}.forward"
        )
        more = (
            "sequence_parallel",
            "async_tensor_model_parallel_allreduce",
            "is_expert_without_slicing",
        )
        if own and kind.__name__ in ("ColumnParallelLinear", "RowParallelLinear"):
            if linear.weight is not None and not any(getattr(linear, what, False) for what in more):
                plain[forward] = operator.attrgetter("skip_bias_add")
    return plain


def _is_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return (
        isinstance(children.get("dist_attn"), DistributedAttention)
        and "dense" in children
        and hasattr(module, "layer_number")
    )


def _why_not(module: nn.Module) -> tuple[str, bool]:
    """Why a layer can't be driven whole, and whether its exchanges can be overlapped all the same;
    ("", True) if it can.
    """
    children = dict(module.named_children())
    if "query_key_value" not in children and not all(child in children for child in SPLIT.values()):
        return "cross attention", False
    if has_own_forward(module.dist_attn):
        return f"dist_attn ({type(module.dist_attn).__name__}): {OWN}", False
    if "forward" in vars(module):
        return "its forward was replaced", True
    if (
        module.num_attention_heads_per_partition != module.num_attention_heads
        or module.sequence_parallel
    ):
        return "tensor parallelism; the projections belong to it", True
    projections = [
        children[name] for name in (*SPLIT.values(), "query_key_value", "dense") if name in children
    ]
    if not all(hasattr(projection, "skip_bias_add") for projection in projections):
        return "its projections are not Megatron's", True
    return "", True


def _is_plain(module: nn.Module) -> bool:
    return bool(_plain([module]))


def find_layers(
    model: nn.Module, overlap: OverlapSettings
) -> tuple[list[FoundLayer], list[HostModule]]:
    """The ``ParallelAttention`` layers of a model, and the modules around them. Raises ValueError
    where ``head_groups`` is out of range.
    """
    found, modules, passes = [], dict(model.named_modules()), ForwardPasses(overlap.config)
    wanted: dict[str, Callable[[], ChainedLayer]] = {}
    known: list[Reader] = []
    for name, module in modules.items():
        if not _is_attention(module):
            continue
        inside = (module.dist_attn,)
        reason, exchanges = _why_not(module)
        if not reason:
            try:
                reader = AttentionReader(name, module, known)
            except Unknown as error:
                reason = str(error)
        if reason and exchanges:
            bind = functools.partial(bind_drop_in, f"{name}.dist_attn", module.dist_attn, overlap)
            got = "q, k, v and o, dq, dk, dv and do with one another and with attention"
            lacks = overlap.why_not_more(reason)
            found.append(
                FoundLayer(f"{name}.dist_attn", module.dist_attn, got, lacks, bind, inside)
            )
            continue
        if reason:
            found.append(FoundLayer(name, module, "", reason, None, inside))
            continue
        groups = overlap.groups_for(module.num_attention_heads, module.num_key_value_heads)
        driven = _drive(name, module, reader, overlap)
        linear = {part: child for part, child in module.named_children() if part != "dist_attn"}
        got, lacks = overlap.of_driven(driven.block, linear, groups)
        bind = functools.partial(rebind, module, driven.forward)
        found.append(FoundLayer(name, module, got, lacks, bind, inside))
        at, _, child = name.rpartition(".")
        chained = functools.partial(
            ParallelTransformerLayer, at, modules[at], child, driven.block, driven.ask
        )
        wanted[name] = functools.partial(chained, list_of(at, modules), _is_plain, passes)
    return found, around(
        find_chains(modules, wanted, found, overlap), passes, overlap.sp_group.size
    )
