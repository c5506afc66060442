"""transformers: finding the attention layers of a model, and driving whole those whose forward is known.

Stock Ulysses (``UlyssesSPAttentionHF``) sits behind ``ALL_ATTENTION_FUNCTIONS``, after the projections, and gathers
``position_ids`` in every layer. Here the layer itself is driven, and ``position_ids`` are gathered once in each forward of the
model (`host`), with the attention mask: packed documents, padding, windows and chunks are those of the global sequence, where
stock drops them. What can't be honoured is refused on all ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..attention.heads import PerHead
from ..attention.linear import PURE
from ..attention.self_attention import SelfAttention
from ..rotary import Rotary
from . import transformers_delta_net as delta_net
from . import transformers_latent as latent
from .layers import Around, Found, Overlap
from .rebinding import rebind
from .transformers_attention import Dispatch, bind_function, local_attention, stock_does_the_same
from .transformers_forward import Forwards, host, stretched
from .transformers_labels import CACHES, UNUSED, Unknown
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
from .transformers_reading import Reader


def find_group(model: nn.Module) -> Any:
    """The sp group that stock Ulysses was registered with for this model; None if it was not."""
    functions, config = attention_functions(), getattr(model, "config", None)
    if functions is None or config is None:
        return None
    stock = stock_of(functions.get(getattr(config, "_attn_implementation", None)))
    return None if stock is None else stock.process_group


def unregister(model: nn.Module) -> None:
    """Undo ``register_with_transformers`` for the attention implementations that ``model`` names."""
    functions = attention_functions()
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    for name in {getattr(config, "_attn_implementation", None) for config in configs}:
        while functions is not None and (stock := stock_of(function := functions.get(name))) is not None:
            if isinstance(function, Dispatch):  # of another model, which stays overlapped
                function.before = stock.attn
            else:
                functions[name] = stock.attn


def _drive(name: str, module: Any, reader: Reader, forwards: Forwards, overlap: Overlap) -> tuple[SelfAttention, Callable]:
    """The block over a layer whose forward is known, and a forward for the layer that calls it."""
    reading, original = reader.reading, module.forward
    heads, sources, rotary = reading.heads, reading.sources, reading.rotary
    fused = len({source.chain for source in sources.values()}) == 1
    kinds = {"qkv_proj": "q"} if fused else {f"{kind}_proj": kind for kind in "qkv"}
    norms = {f"{kind}_norm": norm for kind, source in sources.items() if (norm := source.norm) is not None}

    @functools.lru_cache(maxsize=4)
    def through(*modules: nn.Module) -> nn.Module:
        return modules[0] if len(modules) == 1 else nn.Sequential(*modules)

    def children() -> dict[str, Any]:
        projections = {what: through(*(getattr(module, part) for part in sources[kind].chain)) for what, kind in kinds.items()}
        return {
            **projections,
            **{what: getattr(module, norm) for what, norm in norms.items()},
            "o_proj": getattr(module, reading.output),
        }

    def attend(q, k, v, options, **per_head):
        return local_attention(module, q, k, v, **options, **per_head)

    block = SelfAttention(
        local_attention=attend,
        num_heads=heads["q"],
        num_kv_heads=heads["k"],
        head_dim=reading.head_dim,
        **children(),
        first_rows=reading.first_rows(fused),
        norm_last=any(source.last for source in sources.values()),
        rope=None if rotary is None else Rotary(**rotary),
        sequence_process_group=overlap.channel.group,
        config=overlap.config,
        name=name,
        policy=overlap.policy,
        heads_alike=True,
        pure=PURE | {type(norm).forward for part in norms.values() if _is_theirs(norm := getattr(module, part))},
    )
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def forward(*args, **kwargs):
        if off_in_eval(module):
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        given.update((cache, None) for cache in CACHES if cache in given)
        more = {key: x for key, x in given.items() if key not in UNUSED}
        x, tables, mask = more.pop("hidden_states"), more.pop("position_embeddings", None), more.pop("attention_mask", None)
        block.use(**children())
        sequence, pattern = forwards.of(name, module, x, mask, more)
        options = {"sequence": sequence, "pattern": pattern, **(more if reading.passes else {}), **reader.options(module)}
        per_head = {key: PerHead(options.pop(key)) for key in reading.per_head}

        def stock(x):
            return original(**{**given, "hidden_states": x})[0]

        alike = overlap.policy and stock_does_the_same(module, x, sequence, pattern, overlap.channel, given)
        o = block(
            x, position_embeddings=tables, sequence_lengths=sequence.lengths, baseline=stock if alike else None,
            options=options,  # in a dict, where no labels [b, s/P] that Trainer hands down are taken for something per head
            **per_head,
        )  # fmt: skip
        return o, None

    return block, forward


def _read(name: str, module: Any) -> tuple[Reader | None, str]:
    """What is known about a layer's forward, or why nothing is."""
    if "forward" in vars(module):
        return None, "its forward was replaced"
    try:
        return Reader(name, module), ""
    except Unknown as error:
        return None, str(error)


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
        reader, unknown = _read(name, module)
        why_heads = latent.why_not(module, overlap.channel.size)  # travel, where there is a latent
        if reader is not None:
            heads = reader.reading.heads
            groups = overlap.groups_for(heads["q"], heads["k"])
            block, forward = _drive(name, module, reader, forwards, overlap)
            linear = {part: getattr(module, part) for part in reader.reading.linear}
            got, lacks = overlap.of_driven(block, linear, groups)
            bind = functools.partial(rebind, module, forward)
        elif why_heads == "":
            groups = overlap.groups_for(inner.num_attention_heads, 1)
            got = f"latent attention, {overlap.in_words(groups)}"
            lacks = overlap.why_not_more("its projections are called whole", groups)
            bind = functools.partial(latent.bind, name, module, forwards, overlap)
        else:
            groups = overlap.groups_for(
                inner.num_attention_heads, getattr(inner, "num_key_value_heads", None) or inner.num_attention_heads
            )
            got = f"attention function, {overlap.in_words(groups)}"
            lacks = overlap.why_not_more(f"{why_heads or f'{type(module).__name__}: {unknown}'}; projections stay its own", groups)
            bind = functools.partial(bind_function, name, module, forwards, overlap)
        if reader is None:
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
