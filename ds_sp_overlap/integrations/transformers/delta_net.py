"""Gated delta nets of transformers models (Qwen3-Next, Qwen3.5, OLMo Hybrid), and Kimi's.

Kimi's delta attention has as many heads of q and k as of v, and a decay for each channel.

A gated delta net is recurrent: its state passes from token to token, so that it needs the whole
sequence. A layer is recognised by the source of its forward. `DeltaNet` does the work of the
forward between the projections and the norm, with the same functions for the convolution and for
the delta rule: those of transformers, or the kernels that stand in for them.

A document begins with an empty state, and the convolution doesn't look back beyond the beginning,
so that padding in front of a document has no effect. transformers zeroes padding instead, and keeps
documents apart only where it is given their edges and has kernels for them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.delta_net import DeltaNet
from ...attention.layer import LayerRuntime
from ..inspect.library import digest, once
from ..layers import FoundLayer, OverlapSettings
from ..rebinding import Undo, rebind
from ..sequence.masks import RECURRENT
from ..sequence.positions import GlobalSequence
from .forward import Forwards
from .modules import off_in_eval


@dataclass(frozen=True)
class Source:
    """A projection of a layer's hidden states.

    Attributes:
        names: The results, in order, each by one letter of q, k, v, z, b, a.
        project: Maps the layer and x [b, s/P, m] to the results.
    """

    names: str
    project: Callable[[Any, Tensor], Sequence[Tensor]]


def _project_fused(layer: Any, x: Tensor) -> Sequence[Tensor]:
    """Return q, k, v, z, b and a of a layer with two fused projections."""
    return layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))


def _project_qkv(layer: Any, x: Tensor) -> Sequence[Tensor]:
    """Return q, k and v of a layer that has one projection for the three."""
    return layer.in_proj_qkv(x).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)


def _project_one(child: str, layer: Any, x: Tensor) -> Sequence[Tensor]:
    """Return the result of one projection of a layer."""
    return (getattr(layer, child)(x),)


def _single(name: str, child: str) -> Source:
    """Return the source of one result, made by the layer's projection ``child``."""
    return Source(name, functools.partial(_project_one, child))


Sources = tuple[Source, ...]
FUSED: Sources = (Source("qkvzba", _project_fused),)
SPLIT: Sources = (
    Source("qkv", _project_qkv), _single("z", "in_proj_z"), _single("b", "in_proj_b"),
    _single("a", "in_proj_a"),
)  # fmt: skip
SEPARATE: Sources = (
    _single("q", "q_proj"), _single("k", "k_proj"), _single("v", "v_proj"),
    _single("b", "b_proj"), _single("a", "a_proj"), _single("z", "g_proj"),
)  # fmt: skip
KIMI: Sources = (
    *SEPARATE[:4],
    Source("a", lambda layer, x: (layer.forget_gate.f_b_proj(layer.forget_gate.f_a_proj(x)),)),
    Source("z", lambda layer, x: (layer.g_b_proj(layer.g_a_proj(x)),)),
)
BAILING: Sources = (
    *SEPARATE[:4],
    Source("a", lambda layer, x: (layer.forget_gate.f_proj(x),)),
    _single("z", "g_proj"),
)
# By the digest of the forward, and of the method of the class that it calls.
KNOWN = {
    "0e32b04f43722526": FUSED,  # Qwen3-Next, transformers 5.23
    "dc97d3f7c19cffa1": FUSED,  # Qwen3-Next, 5.24, which renames the cache
    "3efda038042d9626": SPLIT,  # Qwen3.5, dense and MoE, 5.23
    "0cfc669969de8f28": SPLIT,  # Qwen3.5, dense and MoE, 5.24
    "5cc8d6823a28852b": SEPARATE,  # OLMo Hybrid, 5.23
    "9bc3a4822def144a": SEPARATE,  # OLMo Hybrid, 5.24
    "427b6ef3341eefae": KIMI,  # Kimi Linear, 5.24
    "79a0e47b6bb43830": BAILING,  # Bailing Hybrid, 5.24
}


def sources_of(module: nn.Module) -> Sources | None:
    """Return the projections of a gated delta net; None for any module that is not a known one.

    `enable` asks for every module of the model.
    """
    kind, convolution = type(module), getattr(module, "conv1d", None)
    if "forward" in vars(module) or not kind.__module__.startswith("transformers.models."):
        return None
    # `_mix` calls the convolution with the weight alone.
    if type(convolution) is not nn.Conv1d or convolution.bias is not None:
        return None
    # The model must make its masks by the function that `Masks.for_recurrent` replaces.
    if RECURRENT not in names_around(module):
        return None
    return KNOWN.get(_digest(kind))


