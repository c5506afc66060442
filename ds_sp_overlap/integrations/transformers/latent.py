"""Latent attention of transformers models (DeepSeek's MLA), whose latents travel instead of k, v.

k and v of all heads are made of one latent for each token. If the latent is smaller than the k and
v that a rank would receive, exchanging the latent is cheaper. In every family with latent
attention, the forward of a layer hands a latent and a rotated key to its ``expand_kv``, and the
result to the attention function. While a forward runs here, ``expand_kv`` returns its arguments
unchanged, and they are expanded behind the exchange. Everything else, such as the rotation, stays
the layer's own.
"""

from __future__ import annotations

import functools
import re
import textwrap
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.latent import LatentAttention, can_expand_rows, latents_pay
from ...attention.layer import LayerRuntime
from ..inspect.library import digest, source_of
from ..layers import OverlapSettings, kind_of
from ..rebinding import Undo, rebind
from .attention_function import bind_function
from .forward import Forwards
from .modules import off_in_eval, refuse_copy

EXPAND, PROJECTION = "expand_kv", "kv_b_proj"
# Digests of the sources of ``expand_kv`` that compute the same as `LatentAttention`.
KNOWN = {"596e3777c27d516d"}


def is_latent(module: nn.Module) -> bool:
    """Return whether a layer expands latents in a way that is known here.

    Not if somebody replaced ``forward`` or ``expand_kv`` of this layer object.
    """
    kind: Any = type(module)
    is_replaced = vars(module).keys() & {"forward", EXPAND}
    return not is_replaced and _only_passes_to_attention(kind, _code_of(kind))


def _code_of(kind: Any) -> tuple[Any, Any]:
    """Return the functions of a class that may tell latents; somebody may replace them."""
    return kind.forward, getattr(kind, EXPAND, None)


@functools.cache
def _only_passes_to_attention(kind: Any, _: tuple[Any, Any]) -> bool:
    """Return whether ``forward`` hands the results of ``expand_kv`` to attention alone."""
    if digest(kind, EXPAND) not in KNOWN:  # guard: only code that is known
        return False
    # A statement of the body itself, not of a branch in it, that gives both results names.
    code = textwrap.dedent(source_of(kind.forward))
    names = re.search(rf"^    \(?(\w+), (\w+)\)? = self\.{EXPAND}\(", code, re.MULTILINE)
    if names is None:
        return False
    k, v = names.groups()
    # attention_function(self, q, k, v, ..)
    attends = re.search(rf"\(\s*self,\s*[\w.]+,\s*{k},\s*{v}\b", code)
    expands = code.count(f".{EXPAND}")
    # Each name is used twice: where it is assigned, and in the call of the attention function.
    uses = re.findall(rf"\b(?:{k}|{v})\b", code)
    used_once = sorted(uses) == sorted([k, v] * 2)
    return expands == 1 and attends is not None and used_once  # guard: no other use


def why_not(layer: Any, size: int) -> str | None:
    """Explain why the latents of a layer don't travel; asked by `enable`.

    Args:
        layer: The layer.
        size: The sp size.

    Returns:
        The reason; empty if the latents travel; None if the layer isn't known to have latents.
    """
    if not is_latent(layer):
        return None
    per_head = layer.qk_head_dim + layer.v_head_dim
    latent, rotated = layer.kv_lora_rank, layer.qk_rope_head_dim
    projection = getattr(layer, PROJECTION)
    if size > layer.num_heads:
        return (
            f"no latents travel where ranks share heads, here {size} ranks {layer.num_heads} heads"
        )
    if not latents_pay(size, layer.num_heads, latent, rotated=rotated, per_head=per_head):
        return (
            f"latents of {latent + rotated} numbers a token are no smaller than a rank's k and v, "
            f"{layer.num_heads * per_head // size}"
        )
    if not can_expand_rows(projection):
        return f"latents are expanded whole: {PROJECTION} ({kind_of(projection)})"
    return ""


class _Expansion:
    """Takes the place of a layer's ``expand_kv``.

    Args:
        module: The layer.

    Attributes:
        falls_back: Whether k and v travel (`Forwards.fallible`).
    """

    falls_back = False

    def __init__(self, module: Any):
        self.module = module

    def must_fall_back(self) -> bool:
        """Return whether k and v travel in place of the latents, by this rank's modules."""
        # An adapter around the projection expands all latents itself.
        return not can_expand_rows(getattr(self.module, PROJECTION))  # guard: adapters are heard

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return what travels in place of k and v."""
        if off_in_eval(self.module) or self.falls_back or self.must_fall_back():
            return type(self.module).expand_kv(self.module, latent, rotated)
        return latent, rotated


def bind(name: str, module: Any, forwards: Forwards, overlap: OverlapSettings) -> Undo:
    """Rebind a layer so that its latents travel instead of its k and v.

    Runs in `enable`, once the ranks have agreed, for a layer for which `why_not` is empty.

    Args:
        name: The layer's name.
        module: The layer.
        forwards: The forwards of its model.
        overlap: The settings of the model's layers.

    Returns:
        The function that undoes the rebinding.
    """
    # Weak, since the global table of attention functions holds `attention`, and must not keep the
    # model alive. All else here lives with the model.
    module_reference = weakref.ref(module)
    # Taken before `bind_function` rebinds the forward.
    nope_dim, original = module.qk_nope_head_dim, module.forward
    code = _code_of(type(module))

    def attention(layer: LayerRuntime) -> LatentAttention:
        """Make the attention that `bind_function` puts in place of the layer's."""
        return LatentAttention(layer, lambda: getattr(module_reference(), PROJECTION), nope_dim)

    unbind_function = bind_function(name, module, forwards, overlap=overlap, attention=attention)

    expand = forwards.fallible[name] = _Expansion(module)

    @torch._disable_dynamo(recursive=False)
    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, which calls `expand` in place of ``expand_kv``."""
        if _code_of(type(module)) != code:  # guard: latents are expanded as was read
            raise RuntimeError(
                f"{name}: {type(module).__name__} computes something else since its class was given "
                "another forward or expand_kv; call ds_sp_overlap.enable again"
            )
        forwards.refuse_empty(name)
        # The attribute is there only while the layer's forward runs.
        vars(module)[EXPAND] = expand
        try:
            return original(*args, **kwargs)
        finally:
            vars(module).pop(EXPAND, None)

    undo_forward = rebind(module, forward, whole=False, of_copy=refuse_copy)

    def undo(module: nn.Module) -> None:
        undo_forward(module)
        unbind_function(module)

    return undo
