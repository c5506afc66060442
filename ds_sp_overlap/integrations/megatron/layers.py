"""Megatron-DeepSpeed: finds its ``ParallelAttention`` layers.

A layer is recognised by the names of its children, as of commit 4efb479d: ``query_key_value`` (rows
[all q | all k | all v]), ``dist_attn`` (DeepSpeed's class around the local attention) and
``dense``, whose bias the caller adds. Hidden states are [s/P, b, m]. With pull request 415 a layer
has ``query_linear``, ``key_linear`` and ``value_linear`` in place of the fused projection. The
layer is driven whole if its forward is known (`megatron.source`). Megatron is never imported from
here.

A layer that is driven whole computes the right results where Megatron-DeepSpeed at 4efb479d
("HEAD") fails:

- The attention mask reaches core attention; HEAD passes it as ``batch_dim_idx``.
- Attention may return [s, b, h d].
- RoPE works where the sequence is the first dim.
- There may be fewer KV heads than query heads, which HEAD asserts against. KV heads are exchanged
  before they are repeated.
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
    """Return whether a layer's local attention takes [b, s, h, d]: flash attention, not Triton's."""
    return module.use_flash_attn and not module.use_flash_attn_triton


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *, mask: ForAllHeads) -> Tensor:
    """Attend with the local attention that the layer was built with.

    The block calls this between the exchanges, once for each head group. ``h/P`` below stands for
    the query heads of the group.

    Args:
        module: The layer.
        q: [s, b, h/P, d].
        k: [s, b, h_kv', d]. The KV heads that the query heads need.
        v: [s, b, h_kv', d].
        mask: The mask of core attention; flash attention takes none.

    Returns:
        o, [s, b, h/P, d] or [s, b, h/P d].
    """
    local = module.dist_attn.local_attn
    flash_function = getattr(getattr(local, "flash_attn_func", None), "__name__", "")
    grouped = k.shape[2] < q.shape[2]
    # Every other attention of Megatron wants as many KV heads as query heads.
    if grouped and flash_function != "flash_attn_varlen_func":
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    if is_batch_first(module):
        return local(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if module.use_flash_attn:
        return local(q, k, v)
    # Core attention flattens o to this width, that of all heads of a rank. q may hold only the
    # heads of one head group, so the width of q is set for the call.
    with replaced(vars(local), "hidden_size_per_partition", q.shape[2] * q.shape[3]):
        return local(q, k, v, mask.tensor)


def _local_tables(rotary: Any, x: Tensor, sp_group: SPGroup) -> tuple[Tensor, ...]:
    """Return cos and sin at the positions of this rank.

    Args:
        rotary: (cos, sin) of the whole sequence, each [s, 1, 1, d_rot]; None without RoPE.
        x: [s/P, b, m]. The hidden states.
        sp_group: The sp group.

    Returns:
        (cos, sin), each [s/P, 1, 1, d_rot], in the dtype of ``x``; empty without RoPE.

    Raises:
        ValueError: if ``rotary`` is anything else, or too short.
    """
    if rotary is None:
        return ()
    is_pair = not isinstance(rotary, Tensor) and len(rotary) == 2
    if not is_pair or not all(isinstance(table, Tensor) for table in rotary):
        raise ValueError(
            f"rotary_pos_emb must be (cos, sin) of the whole sequence, got {type(rotary).__name__}"
        )
    length, seq = min(len(table) for table in rotary), sp_group.size * len(x)
    if length < seq:
        raise ValueError(
            f"rotary_pos_emb has {length} positions, the whole sequence {seq} ({len(x)} on each "
            f"of {sp_group.size} ranks); give the tables of the whole sequence"
        )
    # RoPE is elementwise. So q and k can be rotated before the exchange, where the time is hidden,
    # and are bit-identical to those that the layer's own forward rotates behind the exchange.
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
    """A layer whose whole forward `SelfAttention` replaces.

    Args:
        name: The layer's name.
        module: The layer.
        settings: The settings of the layer.

    Attributes:
        block: The `SelfAttention`.
        facts: What the layer's forward goes by, as it was in `enable`.
        baseline_is_right: Whether the layer's own forward computes the same.
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
        # Megatron-DeepSpeed passes this at first, and calls again without it after a TypeError.
        cpu_offloading: bool = False,
    ) -> Any:
        """Attend over the global sequence; takes the place of the layer's forward. Collective.

        Raises:
            RuntimeError: on this rank, if the layer has changed since `enable`.
            ValueError: for arguments that can't work. In the layer's first call, every fault of one
                rank is this error on all ranks.
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
        # [b or 1, 1, s, s]; b may be the number of heads.
        mask = ForAllHeads(attention_mask)
        try:
            return block(
                hidden_states,
                baseline=(lambda x: own(x, *others)) if is_candidate else None,
                position_embeddings=tables,
                mask=mask,
            )
        except TypeError as error:
            # HEAD would call again after a TypeError, on this rank alone.
            raise RuntimeError(f"{name}: {error}") from error

    def _refuse_changed(self) -> None:
        """Raise RuntimeError, on this rank, if the layer is another one than in `enable`."""
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
    """Return the forwards of Megatron's linear layers that compute x w^T + b and nothing else.

    The block may compute these part by part.

    Returns:
        For each such forward, a function that tells whether a layer leaves its bias to the caller.
    """
    plain: Plain = {}
    # With any of these a layer computes more, for tensor parallelism.
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
    """Return whether the local attention of a layer is Megatron's, which treats all heads alike."""
    local = module.dist_attn.local_attn
    if not isinstance(local, nn.Module) or "forward" in vars(local) or has_own_call(local):
        return False
    # Megatron defines all of its local attentions in the file that defines the layer.
    files = {kind.__module__ for kind in type(module).__mro__}
    return defined_in(type(local).forward) in files


def _why_not(module: nn.Module) -> tuple[str, bool]:
    """Explain why a layer can't be driven whole.

    Returns:
        The reason, empty if the layer can be driven whole; and whether at least the exchanges in
        its ``dist_attn`` can be overlapped.
    """
    children = dict(module.named_children())
    if "query_key_value" not in children and not all(child in children for child in SPLIT.values()):
        return "cross attention", False
    if has_own_forward(module.dist_attn):
        return f"dist_attn ({type(module.dist_attn).__name__}): {OWN}", False
    # Whatever calls ``dist_attn``, the exchanges in it can be overlapped.
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

    `enable` calls this for every model, and nothing is rebound yet.

    Args:
        model: The model.
        overlap: The settings of its layers.

    Returns:
        The layers, each of which is driven whole, overlapped at its ``dist_attn`` alone, or left as
        it is; empty for a model of another framework.

    Raises:
        ValueError: if ``head_groups`` or ``shares`` is out of range.
    """
    layers: list[FoundLayer] = []
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        inside = (module.dist_attn,)
        reason, can_drop_in = _why_not(module)
        settings = settings_for(module.dist_attn, overlap, heads_alike=_has_own_local(module))
        if reason and can_drop_in:
            dist_attn = f"{name}.dist_attn", module.dist_attn
            layers.append(found_drop_in(*dist_attn, settings, reason=reason, inside=inside))
            continue
        if reason:
            layers.append(FoundLayer(name, module, lacks=reason, inside=inside))
            continue
        # Given a reason, `groups_for` lets no ranks share query heads. With fewer queries than
        # keys, Megatron's flash attention fails an assertion in training, and is not causal in
        # evaluation.
        why = f"{name}: Megatron-DeepSpeed's local attention takes as many queries as keys"
        driven = _Driven(name, module, settings)
        linear = {part: child for part, child in module.named_children() if part != "dist_attn"}
        got, lacks = settings.of_driven(driven.block, linear, why)
        bind = functools.partial(rebind, module, driven.forward)
        layers.append(FoundLayer(name, module, got, lacks=lacks, bind=bind, inside=inside))
    return layers
