"""Finding mixers in transformers models, and binding them.

A layer is recognised by the source of its forward. `MixerLayer` does the work of the forward, with
the same functions for convolution and scan: those of transformers, or the kernels that stand in for
them. The functions that fuse a scan with the gate or the output projection can't be used, since
states or heads travel between the two.

A document begins with an empty state, and the convolution doesn't look back beyond the beginning,
so that padding in front of a document has no effect. transformers zeroes padding instead, and keeps
documents apart only where it is given their edges and has kernels for them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from ...attention.layer import LayerRuntime
from ...attention.mixer import Mixer
from ...attention.mixer_layer import MixerLayer
from ...attention.runtime.linear import can_split
from ..inspect.library import digest
from ..layers import FoundLayer, OverlapSettings
from ..rebinding import Undo, rebind
from ..sequence.pieces import pieces_of
from . import mixers_by_heads as heads
from . import mixers_by_states as states
from .forward import Forwards
from .modules import off_in_eval

# By the digest of the forward and of the method of the class that it calls; then of the unit inside
# that a stand-in takes the place of.
KNOWN = {
    "09cbb1628e8d0160": states.SHORT,  # LFM2, LFM2-MoE, LFM3, transformers 5.24
    "d3d92e71dc093a41": states.MAMBA2,  # Nemotron-H, Granite 4 hybrid, Bamba, Zamba 2, Mamba 2, 5.24
    "8f377c3d9c0ee353": states.LIGHTNING,  # MiniMax, 5.24
    "466c02182d3274e8": states.FALCON,  # Falcon-H1, 5.24
    "b8444426b3b471f48307ce8ae779fc3f": states.LRU,  # RecurrentGemma, 5.24
    "cf28c7b533f11679": states.CCA,  # Zaya's projections, 5.24
    "0e32b04f43722526": heads.FUSED,  # Qwen3-Next, 5.23
    "dc97d3f7c19cffa1": heads.FUSED,  # Qwen3-Next, 5.24, which renames the cache
    "3efda038042d9626": heads.SPLIT,  # Qwen3.5, dense and MoE, 5.23
    "0cfc669969de8f28": heads.SPLIT,  # Qwen3.5, dense and MoE, 5.24
    "5cc8d6823a28852b": heads.SEPARATE,  # OLMo Hybrid, 5.23
    "9bc3a4822def144a": heads.SEPARATE,  # OLMo Hybrid, 5.24
    "427b6ef3341eefaeb2d36b1af99e0c81": heads.KIMI,  # Kimi Linear, 5.24
    "79a0e47b6bb4383075eca377aacacfdb": heads.BAILING,  # Bailing Hybrid, 5.24
    "7bd25206d3841875": heads.MAMBA1,  # Mamba, 5.24
    "403949e4f81d29b1": heads.MAMBA1,  # Falcon-Mamba, 5.24
    "03e8a547dab766aa": heads.MAMBA1,  # Jamba, 5.24
    "a084ee78c80edca7": heads.ZAMBA,  # Zamba, 5.24
}


@functools.cache
def _digest(kind: Any, forward: Any) -> str:
    """Return the digest by which a class of mixers is known; again where its forward is another."""
    return digest(kind, "fix_query_key_value_ordering", "_rnn_scan", "forward")


def mixer_of(module: nn.Module) -> Mixer | None:
    """Return the description of a mixer; None for any module that is not a known one.

    `enable` asks for every module of the model.
    """
    kind = type(module)
    if "forward" in vars(module) or not kind.__module__.startswith("transformers.models."):
        return None
    inner = (getattr(module, name, None) for name in ("forget_gate", "rg_lru"))
    kinds: list[Any] = [type(part) for part in (module, *inner) if part is not None]
    return KNOWN.get("".join(_digest(kind, kind.forward) for kind in kinds))


def describe(
    name: str, layer: Any, model: Any, forwards: Forwards, overlap: OverlapSettings
) -> FoundLayer:
    """Describe a mixer, and how to overlap it; nothing is rebound yet.

    Args:
        name: The layer's name.
        layer: The layer, for which `mixer_of` isn't None.
        model: The innermost transformers model around it.
        forwards: The forwards of the model.
        overlap: The settings of the model's layers.

    Raises:
        ValueError: if a rank would have no head, or the section asks for too many head groups.
    """
    mixer = mixer_of(layer)
    assert mixer is not None
    got = [] if mixer.states is None else ["states"]
    groups, by_heads = 0, None if mixer.states else mixer.heads
    if by_heads is None:
        # No heads are dealt to ranks, so there are no groups of heads to choose.
        overlap = overlap.in_one_group("")
    else:
        what = by_heads.what
        why = f"{name} ({type(layer).__name__}): its {what} needs all queries at once"
        groups = overlap.groups_for(*by_heads.counts(layer), why)
        got.append(f"{what}, {overlap.describe_groups(groups)}")
    if mixer.convolve is not None:
        got.append("tokens before")
    projections = [getattr(layer, child) for child in mixer.split]
    lacks = "its projections are called whole"
    if projections and all(map(can_split, projections)):
        got.append(f"{', '.join(mixer.split)} under them")
        lacks = ""
    elif any(set(source.names) <= {*mixer.late} for source in mixer.sources(layer, False)):
        got.append(f"the projection of {', '.join(mixer.late)} under them")
    if by_heads is not None:
        lacks = overlap.why_not_more(lacks, groups)
    bind = functools.partial(_bind, name, layer, model, mixer, forwards, overlap)
    return FoundLayer(name, layer, ", ".join(got), lacks=lacks, bind=bind)


def _bind(
    name: str, layer: Any, model: Any, mixer: Mixer, forwards: Forwards, overlap: OverlapSettings
) -> Undo:
    """Rebind a mixer; return the function that undoes the rebinding.

    Runs in `enable`, once the ranks have agreed. The arguments are those of `describe`, and the
    layer's `mixer_of`.
    """
    runtime = LayerRuntime(overlap.sp_group, overlap.config, name, policy=overlap.policy)
    mixing, original = MixerLayer(runtime, layer, mixer), layer.forward
    of_class = type(layer).forward
    names = [*inspect.signature(of_class).parameters][1:]

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Take the place of the layer's forward [b, s/P, m] -> [b, s/P, m]. Collective."""
        if off_in_eval(model):
            return original(*args, **kwargs)
        if type(layer).forward is not of_class:  # guard: a mixer computes what was described
            raise RuntimeError(
                f"{name}: {type(layer).__name__} computes something else since its class was given "
                "another forward; call ds_sp_overlap.enable again"
            )
        forwards.refuse_empty(name)
        arguments = {**dict(zip(names, args)), **kwargs}
        hidden_states = arguments.pop(names[0])
        positions = arguments.get("position_ids") if mixer.by_positions else None
        if positions is not None:
            positions = positions.expand(hidden_states.shape[:2])
        # Zaya's projection has the second name.
        of_names = [arguments.pop(key, None) for key in ("attention_mask", "conv_mask")]
        mask = next((mask for mask in of_names if mask is not None), None)
        sequence, _ = forwards.of(name, layer, hidden_states, mask=mask, kwargs=arguments)
        chosen, rank = mixing.mixer, overlap.sp_group.rank
        ways = {"by_states": chosen.states is not None, "by_heads": chosen.heads is not None}
        pieces = pieces_of(sequence, rank, mixer.reach(layer), **ways)
        return mixing(hidden_states, pieces, positions)

    return rebind(layer, forward)
