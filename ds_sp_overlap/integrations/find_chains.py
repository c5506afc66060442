"""Finds the decoder layers of a model that follow each other, and joins them into chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from .chains import ChainedLayer, ChainTrial
from .inspect.accounting import Unknown
from .layers import FoundLayer, OverlapSettings


def find_chains(
    modules: dict[str, nn.Module],
    wanted: Mapping[str, Callable[[], ChainedLayer]],
    layers: list[FoundLayer],
    settings: OverlapSettings,
) -> list[list[ChainedLayer]]:
    """Join decoder layers that follow each other in a list of modules into chains.

    An adapter calls this once, in `enable`. Nothing is rebound yet: the caller rebinds the forward
    of each chained layer.

    Args:
        modules: The modules of the model by name.
        wanted: For each attention layer that is driven whole, by its name and in the order of the
            model, a function that makes the `ChainedLayer` of the decoder layer around it. The
            function raises Unknown if that decoder layer can't run in a chain.
        layers: The attention layers of the model. Their ``got`` and ``lacks`` are updated.
        settings: The settings of the model's layers.

    Returns:
        The chains, each a list of its layers in order. A layer without neighbours is a chain of
        its own. Empty if ``scope`` is "layer", or no layer can run in a chain.
    """
    config, policy = settings.config, settings.policy
    chains: list[list[ChainedLayer]] = []
    if config.scope == "layer":
        return chains
    general_reason = _why_no_chains(settings)
    reasons: dict[str, str] = {}
    # By the name of its attention, each chained layer with its chain.
    chained_layers: dict[str, tuple[ChainedLayer, list[ChainedLayer]]] = {}
    for name, make_layer in wanted.items():
        parent, _, _ = name.rpartition(".")
        try:
            # Reported for each decoder layer, as a reason of the layer's own would be.
            if general_reason:
                raise Unknown(general_reason)
            chained = make_layer()
        except Unknown as error:
            reasons[name] = f"{type(modules[parent]).__name__}: {error}"
            continue
        # A layer joins the chain of the layer before it in its list of modules.
        last = chains[-1][-1] if chains else None
        if last is not None and _follows(modules, parent, last.name):
            # One trial for the chain, so that all its layers run the same candidate.
            chained.choice, last.successor = last.choice, chained
            chains[-1].append(chained)
        else:
            if config.scope == "auto" and policy is not None:
                chained.choice = ChainTrial(chained, policy)
            chains.append([chained])
        chained_layers[name] = chained, chains[-1]
    # Only now is it known how many layers each chain has.
    for layer in layers:
        if layer.name in chained_layers:
            chained, chain = chained_layers[layer.name]
            layer.got = settings.describe_chained(layer.got, chained.layer.attention, len(chain))
            layer.lacks = chained.lacks
        elif layer.name in reasons:
            no_block = f"no block: {reasons[layer.name]}"
            layer.lacks = f"{layer.lacks}; {no_block}" if layer.lacks else no_block
    return chains


def _why_no_chains(settings: OverlapSettings) -> str:
    """Explain why no layer of the model may run in a chain; empty if layers may."""
    config, policy = settings.config, settings.policy
    if not config.projections:
        return "sp_overlap.projections is false"
    if config.window is not None:
        return "sp_overlap.window is of layers one by one"
    # Only a policy of one sp group could time the choice, see `Policy.trial_of_block`.
    if config.scope == "auto" and (policy is None or policy.replicas):
        return 'scope "auto" needs head_groups "auto" and one sp group; "block" runs it untimed'
    return ""


def place_in_list(modules: dict[str, nn.Module], name: str) -> tuple[str, int] | None:
    """Return the name of the ModuleList that a layer is in, and its index there.

    Returns None for a layer in no list.
    """
    parent, _, number = name.rpartition(".")
    is_listed = isinstance(modules.get(parent), nn.ModuleList) and number.isdecimal()
    return (parent, int(number)) if is_listed else None


def _follows(modules: dict[str, nn.Module], name: str, before: str) -> bool:
    """Return whether a layer stands right behind the layer ``before`` in a list of modules."""
    place = place_in_list(modules, name)
    return place is not None and place_in_list(modules, before) == (place[0], place[1] - 1)
