"""Classifies the modules of a transformers model by whether and how they mix tokens.

If a module mixed tokens without an exchange, each rank would compute with its own tokens only, and
give wrong results without an error. So every module that mixes tokens must either be overlapped, or
cause an error with its name.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from ..inspect.library import (
    CACHES,
    Keywords,
    attention_functions,
    by_class,
    defined_in,
    functions_of,
    in_registry,
    once,
    source_of,
)
from ..rebinding import is_ours
from ..sequence.positions import TOKENS
from .registration import refusal_of

# Modules of a model, by their names.
Named = dict[str, nn.Module]

# Names of parameters by which a forward shows that it mixes tokens.
_SEQUENCE_ARGUMENTS = {
    *CACHES, "state", "use_cache", "attention_mask", "padding_mask", "conv_mask", "alibi",
}  # fmt: skip


def stock_of(function: Any) -> Any:
    """Return the ``UlyssesSPAttentionHF`` in an attention function, or None.

    Args:
        function: An entry of transformers' table of attention functions, or None.
    """
    # ``before`` is the function that an `attention_function.Dispatch` replaced.
    function = getattr(function, "before", function)
    # DeepSpeed's entry of the table is a closure that refers to the ``UlyssesSPAttentionHF``.
    for cell in getattr(function, "__closure__", None) or ():
        if type(cell.cell_contents).__name__ == "UlyssesSPAttentionHF":
            return cell.cell_contents
    return None


def stock_for(module: Any) -> Any:
    """Return the ``UlyssesSPAttentionHF`` that exchanges for an attention layer, or None."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return stock_of(attention_functions().get(implementation))


