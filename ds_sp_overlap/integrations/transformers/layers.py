"""Finds the attention layers of a transformers model, and chooses how each is overlapped.

Stock Ulysses (``UlyssesSPAttentionHF``) is an entry of ``ALL_ATTENTION_FUNCTIONS``, so it runs
after the projections. Stock Ulysses gathers ``position_ids`` in every layer, and ignores packed
documents, padding, windows and chunks. This package replaces the whole forward of a layer if this
forward is known. In each forward of the model, it gathers positions and masks of the global
sequence once (`forward.Host`). For a model that would compute wrong results, it raises an error on
all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ...attention.declared import undeclared
from ...attention.mixer import Mixer
from ..inspect.accounting import Unknown
from ..inspect.attention import Reader
from ..inspect.library import attention_functions, names_around
from ..inspect.tensor_parallel import cut_layers, heads_here, heads_of_ranks
from ..layers import Binds, FoundLayer, OverlapSettings
from ..rebinding import rebind
from ..sequence.masks import RECURRENT
from . import latent, mixers, modules
from .attention_function import Dispatch, FunctionLayer, attention_of, function_of
from .checkpoints import Checkpoints
from .driven import Driven
from .forward import Forwards, Host, run_with_largest_position
from .mixers_by_states import Cca

# For reports: the reason why only attention is overlapped in a layer that runs its own forward.
OWN = "projections stay its own, and nobody looked whether tokens meet outside attention"


def find_group(model: nn.Module) -> Any:
    """Return the sp group of the stock Ulysses that exchanges for ``model``.

    This is the stock Ulysses registered for the attention implementation in the model's config.
    Returns None if there is none, if ``model`` has no config, or if transformers isn't loaded.
    """
    stock = None if attention_functions() is None else modules.stock_for(model)
    return None if stock is None else stock.process_group


def is_pretrained(model: nn.Module) -> bool:
    """Return whether ``model`` is, or contains, a model of transformers."""
    if attention_functions() is None:
        return False
    return any(isinstance(module, modules.pretrained()) for module in model.modules())


def unregister(model: nn.Module) -> None:
    """Undo ``register_with_transformers`` for the attention implementations of ``model``.

    `disable` calls this function for ``stock_too=True``. All models of the process with these
    implementations are affected.
    """
    functions = attention_functions()
    if functions is None:
        return
    configs = [getattr(module, "config", None) for module in model.modules()]
    for name in {getattr(config, "_attn_implementation", None) for config in configs}:
        # Each registration wraps the earlier one.
        while (stock := modules.stock_of(function := functions.get(name))) is not None:
            if isinstance(function, Dispatch):
                # Keep a `Dispatch`, which overlaps layers of another model.
                function.before = stock.attn
            else:
                functions[name] = stock.attn


def find_layers(model: nn.Module, overlap: OverlapSettings, binds: Binds) -> list[FoundLayer]:
    """Find the attention layers of a transformers model, and the modules around them.

    `enable` calls this function on every rank. When the ranks have agreed, `enable` rebinds the
    layers and ``binds``. Nothing in the model is changed here.

    Args:
        model: The model.
        overlap: The settings of the model's layers.
        binds: Receives the other modules whose forward must be rebound.

    Returns:
        The layers; none for a model of another framework.

    Raises:
        ValueError: if ``head_groups`` is out of range, if tokens are mixed outside an exchange, or
            if neither this package nor stock Ulysses can exchange for a layer.
    """
    if attention_functions() is None:
        return []
    modules.refuse_prompts(model)
    search = _Search(model, overlap, binds)
    modules.refuse_unexchanged(search.named, search.mixers)
    for name, module in search.named.items():
        config = getattr(module, "config", None)
        if modules.is_attention(module) and hasattr(config, "_attn_implementation"):
            search.add_attention(name, module)
    search.add_mixers()
    search.add_hosts()
    return search.layers


class _Search:
    """Collects the attention layers of one model for `find_layers`.

    Attributes:
        named: The modules of the model by name.
        mixers: The recurrent and convolutional layers by name.
        layers: The layers found so far.
        hosted: For each model around overlapped layers, by name: its first attention layer, or the
            model itself if all its layers are mixers.
        own_code: The names of layers that run transformers' code on this rank's tokens.
        saving: The layers whose attention is saved over checkpoints.
        known: The readers of forwards so far. Layers that are alike share a reading.
        binds: The other modules whose forward must be rebound.
    """

    def __init__(self, model: nn.Module, overlap: OverlapSettings, binds: Binds):
        self.model, self.overlap, self.binds = model, overlap, binds
        self.forwards = Forwards(overlap.sp_group, overlap.config)
        self.named = dict(model.named_modules())
        self.mixers = {}
        for name, module in self.named.items():
            if mixers.mixer_of(module) and modules.models_around(name, self.named):
                self.mixers[name] = module
        self.layers: list[FoundLayer] = []
        self.hosted: modules.Named = {}
        self.own_code = [*self.mixers]
        self.saving: set[nn.Module] = set()
        self.known: list[Reader] = []

    def add_attention(self, name: str, module: Any) -> None:
        """Choose how an attention layer is overlapped, and add it to ``layers``.

        Raises:
            ValueError: if neither this package nor stock Ulysses can exchange for the layer.
        """
        model = modules.model_around(name, self.named)
        # A layer of images or sound needs no exchange, so it gets no ``bind``.
        is_told = model is not None and not modules.hides_arguments(model)
        if is_told and not modules.takes_tokens(model):
            lacks = "not of the sequence that is split"
            self.layers.append(FoundLayer(name, module, lacks=lacks))
            forward = functools.partial(modules.run_without_stock, module)
            self.binds[module] = functools.partial(rebind, module, forward, whole=False)
            return
        if (reason := modules.why_not(name, module, model)) is not None:
            raise ValueError(
                f"{name} ({type(module).__name__}): {reason}; not supported with sequence "
                "parallelism"
            )
        self._refuse_going_by_mask(name, model)
        # Only stock Ulysses can exchange for this layer.
        if (reason := modules.unfit(module.config._attn_implementation)) is not None:
            lacks = f"{reason}; DeepSpeed's exchanges stay"
            self.layers.append(FoundLayer(name, module, lacks=lacks))
            return
        overlap, (function, known) = self.overlap, function_of(module)
        if not known.heads_alike:
            overlap = overlap.in_one_group(undeclared(function))
        self._check_tensor_parallel(name, module, overlap)
        try:
            # A reading describes the forward of the class.
            if "forward" in vars(module):
                raise Unknown("its forward was replaced")
            reader = Reader(name, module, self.known)
        except Unknown as unknown:
            self._add_function(name, module, str(unknown), overlap)
        else:
            self._add_driven(name, module, reader, overlap)
        # Any of these models may be the outermost called model, which must gather.
        for at, outer in modules.models_around(name, self.named).items():
            if modules.takes_tokens(outer):
                self.hosted.setdefault(at, module)

    def _refuse_going_by_mask(self, name: str, model: Any) -> None:
        """Raise ValueError if a module between a layer and its model compares the mask with None.

        Such a module would take a wrong branch: it gets a placeholder, where transformers would
        pass None.
        """
        around = name.rpartition(".")[0]
        while model is not None and (module := self.named[around]) is not model:
            if modules.goes_by_mask(module):
                raise ValueError(
                    f"{around} ({type(module).__name__}): its forward goes by attention_mask being "
                    "None, and here it is never None; not supported with sequence parallelism. "
                    "Take the condition out of the forward"
                )
            around = around.rpartition(".")[0]

    def _check_tensor_parallel(self, name: str, module: Any, overlap: OverlapSettings) -> None:
        """Raise ValueError if a tensor-parallel rank has too few heads of a layer."""
        of_ranks = heads_of_ranks(module) if cut_layers(module) else []
        # Each rank checks the heads of all ranks, so that all ranks raise the error.
        for rank, (heads, kv_heads) in enumerate(of_ranks):
            try:
                if not kv_heads:
                    raise ValueError("it has nothing to attend with")
                overlap.groups_for(heads, kv_heads, attention_of(name, module))
            except ValueError as error:
                raise ValueError(
                    f"{name}: AutoTP gave {heads} query and {kv_heads} KV heads to tensor-parallel "
                    f"rank {rank} of {len(of_ranks)}: {error}; or take a smaller autotp_size"
                ) from None

    def _add_driven(self, name: str, module: Any, reader: Reader, overlap: OverlapSettings) -> None:
        """Add a layer whose whole forward is replaced (`Driven`)."""
        driven = Driven(name, module, reader, self.forwards, overlap)
        linear = {}
        for keyword, parts in driven.children.items():
            if keyword.endswith("_proj"):
                linear.update({part: getattr(module, part) for part in parts})
        got, lacks = overlap.of_driven(driven.block, linear, attention_of(name, module))
        bind = functools.partial(rebind, module, driven.forward, of_copy=modules.refuse_copy)
        self.layers.append(FoundLayer(name, module, got, lacks=lacks, bind=bind))
        if overlap.config.saves_attention and driven.block.can_window():
            self.saving.add(module)

    def _add_function(self, name: str, module: Any, unknown: str, overlap: OverlapSettings) -> None:
        """Add a layer in which the attention function is overlapped (`FunctionLayer`).

        Args:
            name: The layer's name.
            module: The layer.
            unknown: The reason why the layer's forward is not known.
            overlap: The layer's settings.
        """
        kind = FunctionLayer
        what, heads, attend = "attention function", heads_here(module), attention_of(name, module)
        # This is empty if latents are exchanged instead of k and v; None for a layer without
        # latents.
        no_latents = latent.why_not(module, overlap.sp_group.size)
        reason = f"{no_latents or f'{type(module).__name__}: {unknown}'}; {OWN}"
        if no_latents == "":
            kind, what, heads = latent.LatentLayer, "latent attention", (heads[0], 1)
            attend = f"{name} ({type(module).__name__}): {what} needs all queries at once"
            reason = "its projections are called whole"
        groups, lacks = overlap.describe(heads, attend, reason)
        layer, got = kind(name, module, self.forwards, overlap), f"{what}, {groups}"
        self.own_code.append(name)
        self.layers.append(FoundLayer(name, module, got, lacks=lacks, bind=layer.bind))

    def add_mixers(self) -> None:
        """Add the mixers. Call this after `add_attention`, which fills ``hosted``.

        Raises:
            ValueError: if AutoTP cut a mixer.
        """
        for name, module in self.mixers.items():
            (at, model), *outer = modules.models_around(name, self.named).items()
            if outer and at not in self.hosted:
                # A model with only mixers has no argument position_ids. The outermost model has.
                at, model = outer[-1]
            self.hosted.setdefault(at, model)
            if cut_layers(module):
                raise ValueError(
                    f"{name} ({type(module).__name__}): AutoTP cut its projections, which is not "
                    "supported with sequence parallelism; take tensor_parallel out of the config"
                )
            self.layers.append(
                mixers.describe(name, module, model, forwards=self.forwards, overlap=self.overlap)
            )

    def add_hosts(self) -> None:
        """Add to ``binds`` the modules that are rebound in addition to the layers.

        These are the models around the layers, which gather positions and masks, and the rotary
        embeddings whose frequencies depend on the largest position.
        """
        masks = self.forwards.masks
        # Add the globals of each file once, even if the file defines several layers. Leave out
        # files whose models make no masks, such as Mamba's.
        files = map(names_around, self.mixers.values())
        namespaces = {id(names): names for names in files if RECURRENT in names}
        masks.namespaces += namespaces.values()
        bound = {layer.name: layer.module for layer in self.layers if layer.bind is not None}
        for name, module in self.named.items():
            if modules.goes_by_length(module):
                bound[name] = module
                forward = functools.partial(run_with_largest_position, name, module, self.forwards)
                self.binds[module] = functools.partial(rebind, module, forward)
        watched = modules.Watched(self.model, bound)
        for at, layer in self.hosted.items():
            inside = [key for key in self.own_code if not at or key.startswith(f"{at}.")]
            model = self.named[at]
            name = at or type(model).__name__
            # A mask function gets the config of the model, or of the language model in it.
            masks.configs += [model.config, model.config.get_text_config()]
            # Take the checkpoints of this model only, since a model beside it may have others.
            checkpoints = Checkpoints(name, model, self.saving, self.overlap.config)
            host = Host(
                name,
                model,
                self.forwards,
                layer=layer,
                own_code=inside,
                checkpoints=checkpoints,
                watched=watched,
            )
            self.binds[model] = functools.partial(
                rebind, model, host.forward, whole=False, of_copy=modules.refuse_copy
            )


def shape_and_model(model: str) -> tuple[dict[str, int | None], nn.Module]:
    """Return the sizes of a layer, and the model on the meta device, from a model's config.

    ``ds-sp-overlap plan --model`` uses both.

    Args:
        model: The name, folder or file of a transformers config.

    Returns:
        The sizes and the number of layers, by option of ``plan`` (``kv_heads`` for
        ``--kv-heads``), with None for what the config lacks; and the model.

    Raises:
        OSError: if there is no config.
        ValueError: if the config can't be read.
        ImportError: without transformers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model).get_text_config()
    names = {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate": "intermediate_size",
        "layers": "num_hidden_layers",
    }
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    return {key: getattr(config, name, None) for key, name in names.items()}, made


def mixing_layers(model: nn.Module) -> dict[str, list[tuple[nn.Module, type[Mixer] | None]]]:
    """Return the layers that mix tokens, by the names of their classes.

    With each layer comes the `Mixer` class that describes the layer, or None for attention. Zaya's
    mixers are left out, since they are the projections of Zaya's attention. Empty for a model
    without mixers.
    """
    found: dict[str, list] = {}
    for module in model.modules():
        mixer = mixers.mixer_of(module)
        if modules.is_attention(module) or mixer not in (None, Cca):
            found.setdefault(type(module).__name__, []).append((module, mixer))
    has_mixers = any(mixer for layers in found.values() for _, mixer in layers)
    return found if has_mixers else {}
