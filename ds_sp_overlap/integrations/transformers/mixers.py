"""Mixers of transformers models: short convolutions, Mamba 2, lightning attention.

A layer is recognised by the source of its forward. `MixerLayer` does the work of the forward, with
the same functions for convolution and scan: those of transformers, or the kernels that stand in for
them. The functions that fuse a scan with the gate or the output projection can't be used, since the
state travels between the two.

A document begins with an empty state, and the convolution doesn't look back beyond the beginning,
so that padding in front of a document has no effect. transformers zeroes padding instead, and keeps
documents apart only where it is given their edges and has kernels for them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.layer import LayerRuntime
from ...attention.mixer import Mixer, MixerLayer, Source, States
from ...attention.runtime.linear import can_split
from ..inspect.library import digest, once
from ..layers import FoundLayer, OverlapSettings
from ..rebinding import Undo, rebind
from ..sequence.masks import RECURRENT
from ..sequence.pieces import pieces_of
from .delta_net import names_around
from .forward import Forwards
from .modules import off_in_eval


def _rows(projection: nn.Linear, sizes: Sequence[int]) -> list[Callable[[Any, Tensor], Tensor]]:
    """Return for each run of rows of a projection the function of layer and x that computes it."""
    biases: Sequence[Tensor | None] = [None] * len(sizes)
    if projection.bias is not None:
        biases = projection.bias.split(sizes)

    def rows(weight: Tensor, bias: Tensor | None, layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    # The gradients of the rows are joined in one pass.
    pairs = zip(projection.weight.split(sizes), biases)
    return [functools.partial(rows, weight, bias) for weight, bias in pairs]


def _convolve(child: str, activation: str, layer: Any, x: Tensor) -> Tensor:
    """Return the causal convolution of one document [b, n, channels]."""
    convolution, function = getattr(layer, child), names_around(layer)["causal_conv1d_fn"]
    weight, channels_first = convolution.weight.squeeze(1), x.transpose(1, 2)
    options = dict(activation=getattr(layer, activation)) if activation else {}
    return function(channels_first, weight, convolution.bias, **options).transpose(1, 2)


def _reach(layer: Any) -> int:
    """Return how many tokens before a token its convolution needs."""
    return layer.conv_kernel_size - 1


# Short convolutions: out_proj(c * convolution(b * v)), where in_proj gives b, c and v.


def _short_sources(layer: Any, splits: bool) -> list[Source]:
    if splits:
        b, c, v = _rows(layer.in_proj, [layer.conv.in_channels] * 3)
        inner = Source(["x"], lambda layer, x: [b(layer, x) * v(layer, x)])
        return [inner, Source(["c"], lambda layer, x: [c(layer, x)])]

    def whole(layer: Any, x: Tensor) -> list[Tensor]:
        b, c, v = layer.in_proj(x).chunk(3, -1)
        return [b * v, c]

    return [Source(["x", "c"], whole)]


SHORT = Mixer(
    sources=_short_sources,
    merge=lambda layer, y, given: layer.out_proj(given["c"] * y),
    beside=["c"],
    reach=_reach,
    convolve=functools.partial(_convolve, "conv", ""),
    split=["in_proj"],
)

# Mamba 2: in_proj gives the gate z; x, B and C, which are convolved; and dt.


def _mamba2_sources(layer: Any, splits: bool) -> list[Source]:
    names = ["z", "x", "dt"]
    sizes = [layer.intermediate_size, layer.conv1d.in_channels, layer.num_heads]
    if splits:
        z, x, dt = _rows(layer.in_proj, sizes)
        return [
            Source(["z"], lambda *given: [z(*given)]),
            Source(["x"], lambda *given: [x(*given)]),
            Source(["dt"], lambda *given: [dt(*given)]),
        ]
    return [Source(names, lambda layer, x: layer.in_proj(x).split(sizes, -1))]


def _falcon_sources(layer: Any, splits: bool) -> list[Source]:
    """Return the projections of a Mamba 2 of Falcon-H1, which are scaled."""
    (of_mamba2,) = _mamba2_sources(layer, False)
    sizes = [layer.intermediate_size, layer.conv1d.in_channels, layer.num_heads]

    def scaled(layer: Any, x: Tensor) -> list[Tensor]:
        results = of_mamba2.project(layer, x * layer.ssm_in_multiplier)
        return [y * scale for y, scale in zip(results, layer.mup_vector.split(sizes, -1))]

    return [Source(of_mamba2.names, scaled)]


def _mamba2_parts(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [b, n, h, d], B and C [b, n, groups, n_state] of the convolution's result."""
    few = layer.n_groups * layer.ssm_state_size
    inner, b, c = x.split([layer.intermediate_size, few, few], -1)
    b, c = (y.unflatten(-1, (layer.n_groups, layer.ssm_state_size)) for y in (b, c))
    return inner.unflatten(-1, (layer.num_heads, layer.head_dim)), b, c


