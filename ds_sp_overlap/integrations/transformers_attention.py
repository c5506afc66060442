"""transformers: attention over the global sequence, and the attention function of layers of unknown families."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.drop_in import ProjectedAttention
from ..attention.heads import PerHead
from ..attention.latent import LatentAttention
from ..attention.layer import Layer
from ..attention.linear import autocast
from ..exchange.channel import Channel
from .layers import Overlap
from .masks import Pattern
from .positions import GlobalSequence
from .rebinding import Undo, rebind
from .transformers_forward import Forwards
from .transformers_modules import attention_functions, off_in_eval, refuse_copy, stock_of, unfit


def _core(module: Any) -> tuple[str, Callable]:
    """Name and function of the attention that the model was configured for, without sequence parallelism around it."""
    name = module.config._attn_implementation
    if (reason := unfit(name)) is not None:  # of another attention than at `enable`
        raise ValueError(f"sp_overlap: {type(module).__name__}: {reason}")
    function = attention_functions()[name]
    stock = stock_of(function)
    if stock is not None:
        return name, stock.attn
    return name, function.before if isinstance(function, Dispatch) else function


def _takes_edges(function: Callable) -> bool:
    """Whether a flash attention is transformers' own, or a partial of it; another one may find documents in position_ids alone."""
    return getattr(getattr(function, "func", function), "__module__", "") == "transformers.integrations.flash_attention"


def local_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, *, sequence: GlobalSequence, pattern: Pattern, **options: Any
) -> Tensor:
    """q, k, v [b, s, h/P, d] -> o [b, s, h/P, d], through transformers' own attention function.

    As on one rank, sdpa goes by what the mask says, and a flash attention by its own arguments.
    """
    name, function = _core(module)
    told = vars(module).get("num_key_value_groups")
    heads_per_kv = q.shape[2] // k.shape[2]
    module.num_key_value_groups = heads_per_kv  # of this rank, where ranks share KV heads

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
        return function(module, *(x.transpose(1, 2) for x in (q, k, v)), mask, **options, **more)[0]

    def document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, window = q.shape[1], pattern.window
        return attention(q, k, v, sequence.window_mask(length, window) if window is not None and window < length else None)

    def alone(v: Tensor) -> Tensor:
        kept = F.dropout(v.new_ones(len(v), v.shape[1] * heads_per_kv, 1), options.get("dropout", 0.0))
        return v.repeat_interleave(heads_per_kv, 1) * kept

    try:
        if name == "sdpa":
            documents = sequence.documents(pattern.chunk)
            return document(q, k, v) if documents is None else documents.attend(document, alone, q, k, v)
        if pattern.chunk is not None and pattern.chunk < q.shape[1]:
            raise ValueError(f'{type(module).__name__}: "{name}" has no attention in chunks of {pattern.chunk}; use "sdpa"')
        if _takes_edges(function):
            return attention(q, k, v, None, **sequence.for_flash)  # guard: edges, no positions
        if sequence.bounds is None or q.shape[0] == 1:  # position_ids tell the documents of one row
            return attention(q, k, v, None, position_ids=sequence.position_ids)
        rows = [slice(row, row + 1) for row in range(q.shape[0])]
        return torch.cat([attention(q[row], k[row], v[row], None, position_ids=sequence.position_ids[row]) for row in rows])
    finally:
        if told is not None:
            module.num_key_value_groups = told
        else:
            del module.num_key_value_groups


def stock_does_the_same(
    module: Any, x: Tensor, sequence: GlobalSequence, pattern: Pattern, channel: Channel, given: dict[str, Any]
) -> bool:
    """Whether stock Ulysses is registered for a call with ``x`` [b, s/P, ..] and would compute what we do."""
    stock = stock_of(attention_functions().get(module.config._attn_implementation))
    if stock is None or dist.get_process_group_ranks(stock.process_group) != dist.get_process_group_ranks(channel.group):
        return False
    fits = x.shape[0] == stock.batch_size and (stock.seq_length_is_variable or x.shape[1] == stock.local_seq_length)
    seq, alike = sum(sequence.lengths), len(set(sequence.lengths)) == 1
    whole = sequence.bounds is None and all(size is None or size >= seq for size in (pattern.window, pattern.chunk))
    return fits and alike and whole and given.get("position_ids") is not None


class Dispatch:
    """An attention function that overlaps the modules it was given, and passes on all others."""

    def __init__(self, before: Callable):
        self.before = before
        self.attend: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()

    @torch.compiler.disable
    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        if module not in self.attend or off_in_eval(module):
            return self.before(module, query, key, value, attention_mask, **kwargs)
        attend, forwards, where = self.attend[module]
        forwards.attended.add(where)
        if kwargs.get("position_bias") is not None:
            raise ValueError(f"{where}: attention with position_bias (a mask for each head) can't be split over ranks here")
        given = dict(kwargs)
        per_head = {"s_aux": PerHead(kwargs.pop("s_aux"))} if kwargs.get("s_aux") is not None else {}
        q, k, v = autocast(*(x.transpose(1, 2) for x in (query, key, value)))  # norms and rotations may have left fp32
        sequence, pattern = forwards.of(where, module, q, attention_mask, kwargs)
        channel = attend.layer.channel
        q = _scaled_by_position(module, q, sequence, channel.rank)
        local = functools.partial(local_attention, module, sequence=sequence, pattern=pattern, **kwargs)

        def stock(*qkv):
            o = self.before(module, *(x.transpose(1, 2) for x in qkv), attention_mask, **given)[0]
            return o.unflatten(-1, (q.shape[2], -1)) if o.dim() == 3 else o

        alike = attend.layer.policy and stock_does_the_same(module, q, sequence, pattern, channel, given)
        ulysses = stock_of(self)
        alike = alike and (q.shape[2], k.shape[2]) == (ulysses.attn_head_count, ulysses.global_kv_head_count)
        baseline = stock if alike else None
        o = attend(local, q, k, v, kwargs=per_head, batch_first=True, sequence_lengths=sequence.lengths, baseline=baseline)
        return o, None


def _scaled_by_position(module: Any, q: Tensor, sequence: GlobalSequence, rank: int) -> Tensor:
    """Llama 4 scales q [b, s/P, h, d] of layers without RoPE by position, which it counts from this rank's first token."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return q
    local = torch.arange(q.shape[1], device=q.device, dtype=torch.float32)

    def scale(position: Tensor) -> Tensor:
        return torch.log1p(torch.floor((position + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    right = scale(local + sum(sequence.lengths[:rank])).to(q.dtype) / scale(local).to(q.dtype)
    return q * right[:, None, None]


def bind_function(
    name: str,
    module: Any,
    forwards: Forwards,
    overlap: Overlap,
    attention: Callable[[Layer], ProjectedAttention | LatentAttention] = ProjectedAttention,
) -> Undo:
    """Overlap the attention function of a layer; its projections stay its own."""
    functions, implementation = attention_functions(), module.config._attn_implementation
    if not isinstance(functions[implementation], Dispatch):
        functions[implementation] = Dispatch(functions[implementation])
    dispatch = functions[implementation]
    attend = attention(Layer(overlap.channel, overlap.config, name, overlap.policy, heads_alike=True))
    dispatch.attend[module] = attend, forwards, name
    rebound = rebind(module, module.forward, whole=False, of_copy=refuse_copy)

    def undo(module: nn.Module) -> None:
        rebound(module)
        del dispatch.attend[module]
        if not dispatch.attend and functions[implementation] is dispatch:
            functions[implementation] = dispatch.before

    return undo
