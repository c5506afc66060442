"""transformers: finding the attention layers of a model, and driving whole those of the families we know.

Stock Ulysses (``UlyssesSPAttentionHF``) sits behind ``ALL_ATTENTION_FUNCTIONS``, after the projections, and gathers
``position_ids`` in every layer. Here the layer itself is driven, and ``position_ids`` are gathered once in each forward of the
model (`host`), with the attention mask: packed documents, padding, windows and chunks are those of the global sequence, where
stock drops them. What can't be honoured is refused on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..attention.linear import PURE
from ..attention.self_attention import SelfAttention
from ..rotary import Rotary
from . import transformers_delta_net as delta_net
from .layers import Around, Found, Overlap
from .rebinding import rebind
from .transformers_attention import bind_function, local_attention, stock_does_the_same
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


def _drive(name: str, module: Any, forwards: Forwards, overlap: Overlap) -> tuple[SelfAttention, Callable]:
    """The block over a layer of a known family, and a forward for the layer that calls it."""
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")

    def children() -> dict[str, Any]:
        return {name: child for name in names if (child := getattr(module, name, None)) is not None}

    block = SelfAttention(
        local_attention=functools.partial(local_attention, module),
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

        alike = overlap.policy and stock_does_the_same(module, hidden_states, sequence, pattern, overlap.channel, given)
        o = block(
            hidden_states, position_embeddings=position_embeddings, sequence_lengths=sequence.lengths,
            baseline=stock if alike else None, sequence=sequence, pattern=pattern, **kwargs,
        )  # fmt: skip
        return o, None

    return block, forward


def find_layers(model: nn.Module, overlap: Overlap) -> tuple[list[Found], list[Around]]:
    """The attention layers of a transformers model, and the modules around them.

    Raises ValueError where ``head_groups`` is out of range, or tokens meet where no exchange covers it.
    """
    if attention_functions() is None:
        return [], []
    forwards, modules, found = Forwards(overlap.channel, overlap.config), dict(model.named_modules()), []
    nets = {
        name: models[0]
        for name, module in modules.items()
        if delta_net.sources_of(module) and (models := models_around(name, modules))
    }
    refuse_unexchanged(modules, nets)
    hosts: dict[str, dict[str, nn.Module]] = {}  # bound layers, by the models around them
    witnessed: set[str] = set()  # layers that must be seen to call their attention function
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
            bind = functools.partial(bind_function, name, module, forwards, overlap)
            witnessed.add(name)
        found.append(Found(name, module, got, lacks, bind))
        for at, outer in models:
            if takes_tokens(outer):
                hosts.setdefault(at, {})[name] = module
    for name, (at, around) in nets.items():
        if at not in hosts:
            raise ValueError(f"{name} ({type(modules[name]).__name__}): no attention layer beside it is overlapped")
        found.append(delta_net.found(name, modules[name], around, forwards, overlap))
    asking = {id(names): names for names in (delta_net.names_around(modules[name]) for name in nets)}
    configs = [config for at in hosts for config in (modules[at].config, modules[at].config.get_text_config())]
    hosting: list[tuple[nn.Module, tuple]] = [
        (modules[at], host(at or type(model).__name__, modules[at], forwards, layers, witnessed, configs, list(asking.values())))
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
