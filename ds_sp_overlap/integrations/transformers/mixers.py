"""Finds mixers (recurrent and convolutional layers) in transformers models, and rebinds them.

A mixer is recognised by the source of its forward. `MixerLayer` replaces the forward, and calls the
same functions for convolution and scan: those of transformers, or the kernels that replace them in
transformers. Functions that fuse the scan with the gate or the output projection can't be used,
since states or heads are exchanged after the scan.

Each document begins with an empty state, and the convolution reads no tokens before the document.
So padding in front of a document has no effect. transformers zeroes padding instead. It separates
documents only if it gets their edges and has kernels for this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ...attention.mixer import Mixer
from ...attention.mixer_layer import MixerLayer
from ...attention.runtime.linear import can_split
from ..inspect.library import digest
from ..layers import FoundLayer, OverlapSettings
from ..rebinding import rebind
from ..sequence.pieces import pieces_of
from . import mixers_by_heads as heads
from . import mixers_by_states as states
from .forward import Forwards, given
from .modules import by_name, off_in_eval, parameters_of

# The supported mixers. A key is the digest of the source of the layer's forward and the method that
# the forward calls. The digest of the layer's forget gate or RG-LRU unit follows, if there is one.
KNOWN = {
    "09cbb1628e8d0160": states.Short,  # LFM2, LFM2-MoE, LFM3, transformers 5.24
    "d3d92e71dc093a41": states.Mamba2,  # Nemotron-H, Granite 4 hybrid, Bamba, Zamba 2, Mamba 2, 5.24
    "8f377c3d9c0ee353": states.Lightning,  # MiniMax, 5.24
    "466c02182d3274e8": states.Falcon,  # Falcon-H1, 5.24
    "b8444426b3b471f48307ce8ae779fc3f": states.Lru,  # RecurrentGemma, 5.24
    "cf28c7b533f11679": states.Cca,  # Zaya's projections, 5.24
    "0e32b04f43722526": heads.Fused,  # Qwen3-Next, 5.23
    "dc97d3f7c19cffa1": heads.Fused,  # Qwen3-Next, 5.24, which renames the cache
    "3efda038042d9626": heads.Split,  # Qwen3.5, dense and MoE, 5.23
    "0cfc669969de8f28": heads.Split,  # Qwen3.5, dense and MoE, 5.24
    "5cc8d6823a28852b": heads.Separate,  # OLMo Hybrid, 5.23
    "9bc3a4822def144a": heads.Separate,  # OLMo Hybrid, 5.24
    "427b6ef3341eefaeb2d36b1af99e0c81": heads.Kimi,  # Kimi Linear, 5.24
    "79a0e47b6bb4383075eca377aacacfdb": heads.Bailing,  # Bailing Hybrid, 5.24
    "7bd25206d3841875": heads.Mamba1,  # Mamba, 5.24
    "403949e4f81d29b1": heads.Mamba1,  # Falcon-Mamba, 5.24
    "03e8a547dab766aa": heads.Mamba1,  # Jamba, 5.24
    "a084ee78c80edca7": heads.Zamba,  # Zamba, 5.24
}


@functools.cache
def _digest(kind: Any, forward: Any) -> str:
    """Return the digest of a class of mixers; cached, with ``forward`` to notice a new forward."""
    return digest(kind, "fix_query_key_value_ordering", "_rnn_scan", "forward")


def mixer_of(module: nn.Module) -> type[Mixer] | None:
    """Return the `Mixer` class that describes a module; None if the module is no known mixer.

    `enable` calls this function for every module of the model.
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
    """Describe a mixer and its overlap for `enable`. Nothing is rebound here.

    Args:
        name: The layer's name.
        layer: The layer, a known mixer (`mixer_of`).
        model: The innermost transformers model around the layer.
        forwards: The forwards of the model.
        overlap: The settings of the model's layers.

    Raises:
        ValueError: if a rank would have no head, or if the ``sp_overlap`` section asks for too many
            head groups.
    """
    kind = mixer_of(layer)
    assert kind is not None
    mixer = kind(layer)
    under, lacks = "", "its projections are called whole"
    if mixer.split and can_split(getattr(layer, mixer.split)):
        under, lacks = mixer.split, ""
    elif any({*source.names} <= {*mixer.late} for source in mixer.sources(False)):
        under = f"the projection of {', '.join(mixer.late)}"
    if mixer.by_states or not mixer.by_heads:
        got = ["states"] if mixer.by_states else []
        # Ranks don't split the heads, so there are no head groups to choose.
        overlap = overlap.in_one_group("")
    else:
        why = f"{name} ({type(layer).__name__}): its {mixer.by_heads} needs all queries at once"
        groups, lacks = overlap.describe(mixer.counts(), why, lacks)
        got = [f"{mixer.by_heads}, {groups}"]
    if mixer.convolve is not None:
        got.append("tokens before")
    if under:
        got.append(f"{under} under them")
    driven = _Driven(name, model, mixer, forwards, overlap)
    bind = functools.partial(rebind, layer, driven.forward)
    return FoundLayer(name, layer, ", ".join(got), lacks=lacks, bind=bind)


class _Driven:
    """Replaces the forward of a mixer by a `MixerLayer`; see `describe` for the arguments."""

    def __init__(
        self, name: str, model: Any, mixer: Mixer, forwards: Forwards, overlap: OverlapSettings
    ):
        self.name, self.model, self.mixer, self.forwards = name, model, mixer, forwards
        self.run, self.known = MixerLayer(overlap.runtime(name), mixer), type(mixer.layer).forward

    def forward(self, own: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the layer's own forward, [b, s/P, m] -> [b, s/P, m]. Collective."""
        name, mixer, layer = self.name, self.mixer, self.mixer.layer
        if off_in_eval(self.model):
            return own(*args, **kwargs)
        if type(layer).forward is not self.known:  # guard: a mixer computes what was described
            raise RuntimeError(
                f"{name}: {type(layer).__name__} computes something else since its class was given "
                "another forward; call ds_sp_overlap.enable again"
            )
        arguments = by_name(layer, args, kwargs)
        hidden_states = arguments.pop(parameters_of(layer)[0])
        positions = arguments.get("position_ids") if mixer.by_positions else None
        if positions is not None:
            positions = positions.expand(hidden_states.shape[:2])
        mask = given(arguments, ("attention_mask", "conv_mask"))
        sequence, _ = self.forwards.of(name, layer, hidden_states, mask=mask, kwargs=arguments)
        rank = self.run.runtime.sp_group.rank
        pieces = pieces_of(
            sequence, rank, mixer.reach(), by_states=mixer.by_states, by_heads=bool(mixer.by_heads)
        )
        return self.run(hidden_states, pieces, positions)
