"""Mixers that meet whole sequences of some heads: delta nets, and Mamba 1 by channels."""

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

from ...attention.mixer import ByHeads, Mixer, Sections, Source
from ..inspect.library import names_around, own_class
from .mixers_by_states import PER_HEAD, convolve, in_proj_parts, reach


def _heads(x: Tensor, count: int) -> Tensor:
    """Return x [b, s/P, count, d], which may come with heads and head dim flattened."""
    return x if x.dim() == 4 else x.unflatten(-1, (count, -1))


# Gated delta nets have many heads of v, and few of q and k, each for several of v. So v, with the
# input of rate b and decay a behind it, travels in place of q, and q in place of v. Kimi's delta
# attention has as many heads of q and k as of v, and a decay for each channel.


def _counts(layer: Any) -> tuple[int, int]:
    """Return the heads of v, and those of q and k."""
    if hasattr(layer, "forget_gate"):
        return layer.num_heads, layer.num_heads
    return layer.num_v_heads, layer.num_k_heads


def _with_rates(v: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Return v [b, s/P, h, ..] with b [b, s/P, h] and a [b, s/P, h x n] behind each head."""
    heads = b.shape[-1]
    return torch.cat([_heads(v, heads), b.unsqueeze(-1), a.unflatten(-1, (heads, -1))], -1)


def _fused_sources(layer: Any, splits: bool) -> list[Source]:
    def project(x: Tensor) -> list[Tensor]:
        projected = layer.in_proj_qkvz(x), layer.in_proj_ba(x)
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(*projected)
        return [_with_rates(v, b, a), k, q, z]

    return [Source("qkvz", project)]


def _split_sources(layer: Any, splits: bool) -> list[Source]:
    def project(x: Tensor) -> list[Tensor]:
        q, k, v = layer.in_proj_qkv(x).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
        q, k = _heads(q, layer.num_k_heads), _heads(k, layer.num_k_heads)
        return [_with_rates(v, layer.in_proj_b(x), layer.in_proj_a(x)), k, q]

    return [Source("qkv", project), Source("z", layer.in_proj_z)]


def _separate_sources(
    decay: Sequence[str], gate: Sequence[str], layer: Any, splits: bool
) -> list[Source]:
    """Return the projections of a layer that has one for each result.

    Args:
        decay: The names of the modules that make the input of the decay, one after another.
        gate: Those that make the gate.
        layer: The layer.
        splits: Has no effect.
    """
    few = _counts(layer)[1]

    def through(names: Sequence[str], x: Tensor) -> Tensor:
        for name in names:
            x = layer.get_submodule(name)(x)
        return x

    return [
        Source("q", lambda x: _with_rates(layer.v_proj(x), layer.b_proj(x), through(decay, x))),
        Source("k", lambda x: _heads(layer.k_proj(x), few)),
        Source("v", lambda x: _heads(layer.q_proj(x), few)),
        Source("z", lambda x: through(gate, x)),
    ]


def _learned(layer: Any) -> list[tuple[Tensor | None, Sections]]:
    """Return weight and bias of the convolution, the decays, and what is added to a."""
    gate = getattr(layer, "forget_gate", layer)
    is_kimi = gate is not layer
    few = layer.head_dim if is_kimi else layer.head_k_dim
    many = layer.head_dim if is_kimi else layer.head_v_dim
    channels: Sections = (("k", few), ("k", few), ("q", many))
    return [
        (layer.conv1d.weight, channels),
        (layer.conv1d.bias, channels),
        (gate.A_log.flatten(), PER_HEAD),
        (gate.dt_bias.view(_counts(layer)[0], -1), PER_HEAD),
    ]


def _delta_rule(
    layer: Any,
    vba: Tensor,
    k: Tensor,
    q: Tensor,
    taps: Tensor,
    taps_bias: Tensor | None,
    decay: Tensor,
    bias: Tensor,
) -> Tensor:
    """Compute the convolution and the delta rule of some heads, as the layer's forward does.

    Args:
        layer: The layer.
        vba: [b, s, h', ..]. v with b and a behind it.
        k: [b, s, h_k', d_k].
        q: [b, s, h_k', d_k].
        taps: [channels, 1, taps]. Weights of the convolution for the channels of q, k and v.
        taps_bias: [channels], or None.
        decay: [h']. The logarithm of the decay of each head.
        bias: [h', ..]. Added to a.

    Returns:
        o [b, s, h', d_v].
    """
    names, is_kimi = names_around(layer), hasattr(layer, "forget_gate")
    rule = names["chunk_kimi_delta_attention" if is_kimi else "torch_chunk_gated_delta_rule"]
    v, b, a = vba.split([vba.shape[-1] - 1 - bias.shape[-1], 1, bias.shape[-1]], -1)
    flat = [x.flatten(2) for x in (q, k, v)]
    mixed = names["causal_conv1d_fn"](
        torch.cat(flat, -1).transpose(1, 2),
        taps.squeeze(1),
        taps_bias,
        activation=layer.activation,
    )
    mixed = mixed.transpose(1, 2).split([x.shape[-1] for x in flat], -1)
    beta = b.squeeze(-1).sigmoid()
    if is_kimi:
        g = _kimi_decay(layer.forget_gate, a, decay, bias)
    else:
        g = -decay.float().exp() * F.softplus(a.float() + bias).squeeze(-1)
    output, *_ = rule(
        *(x.unflatten(-1, like.shape[2:]) for x, like in zip(mixed, (q, k, v))),
        g=g,
        beta=beta * 2.0 if getattr(layer, "allow_neg_eigval", False) else beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    return output


def _kimi_decay(gate: Any, a: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
    """Return the log decay of each channel of some heads, by the forward of Kimi's forget gate.

    Args:
        gate: The forget gate.
        a: [b, s, h', d]. The result of its projections.
        decay: [h']. Its ``A_log`` for these heads.
        bias: [h', d]. Its ``dt_bias`` for these heads.
    """
    own = {name: value for name, value in vars(gate).items() if not name.startswith("_")}
    heads = dict(
        num_heads=len(decay),
        A_log=decay.view(1, 1, -1, 1) if gate.A_log.dim() == 4 else decay,
        dt_bias=bias.flatten(),
    )
    # The projections are behind it: their results are its input.
    projections = dict.fromkeys(("f_a_proj", "f_b_proj", "f_proj"), lambda x: x)
    inner = types.SimpleNamespace(**{**own, **heads, **projections})
    return inspect.unwrap(type(gate).forward)(inner, a.flatten(2))


def _delta_merge(layer: Any, o: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Apply the gated norm and the output projection to o and z [b, s/P, h, d_v]."""
    # OLMo Hybrid and Kimi have the second pair of names.
    norm, out = ("norm", "out_proj") if hasattr(layer, "out_proj") else ("o_norm", "o_proj")
    width = o.shape[-1]
    y = getattr(layer, norm)(o.reshape(-1, width), given["z"].reshape(-1, width))
    return getattr(layer, out)(y.view(o.shape).flatten(2))


def _delta_net(sources: Callable[[Any, bool], Sequence[Source]]) -> Mixer:
    """Return the description of the delta nets with these projections."""
    rule = ByHeads("delta rule", _counts, _delta_rule, _learned)
    return Mixer(sources, _delta_merge, late=["z"], heads=rule)


FUSED, SPLIT = _delta_net(_fused_sources), _delta_net(_split_sources)
SEPARATE = _delta_net(functools.partial(_separate_sources, ["a_proj"], ["g_proj"]))
KIMI = _delta_net(
    functools.partial(
        _separate_sources,
        ["forget_gate.f_a_proj", "forget_gate.f_b_proj"],
        ["g_a_proj", "g_b_proj"],
    )
)
BAILING = _delta_net(functools.partial(_separate_sources, ["forget_gate.f_proj"], ["g_proj"]))

# Mamba 1: decays are numbers for each channel and state. in_proj gives x, which is convolved, and
# the gate z; x_proj gives the latent of dt, B and C, which are the same for all channels, or for
# those of one of Zamba's heads.


def _mamba1_sources(layer: Any, splits: bool) -> list[Source]:
    return in_proj_parts(layer, splits, ["x", "z"], [layer.intermediate_size] * 2)


def _zamba_sources(layer: Any, splits: bool) -> list[Source]:
    return [Source("xz", lambda x: layer.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1))]


def _mamba1_inputs(layer: Any, given: dict[str, Tensor]) -> list[Source]:
    """Return the source of x by channels; of dt's latent; and of B and C."""

    def project(x: Tensor) -> list[Tensor]:
        if hasattr(layer, "x_proj"):
            latent = layer.x_proj(x).unsqueeze(2)
        else:
            by_heads = _heads(x, layer.n_mamba_heads).unsqueeze(-2)
            latent = (by_heads @ layer.x_proj_weight.transpose(1, 2)).squeeze(-2)
        few = layer.ssm_state_size
        dt, b, c = latent.split([layer.time_step_rank, few, few], -1)
        if hasattr(layer, "dt_layernorm"):
            dt, b, c = layer.dt_layernorm(dt), layer.b_layernorm(b), layer.c_layernorm(c)
        return [x.unsqueeze(-1), dt, torch.cat([b, c], -1)]

    return [Source("qkv", project)]


def _channels(layer: Any) -> tuple[int, int]:
    """Return the number of channels, and of the heads that dt, B and C have.

    Raises:
        ValueError: for a projection of dt whose weight can't be cut by channels.
    """
    projection = getattr(layer, "dt_proj", None)
    if projection is not None and own_class(type(projection)) is not nn.Linear:
        raise ValueError(
            f"{type(layer).__name__}: its dt_proj is a {type(projection).__name__}, whose weight "
            "can't be cut by channels; leave dt_proj out of the adapter or quantisation"
        )
    return layer.intermediate_size, getattr(layer, "n_mamba_heads", 1)


def _mamba1_parameters(layer: Any) -> list[tuple[Tensor | None, Sections]]:
    """Return weight and bias of dt's projection, the decays, and D, [channels, ..] each."""
    if hasattr(layer, "dt_proj"):
        tensors = [layer.dt_proj.weight, layer.dt_proj.bias, layer.A_log, layer.D]
    else:
        of_heads = layer.dt_proj_weight, layer.dt_proj_bias, layer.A_log, layer.D
        tensors = [x.flatten(0, 1) for x in of_heads]
    return [(x, PER_HEAD) for x in tensors]


def _mamba1_scan(layer: Any, x: Tensor, dt: Tensor, bc: Tensor, *parameters: Tensor) -> Tensor:
    """Scan some channels; as many of them, one after another, share each head of dt, B and C."""
    scan, heads = names_around(layer)["mamba_selective_scan"], dt.shape[2]
    of_heads = zip(
        x.chunk(heads, 2), dt.unbind(2), bc.unbind(2), *(p.chunk(heads) for p in parameters)
    )
    mixed = []
    for x_head, dt_head, bc_head, weight, bias, a_log, d in of_heads:
        b, c = bc_head.transpose(1, 2).chunk(2, 1)
        mixed.append(
            scan(
                x_head.squeeze(-1).transpose(1, 2),
                weight @ dt_head.transpose(1, 2),
                -torch.exp(a_log.float()),
                b,
                c,
                D=d.float(),
                z=None,
                delta_bias=bias.float(),
                delta_softplus=True,
                use_mambapy=getattr(layer, "use_mambapy", False),
                use_associative_scan=layer.use_associative_scan,
            )
        )
    return torch.cat(mixed, 1).transpose(1, 2).unsqueeze(-1).to(x.dtype)


def _mamba1_merge(layer: Any, y: Tensor, given: dict[str, Tensor]) -> Tensor:
    return layer.out_proj(y.squeeze(-1) * F.silu(given["z"]))


MAMBA1 = Mixer(
    _mamba1_sources,
    _mamba1_merge,
    late=["z"],
    reach=reach,
    convolve=functools.partial(convolve, "conv1d", "activation"),
    heads=ByHeads(
        "selective scan",
        _channels,
        _mamba1_scan,
        _mamba1_parameters,
        _mamba1_inputs,
    ),
    split=["in_proj"],
)
ZAMBA = dataclasses.replace(MAMBA1, sources=_zamba_sources, split=[])
