"""transformers' modules: which attend, how, and what else lets tokens meet."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from torch import nn


def attention_functions() -> Any:
    """transformers' attention functions, if the process uses transformers at all."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS


def stock_of(function: Any) -> Any:
    """The ``UlyssesSPAttentionHF`` behind an attention function that ``register_with_transformers`` put in place, or None."""
    function = getattr(function, "before", function)  # of `transformers_attention.Dispatch`
    cells = getattr(function, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells]
    return next((x for x in inside if type(x).__name__ == "UlyssesSPAttentionHF"), None)


def off_in_eval(module: Any) -> bool:
    """Whether stock Ulysses was told to leave evaluation alone (``disable_in_eval``)."""
    stock = stock_of(attention_functions().get(module.config._attn_implementation))
    return stock is not None and stock.disable_in_eval and not module.training


def refuse_copy(module: Any) -> None:
    """Refuse a copy of a module that is overlapped, where nobody would exchange for the copy. Raises RuntimeError."""
    if stock_of(attention_functions().get(module.config._attn_implementation)) is None:  # guard: no rank attends alone
        raise RuntimeError(
            f"{type(module).__name__}: this is a copy of one that is overlapped, and would attend to this rank's tokens alone; call "
            "ds_sp_overlap.enable with the copy, or ds_sp_overlap.disable, after which each rank attends by itself"
        )


class Watched:
    """Whether layers below a model are where they were, and call the attention function that they did.

    edges       holder, name and module of each step from the model to a layer
    functions   layers that are overlapped at their attention function, by name
    """

    def __init__(self, at: str, names: Collection[str], modules: dict[str, nn.Module], functions: Collection[str]):
        self.edges: dict[str, tuple[nn.Module, str, nn.Module]] = {}
        for name in names:
            while name != at:
                holder, _, child = name.rpartition(".")
                self.edges[name] = modules[holder], child, modules[name]
                name = holder
        self.layers = {modules[name] for name in names}
        self.functions = {name: modules[name] for name in names if name in functions}

    def refuse_changed(self) -> None:
        """Raise RuntimeError if something else would run than what was overlapped. The same on every rank."""
        for name, (holder, child, module) in self.edges.items():
            now = holder._modules.get(child)
            if now is module or now is None:  # a layer may be left out
                continue
            if any(is_attention(part) and part not in self.layers for part in now.modules()):  # guard: who is overlapped runs
                raise RuntimeError(
                    f"{name}: the {type(module).__name__} there was replaced since ds_sp_overlap.enable; call it again"
                )
        for name, layer in self.functions.items():
            implementation: str = layer.config._attn_implementation  # type: ignore[union-attr, assignment]
            if layer not in getattr(attention_functions().get(implementation), "attend", ()):  # guard: a function that exchanges
                raise RuntimeError(
                    f'{name}: its attention is "{implementation}" since ds_sp_overlap.enable, and each rank would attend to its own tokens '
                    "alone; call ds_sp_overlap.enable again"
                )


# Modules.

_OF_SEQUENCE = {"past_key_values", "past_key_value", "cache_params", "layer_past", "cache", "state", "use_cache"}
_OF_SEQUENCE |= {"attention_mask", "padding_mask", "conv_mask", "alibi"}


def unfit(implementation: str) -> str | None:
    """Why an attention implementation can't be overlapped; None if it can."""
    if implementation == "sdpa" or "flash" in implementation:
        return None
    return f'attention "{implementation}" needs a mask of the whole sequence; use "sdpa" or a flash attention'


_Said = TypeVar("_Said")


def once(function: Callable[[Any], _Said]) -> Callable[[Any], _Said]:
    """functools.cache, whose types take no class for hashable."""
    return functools.cache(function)


@once
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def digest(kind: type[nn.Module], *names: str) -> str:
    """Of the source of some methods of a class, those that it has, without comments and line breaks. Raises OSError without source."""
    functions = (function for name in names if (function := getattr(kind, name, None)) is not None)
    text = " ".join(inspect.getsource(inspect.unwrap(function)) for function in functions)
    return hashlib.blake2b(" ".join(re.sub("#.*", "", text).split()).encode(), digest_size=8).hexdigest()


