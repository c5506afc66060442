"""Recognises the forward of Megatron-DeepSpeed's ``ParallelAttention`` by its source.

A forward with a known source

- takes q, k and v from the rows [all q | all k | all v] of its projections,
- passes q, k, v, the rotary tables, the mask and nothing else to ``dist_attn``,
- passes the result of ``dist_attn`` to ``dense``,
- fails for fewer KV heads than query heads, and so is no baseline to time for such layers.
"""

from __future__ import annotations

from typing import Any

from ...attention.runtime.linear import hooks_are_harmless
from ..inspect.accounting import is_plain
from ..inspect.library import digest
from ..inspect.tokenwise import has_own_call

# The methods in which the layer computes, and the digests of their source in the known commits:
# 4efb479d, and pull request 415.
PARTS = "forward", "get_sp_stream", "repeat_kv"
KNOWN = {"6ad9c6854d8c1e86", "57d3f24bba0e530c"}
# The digests of the forwards of ColumnParallelLinear and RowParallelLinear in these commits.
KNOWN_LINEAR = {"870192154e55c3f4", "2f83d0e5bb03246d", "38b5176df5e3ceac"}


def why_unknown(module: Any) -> str:
    """Explain why the computation of a layer's forward is not known; empty if it is known."""
    if has_own_call(module):
        return "it has a __call__ of its own"
    if not hooks_are_harmless(module.dist_attn):
        return (
            "dist_attn has a hook of its own"  # guard: a call of dist_attn that is hooked is made
        )
    if digest(type(module), *PARTS) not in KNOWN:  # guard: known by its source
        return "the source of its forward is not known here"
    return ""


def facts_of(module: Any) -> dict[str, Any]:
    """Return, by name, the children, constants and methods on which a known forward depends.

    If one of these changes after `enable`, the layer can't run (`layers._Driven`).
    """
    facts = dict(module.named_children())
    for name, value in vars(module).items():
        if is_plain(value) and name != "training":
            facts[name] = value
    for name in (*PARTS, "__call__"):
        facts[f"__class__.{name}"] = getattr(type(module), name, None)
    return facts