@once
def _digest(kind: type[nn.Module]) -> str:
    """Return the digest by which a class of gated delta nets is known."""
    return digest(kind, "fix_query_key_value_ordering", "forward")


def names_around(layer: nn.Module) -> dict[str, Any]:
    """Return the globals of the file that defines the layer's forward and its model."""
    return inspect.unwrap(type(layer).forward).__globals__


def _sizes(layer: Any) -> tuple[int, int, int, int]:
    """Return heads and head dim of v, then of q and k."""
    if hasattr(layer, "forget_gate"):
        return (layer.num_heads, layer.head_dim) * 2
    return layer.num_v_heads, layer.head_v_dim, layer.num_k_heads, layer.head_k_dim


def describe(
    name: str, layer: Any, model: Any, forwards: Forwards, overlap: OverlapSettings
) -> FoundLayer:
    """Describe a gated delta net, and how to overlap it; nothing is rebound yet.

    Args:
        name: The layer's name.
        layer: The layer, for which `sources_of` isn't None.
        model: The innermost transformers model around it.
        forwards: The forwards of the model.
        overlap: The settings of the model's layers.

    Raises:
        ValueError: if a rank would have no head, or the section asks for too many head groups.
    """
    (heads, _, key_heads, _), size = _sizes(layer), overlap.sp_group.size
    if heads < size:
        raise ValueError(
            f"{name} ({type(layer).__name__}): {heads} value heads leave a rank of sp size {size} "
            f"with no head; use sp size {heads} or less"
        )
    why = f"{name} ({type(layer).__name__}) is a gated delta net, which needs all queries at once"
    groups = overlap.groups_for(heads, key_heads, why)
    sources = sources_of(layer)
    assert sources is not None
    got = f"delta rule, {overlap.describe_groups(groups)}"
    if any(source.names == "z" for source in sources):
        got += ", the projection of z under q, k, v"
    lacks = overlap.why_not_more("its projections are called whole", groups)
    bind = functools.partial(_bind, name, layer, model, sources, forwards, overlap)
    return FoundLayer(name, layer, got, lacks=lacks, bind=bind)


def _bind(
    name: str,
    layer: Any,
    model: Any,
    sources: Sources,
    forwards: Forwards,
    overlap: OverlapSettings,
) -> Undo:
    """Rebind a gated delta net; return the function that undoes the rebinding.

    Runs in `enable`, once the ranks have agreed. The arguments are those of `describe`, and the
    layer's `sources_of`.
    """
    # OLMo Hybrid and Kimi have the second pair of names.
    norm, out = ("norm", "out_proj") if hasattr(layer, "out_proj") else ("o_norm", "o_proj")
    heads, head_dim, key_heads, key_dim = _sizes(layer)

    def merge(o: Tensor, z: Tensor) -> Tensor:
        """Apply the gated norm and the output projection to o and z [b, s/P, h, d_v]."""
        y = getattr(layer, norm)(o.reshape(-1, head_dim), z.reshape(-1, head_dim))
        return getattr(layer, out)(y.view(o.shape).flatten(2))

    net = DeltaNet(
        LayerRuntime(overlap.sp_group, overlap.config, name, policy=overlap.policy),
        heads=heads,
        head_dim=head_dim,
        key_heads=key_heads,
        key_dim=key_dim,
        project=functools.partial(_Projected, layer, sources),
        merge=merge,
        # In the order in which `_mix` takes them.
        learned=lambda: _learned(layer),
        trained=lambda: [p.requires_grad for p in layer.parameters()],
    )
    original = layer.forward

    def forward(hidden_states, *, attention_mask=None, **kwargs):
        """Take the place of the layer's forward [b, s/P, m] -> [b, s/P, m]. Collective."""
        if off_in_eval(model):
            return original(hidden_states, attention_mask=attention_mask, **kwargs)
        # `_mix` calls the convolution without a bias. `sources_of` left out layers that had one.
        if layer.conv1d.bias is not None:
            raise RuntimeError(
                f"{name}: its conv1d has a bias since ds_sp_overlap.enable, which is not supported "
                "here; take the bias away, or call ds_sp_overlap.disable"
            )
        forwards.refuse_empty(name)
        sequence, _ = forwards.of(name, layer, hidden_states, mask=attention_mask, kwargs=kwargs)
        mix = functools.partial(_mix, layer, sequence)
        return net(hidden_states, mix, sequence.lengths)

    return rebind(layer, forward)


