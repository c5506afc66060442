"""Chooses the geometry of a call: head groups, and the heads and tokens of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..config import SpOverlapConfig
from ..exchange.copy_engines import CopyEngine
from ..exchange.geometry import Geometry, shares_for
from ..exchange.shares import QueryChunks
from ..exchange.sp_group import SPGroup
from ..warn import warn_once
from .arguments import PerHead, takes
from .layer import LayerRuntime

make_geometry = lru_cache(maxsize=4096)(Geometry)


class Tokens(NamedTuple):
    """Describes the tokens of a call.

    Attributes:
        batch_first: Whether tensors are [b, s/P, ..] instead of [s/P, b, ..].
        lengths: Local sequence length of every rank, in tokens; None where all are the same.
        query_chunks: For each share of the queries, its ranges of tokens; None for the default of
            `Geometry`. Ignored where no ranks share query heads.
    """

    batch_first: bool
    lengths: list[int] | None = None
    query_chunks: QueryChunks | None = None


def geometry_of(
    layer: LayerRuntime,
    x: Tensor,
    all_heads: tuple[int, int],
    tokens: Tokens,
    attend: Callable[..., Any] | str,
    extra: tuple = (),
) -> Geometry:
    """Return the geometry of a call, with the default number of head groups.

    Equal calls get the same `Geometry` object.

    Args:
        layer: The layer that is called.
        x: A tensor of the call, [b, s/P, ..] or [s/P, b, ..]; its shape gives ``b`` and ``s/P``.
        all_heads: ``h`` and ``h_kv``.
        tokens: The tokens of the call.
        attend: The local attention; or, if all queries are needed at once, a text that says why.
        extra: Arguments of the local attention beside q, k and v. A tensor that may have a slice
            for each head of a rank makes the layer run in one head group.

    Raises:
        ValueError: for a `PerHead` that lacks slices, for ``tokens`` that don't fit ``x``, or for
            values that `Geometry` or `shares_of` refuses.
    """
    sp_group, (heads, kv_heads) = layer.sp_group, all_heads
    batch, local_seq = x.shape[:2] if tokens.batch_first else (x.shape[1], x.shape[0])
    seq_lens = (local_seq,) * sp_group.size
    if tokens.lengths is not None:
        seq_lens = tuple(map(int, tokens.lengths))
    # Cache the choice, so that the signature of the attention is read once for each layer.
    if all_heads not in layer.shares_and_groups:
        shares = shares_of(layer.config, sp_group, heads, kv_heads, attend)
        parts = max(1, sp_group.size // shares)
        groups = layer.config.groups_for(heads, parts, layer.windowed)
        layer.shares_and_groups[all_heads] = shares, groups
    shares, groups = layer.shares_and_groups[all_heads]
    for argument in extra:
        if isinstance(argument, PerHead):
            argument.check(heads)
    # Without shares, query chunks have no effect. Leave them out, so that more calls share one
    # cached `Geometry`.
    query_chunks = tokens.query_chunks if shares > 1 else None
    nodes = sp_group.nodes if layer.config.kv_once_per_node else None
    counts, how = (batch, heads, kv_heads, groups), (tokens.batch_first, shares)
    geometry = make_geometry(
        sp_group.size, sp_group.rank, seq_lens, *counts, *how, query_chunks, nodes
    )
    if groups > 1 and extra and _may_be_per_head(geometry, extra):
        geometry = geometry.in_groups(1)
        warn_once(
            f"sp_overlap: {layer.where} runs in one head group: a tensor that is given to its "
            "local attention is as long as a rank's number of heads in some dimension, and may "
            "have a slice for each head. Hand such a tensor over as PerHead, or reshape it"
        )
    if seq_lens[sp_group.rank] != local_seq:
        raise ValueError(
            f"sequence_lengths: {seq_lens[sp_group.rank]} for sp rank {sp_group.rank}, whose "
            f"local sequence has {local_seq} tokens; give every rank's own"
        )
    return geometry


def shares_of(
    config: SpOverlapConfig,
    sp_group: SPGroup,
    heads: int,
    kv_heads: int,
    attend: Callable[..., Any] | str,
) -> int:
    """Return r, the number of ranks that share their query heads, see Note [Shares] in `shares`.

    Args:
        config: The ``sp_overlap`` section.
        sp_group: The sp group.
        heads: ``h``.
        kv_heads: ``h_kv``.
        attend: The local attention; or, if all queries are needed at once, a text that says why.

    Raises:
        ValueError: if ranks have to share query heads (the config asks for r > 1, or there are
            fewer heads than ranks), but the layer can't attend with a share of the queries.
    """
    asked, sp_size = config.shares, sp_group.size
    shares = shares_for(sp_size, heads, kv_heads) if asked == "auto" else asked
    if shares == 1:
        return 1
    if isinstance(attend, str):
        lacks = attend
    elif isinstance(sp_group.transport, CopyEngine):
        # Parts of an exchange may be equal on one rank and unequal on another.
        lacks = 'sp_overlap.transport "copy_engine" moves equal parts only'
    elif not takes(attend, "queries"):
        name = getattr(attend, "__qualname__", type(attend).__name__)
        lacks = (
            f"{name} has no parameter queries=, a range (a, b) of the tokens that it is called with"
        )
    else:
        return shares
    why, remedy = f"sp_overlap.shares is {asked}", ', or sp_overlap.shares "auto"'
    if asked == "auto":
        # The config does not ask for shares, and there are enough heads for all ranks.
        if heads >= sp_size:
            return 1
        why, remedy = f"{heads} query heads are fewer than {sp_size} ranks", ""
    raise ValueError(  # guard: no attention with a share of the queries unless it can
        f"{why}, so that {shares} ranks would share query heads; but {lacks}; use sp size {heads} "
        f"or less{remedy}"
    )


def _may_be_per_head(geometry: Geometry, extra: Iterable) -> bool:
    """Return whether some tensor may have a slice for each head of a rank (a bias, slopes).

    Such a tensor allows no head groups: every group would get the slices of the first heads.
    """
    # Ranks differ by at most one head. Check for both numbers of heads on every rank, so that all
    # ranks return the same. A tensor with such a dimension by chance only costs head groups.
    counts = {geometry.heads // geometry.parts, -(-geometry.heads // geometry.parts)}
    return any(isinstance(x, Tensor) and not counts.isdisjoint(x.shape) for x in extra)
