"""Finds the ``ParallelAttention`` layers of Megatron-DeepSpeed, and replaces their forward.

A layer is recognised by the names of its children, as of commit 4efb479d: ``query_key_value``, the
fused projection with rows [all q | all k | all v]; ``dist_attn``, DeepSpeed's class around the
local attention; and ``dense``, whose bias the layer's caller adds. With pull request 415 a layer
has ``query_linear``, ``key_linear`` and ``value_linear`` instead of the fused projection. Hidden
states are [s/P, b, m]. If the forward of a layer is known (`megatron.source`), `SelfAttention`
replaces the whole forward. This file never imports Megatron.

The replaced forward computes correct results where Megatron-DeepSpeed at 4efb479d ("HEAD") fails:

- The attention mask reaches core attention; HEAD passes it as ``batch_dim_idx``.
- Attention may return [s, b, h d].
- RoPE works where the sequence is the first dim.
- There may be fewer KV heads than query heads; HEAD asserts equal numbers. KV heads are repeated
  only after the exchange.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...attention.arguments import ForAllHeads
from ...attention.runtime.linear import Plain, hooks_are_harmless
from ...attention.self_attention import SelfAttention
from ...exchange.sp_group import SPGroup
from ...rotary import Rotary
from ..distributed_attention import OWN, found_drop_in, has_own_forward, is_stock, settings_for
from ..inspect.library import MISSING, defined_in, digest, replaced
from ..inspect.tokenwise import has_own_call
from ..layers import FoundLayer, OverlapSettings
from ..rebinding import rebind
from .source import KNOWN_LINEAR, facts_of, why_unknown

SPLIT = {"q_proj": "query_linear", "k_proj": "key_linear", "v_proj": "value_linear"}


# Attention over the whole sequence with this rank's heads.


def is_batch_first(module: Any) -> bool:
    """Return whether a layer's local attention takes q as [b, s, h, d].

    Flash attention does, except for its implementation in Triton.
    """
    return module.use_flash_attn and not module.use_flash_attn_triton


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *, mask: ForAllHeads) -> Tensor:
    """Attend with the local attention that the layer was built with.

    `SelfAttention` calls this between the exchanges, once for each head group of h' query heads.

    Args:
        module: The layer.
        q: [s, b, h', d].
        k: [s, b, h_kv', d]. The KV heads that the query heads need.
        v: [s, b, h_kv', d].
        mask: The attention mask; used by core attention, ignored by flash attention.

    Returns:
        o, [s, b, h', d] or [s, b, h' * d].
    """
    local = module.dist_attn.local_attn
    flash_function = getattr(getattr(local, "flash_attn_func", None), "__name__", "")
    grouped = k.shape[2] < q.shape[2]
    # Repeat KV heads, except for flash-attn 2: all other attentions of Megatron need as many KV
    # heads as query heads.
    if grouped and flash_function != "flash_attn_varlen_func":
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    if is_batch_first(module):
        return local(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if module.use_flash_attn:
        return local(q, k, v)
    # Core attention flattens the heads of o to the width in this attribute, the width of all heads
    # of a rank. Set the attribute to the width of q, which may hold a single head group.
    with replaced(vars(local), "hidden_size_per_partition", q.shape[2] * q.shape[3]):
        return local(q, k, v, mask.tensor)


def _local_tables(rotary: Any, x: Tensor, sp_group: SPGroup) -> tuple[Tensor, ...]:
    """Return the cos and sin tables for the positions of this rank.

    Args:
        rotary: (cos, sin) of the whole sequence, each [s, 1, 1, d_rot]; None without RoPE.
        x: [s/P, b, m]. The hidden states.
        sp_group: The sp group.

    Returns:
        (cos, sin), each [s/P, 1, 1, d_rot], in the dtype of ``x``; empty without RoPE.

    Raises:
        ValueError: if ``rotary`` is not two tensors, or is shorter than the sequence.
    """
    if rotary is None:
        return ()
    if isinstance(rotary, Tensor) or [isinstance(each, Tensor) for each in rotary] != [True] * 2:
        raise ValueError(
            f"rotary_pos_emb must be (cos, sin) of the whole sequence, got {type(rotary).__name__}"
        )
    length, seq = min(map(len, rotary)), sp_group.size * len(x)
    if length < seq:
        raise ValueError(
            f"rotary_pos_emb has {length} positions, the whole sequence {seq} ({len(x)} on each "
            f"of {sp_group.size} ranks); give the tables of the whole sequence"
        )
    # RoPE computes each token by itself. So each rank rotates its own tokens before the exchange,
    # while other exchanges are in flight. The result has the same bits as in the layer's own
    # forward, which rotates after the exchange.
    (cos, sin), own = rotary, slice(sp_group.rank * len(x), (sp_group.rank + 1) * len(x))
    return cos[own].to(x.dtype), sin[own].to(x.dtype)


def _check_mask(mask: Any, seq: int) -> None:
    """Raise ValueError for a mask that does not cover the whole sequence."""
    if isinstance(mask, Tensor) and list(mask.shape[-2:]) != [seq, seq]:
        raise ValueError(
            f"attention_mask must cover the whole sequence, [b or 1, 1, {seq}, {seq}], got "
            f"{list(mask.shape)}"
        )


# Layers.


class _Driven:
    """Runs a layer whose whole forward `SelfAttention` replaces.

    Args:
        name: The layer's name.
        module: The layer.
        settings: The settings of the layer.

    Attributes:
        block: The `SelfAttention`.
        facts: The children, constants and methods that the forward uses, recorded in `enable`.
        baseline_is_right: Whether the layer's own forward computes the same result.
    """

    def __init__(self, name: str, module: Any, settings: OverlapSettings):
        self.name, self.module, self.settings = name, module, settings
        self.facts = facts_of(module)
        heads, kv_heads = module.num_attention_heads, module.num_key_value_heads
        even = heads == kv_heads and heads % settings.sp_group.size == 0
        self.baseline_is_right = even and is_batch_first(module)
        projections = (
            {"qkv_proj": module.query_key_value}
            if "query_key_value" in self.facts
            else {kind: getattr(module, child) for kind, child in SPLIT.items()}
        )
        self.block = SelfAttention(
            local_attention=functools.partial(_attend, module),
            o_proj=module.dense,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=module.hidden_size_per_attention_head,
            **projections,
            rope=Rotary(lambda tables: tables or None, partial=True),  # --rotary-percent
            sequence_process_group=settings.sp_group.group,
            batch_first=False,
            config=settings.config,
            name=name,
            policy=settings.policy,
            plain=_plain([*projections.values(), module.dense]),
            heads_alike=True,
        )

    def forward(
        self,
        own: Callable,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Any = None,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        # Megatron-DeepSpeed first calls with this argument. After a TypeError it calls without.
        cpu_offloading: bool = False,
    ) -> Any:
        """Attend over the global sequence; replaces the layer's forward. Collective.

        Raises:
            RuntimeError: on this rank, if the layer has changed since `enable`.
            ValueError: for invalid arguments. In the layer's first call, an error of one rank is
                raised on all ranks, as a ValueError.
        """
        name, module, block, settings = self.name, self.module, self.block, self.settings
        others = (attention_mask, encoder_output, inference_params, rotary_pos_emb)
        try:
            self._refuse_changed()
            if inference_params is not None:
                raise ValueError(
                    "generation with a KV cache does not work on a sequence that is split over "
                    "ranks; call ds_sp_overlap.disable(model) and generate without sequence "
                    "parallelism"
                )
            if not module.use_flash_attn:
                _check_mask(attention_mask, settings.sp_group.size * len(hidden_states))
            tables = _local_tables(rotary_pos_emb, hidden_states, settings.sp_group)
        except (RuntimeError, ValueError) as error:
            block.layer.refuse(error)
        is_candidate = settings.policy and self.baseline_is_right
        # The mask is [b or 1, 1, s, s]. If b equals the number of heads, dim 0 would be taken for
        # heads, and cut. `ForAllHeads` prevents that.
        mask = ForAllHeads(attention_mask)
        try:
            return block(
                hidden_states,
                baseline=(lambda x: own(x, *others)) if is_candidate else None,
                position_embeddings=tables,
                mask=mask,
            )
        except TypeError as error:
            # Raise no TypeError: Megatron-DeepSpeed would call again, on this rank only.
            raise RuntimeError(f"{name}: {error}") from error

    def _refuse_changed(self) -> None:
        """Raise RuntimeError, on this rank, if the layer has changed since `enable`."""
        module, now = self.module, facts_of(self.module)
        changed = [name for name, fact in self.facts.items() if now.get(name, MISSING) != fact]
        if not hooks_are_harmless(module.dist_attn) or has_own_forward(module.dist_attn):
            changed.append("dist_attn")
        if changed:
            raise RuntimeError(
                f"{self.name}: {', '.join(changed)} replaced, hooked or patched since "
                "ds_sp_overlap.enable; call ds_sp_overlap.enable again"
            )


def _plain(linears: list[nn.Module]) -> Plain:
    """Find the forwards, among those of ``linears``, that compute x w^T + b and nothing else.

    `SelfAttention` may compute such linear layers part by part.

    Returns:
        For each such forward, a function of a linear layer: whether the layer's caller adds the
        bias.
    """
    plain: Plain = {}
    # A linear layer with one of these attributes set also communicates, for tensor parallelism.
    extras = (
        "sequence_parallel",
        "async_tensor_model_parallel_allreduce",
        "is_expert_without_slicing",
    )
    for linear in linears:
        if digest(type(linear), "forward") not in KNOWN_LINEAR:  # guard: linear by its source
            continue
        if linear.weight is not None and not any(getattr(linear, name, False) for name in extras):
            plain[type(linear).forward] = operator.attrgetter("skip_bias_add")
    return plain


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is a ``ParallelAttention``, which calls DeepSpeed's ``dist_attn``."""
    children = dict(module.named_children())
    return (
        is_stock(children.get("dist_attn"))
        and "dense" in children
        and hasattr(module, "layer_number")
    )


def _has_own_local(module: Any) -> bool:
    """Return whether a layer's local attention is Megatron's; Megatron's treats all heads alike."""
    local = module.dist_attn.local_attn
    if not isinstance(local, nn.Module) or "forward" in vars(local) or has_own_call(local):
        return False
    # Megatron defines all of its local attentions in the same file as the layer.
    files = {kind.__module__ for kind in type(module).__mro__}
    return defined_in(type(local).forward) in files


def _why_not(module: nn.Module) -> tuple[str, bool]:
    """Explain why the whole forward of a layer can't be replaced.

    Returns:
        The reason; empty if the forward can be replaced. And whether the exchanges in the layer's
        ``dist_attn`` can be overlapped, at least.
    """
    children = dict(module.named_children())
    if "query_key_value" not in children and not children.keys() >= set(SPLIT.values()):
        return "cross attention", False
    if has_own_forward(module.dist_attn):
        return f"dist_attn ({type(module.dist_attn).__name__}): {OWN}", False
    # From here on, at least the exchanges in ``dist_attn`` can be overlapped.
    if "forward" in vars(module):
        return "its forward was replaced", True
    splits_heads = module.num_attention_heads_per_partition != module.num_attention_heads
    if splits_heads or module.sequence_parallel:
        return "tensor parallelism; the projections belong to it", True
    # Every linear layer of Megatron has this attribute.
    for name in (*SPLIT.values(), "query_key_value", "dense"):
        if name in children and not hasattr(children[name], "skip_bias_add"):
            return "its projections are not Megatron's", True
    return why_unknown(module), True


def find_layers(model: nn.Module, overlap: OverlapSettings) -> list[FoundLayer]:
    """Find the ``ParallelAttention`` layers of a model.

    `enable` calls this for every model. Nothing is rebound here.

    Args:
        model: The model.
        overlap: The settings of its layers.

    Returns:
        All such layers: layers whose whole forward is replaced, layers that only overlap exchanges
        in ``dist_attn``, and layers that overlap nothing. Empty for a model of another framework.

    Raises:
        ValueError: if ``head_groups`` or ``shares`` is out of range.
    """
    layers = []
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        reason, can_drop_in = _why_not(module)
        settings = settings_for(module.dist_attn, overlap, heads_alike=_has_own_local(module))
        layer = FoundLayer(name, module, lacks=reason)
        if reason and can_drop_in:
            layer = found_drop_in(f"{name}.dist_attn", module.dist_attn, settings, reason)
        elif not reason:
            # If ranks shared query heads, each would have fewer queries than keys. Megatron's flash
            # attention then fails an assertion in training, and is not causal in evaluation. Given
            # this reason as ``attend``, `shares_of` lets no ranks share query heads.
            why = f"{name}: Megatron-DeepSpeed's local attention takes as many queries as keys"
            driven = _Driven(name, module, settings)
            linear = dict(module.named_children())
            del linear["dist_attn"]
            layer.got, layer.lacks = settings.of_driven(driven.block, linear, why)
            layer.bind = functools.partial(rebind, module, driven.forward)
        layer.inside = (module.dist_attn,)
        layers.append(layer)
    return layers