@once
def functions_of(kind: type[nn.Module]) -> list[types.FunctionType]:
    """The functions of a module's class, without their decorators."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    unwrapped = (inspect.unwrap(f) for base in bases for f in vars(base).values() if callable(f))
    return [f for f in unwrapped if isinstance(f, types.FunctionType)]


def is_attention(module: nn.Module) -> bool:
    """Whether a module's code uses transformers' attention functions; some have a collection of their own under the name."""
    name, library = "ALL_ATTENTION_FUNCTIONS", attention_functions()
    uses = (f for f in functions_of(type(module)) if name in f.__code__.co_names)
    return not isinstance(module, pretrained()) and any(f.__globals__.get(name, library) is library for f in uses)


def mixes(module: nn.Module) -> bool:
    """Whether a module looks at more than one token: some argument only concerns a sequence."""
    return not _OF_SEQUENCE.isdisjoint(_arguments(type(module))) and not isinstance(module, nn.Embedding)


def pretrained() -> type:
    return sys.modules["transformers.modeling_utils"].PreTrainedModel


def models_around(name: str, modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """The transformers models that a module is in, the innermost first."""
    outer = [name[:at] for at in range(len(name)) if name[at] == "."][::-1] + [""]
    return [(at, modules[at]) for at in outer if isinstance(modules[at], pretrained())]


def takes_tokens(model: nn.Module) -> bool:
    """Whether ``model`` is one of the sequence that is split, rather than of images or sound, which every rank has whole."""
    return not _arguments(type(model)).isdisjoint(("input_ids", "inputs_embeds"))


def goes_by_length(module: nn.Module) -> bool:
    """Whether a rotary embedding chooses its frequencies by the largest position."""
    kinds = getattr(module, "rope_type", None)
    return any("dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds or ""]))


def refuse_unexchanged(modules: dict[str, nn.Module], exchanged: Collection[str]) -> None:
    """Refuse a model in which tokens meet where no exchange covers it. Raises ValueError.

    exchanged   names of layers beside those with transformers' attention functions whose tokens meet over exchanges
    """
    block = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", ())  # of layers, or of an MLP
    attention = {name for name, module in modules.items() if is_attention(module)}
    decoders = {models_around(name, modules)[0][1] for name in attention if models_around(name, modules)}
    mixing: dict[str, nn.Module] = {}
    inside = tuple(f"{name}." for name in exchanged)
    for name, module in reversed(modules.items()):  # the inner ones first
        if name in exchanged or name.startswith(inside):
            continue
        convolution = isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1
        if not convolution and (name in attention or not mixes(module) or isinstance(module, (block, pretrained()))):
            continue
        models = models_around(name, modules)
        if not models or not takes_tokens(models[0][1]) or (convolution and models[0][1] not in decoders):
            continue
        name = name.rpartition(".")[0] if convolution else name
        if not any(inner.startswith(name + ".") for inner in (*attention, *exchanged, *mixing)):
            mixing[name] = modules[name]
    if mixing:
        name, module = next(reversed(mixing.items()))
        raise ValueError(
            f"{first_of(name, module, len(mixing))} mixes tokens without transformers' attention functions, and each rank would see "
            "its own tokens alone; not supported with sequence parallelism"
        )


def first_of(name: str, module: nn.Module, count: int) -> str:
    return f"{name} ({type(module).__name__}{f', and {count - 1} more' if count > 1 else ''})"


def why_not(name: str, module: Any, models: list[tuple[str, nn.Module]]) -> str | None:
    """Why a layer can't be exchanged by anybody; None if it can."""
    inner = module.config
    if (reason := unfit(inner._attn_implementation)) is not None:
        stock = inner._attn_implementation == "flex_attention" and stock_of(attention_functions().get("flex_attention"))
        return None if stock else reason
    if getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower() or name.endswith("encoder_attn"):
        return "cross-attention"
    if not getattr(module, "is_causal", True):
        return "its attention is not causal"
    if any("context_parallel" in getattr(hook, "__qualname__", "") for hook in module._forward_pre_hooks.values()):
        return "Accelerate's context parallelism (cp_size) splits the sequence around it; give sp_size, and no cp_size"
    if models and "position_ids" not in _arguments(type(models[0][1])):
        return f"{type(models[0][1]).__name__} takes no position_ids and counts each rank's tokens from 0"
    return None
