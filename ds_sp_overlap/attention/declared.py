"""Records the declared properties of attention functions, keyed by the function object.

Note [Heads alike]
~~~~~~~~~~~~~~~~~~
With head groups, each call of an attention function gets only some of a rank's heads. The rank may
also have other heads than without groups (`Geometry.groups_first`). If the function has a value for
each head (ALiBi slopes, a scale of each KV head, a sink), every group silently gets the values of
the first heads. This can't be seen from outside: the function's name does not tell, and in a trial
run the values may still be equal for all heads. So a function that nobody has declared gets all of
a rank's heads at once, in one head group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..config import SpOverlapConfig
from ..warn import warn_once

_Function = TypeVar("_Function", bound=Callable)


@dataclass(frozen=True)
class AttentionFunction:
    """Holds the properties of an attention function.

    The other fields are arguments of `attention_function`, which describes them.

    Attributes:
        takes_masks: Whether the function takes a mask [1, 1, n, s]; transformers' sdpa gets a
            sliding window in this form.
    """

    causal: bool | str = True
    documents: Literal["edges", "positions"] | None = None
    heads_alike: bool = False
    takes_sinks: bool = False
    takes_queries: bool = False
    takes_masks: bool = False


# The properties of a function that nobody has declared. The function is called as under DeepSpeed's
# class: with all of a rank's heads, all tokens, their positions and no mask.
UNKNOWN = AttentionFunction(documents="positions", takes_sinks=True)
# The declared properties by function or module. The dict keeps the functions and modules alive.
_declared: dict[Any, AttentionFunction] = {}


def attention_function(
    function: _Function,
    *,
    causal: bool | str = True,
    documents: Literal["edges", "positions"] | None = None,
    heads_alike: bool = False,
    takes_sinks: bool = False,
    takes_queries: bool = False,
) -> _Function:
    """Declare what an attention function supports, so that layers can overlap it in head groups.

    Declare a function of transformers' ``AttentionInterface`` before `enable`. For the local
    attention of a `SelfAttention` or a ``DistributedAttention``, only ``heads_alike`` matters.
    A function that is not declared runs in one head group.

    Args:
        function: The function object or the module that is called; the wrapper, if the function is
            wrapped.
        causal: True if the function is always causal; otherwise the name of the option that makes
            it causal (``is_causal``). A layer that passes False for this option is refused.
        documents: How the function receives packed documents. "edges": as transformers' flash
            attention does, by ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and
            ``max_length_k``, counted over all rows one after another. "positions": by
            ``position_ids``, for one row at a time. None: the function knows no documents, so it is
            called for one document at a time, or for a batch of short documents.
        heads_alike: Whether the function treats all heads alike, see Note [Heads alike].
        takes_sinks: Whether the function uses ``s_aux``, a sink for each head of the call.
        takes_queries: Whether the function accepts fewer queries than keys and aligns the last
            query with the last key. Needed where ranks share query heads.

    Returns:
        ``function``.

    Raises:
        ValueError: for an unknown ``documents`` or ``causal``; and for "positions" together with
            ``takes_queries``, since ``position_ids`` would belong to the keys.
    """
    if documents not in ("edges", "positions", None):
        raise ValueError(
            f'attention_function: documents must be "edges", "positions" or None, got {documents!r}'
        )
    if causal is not True and not isinstance(causal, str):
        raise ValueError(
            "attention_function: causal must be True or the name of the option that says so, got "
            f"{causal!r}; attention that is not causal can't be overlapped"
        )
    if takes_queries and documents == "positions":
        raise ValueError(
            'attention_function: takes_queries with documents="positions", which are those of the '
            'keys; use "edges" or None, or leave takes_queries out'
        )
    _declared[function] = AttentionFunction(
        causal, documents, heads_alike, takes_sinks=takes_sinks, takes_queries=takes_queries
    )
    return function


def declared(function: Any) -> AttentionFunction | None:
    """Return the declared properties of a function or module; None if it was not declared."""
    try:
        return _declared.get(function)
    except TypeError:  # the object has no hash
        return None


def undeclared(function: Any) -> str:
    """Return a text that says why a function runs in one head group, and how to get more groups."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return (
        f"{name} runs in one head group, since it isn't known to treat all heads alike; if it "
        "does, declare it with ds_sp_overlap.attention_function(.., heads_alike=True)"
    )


def in_one_group(config: SpOverlapConfig) -> SpOverlapConfig:
    """Return a copy of ``config`` with one head group, see Note [Heads alike]."""
    return config.model_copy(update={"head_groups": 1})


def config_for(function: Any, config: SpOverlapConfig, heads_alike: bool) -> SpOverlapConfig:
    """Return the config of a layer that runs a local attention of the caller.

    If the attention isn't known to treat all heads alike, the layer gets one head group, and a
    warning is logged once.

    Args:
        function: The local attention.
        config: The ``sp_overlap`` section.
        heads_alike: Whether the caller declares that the attention treats all heads alike.
    """
    known = declared(function)
    if heads_alike or config.head_groups == 1 or (known is not None and known.heads_alike):
        return config
    warn_once(f"sp_overlap: {undeclared(function)}; or give heads_alike=True")
    return in_one_group(config)
