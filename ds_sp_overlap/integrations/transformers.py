"""transformers: attention layers of the families we know, and the attention function of the others.

Stock Ulysses (``UlyssesSPAttentionHF``) sits behind ``ALL_ATTENTION_FUNCTIONS``, after the projections, and gathers
``position_ids`` in every layer. Here the layer itself is driven, and they are gathered once a step.

Beyond stock: with sdpa, packed documents and sliding windows are honoured. transformers would express them as a mask
of the local sequence, which stock drops; here attention runs document by document.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attention import ProjectedAttention
from ..channel import Channel
from ..config import SpOverlapConfig
from ..layout import Geometry
from ..policy import Policy
from ..rotary import Rotary
from ..self_attention import SelfAttention
from . import Layer, driven, groups_in_words, rebind
from .positions import Positions, Step

# Families whose attention layer is driven whole: where each finds its sliding window.
FAMILIES: dict[str, Callable[[nn.Module], int | None]] = {
    "LlamaAttention": lambda layer: None,
    "MistralAttention": lambda layer: layer.config.sliding_window,
    "Qwen2Attention": lambda layer: layer.sliding_window,
    "Qwen3Attention": lambda layer: layer.sliding_window,
    "Phi3Attention": lambda layer: layer.config.sliding_window,
}


def _library():
    """transformers' attention functions, if the process uses transformers at all."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS


def _stock(function: Any) -> nn.Module | None:
    """The ``UlyssesSPAttentionHF`` behind an attention function that ``register_with_transformers`` put in place."""
    function = function.before if isinstance(function, _Dispatch) else function
    cells = getattr(function, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells]
    return next((x for x in inside if type(x).__name__ == "UlyssesSPAttentionHF"), None)


def find_group(model: nn.Module) -> Any:
    """The sp group that stock Ulysses was registered with for this model; None if it was not."""
    functions, config = _library(), getattr(model, "config", None)
    if functions is None or config is None:
        return None
    stock = _stock(functions.get(getattr(config, "_attn_implementation", None)))
    return None if stock is None else stock.process_group


# Attention over the whole sequence with this rank's heads.


def _core(module: nn.Module) -> tuple[str, Callable]:
    """Name and function of the attention that the model was configured for, without sequence parallelism around it."""
    name = module.config._attn_implementation
    if (reason := _why_not(module)) is not None:  # it was switched after `enable`
        raise ValueError(f"sp_overlap: {type(module).__name__}: {reason}")
    function = _library()[name]
    stock = _stock(function)
    if stock is not None:
        return name, stock.attn
    return name, function.before if isinstance(function, _Dispatch) else function


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, step: Step, **options: Any) -> Tensor:
    """q, k, v [b, s, h/P, d] -> o [b, s, h/P, d], through transformers' own attention function."""
    name, function = _core(module)
    window = options.get("sliding_window")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    told = vars(module).get("num_key_value_groups")
    module.num_key_value_groups = q.shape[1] // k.shape[1]  # of this rank, where ranks share KV heads
    try:
        if name != "sdpa":  # flash attention finds documents in position_ids, of one row, and has a window of its own

            def flash(rows: slice, position_ids: Tensor) -> Tensor:
                return function(module, q[rows], k[rows], v[rows], None, position_ids=position_ids, **options)[0]

            if step.documents is None or q.shape[0] == 1:
                return flash(slice(None), step.position_ids)
            every = step.position_ids.expand(q.shape[0], -1)
            return torch.cat([flash(slice(row, row + 1), every[row : row + 1]) for row in range(q.shape[0])])

        def segment(rows: slice, start: int, stop: int) -> Tensor:
            length = stop - start
            mask = step.window_mask(length, window) if window is not None and window < length else None
            cut = (x[rows, :, start:stop] for x in (q, k, v))
            return function(module, *cut, mask, **options)[0]

        documents = step.documents or [[(0, q.shape[2])]]
        if all(row == documents[0] for row in documents):
            rows = [(slice(None), documents[0])]
        else:
            rows = [(slice(row, row + 1), edges) for row, edges in enumerate(documents)]
        return torch.cat([torch.cat([segment(row, *edge) for edge in edges], dim=1) for row, edges in rows])
    finally:
        if told is not None:
            module.num_key_value_groups = told
        else:
            del module.num_key_value_groups


