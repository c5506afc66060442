"""transformers: gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid), recognised by the source of their forward.

What a forward does between its projections and its norm is done here by `DeltaNet`, with the same functions for the convolution and
for the delta rule, be they transformers' own or the kernels that stand in for them. A document begins with an empty state, and the
convolution doesn't look back beyond it, so that padding in front of it leaves no trace. (transformers zeroes padding, and keeps
documents apart where it is given their edges and has kernels for it.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.delta_net import DeltaNet, Mix
from ..attention.layer import Layer
from .layers import Found, Overlap
from .masks import RECURRENT
from .positions import GlobalSequence
from .rebinding import rebind
from .transformers_forward import Forwards
from .transformers_modules import digest, off_in_eval, once

Sources = tuple[tuple[str, Callable[[Any, Tensor], Any]], ...]  # what gives which of q, k, v, z, b, a of a layer's hidden states


def _qkv(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    return layer.in_proj_qkv(x).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)


def _one(child: str) -> Callable[[Any, Tensor], tuple[Tensor]]:
    return lambda layer, x: (getattr(layer, child)(x),)


FUSED: Sources = (("qkvzba", lambda layer, x: layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))),)
SPLIT: Sources = (("qkv", _qkv), *((name, _one(f"in_proj_{name}")) for name in "zba"))
SEPARATE: Sources = (*((name, _one(f"{name}_proj")) for name in "qkvba"), ("z", _one("g_proj")))
KNOWN = {  # by the source of the forward, and of what else of the class it calls
    "0e32b04f43722526": FUSED,  # Qwen3-Next
    "3efda038042d9626": SPLIT,  # Qwen3.5, dense and MoE
    "5cc8d6823a28852b": SEPARATE,  # OLMo Hybrid
}


def sources_of(module: nn.Module) -> Sources | None:
    """How a gated delta net projects; None for a module that is none, or whose code is not one that is known here."""
    kind, convolution = type(module), getattr(module, "conv1d", None)
    if "forward" in vars(module) or not kind.__module__.startswith("transformers.models."):
        return None
    if type(convolution) is not nn.Conv1d or convolution.bias is not None or RECURRENT not in names_around(module):
        return None
    return KNOWN.get(_digest(kind))


@once
def _digest(kind: type[nn.Module]) -> str:
    return digest(kind, "fix_query_key_value_ordering", "forward")


def names_around(layer: nn.Module) -> dict[str, Any]:
    """What the names in the code of a layer's forward, and in its model's, stand for."""
    return inspect.unwrap(type(layer).forward).__globals__


def found(name: str, layer: Any, model: Any, forwards: Forwards, overlap: Overlap) -> Found:
    """A gated delta net in ``model``, with what it gets. Raises ValueError where it can't be split."""
    heads, key_heads, size = layer.num_v_heads, layer.num_k_heads, overlap.channel.size
    where = f"{name} ({type(layer).__name__})"
    if heads < size:
        raise ValueError(f"{where}: {heads} value heads leave a rank of sp size {size} with no head; use sp size {heads} or less")
    groups = overlap.groups_for(heads, key_heads)
    sources = sources_of(layer)
    assert sources is not None
    z_alone = any(names == "z" for names, _ in sources)
    got = f"delta rule, {overlap.in_words(groups)}" + (", the projection of z under q, k, v" if z_alone else "")
    lacks = overlap.why_not_more("its projections are called whole", groups)
    return Found(name, layer, got, lacks, functools.partial(_bind, name, layer, model, sources, forwards, overlap))


def _bind(name: str, layer: Any, model: Any, sources: Sources, forwards: Forwards, overlap: Overlap) -> Any:
    norm, out = ("norm", "out_proj") if hasattr(layer, "out_proj") else ("o_norm", "o_proj")

    def merge(o: Tensor, z: Tensor) -> Tensor:
        y = getattr(layer, norm)(o.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
        return getattr(layer, out)(y.view(o.shape).flatten(2))

    net = DeltaNet(
        Layer(overlap.channel, overlap.config, name, overlap.policy),
        heads=layer.num_v_heads, head_dim=layer.head_v_dim, key_heads=layer.num_k_heads, key_dim=layer.head_k_dim,
        project=functools.partial(_projected, layer, sources),
        merge=merge,
        learned=lambda: (layer.conv1d.weight, layer.A_log, layer.dt_bias),
        trained=lambda: [p.requires_grad for p in layer.parameters()],
    )  # fmt: skip
    original = layer.forward

    def forward(hidden_states, cache_params=None, attention_mask=None, **kwargs):
        if off_in_eval(model):
            return original(hidden_states, cache_params, attention_mask, **kwargs)
        sequence, _ = forwards.of(name, layer, hidden_states, attention_mask, kwargs)
        return net(hidden_states, _mix(layer, sequence), sequence.lengths)

    return rebind(layer, forward)


def _projected(layer: Any, sources: Sources, x: Tensor) -> Callable[[str], Tensor]:
    """What gives q, k, v, z [b, s/P, heads, d], b and a [b, s/P, heads] of ``x``; each projection is called when it is asked for."""
    made: dict[str, Tensor] = {}
    dims = dict.fromkeys("qk", layer.head_k_dim) | dict.fromkeys("vz", layer.head_v_dim)

    def give(name: str) -> Tensor:
        if name not in made:
            names, project = next(source for source in sources if name in source[0])
            made.update(zip(names, project(layer, x)))
        y = made.pop(name)
        return y if name in "ba" or y.dim() == 4 else y.unflatten(-1, (-1, dims[name]))

    return give


def _mix(layer: Any, sequence: GlobalSequence) -> Mix:
    """The convolution and the delta rule of some heads over the whole sequence, as the layer's own forward has them."""
    names = names_around(layer)
    convolve, rule = names["causal_conv1d_fn"], names["torch_chunk_gated_delta_rule"]
    scale, d_v = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0, layer.head_v_dim

    def mix(q: Tensor, k: Tensor, vba: Tensor, taps: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        def document(vba: Tensor, k: Tensor, q: Tensor) -> Tensor:
            qkv, (b, a) = [x.flatten(2) for x in (q, k, vba[..., :d_v])], vba[..., d_v:].unbind(-1)
            mixed = torch.cat(qkv, -1).transpose(1, 2)
            mixed = convolve(mixed, taps.squeeze(1), None, activation=layer.activation).transpose(1, 2)
            q, k, v = (
                y.unflatten(-1, x.shape[2:]) for y, x in zip(mixed.split([x.shape[-1] for x in qkv], -1), (q, k, vba[..., :d_v]))
            )
            beta, g = b.sigmoid(), -decay.float().exp() * F.softplus(a.float() + bias)
            beta = beta if scale == 1.0 else beta * scale
            return rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)[0]

        documents = sequence.recurrences  # guard: an empty state
        return document(vba, k, q) if documents is None else documents.attend(document, None, vba, k, q)

    return mix
