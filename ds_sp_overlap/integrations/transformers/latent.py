"""Exchanges the latents of latent attention (DeepSeek's MLA) instead of k and v.

A layer computes k and v of all heads from one latent per token. If the latent is smaller than the k
and v that a rank would receive, it is cheaper to exchange the latent. In every transformers model
with latent attention, the forward of a layer passes a latent and a rotated key to the layer's
``expand_kv``, and passes the result to the attention function. While such a forward runs,
`LatentLayer.expand` replaces ``expand_kv``, and returns both arguments unchanged. They are expanded
after the exchange. The layer itself computes everything else, such as the rotation.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.latent import LatentAttention, can_expand_rows, latents_pay
from ..inspect.library import digest, replaced, source_of
from ..layers import kind_of
from .attention_function import FunctionLayer
from .modules import off_in_eval

EXPAND, PROJECTION = "expand_kv", "kv_b_proj"
# The digests of those sources of ``expand_kv`` whose results `LatentAttention` reproduces.
KNOWN = {"596e3777c27d516d"}


def is_latent(module: nn.Module) -> bool:
    """Return whether a layer expands latents in a known way.

    False if ``forward`` or ``expand_kv`` of this layer object was replaced.
    """
    kind: Any = type(module)
    is_replaced = vars(module).keys() & {"forward", EXPAND}
    return not is_replaced and _only_passes_to_attention(kind, _code_of(kind))


def _code_of(kind: Any) -> tuple[Any, Any]:
    """Return ``forward`` and ``expand_kv`` of a class, to notice when one of them is replaced."""
    return kind.forward, getattr(kind, EXPAND, None)


@functools.cache
def _only_passes_to_attention(kind: Any, _: tuple[Any, Any]) -> bool:
    """Return whether ``forward`` uses the results of ``expand_kv`` only as k and v of attention."""
    if digest(kind, EXPAND) not in KNOWN:  # guard: only code that is known
        return False
    # Find a statement that names both results, in the body itself, not in a branch of it.
    code = textwrap.dedent(source_of(kind.forward))
    names = re.search(rf"^    \(?(\w+), (\w+)\)? = self\.{EXPAND}\(", code, re.MULTILINE)
    if names is None:
        return False
    k, v = names.groups()
    # attention_function(self, q, k, v, ..)
    attends = re.search(rf"\(\s*self,\s*[\w.]+,\s*{k},\s*{v}\b", code)
    expands = code.count(f".{EXPAND}")
    # Each name must occur twice: in this statement, and in the call of the attention function.
    uses = re.findall(rf"\b(?:{k}|{v})\b", code)
    used_once = sorted(uses) == sorted([k, v] * 2)
    return expands == 1 and attends is not None and used_once  # guard: no other use


def why_not(layer: Any, size: int) -> str | None:
    """Explain why the latents of a layer are not exchanged; `enable` calls this.

    Args:
        layer: The layer.
        size: The sp size.

    Returns:
        The reason; empty if the latents are exchanged; None if the layer has no known latents.
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


class LatentLayer(FunctionLayer):
    """Overlaps a layer, and exchanges latents instead of k and v; `why_not` is empty for the layer.

    Attributes:
        falls_back: Whether k and v are exchanged instead of latents (`Forwards.fallible`).
    """

    falls_back = False

    def make_attention(self) -> LatentAttention:
        self.code = _code_of(type(self.module))
        self.forwards.fallible[self.name] = self
        runtime, nope_dim = self.overlap.runtime(self.name), self.module.qk_nope_head_dim
        return LatentAttention(runtime, lambda: getattr(self.module, PROJECTION), nope_dim)

    def must_fall_back(self) -> bool:
        """Return whether k and v must be exchanged because of this rank's modules."""
        # If an adapter wraps the projection, its rows can't be computed separately.
        return not can_expand_rows(getattr(self.module, PROJECTION))  # guard: adapters are heard

    def expand(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents and the rotated keys unchanged, or k and v if the layer falls back.

        This method replaces ``expand_kv`` of the layer.
        """
        if off_in_eval(self.module) or self.falls_back or self.must_fall_back():
            return type(self.module).expand_kv(self.module, latent, rotated)
        return latent, rotated

    @torch._disable_dynamo(recursive=False)
    def forward(self, own: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, which calls `expand` instead of ``expand_kv``."""
        if _code_of(type(self.module)) != self.code:  # guard: latents are expanded as was read
            raise RuntimeError(
                f"{self.name}: {type(self.module).__name__} computes something else since its "
                "class was given another forward or expand_kv; call ds_sp_overlap.enable again"
            )
        # Set the attribute only while the layer's forward runs.
        with replaced(vars(self.module), EXPAND, self.expand):
            return FunctionLayer.forward(self, own, *args, **kwargs)