def _learned(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the taps [channels, ..]; and, for each head, the decay [h] and the bias [h, ..]."""
    if not hasattr(layer, "forget_gate"):
        return layer.conv1d.weight, layer.A_log, layer.dt_bias
    gate = layer.forget_gate
    return layer.conv1d.weight, gate.A_log.flatten(), gate.dt_bias.view(layer.num_heads, -1)


class _Projected:
    """The projections of one call; each runs when one of its results is first asked for.

    `DeltaNet` makes one for each call of the layer.

    Args:
        layer: The layer.
        sources: Its projections.
        x: [b, s/P, m]. The hidden states.
    """

    def __init__(self, layer: Any, sources: Sources, x: Tensor):
        self.layer, self.sources, self.x = layer, sources, x
        self._results: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """Return and forget a result: q, k, v or z [b, s/P, heads, d]; b or a [b, s/P, heads].

        Kimi's a is [b, s/P, heads, d].
        """
        if name not in self._results:
            source = next(source for source in self.sources if name in source.names)
            self._results.update(zip(source.names, source.project(self.layer, self.x)))
        result = self._results.pop(name)
        heads, _, key_heads, _ = _sizes(self.layer)
        is_one_each = name == "b" or (name == "a" and result.shape[-1] == heads)
        if is_one_each or result.dim() == 4:
            return result
        return result.unflatten(-1, (key_heads if name in "qk" else heads, -1))


def _mix(
    layer: Any,
    sequence: GlobalSequence,
    q: Tensor,
    k: Tensor,
    vba: Tensor,
    taps: Tensor,
    decay: Tensor,
    bias: Tensor,
) -> Tensor:
    """Compute the convolution and the delta rule of some heads, as the layer's forward does.

    Runs between the exchanges, once per head group; h' and h_k' count the heads of the group on
    this rank.

    Args:
        layer: The layer.
        sequence: The global sequence.
        q: [b, s, h_k', d_k].
        k: [b, s, h_k', d_k].
        vba: [b, s, h', ..]. v with b and a behind it.
        taps: [channels, 1, taps]. Weights of the convolution for the channels of q, k and v.
        decay: [h']. The logarithm of the decay of each head.
        bias: [h', ..]. Added to a.

    Returns:
        o [b, s, h', d_v].
    """
    names = names_around(layer)
    is_kimi, head_dim = hasattr(layer, "forget_gate"), _sizes(layer)[1]
    rule = names["chunk_kimi_delta_attention" if is_kimi else "torch_chunk_gated_delta_rule"]
    convolve, allow_negative = names["causal_conv1d_fn"], getattr(layer, "allow_neg_eigval", False)

    def document(vba: Tensor, k: Tensor, q: Tensor) -> Tensor:
        """Mix the tokens of documents of one length, from an empty state."""
        v, b, a = vba.split([head_dim, 1, vba.shape[-1] - head_dim - 1], -1)
        q_flat, k_flat, v_flat = q.flatten(2), k.flatten(2), v.flatten(2)
        widths = [q_flat.shape[-1], k_flat.shape[-1], v_flat.shape[-1]]
        channels_first = torch.cat((q_flat, k_flat, v_flat), -1).transpose(1, 2)
        mixed = convolve(channels_first, taps.squeeze(1), None, activation=layer.activation)
        q_mixed, k_mixed, v_mixed = mixed.transpose(1, 2).split(widths, -1)
        beta = b.squeeze(-1).sigmoid()
        if is_kimi:
            g = _kimi_decay(layer.forget_gate, a, decay, bias)
        else:
            g = -decay.float().exp() * F.softplus(a.squeeze(-1).float() + bias)
        output, *_ = rule(
            q_mixed.unflatten(-1, q.shape[2:]),
            k_mixed.unflatten(-1, k.shape[2:]),
            v_mixed.unflatten(-1, v.shape[2:]),
            g=g,
            beta=beta * 2.0 if allow_negative else beta,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        return output

    documents = sequence.recurrent_documents  # guard: an empty state
    if documents is None:
        return document(vba, k, q)
    # As in the exchanges, v takes the place of q.
    return documents.attend(document, None, vba, k, q)


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