def _mamba2_scan(layer: Any, x: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    inner, b, c = _mamba2_parts(layer, x)
    return names_around(layer)["mamba2_chunk_scan"](
        inner,
        dt,
        -torch.exp(layer.A_log.float()),
        b,
        c,
        chunk_size=layer.chunk_size,
        D=layer.D,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
        dt_limit=layer.time_step_limit,
        return_final_states=True,
    )


def _mamba2_log_decay(layer: Any, x: Tensor, dt: Tensor) -> Tensor:
    step = F.softplus(dt.float() + layer.dt_bias.float())
    step = step.clamp(*layer.time_step_limit)  # guard: the step that the scan takes
    return -torch.exp(layer.A_log.float()) * step


def _mamba2_read(layer: Any, state: Tensor, x: Tensor, dt: Tensor) -> Tensor:
    *_, c = _mamba2_parts(layer, x)
    grouped = state.unflatten(1, (layer.n_groups, -1)).flatten(2, 3)
    y = torch.einsum("bsgn,bgqn->bsgq", c.to(state.dtype), grouped)
    return y.reshape(*y.shape[:2], layer.num_heads, layer.head_dim)


def _mamba2_merge(layer: Any, y: Tensor, given: dict[str, Tensor]) -> Tensor:
    z, y = given["z"], y.flatten(2)
    y = layer.norm(y, z) if getattr(layer, "mamba_rms_norm", True) else y * F.silu(z)
    return layer.out_proj(y.to(z.dtype))


MAMBA2 = Mixer(
    sources=_mamba2_sources,
    merge=_mamba2_merge,
    beside=["dt"],
    late=["z"],
    reach=_reach,
    convolve=functools.partial(_convolve, "conv1d", "activation"),
    states=States(_mamba2_scan, _mamba2_log_decay, _mamba2_read),
    split=["in_proj"],
)
FALCON = dataclasses.replace(MAMBA2, sources=_falcon_sources, split=[])

# Lightning attention: the loop over blocks stands in the forward, which also returns the state.


def _itself(x: Tensor) -> Tensor:
    """Stand in for a module of a forward that is called for what it does between its modules."""
    return x


def _open(x: Tensor) -> Tensor:
    """Stand in for the projection of a gate, so that the gate is 1."""
    return x.new_full((), float("inf"))


def _lightning_scan(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    names = ("block_size", "head_dim", "num_attention_heads", "slope_rate", "query_decay")
    known = {name: getattr(layer, name) for name in (*names, "key_decay", "diagonal_decay")}
    modules = dict.fromkeys(("act_fn", "qkv_proj", "norm", "out_proj"), _itself)
    inner = types.SimpleNamespace(**known, **modules, output_gate=_open)
    y, state = inspect.unwrap(type(layer).forward)(inner, x, None, None)
    return y.unflatten(-1, (layer.num_attention_heads, -1)), state


def _lightning_log_decay(layer: Any, x: Tensor) -> Tensor:
    return -layer.slope_rate.float().view(1, 1, -1).expand(*x.shape[:2], -1)


def _lightning_read(layer: Any, state: Tensor, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (layer.num_attention_heads, -1))[..., : layer.head_dim]
    return (q.transpose(1, 2).to(state.dtype) @ state).transpose(1, 2)


def _lightning_merge(layer: Any, y: Tensor, given: dict[str, Tensor]) -> Tensor:
    return layer.out_proj(F.sigmoid(given["z"]) * layer.norm(y.flatten(2)))


LIGHTNING = Mixer(
    sources=lambda layer, splits: [
        Source(["x"], lambda layer, x: [layer.act_fn(layer.qkv_proj(x))]),
        Source(["z"], lambda layer, x: [layer.output_gate(x)]),
    ],
    merge=_lightning_merge,
    late=["z"],
    states=States(_lightning_scan, _lightning_log_decay, _lightning_read),
    pair=True,
)

# By the digest of the forward.
KNOWN = {
    "09cbb1628e8d0160": SHORT,  # LFM2, LFM2-MoE, LFM3, transformers 5.24
    "d3d92e71dc093a41": MAMBA2,  # Nemotron-H, Granite 4 hybrid, Bamba, Zamba 2, Mamba 2, 5.24
    "8f377c3d9c0ee353": LIGHTNING,  # MiniMax, 5.24
    "466c02182d3274e8": FALCON,  # Falcon-H1, 5.24
}


def mixer_of(module: nn.Module) -> Mixer | None:
    """Return the description of a mixer; None for any module that is not a known one.

    `enable` asks for every module of the model.
    """
    kind = type(module)
    if "forward" in vars(module) or not kind.__module__.startswith("transformers.models."):
        return None
    # The model must make its masks by the function that `Masks.for_recurrent` replaces.
    if RECURRENT not in names_around(module):
        return None
    return KNOWN.get(_digest(kind))


@once
def _digest(kind: type[nn.Module]) -> str:
    """Return the digest by which a class of mixers is known."""
    return digest(kind, "forward")


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
    """
    mixer = mixer_of(layer)
    assert mixer is not None
    exchanged = [] if mixer.states is None else ["states"]
    if mixer.convolve is not None:
        exchanged.append("tokens before")
    got, lacks = ", ".join(exchanged), "its projections are called whole"
    projections = [getattr(layer, child) for child in mixer.split]
    if projections and all(map(can_split, projections)):
        lacks = ""
        got += f", {', '.join(mixer.split)} under them"
    bind = functools.partial(_bind, name, layer, model, mixer, forwards, overlap)
    return FoundLayer(name, layer, got, lacks=lacks, bind=bind)


def _bind(
    name: str, layer: Any, model: Any, mixer: Mixer, forwards: Forwards, overlap: OverlapSettings
) -> Undo:
    """Rebind a mixer; return the function that undoes the rebinding.

    Runs in `enable`, once the ranks have agreed. The arguments are those of `describe`, and the
    layer's `mixer_of`.
    """
    # No heads are dealt to ranks, so there are no groups of heads to choose.
    overlap = overlap.in_one_group("")
    runtime = LayerRuntime(overlap.sp_group, overlap.config, name)
    mixing, original = MixerLayer(runtime, layer, mixer), layer.forward

    def forward(hidden_states, *args, attention_mask=None, **kwargs):
        """Take the place of the layer's forward [b, s/P, m] -> [b, s/P, m]. Collective."""
        if off_in_eval(model):
            return original(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        forwards.refuse_empty(name)
        sequence, _ = forwards.of(name, layer, hidden_states, mask=attention_mask, kwargs=kwargs)
        pieces = pieces_of(sequence, overlap.sp_group.rank, mixer.reach(layer))
        y = mixing(hidden_states, pieces)
        return (y, None) if mixer.pair else y

    return rebind(layer, forward)