# Layers.


def _take_position_ids(kwargs: dict[str, Any]) -> Tensor | None:
    """position_ids, out of ``kwargs``, with what describes documents of this rank's slice alone."""
    for of_slice in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(of_slice, None)
    return kwargs.pop("position_ids", None)


def _refuse_cache(cache: Any, module: nn.Module, seen: weakref.WeakSet, where: str) -> None:
    """Refuse to decode. A cache that comes new and empty is transformers' default and harmless: it stays empty."""
    if cache is None or torch.is_grad_enabled():
        return
    if cache in seen or cache.get_seq_length(module.layer_idx) > 0:
        raise RuntimeError(
            f"{where}: generation with a KV cache does not work on a sequence that is split over ranks; call "
            "ds_sp_overlap.disable(model) and generate without sequence parallelism"
        )
    seen.add(cache)


def _stock_does_the_same(module: nn.Module, x: Tensor, step: Step, window: int | None, channel: Channel) -> bool:
    """Whether stock Ulysses is registered for a call with ``x`` [b, s/P, ..] and would compute what we do."""
    stock = _stock(_library().get(module.config._attn_implementation))
    if stock is None or dist.get_process_group_ranks(stock.process_group) != dist.get_process_group_ranks(channel.group):
        return False
    fits = x.shape[0] == stock.batch_size and (stock.seq_length_is_variable or x.shape[1] == stock.local_seq_length)
    drops_window = _core(module)[0] == "sdpa" and window is not None and window < sum(step.lengths)
    return fits and len(set(step.lengths)) == 1 and step.documents is None and not drops_window