def run_without_stock(module: Any, own: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's own forward without stock Ulysses, since its tokens are not split over ranks.

    During the call, transformers' table has the attention function that stock Ulysses wraps.
    """
    stock = stock_for(module)
    with contextlib.nullcontext() if stock is None else in_registry(module, stock.attn):
        return own(*args, **kwargs)


def off_in_eval(module: Any) -> bool:
    """Return whether ``module`` is in evaluation, and stock Ulysses is switched off in evaluation.

    Called in every call of a layer. If True, each rank attends to its own tokens only.
    """
    if module.training:
        return False
    stock = stock_for(module)
    return stock is not None and stock.disable_in_eval


def refuse_copy(module: Any) -> None:
    """Raise RuntimeError for a copy of an overlapped module, unless stock Ulysses exchanges for it.

    The copy, such as an EMA model, would attend to the tokens of this rank only. The forward that
    `rebind` installs calls this function, its ``of_copy``, in each call of a copy.

    Args:
        module: The copy.
    """
    stock = stock_for(module)
    if stock is None:  # guard: no rank attends alone
        raise RuntimeError(
            f"{type(module).__name__}: this is a copy of one that is overlapped, and would attend "
            "to this rank's tokens alone; call ds_sp_overlap.enable with the copy, or "
            "ds_sp_overlap.disable, after which each rank attends by itself"
        )


# transformers' attention functions that need a mask, even for causal attention.
_MASKED = "transformers.integrations.flex_attention", "transformers.integrations.eager_paged"


class Watched:
    """Finds modules that no longer exchange as in `enable`, before each forward of a model.

    Args:
        model: The model.
        bound: The modules in the model whose forward `enable` replaces, by name.

    Attributes:
        kinds: The classes of the layers in ``bound``.
        known: The modules that already needed the tokens of all ranks in `enable`. A weak set,
            which keeps no module alive.
    """

    def __init__(self, model: nn.Module, bound: Named):
        self.model, self.bound = model, bound
        self.kinds = {type(x) for x in bound.values() if not hasattr(x, "rope_type")}
        self.known = weakref.WeakSet(filter(self._needs_tokens_of_all, model.modules()))

    @torch._disable_dynamo
    def suspects(self) -> Named:
        """Return the modules, by name, that may run without an exchange.

        There are two kinds: modules whose forward is no longer that of `enable`; and modules that
        need the tokens of all ranks now, but did not in `enable`, or were added to the model later.
        Modules for which stock Ulysses exchanges are left out.

        Raises:
            RuntimeError: for a shallow copy, since its forward would run the original module.
        """
        foreign = {name: module for name, module in self.bound.items() if not is_ours(module)}
        for name, part in self.model.named_modules():
            forward = vars(part).get("forward")
            if forward is not None and is_ours(part) and forward.__self__ is not part:
                raise RuntimeError(
                    f"{name}: this {type(part).__name__} is a shallow copy of an overlapped one, "
                    "which would run in its place; put a copy.deepcopy there, and call "
                    "ds_sp_overlap.enable again"
                )
            if self._needs_tokens_of_all(part) and part not in self.known:
                foreign[f"the new {name}"] = part  # guard: by a name of its own
        return {name: x for name, x in foreign.items() if not (is_attention(x) and stock_for(x))}

    def _needs_tokens_of_all(self, part: nn.Module) -> bool:
        """Return whether a module needs the tokens, or the largest position, of all ranks."""
        return is_attention(part) or type(part) in self.kinds or goes_by_length(part)


def core_of(implementation: str) -> Any:
    """Return the attention function of an implementation, without sequence parallelism around it.

    Stock Ulysses and `attention_function.Dispatch`, which may be nested, are unwrapped. None for
    "eager", which is no entry of transformers' table.
    """
    function = attention_functions().get(implementation)
    # Stock Ulysses may be registered over the `Dispatch` of another model.
    while (stock := stock_of(function)) is not None or hasattr(function, "before"):
        function = function.before if stock is None else stock.attn
    return function


def unfit(implementation: str) -> str | None:
    """Explain why an attention implementation, such as "eager", can't be overlapped.

    None if the implementation can be overlapped.
    """
    core = core_of(implementation)
    if core is not None and defined_in(core) not in _MASKED:
        return None
    return (
        f'attention "{implementation}" needs a mask of the whole sequence; '
        'use "sdpa" or a flash attention'
    )


@once
def _parameters(forward: Callable) -> list[str]:
    """Return the names of the parameters of a class's forward, without ``self``."""
    return list(inspect.signature(forward).parameters)[1:]


def parameters_of(module: nn.Module) -> list[str]:
    """Return the names of the parameters of the forward of a module's class."""
    return _parameters(type(module).forward)


# Dynamo would trace the cache of names, and warn.
@torch._disable_dynamo
def by_name(module: nn.Module, args: tuple, kwargs: Keywords) -> Keywords:
    """Return, by name, the arguments of a call of a module's forward."""
    return {**dict(zip(parameters_of(module), args)), **kwargs}


@by_class
def is_attention(kind: type[nn.Module]) -> bool:
    """Return whether the code of a class uses transformers' table of attention functions."""
    if issubclass(kind, pretrained()):
        return False
    name, library = "ALL_ATTENTION_FUNCTIONS", attention_functions()
    using = (x for x in functions_of(kind) if name in x.__code__.co_names)
    # Some files of transformers define a different table under this name.
    return any(x.__globals__.get(name, library) is library for x in using)


def first_tokens(x: Any, stop: int) -> Any:
    """Return the tokens up to ``stop`` of a tensor [.., s, d], or of each tensor of a tuple."""
    if isinstance(x, (tuple, list)):
        return tuple(first_tokens(table, stop) for table in x)
    return x if x is None else x[..., :stop, :].contiguous()


def mixes(module: nn.Module) -> bool:
    """Return whether a module seems to mix tokens, judged by the parameters of its forward."""
    if isinstance(module, nn.Embedding):
        return False
    return not _SEQUENCE_ARGUMENTS.isdisjoint(parameters_of(module))


def pretrained() -> type:
    """Return the base class of transformers models."""
    return sys.modules["transformers.modeling_utils"].PreTrainedModel


def models_around(name: str, modules: Named) -> Named:
    """Return the transformers models around a module by name, innermost first."""
    around = {}
    # Around "a.b.c" are "a.b", "a", and the whole model, whose name is empty.
    while name:
        name, _, _ = name.rpartition(".")
        if isinstance(modules[name], pretrained()):
            around[name] = modules[name]
    return around


def model_around(name: str, modules: Named) -> Any:
    """Return the innermost transformers model around a module; None if there is none."""
    return next(iter(models_around(name, modules).values()), None)


@by_class
def goes_by_mask(kind: type[nn.Module]) -> bool:
    """Return whether the code of a class compares ``attention_mask`` with None."""
    compares = re.compile(r"\battention_mask is (not )?None\b").search
    return any(compares(source_of(function)) for function in functions_of(kind))


def takes_tokens(model: nn.Module) -> bool:
    """Return whether the input of a model is the sequence that is split over ranks.

    False for models of images or sound, which every rank runs on the whole input.
    """
    return not set(TOKENS).isdisjoint(parameters_of(model))


def hides_arguments(model: nn.Module) -> bool:
    """Return whether the forward of a model's class takes ``*args``, as a wrapped forward may.

    The parameters then don't show whether the model takes tokens.
    """
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def goes_by_length(module: nn.Module) -> bool:
    """Return whether the frequencies of a rotary embedding depend on the largest position."""
    # Don't use ``hasattr(module, ..)``, since a wrapper may return attributes of its inner module.
    if "rope_type" not in vars(module) and not hasattr(type(module), "rope_type"):
        return False
    # This is a dict if the layers of a model have different types.
    kinds: Any = module.rope_type
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds or ""]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def refuse_prompts(model: nn.Module) -> None:
    """Raise ValueError if an adapter of PEFT prepends learned tokens to the input of every call.

    Each rank would prepend the learned tokens to its own tokens. Also, PEFT drops or shifts
    position_ids.
    """
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(adapter, "is_prompt_learning", False):
                raise ValueError(
                    f"{type(module).__name__}: PEFT's {adapter.peft_type.value} puts virtual "
                    "tokens in front of each rank's tokens; not supported with sequence "
                    "parallelism: take an adapter of the layers, such as LoRA"
                )


