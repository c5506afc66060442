"""transformers: attention layers of the families we know, and the attention function of the others.

Stock Ulysses (``UlyssesSPAttentionHF``) sits behind ``ALL_ATTENTION_FUNCTIONS``, after the projections, and gathers
``position_ids`` in every layer. Here the layer itself is driven, and they are gathered once in each forward of the model
(`host`), with its attention mask: packed documents, padding, windows and chunks are those of the whole sequence, where
stock drops them. What can't be honoured is refused on all ranks.
"""

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
from ..attention.layer import Layer
from ..attention.linear import PURE
from ..attention.self_attention import SelfAttention
from ..exchange.channel import Channel
from ..rotary import Rotary
from .layers import Around, Found, Overlap
from .masks import Pattern
from .positions import GlobalSequence
from .rebinding import Undo, rebind
from .transformers_forward import Forwards, host, stretched
from .transformers_modules import (
    attention_functions,
    goes_by_length,
    is_attention,
    models_around,
    off_in_eval,
    refuse_unexchanged,
    stock_of,
    takes_tokens,
    unfit,
    why_not,
)

# Families whose attention layer is driven whole: where each finds its sliding window.
FAMILIES: dict[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda layer: None,
    "MistralAttention": lambda layer: layer.config.sliding_window,
    "Qwen2Attention": lambda layer: layer.sliding_window,
    "Qwen3Attention": lambda layer: layer.sliding_window,
    "Phi3Attention": lambda layer: layer.config.sliding_window,
}


def find_group(model: nn.Module) -> Any:
    """The sp group that stock Ulysses was registered with for this model; None if it was not."""
    functions, config = attention_functions(), getattr(model, "config", None)
    if functions is None or config is None:
        return None
    stock = stock_of(functions.get(getattr(config, "_attn_implementation", None)))
    return None if stock is None else stock.process_group


# Attention over the whole sequence with this rank's heads.


def _core(module: Any) -> tuple[str, Callable]:
    """Name and function of the attention that the model was configured for, without sequence parallelism around it."""
    name = module.config._attn_implementation
    if (reason := unfit(name)) is not None:  # it was switched after `enable`
        raise ValueError(f"sp_overlap: {type(module).__name__}: {reason}")
    function = attention_functions()[name]
    stock = stock_of(function)
    if stock is not None:
        return name, stock.attn
    return name, function.before if isinstance(function, Dispatch) else function


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *, sequence: GlobalSequence, pattern: Pattern, **options: Any) -> Tensor:
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
        if sequence.bounds is None or q.shape[0] == 1:  # it finds documents in position_ids, of one row
            return attention(q, k, v, None, position_ids=sequence.position_ids)
        assert sequence.position_ids is not None  # which told the documents
        rows = [slice(row, row + 1) for row in range(q.shape[0])]
        return torch.cat([attention(q[row], k[row], v[row], None, position_ids=sequence.position_ids[row]) for row in rows])
    finally:
        if told is not None:
            module.num_key_value_groups = told
        else:
            del module.num_key_value_groups


# Layers.


def _stock_does_the_same(
    module: Any, x: Tensor, sequence: GlobalSequence, pattern: Pattern, channel: Channel, given: dict[str, Any]
) -> bool:
    """Whether stock Ulysses is registered for a call with ``x`` [b, s/P, ..] and would compute what we do."""
    stock = stock_of(attention_functions().get(module.config._attn_implementation))
    if stock is None or dist.get_process_group_ranks(stock.process_group) != dist.get_process_group_ranks(channel.group):
        return False
    fits = x.shape[0] == stock.batch_size and (stock.seq_length_is_variable or x.shape[1] == stock.local_seq_length)
    whole = sequence.bounds is None and all(
        size is None or size >= sum(sequence.lengths) for size in (pattern.window, pattern.chunk)
    )
    return fits and len(set(sequence.lengths)) == 1 and whole and given.get("position_ids") is not None