def _drive(
    name: str, module: nn.Module, positions: Positions, channel: Channel, config: SpOverlapConfig, policy: Policy | None
):
    """The block over a layer of a known family, and a forward for the layer that calls it."""
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")

    def parts() -> dict[str, nn.Module]:
        return {part: child for part in names if (child := getattr(module, part, None)) is not None}

    block = SelfAttention(
        local_attention=lambda q, k, v, **options: _attend(module, q, k, v, **options),
        num_heads=module.config.num_attention_heads,
        num_kv_heads=module.config.num_key_value_heads,
        head_dim=module.head_dim,
        **parts(),
        rope=Rotary(
            lambda tables: tuple(table.unsqueeze(2) for table in tables),
            partial=(getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0,
        ),
        sequence_process_group=channel.group,
        config=config,
        name=name,
        policy=policy,
        heads_alike=True,
    )
    original = module.forward
    caches: weakref.WeakSet = weakref.WeakSet()

    def forward(hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        if _off_in_eval(module):
            return original(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        _refuse_cache(past_key_values, module, caches, name)
        block.use(**parts())
        given = dict(kwargs)
        step = positions.gather(_take_position_ids(kwargs), name)
        kwargs["dropout"] = module.attention_dropout if module.training else 0.0
        kwargs["scaling"] = module.scaling
        kwargs["sliding_window"] = window = FAMILIES[type(module).__name__](module)

        def stock(x):
            return original(x, position_embeddings, attention_mask, None, **given)[0]

        instead = stock if policy and _stock_does_the_same(module, hidden_states, step, window, channel) else None
        o = block(
            hidden_states, position_embeddings=position_embeddings, sequence_lengths=step.lengths, instead=instead,
            step=step, **kwargs,
        )  # fmt: skip
        return o, None

    return block, forward


def _off_in_eval(module: nn.Module) -> bool:
    """Whether stock Ulysses was told to leave evaluation alone (``disable_in_eval``)."""
    stock = _stock(_library().get(module.config._attn_implementation))
    return stock is not None and stock.disable_in_eval and not module.training


class _Dispatch:
    """An attention function that overlaps the modules it was given, and passes on all others."""

    def __init__(self, before: Callable):
        self.before = before
        self.attend: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()

    @torch.compiler.disable
    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        if module not in self.attend or _off_in_eval(module):
            return self.before(module, query, key, value, attention_mask, **kwargs)
        attend, positions, where = self.attend[module]
        for argument in ("s_aux", "position_bias"):
            if kwargs.get(argument) is not None:
                raise ValueError(f"{where}: attention with {argument} (one value per head) can't be split over ranks here")
        given = dict(kwargs)
        step = positions.gather(_take_position_ids(kwargs), where)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        local = functools.partial(_attend, module, step=step, **kwargs)

        def stock(*qkv):
            o = self.before(module, *(x.transpose(1, 2) for x in qkv), attention_mask, **given)[0]
            return o.unflatten(-1, (q.shape[2], -1)) if o.dim() == 3 else o

        channel, window = attend.layer.channel, kwargs.get("sliding_window")
        alike = attend.layer.policy and _stock_does_the_same(module, q, step, window, channel)
        ulysses = _stock(self)
        alike = alike and (q.shape[2], k.shape[2]) == (ulysses.attn_head_count, ulysses.global_kv_head_count)
        instead = stock if alike else None
        o = attend(local, q, k, v, batch_first=True, sequence_lengths=step.lengths, instead=instead)
        return o, None


def _bind_function(
    name: str, module: nn.Module, positions: Positions, channel: Channel, config: SpOverlapConfig, policy: Policy | None
):
    """Overlap the attention function of a layer of an unknown family; its projections stay its own."""
    functions, implementation = _library(), module.config._attn_implementation
    if not isinstance(functions[implementation], _Dispatch):
        functions[implementation] = _Dispatch(functions[implementation])
    dispatch = functions[implementation]
    dispatch.attend[module] = ProjectedAttention(channel, config, name, policy, heads_alike=True), positions, name

    def undo(module: nn.Module) -> None:
        del dispatch.attend[module]
        if not dispatch.attend and functions[implementation] is dispatch:
            functions[implementation] = dispatch.before

    return undo


def _why_not(module: nn.Module) -> str | None:
    """Why a layer can't be overlapped at all; None if it can."""
    name = module.config._attn_implementation
    if not (name == "sdpa" or "flash" in name):
        return f'attention "{name}" needs a mask of the whole sequence; use "sdpa" or a flash attention'
    if getattr(module, "is_cross_attention", False) or not getattr(module, "is_causal", True):
        return "not causal self-attention"
    return None


def find_layers(model: nn.Module, channel: Channel, config: SpOverlapConfig, policy: Policy | None = None) -> list[Layer]:
    """The attention layers of a transformers model. Raises ValueError where ``head_groups`` is out of range."""
    if _library() is None:
        return []
    positions, found = Positions(channel), []
    for name, module in model.named_modules():
        inner = getattr(module, "config", None)
        if not type(module).__name__.endswith("Attention") or not hasattr(inner, "_attn_implementation"):
            continue
        if (reason := _why_not(module)) is not None:
            found.append(Layer(name, module, got="", lacks=reason))
            continue
        heads = inner.num_attention_heads
        kv_heads = getattr(inner, "num_key_value_heads", None) or heads
        groups = config.groups_for(heads, channel.size)
        Geometry(channel.size, channel.rank, (0,) * channel.size, 0, heads, kv_heads, groups)  # refuses what can't work
        if _is_known(module):
            block, forward = _drive(name, module, positions, channel, config, policy)
            linear = {name: child for name, child in module.named_children() if name.endswith("_proj")}
            got, lacks = driven(block, linear, groups, policy)
            bind = functools.partial(rebind, module, forward)
        else:
            got = f"attention function, {groups_in_words(groups, policy)}"
            lacks = f"{type(module).__name__}: unknown family, projections stay its own"
            lacks += "; one query head a rank" if groups == 1 and config.head_groups == "auto" else ""
            bind = functools.partial(_bind_function, name, module, positions, channel, config, policy)
        found.append(Layer(name, module, got, lacks, bind))
    return found


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
