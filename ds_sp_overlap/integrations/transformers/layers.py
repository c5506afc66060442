"""Finding the attention layers of a transformers model, and choosing how each is overlapped.

Stock Ulysses (``UlyssesSPAttentionHF``) sits in ``ALL_ATTENTION_FUNCTIONS``, behind the
projections, gathers ``position_ids`` in every layer, and drops packed documents, padding, windows
and chunks. Here a layer whose forward is known is driven whole, positions and masks are gathered
once in each forward of the model (`forward.Host`), and they are those of the global sequence. A
model that can't be served correctly is refused on all ranks.
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
from ..inspect.tensor_parallel import heads_here, heads_of_ranks, is_cut
from ..layers import Binds, FoundLayer, OverlapSettings
from ..rebinding import rebind
from ..sequence.masks import RECURRENT
from . import latent, mixers, modules
from .attention_function import Dispatch, FunctionLayer, attention_of, function_of
from .checkpoints import Checkpoints
from .driven import Driven
from .forward import Forwards, Host, run_with_largest_position
from .mixers_by_states import Cca

# Why no more is overlapped of a layer that runs its own forward.
OWN = "projections stay its own, and nobody looked whether tokens meet outside attention"


def find_group(model: nn.Module) -> Any:
    """Return the sp group of stock Ulysses, if that is registered in transformers' table under the
    attention implementation that the config of ``model`` names.

    None if it is not, if ``model`` has no config, or if transformers isn't loaded.
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

    `disable` calls it if asked to. Concerns all models of the process with these implementations.
    """
    functions = attention_functions()
    if functions is None:
        return
    configs = [getattr(module, "config", None) for module in model.modules()]
    for name in {getattr(config, "_attn_implementation", None) for config in configs}:
        # Each registration wraps the one before.
        while (stock := modules.stock_of(function := functions.get(name))) is not None:
            if isinstance(function, Dispatch):
                # It overlaps layers of another model, which stays overlapped.
                function.before = stock.attn
            else:
                functions[name] = stock.attn


def find_layers(model: nn.Module, overlap: OverlapSettings, binds: Binds) -> list[FoundLayer]:
    """Find the attention layers of a transformers model, and the modules around them.

    `enable` calls it on every rank, and rebinds what it returns once the ranks have agreed. Nothing
    is changed in the model here.

    Args:
        model: The model.
        overlap: The settings of its layers.
        binds: The other modules whose forward must be rebound are added here.

    Returns:
        The layers; none for a model of another framework.

    Raises:
        ValueError: if ``head_groups`` is out of range, tokens meet outside an exchange, or a layer
            can be served neither here nor by stock Ulysses.
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
    """Collects the attention layers of one model; `find_layers` calls its methods in their order.

    Attributes:
        named: The modules of the model by name.
        mixers: The recurrent and convolutional layers by name.
        layers: The layers that were found.
        hosted: For the name of each model around overlapped layers, the first attention layer; the
            model itself if all its layers are mixers.
        own_code: The names of layers that run transformers' code on this rank's tokens.
        saving: The layers whose attention is saved over checkpoints.
        known: The readings of forwards; layers that are alike share a reading.
        binds: The other modules whose forward must be rebound.
    """

    def __init__(self, model: nn.Module, overlap: OverlapSettings, binds: Binds):
        self.model, self.overlap, self.binds = model, overlap, binds
        self.forwards = Forwards(overlap.sp_group, overlap.config)
        self.named = dict(model.named_modules())
        self.mixers: dict[str, nn.Module] = {}
        for name, module in self.named.items():
            if mixers.mixer_of(module) and modules.models_around(name, self.named):
                self.mixers[name] = module
        self.layers: list[FoundLayer] = []
        self.hosted: dict[str, nn.Module] = {}
        self.own_code = [*self.mixers]
        self.saving: set[nn.Module] = set()
        self.known: list[Reader] = []

    def add_attention(self, name: str, module: Any) -> None:
        """Find out how an attention layer is overlapped, and add it to ``layers``.

        Raises:
            ValueError: if neither this package nor stock Ulysses can exchange for it.
        """
        models = modules.models_around(name, self.named)
        # A layer without a ``bind`` is left as it is: here no exchange is needed.
        is_told = models and not modules.hides_arguments(models[0][1])
        if is_told and not modules.takes_tokens(models[0][1]):
            lacks = "not of the sequence that is split"
            self.layers.append(FoundLayer(name, module, lacks=lacks))
            forward = functools.partial(modules.run_without_stock, module)
            self.binds[module] = functools.partial(rebind, module, forward, whole=False)
            return
        if (reason := modules.why_not(name, module, models)) is not None:
            raise ValueError(
                f"{name} ({type(module).__name__}): {reason}; not supported with sequence "
                "parallelism"
            )
        self._refuse_going_by_mask(name, models)
        # Stock Ulysses can exchange for it, or `why_not` had a reason.
        if (reason := modules.unfit(module.config._attn_implementation)) is not None:
            lacks = f"{reason}; DeepSpeed's exchanges stay"
            self.layers.append(FoundLayer(name, module, lacks=lacks))
            return
        overlap, (function, known) = self.overlap, function_of(module)
        if not known.heads_alike:
            overlap = overlap.in_one_group(undeclared(function))
        self._check_tensor_parallel(name, module, overlap)
        try:
            # A reading holds for the forward of the class.
            if "forward" in vars(module):
                raise Unknown("its forward was replaced")
            reader = Reader(name, module, self.known)
        except Unknown as unknown:
            self._add_function(name, module, str(unknown), overlap)
        else:
            self._add_driven(name, module, reader, overlap)
        # Any of these may be the outermost model that is called, which gathers for the others.
        for at, outer in models:
            if modules.takes_tokens(outer):
                self.hosted.setdefault(at, module)

    def _refuse_going_by_mask(self, name: str, models: list[tuple[str, nn.Module]]) -> None:
        """Raise ValueError if a module between a layer and its model goes by the mask being None.

        Such a module would take another branch here: it is given a placeholder where transformers
        gives None.
        """
        around = name.rpartition(".")[0]
        while models and around != models[0][0]:
            module = self.named[around]
            if modules.goes_by_mask(module):
                raise ValueError(
                    f"{around} ({type(module).__name__}): its forward goes by attention_mask being "
                    "None, and here it is never None; not supported with sequence parallelism. "
                    "Take the condition out of the forward"
                )
            around = around.rpartition(".")[0]

    def _check_tensor_parallel(self, name: str, module: Any, overlap: OverlapSettings) -> None:
        """Raise ValueError if a tensor-parallel rank has too few heads of a layer."""
        of_ranks = heads_of_ranks(module) if is_cut(module) else []
        # Each rank checks all, since a rank that is refused alone leaves the others waiting.
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
        """Add a layer whose forward a `Driven` replaces."""
        driven = Driven(name, module, reader, self.forwards, overlap)
        linear = {}
        for keyword, parts in driven.children.items():
            if keyword.endswith("_proj"):
                linear.update({part: getattr(module, part) for part in parts})
        got, lacks = overlap.of_driven(driven.block, linear, attention_of(name, module))
        bind = functools.partial(rebind, module, driven.forward, of_copy=modules.refuse_copy)
        self.layers.append(FoundLayer(name, module, got, lacks=lacks, bind=bind))
        if driven.block.saves_over_checkpoints():
            self.saving.add(module)

    def _add_function(self, name: str, module: Any, unknown: str, overlap: OverlapSettings) -> None:
        """Add a layer that is overlapped at its attention function.

        Args:
            name: The layer's name.
            module: The layer.
            unknown: The reason why its forward is not known.
            overlap: The layer's settings.
        """
        heads = heads_here(module)
        # Empty if latents travel in place of k and v; None for a layer that has none.
        no_latents = latent.why_not(module, overlap.sp_group.size)
        if no_latents == "":
            why = f"{name} ({type(module).__name__}): latent attention needs all queries at once"
            reason = "its projections are called whole"
            groups, lacks = overlap.describe((heads[0], 1), why, reason)
            got = f"latent attention, {groups}"
        else:
            reason = f"{no_latents or f'{type(module).__name__}: {unknown}'}; {OWN}"
            groups, lacks = overlap.describe(heads, attention_of(name, module), reason)
            got = f"attention function, {groups}"
        kind = latent.LatentLayer if no_latents == "" else FunctionLayer
        layer = kind(name, module, self.forwards, overlap)
        self.own_code.append(name)
        self.layers.append(FoundLayer(name, module, got, lacks=lacks, bind=layer.bind))

    def add_mixers(self) -> None:
        """Add the mixers, once the models that host attention layers are known.

        Raises:
            ValueError: if AutoTP cut one.
        """
        for name, module in self.mixers.items():
            (at, model), *outer = modules.models_around(name, self.named)
            if outer and at not in self.hosted:
                # Models of mixers alone take no position_ids. The outermost one is given them.
                at, model = outer[-1]
            self.hosted.setdefault(at, model)
            if is_cut(module):
                raise ValueError(
                    f"{name} ({type(module).__name__}): AutoTP cut its projections, which is not "
                    "supported with sequence parallelism; take tensor_parallel out of the config"
                )
            self.layers.append(
                mixers.describe(name, module, model, forwards=self.forwards, overlap=self.overlap)
            )

    def add_hosts(self) -> None:
        """Add the models around the layers, which gather positions and masks; and the rotary
        embeddings whose frequencies depend on the largest position.
        """
        masks = self.forwards.masks
        # Masks are made with the config of the model, or of the language model in it.
        for at in self.hosted:
            config: Any = self.named[at].config
            masks.configs += [config, config.get_text_config()]
        # The globals of a file once, however many layers the file defines. Mamba's models make no
        # masks.
        files = map(names_around, self.mixers.values())
        namespaces = {id(names): names for names in files if RECURRENT in names}
        masks.namespaces += namespaces.values()
        bound = {layer.name: layer.module for layer in self.layers if layer.bind is not None}
        for name, module in self.named.items():
            if modules.goes_by_length(module):
                bound[name] = module
                forward = functools.partial(run_with_largest_position, name, module, self.forwards)
                self.binds[module] = functools.partial(rebind, module, forward)
        whole = type(self.model).__name__
        checkpoints = Checkpoints(whole, self.model, self.saving, self.overlap.config)
        watched = modules.Watched(self.model, bound)
        host_of = functools.partial(
            Host, forwards=self.forwards, checkpoints=checkpoints, watched=watched
        )
        for at, layer in self.hosted.items():
            inside = [key for key in self.own_code if not at or key.startswith(f"{at}.")]
            model = self.named[at]
            host = host_of(at or whole, model, layer=layer, own_code=inside)
            self.binds[model] = functools.partial(
                rebind, model, host.forward, whole=False, of_copy=modules.refuse_copy
            )


def shape_and_model(model: str) -> tuple[dict[str, int | None], nn.Module]:
    """Return the sizes of a layer, and the model on the meta device, from a model's config.

    ``ds-sp-overlap plan --model`` asks for them.

    Args:
        model: A name, a folder or a file.

    Returns:
        The sizes and the number of layers, by the options of ``plan`` (``kv_heads`` for
        ``--kv-heads``), None for one that the config doesn't give; and the model.

    Raises:
        OSError: if there is no config.
        ValueError: if it can't be read.
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
    """Return the layers that mix tokens, by the names of their types; none without mixers.

    A mixer comes with its description. Zaya's are projections of its attention, and left out.
    """
    found: dict[str, list] = {}
    for module in model.modules():
        mixer = mixers.mixer_of(module)
        if modules.is_attention(module) or (mixer is not None and mixer is not Cca):
            found.setdefault(type(module).__name__, []).append((module, mixer))
    has_mixers = any(mixer for layers in found.values() for _, mixer in layers)
    return found if has_mixers else {}
