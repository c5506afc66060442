"""Records what attention functions do, by the function object that runs.

Note [Heads alike]
~~~~~~~~~~~~~~~~~~
Head groups call an attention function with some of a rank's heads at a time, and with other heads
than without groups (`Geometry.groups_first`). If the function has a value for each head (ALiBi
slopes, a scale of each KV head, a sink), every group silently gets the values of the first heads.
Nothing tells this of a function from outside: not its name, and no trial, since what it holds may
be alike for all heads at first. So a function that nobody has declared gets all of a rank's heads
at once, in one head group.
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
    """Says what an attention function does; the fields are arguments of `attention_function`.

    Attributes:
        takes_masks: Whether it takes a mask [1, 1, n, s], by which transformers' sdpa is told a
            sliding window.
    """

    causal: bool | str = True
    documents: Literal["edges", "positions"] | None = None
    heads_alike: bool = False
    takes_sinks: bool = False
    takes_queries: bool = False
    takes_masks: bool = False


# A function that nobody has declared. It is called as under DeepSpeed's class: with all of a rank's
# heads, all tokens, their positions and no mask.
UNKNOWN = AttentionFunction(documents="positions", takes_sinks=True)
# By the object, which is kept alive.
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
    """Declare what an attention function does, so that it is overlapped as one that is known.

    For a function in transformers' ``AttentionInterface``, declared before `enable`. Of the local
    attention of a `SelfAttention` or a ``DistributedAttention``, ``heads_alike`` alone counts. A
    function that is not declared runs in one head group.

    Args:
        function: The function object that is called, a wrapper and not what it wraps; or a module.
        causal: True for attention that is always causal; or the name of the option by which it is
            told (``is_causal``). A layer that gives this option as False is refused.
        documents: How it learns of packed documents. "edges": as transformers' flash attention, by
            ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, counted
            over all rows one after another. "positions": by ``position_ids``, for one row at a
            time. None: not at all, so that it is called for one document at a time, and for a batch
            of short ones.
        heads_alike: Whether it treats all heads alike, see Note [Heads alike].
        takes_sinks: Whether it honours ``s_aux``, a sink for each head that it is called with.
        takes_queries: Whether it can be called with the last queries alone, fewer than there are
            keys, where the last query sees the last key. Needed where ranks share query heads.

    Returns:
        ``function``.

    Raises:
        ValueError: for ``documents`` or ``causal`` of another kind, and for "positions" of a function
            that ``takes_queries``, since positions of keys alone are not given.
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
    """Return what was declared of a function or module; None if nothing was."""
    try:
        return _declared.get(function)
    except TypeError:  # an object without a hash
        return None


def undeclared(function: Any) -> str:
    """Return the words that an attention function runs in one head group, and how to get more."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return (
        f"{name} runs in one head group, since it isn't known to treat all heads alike; if it "
        "does, declare it with ds_sp_overlap.attention_function(.., heads_alike=True)"
    )


def in_one_group(config: SpOverlapConfig) -> SpOverlapConfig:
    """Return a config that lets a layer run in one head group, see Note [Heads alike]."""
    return config.model_copy(update={"head_groups": 1})


def config_for(function: Any, config: SpOverlapConfig, heads_alike: bool) -> SpOverlapConfig:
    """Return the config of a layer with a local attention of the caller's; says so once if it runs
    in one head group.

    Args:
        function: The local attention.
        config: The ``sp_overlap`` section.
        heads_alike: Whether the caller says that all heads are treated alike.
    """
    known = declared(function)
    if heads_alike or config.head_groups == 1 or (known is not None and known.heads_alike):
        return config
    warn_once(f"sp_overlap: {undeclared(function)}; or give heads_alike=True")
    return in_one_group(config)