def _drive(name: str, module: Any, forwards: Forwards, overlap: Overlap) -> tuple[SelfAttention, Callable]:
    """The block over a layer of a known family, and a forward for the layer that calls it."""
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")

    def children() -> dict[str, Any]:
        return {name: child for name in names if (child := getattr(module, name, None)) is not None}

    block = SelfAttention(
        local_attention=lambda q, k, v, **options: _attend(module, q, k, v, **options),
        num_heads=module.config.num_attention_heads,
        num_kv_heads=module.config.num_key_value_heads,
        head_dim=module.head_dim,
        **children(),
        rope=Rotary(
            lambda tables: tuple(table.unsqueeze(2) for table in tables),
            partial=(getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0,
        ),
        sequence_process_group=overlap.channel.group,
        config=overlap.config,
        name=name,
        policy=overlap.policy,
        heads_alike=True,
        pure=PURE | {type(norm).forward for child, norm in children().items() if child.endswith("_norm") and _is_theirs(norm)},
    )
    original = module.forward

    def forward(hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        if off_in_eval(module):
            return original(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        block.use(**children())
        given = dict(kwargs)
        sequence, pattern = forwards.of(name, module, hidden_states, attention_mask, kwargs)
        kwargs["dropout"] = module.attention_dropout if module.training else 0.0
        kwargs["scaling"] = module.scaling
        kwargs["sliding_window"] = FAMILIES[type(module).__name__](module)

        def stock(x):
            return original(x, position_embeddings, attention_mask, None, **given)[0]

        alike = overlap.policy and _stock_does_the_same(module, hidden_states, sequence, pattern, overlap.channel, given)
        o = block(
            hidden_states, position_embeddings=position_embeddings, sequence_lengths=sequence.lengths,
            baseline=stock if alike else None, sequence=sequence, pattern=pattern, **kwargs,
        )  # fmt: skip
        return o, None

    return block, forward


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
        for argument in ("s_aux", "position_bias"):
            if kwargs.get(argument) is not None:
                raise ValueError(f"{where}: attention with {argument} (one value per head) can't be split over ranks here")
        given = dict(kwargs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        sequence, pattern = forwards.of(where, module, q, attention_mask, kwargs)
        channel = attend.layer.channel
        q = _scaled_by_position(module, q, sequence, channel.rank)
        local = functools.partial(_attend, module, sequence=sequence, pattern=pattern, **kwargs)

        def stock(*qkv):
            o = self.before(module, *(x.transpose(1, 2) for x in qkv), attention_mask, **given)[0]
            return o.unflatten(-1, (q.shape[2], -1)) if o.dim() == 3 else o

        alike = attend.layer.policy and _stock_does_the_same(module, q, sequence, pattern, channel, given)
        ulysses = stock_of(self)
        alike = alike and (q.shape[2], k.shape[2]) == (ulysses.attn_head_count, ulysses.global_kv_head_count)
        baseline = stock if alike else None
        o = attend(local, q, k, v, batch_first=True, sequence_lengths=sequence.lengths, baseline=baseline)
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


def _bind_function(name: str, module: Any, forwards: Forwards, overlap: Overlap) -> Undo:
    """Overlap the attention function of a layer of an unknown family; its projections stay its own."""
    functions, implementation = attention_functions(), module.config._attn_implementation
    if not isinstance(functions[implementation], Dispatch):
        functions[implementation] = Dispatch(functions[implementation])
    dispatch = functions[implementation]
    attend = ProjectedAttention(Layer(overlap.channel, overlap.config, name, overlap.policy, heads_alike=True))
    dispatch.attend[module] = attend, forwards, name

    def undo(module: nn.Module) -> None:
        del dispatch.attend[module]
        if not dispatch.attend and functions[implementation] is dispatch:
            functions[implementation] = dispatch.before

    return undo


# What is found.


def find_layers(model: nn.Module, overlap: Overlap) -> tuple[list[Found], list[Around]]:
    """The attention layers of a transformers model, and the modules around them.

    Raises ValueError where ``head_groups`` is out of range, or tokens meet where no exchange covers it.
    """
    if attention_functions() is None:
        return [], []
    forwards, modules, found = Forwards(overlap.channel, overlap.config), dict(model.named_modules()), []
    refuse_unexchanged(modules)
    hosts: dict[str, dict[str, nn.Module]] = {}  # the layers that are bound by the models that they are in
    witnessed: set[str] = set()  # they count on the layer to call its attention function
    for name, module in modules.items():
        inner: Any = getattr(module, "config", None)
        if not is_attention(module) or not hasattr(inner, "_attn_implementation"):
            continue
        models = models_around(name, modules)
        if models and not takes_tokens(models[0][1]):
            found.append(Found(name, module, got="", lacks="not of the sequence that is split"))
            continue
        if (reason := why_not(name, module, models)) is not None:
            raise ValueError(f"{name} ({type(module).__name__}): {reason}; not supported with sequence parallelism")
        if (reason := unfit(inner._attn_implementation)) is not None:
            found.append(Found(name, module, got="", lacks=f"{reason}; DeepSpeed's exchanges stay"))
            continue
        heads = inner.num_attention_heads
        kv_heads = getattr(inner, "num_key_value_heads", None) or heads
        groups = overlap.groups_for(heads, kv_heads)
        if _is_known(module):
            block, forward = _drive(name, module, forwards, overlap)
            linear = {name: child for name, child in module.named_children() if name.endswith("_proj")}
            got, lacks = overlap.of_driven(block, linear, groups)
            bind = functools.partial(rebind, module, forward)
        else:
            got = f"attention function, {overlap.in_words(groups)}"
            lacks = overlap.why_not_more(f"{type(module).__name__}: unknown family, projections stay its own", groups)
            bind = functools.partial(_bind_function, name, module, forwards, overlap)
            witnessed.add(name)
        found.append(Found(name, module, got, lacks, bind))
        for at, outer in models:
            if takes_tokens(outer):
                hosts.setdefault(at, {})[name] = module
    configs = [config for at in hosts for config in (modules[at].config, modules[at].config.get_text_config())]
    hosting: list[tuple[nn.Module, tuple]] = [
        (modules[at], host(at or type(model).__name__, modules[at], forwards, layers, witnessed, configs))
        for at, layers in hosts.items()
    ]
    hosting += [(module, stretched(module, forwards)) for module in modules.values() if goes_by_length(module)]
    return found, [Around(module, functools.partial(rebind, module, *forward)) for module, forward in hosting]


def _is_theirs(norm: nn.Module) -> bool:
    """Whether a norm is one of transformers', which are functions of their input and weight alone."""
    return type(norm).__module__.startswith("transformers.")


def _is_known(module: nn.Module) -> bool:
    return (
        type(module).__name__ in FAMILIES
        and type(module).__module__.startswith("transformers.models.")
        and "forward" not in vars(module)
    )


def layer_shape(model: str) -> dict[str, int | None]:
    """Sizes of a layer by the config that ``model`` names (a name, a folder or a file); None for those it doesn't give.

    Raises OSError or ValueError where there is no config.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    names = {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate": "intermediate_size",
    }
    return {key: getattr(config, name, None) for key, name in names.items()}