def refuse_unexchanged(modules: Named, exchanged: Collection[str]) -> None:
    """Raise an error for a model in which tokens are mixed outside an exchange.

    Args:
        modules: The modules of the model by name.
        exchanged: The names of layers that mix tokens by an exchange. Layers that call
            transformers' attention functions need no name here.

    Raises:
        ValueError: if another module mixes tokens.
    """
    attention = {name for name, module in modules.items() if is_attention(module)}
    # These are the innermost models around attention layers. Convolutions in other models are
    # harmless.
    decoders = {model_around(name, modules) for name in attention}
    # Decoder layers and whole models take masks and caches only to pass them to their children.
    library = sys.modules.get("transformers.modeling_layers")
    passing_on = getattr(library, "GradientCheckpointingLayer", ()), pretrained()
    mixing: Named = {}
    known = (*attention, *exchanged)
    inside_exchanged = tuple(f"{name}." for name in exchanged)
    # Inner modules come first, so that the error names the innermost module that mixes tokens.
    for name, module in reversed(modules.items()):
        model = model_around(name, modules)
        of_tokens = model is not None and takes_tokens(model)
        if not of_tokens or f"{name}.".startswith(inside_exchanged):
            continue
        if isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1:
            if model not in decoders:
                continue
            name = name.rpartition(".")[0]
        elif name in attention or isinstance(module, passing_on) or not mixes(module):
            continue
        # Skip a module that contains one in ``known`` or ``mixing``, since it only passes arguments
        # on.
        if not any(inner.startswith(f"{name}.") for inner in (*known, *mixing)):
            mixing[name] = modules[name]
    if mixing:
        name, module = next(reversed(mixing.items()))
        raise ValueError(
            f"{first_of(name, module, len(mixing))} mixes tokens without transformers' attention "
            "functions, and each rank would see its own tokens alone; not supported with sequence "
            "parallelism"
        )


def first_of(name: str, module: nn.Module, count: int) -> str:
    """Name the first of ``count`` modules, for an error: "a.b (Class, and 3 more)"."""
    more = f", and {count - 1} more" if count > 1 else ""
    return f"{name} ({type(module).__name__}{more})"


def why_not(name: str, module: Any, model: Any) -> str | None:
    """Explain why neither this package nor stock Ulysses can exchange for a layer.

    Returns None if one of the two can.

    Args:
        name: The layer's name.
        module: The layer.
        model: The innermost model around the layer; None if there is none.
    """
    implementation = module.config._attn_implementation
    if (reason := unfit(implementation)) is not None:
        # Even around flex attention, stock Ulysses can exchange.
        stock = stock_for(module)
        if implementation == "flex_attention" and stock is not None:
            return refusal_of(stock)
        return reason
    cross = getattr(module, "is_cross_attention", False) or name.endswith("encoder_attn")
    if cross or "cross" in type(module).__name__.lower():
        return "cross-attention"
    if not getattr(module, "is_causal", True):
        return "its attention is not causal"
    for hook in module._forward_pre_hooks.values():
        if "context_parallel" in getattr(hook, "__qualname__", ""):
            return (
                "Accelerate's context parallelism (cp_size) splits the sequence around it; "
                "give sp_size, and no cp_size"
            )
    if model is not None and "position_ids" not in parameters_of(model):
        kind = type(model).__name__
        if hides_arguments(model):
            return (
                f"the forward of {kind} takes *args, which don't tell whether it takes tokens; "
                "use functools.wraps in the wrapper around it"
            )
        return f"{kind} takes no position_ids and counts each rank's tokens from 0"
    return None
