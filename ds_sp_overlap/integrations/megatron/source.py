"""Megatron-DeepSpeed: knows the forward of a ``ParallelAttention`` by its source.

In a forward that is known

- q, k and v are the rows [all q | all k | all v] of its projections,
- ``dist_attn`` is given these, the tables and the mask, and nothing else,
- ``dense`` is given what ``dist_attn`` returns,
- fewer KV heads than query heads are refused: the forward is no baseline there.
"""

from __future__ import annotations

from typing import Any

from ...attention.runtime.linear import hooks_are_harmless
from ..inspect.accounting import is_plain
from ..inspect.library import digest
from ..inspect.tokenwise import has_own_call

# The methods that compute, and the digests of their source in the commits that are known:
# 4efb479d, and pull request 415.
PARTS = "forward", "get_sp_stream", "repeat_kv"
KNOWN = {"6ad9c6854d8c1e86", "57d3f24bba0e530c"}
# The digests of the forwards of its ColumnParallelLinear and RowParallelLinear in these commits.
KNOWN_LINEAR = {"870192154e55c3f4", "2f83d0e5bb03246d", "38b5176df5e3ceac"}


def why_unknown(module: Any) -> str:
    """Explain why it is not known what a layer's forward computes; empty if it is known."""
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
    """Return what a known forward and its driver go by: children, constants and methods, by name.

    All must stay as they were in `enable`.
    """
    facts = dict(module.named_children())
    for name, value in vars(module).items():
        if is_plain(value) and name != "training":
            facts[name] = value
    for name in (*PARTS, "__call__"):
        facts[f"__class__.{name}"] = getattr(type(module), name, None)
    return facts
