"""transformers: finding the attention layers of a model, and driving whole those whose forward is known.

Stock Ulysses (``UlyssesSPAttentionHF``) sits behind ``ALL_ATTENTION_FUNCTIONS``, after the projections, and gathers
``position_ids`` in every layer. Here the layer itself is driven, and ``position_ids`` are gathered once in each forward of the
model (`host`), with the attention mask: packed documents, padding, windows and chunks are those of the global sequence, where
stock drops them. What can't be honoured is refused on all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from . import transformers_delta_net as delta_net
from . import transformers_latent as latent
from .accounting import Unknown
from .chains import find_chains
from .layers import Around, Found, Overlap
from .rebinding import rebind
from .transformers_attention import Dispatch, bind_function
from .transformers_chains import DecoderLayer
from .transformers_checkpoints import Checkpoints, can_keep
from .transformers_driven import Driven, drive
from .transformers_forward import Forwards, host, stretched
from .transformers_modules import (
    Watched,
    attention_functions,
    goes_by_length,
    is_attention,
    models_around,
    refuse_copy,
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


def _read(name: str, module: Any, known: list[Reader]) -> tuple[Reader | None, str]:
    """What is known about a layer's forward, or why nothing is."""
    if "forward" in vars(module):
        return None, "its forward was replaced"
    try:
        return Reader(name, module, known), ""
    except Unknown as error:
        return None, str(error)


def find_layers(model: nn.Module, overlap: Overlap) -> tuple[list[Found], list[Around]]:
    """The attention layers of a transformers model, and the modules around them.

    Raises ValueError where ``head_groups`` is out of range, or tokens meet where no exchange covers it.
    """
    if attention_functions() is None:
        return [], []
    if overlap.config.memory == "auto" and "checkpointing" not in overlap.config.model_fields_set and can_keep(model):
        overlap = overlap._replace(config=overlap.config.model_copy(update={"checkpointing": "keep"}))
    forwards, modules, found = Forwards(overlap.channel, overlap.config), dict(model.named_modules()), []
    nets = {
        name: models[0]
        for name, module in modules.items()
        if delta_net.sources_of(module) and (models := models_around(name, modules))
    }
    refuse_unexchanged(modules, nets)
    whole: dict[str, Driven] = {}  # layers that are driven whole
    hosts: dict[str, dict[str, nn.Module]] = {}  # bound layers, by the models around them
    witnessed: set[str] = set()  # layers that must be seen to call their attention function
    known: list[Reader] = []
    keeping: set[nn.Module] = set()  # layers that keep their attention over checkpoints
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
        reader, unknown = _read(name, module, known)
        why_heads = latent.why_not(module, overlap.channel.size)  # travel, where there is a latent
        if reader is not None:
            heads = reader.reading.heads
            groups = overlap.groups_for(heads["q"], heads["k"])
            driven = drive(name, module, reader, forwards, overlap)
            linear = {part: getattr(module, part) for part in reader.reading.linear}
            got, lacks = overlap.of_driven(driven.block, linear, groups)
            bind = functools.partial(rebind, module, driven.forward, of_copy=refuse_copy)
            whole[name] = driven
            keeping |= {module} if driven.block.keeps_over_checkpoints() else set()
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
    wanted = {
        name: functools.partial(DecoderLayer, parent, modules[parent], child, driven, forwards)
        for name, driven in whole.items()
        for parent, _, child in [name.rpartition(".")]
    }
    chains = find_chains(modules, wanted, found, overlap)
    for name, (at, around) in nets.items():
        if at not in hosts:
            raise ValueError(f"{name} ({type(modules[name]).__name__}): no attention layer beside it is overlapped")
        found.append(delta_net.found(name, modules[name], around, forwards, overlap))
    asking = {id(names): names for names in (delta_net.names_around(modules[name]) for name in nets)}
    configs = [config for at in hosts for config in (modules[at].config, modules[at].config.get_text_config())]
    hosting: list[tuple[nn.Module, tuple]] = []
    for at, layers in hosts.items():
        where, host_of = at or type(model).__name__, modules[at]
        checkpoints = Checkpoints(where, host_of, keeping, overlap.channel)
        recurrent = list(asking.values())
        watched = Watched(at, layers, modules, witnessed)
        hosting.append((host_of, host(where, host_of, forwards, layers, witnessed, configs, recurrent, checkpoints, watched)))
    hosting += [(module, stretched(module, forwards)) for module in modules.values() if goes_by_length(module)]
    hosting += [(link.module, (link.forward,)) for chain in chains for link in chain]
    return found, [Around(module, functools.partial(rebind, module, *forward)) for module, forward in hosting]


def layer_shape(model: str) -> dict[str, int | None]:
    """Sizes of a layer, and how many there are, by the config that ``model`` names (a name, a folder or a file); None for those it doesn't give.

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
        "layers": "num_hidden_layers",
    }
    return {key: getattr(config, name, None) for key, name in names.items()}


def parameters(model: str) -> int:
    """How many parameters the model of a config has, without making them. Raises as `layer_shape`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model).get_text_config()
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
