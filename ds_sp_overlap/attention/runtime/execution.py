"""One call of one attention layer: its exchanges, and the attention of each head group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...exchange.geometry import Geometry
from ...exchange.layout import Range
from ...exchange.sp_group import SPGroup
from ...schedule import Exchanged, Part, Schedule
from ..memory.checkpoint_cache import CheckpointPass
from ..memory.forward_state import autocast_of
from ..memory.recompute import Attended, LocalAttention, join_pieces
from .slices import cut_ranges

# The number of a head group, and its q, k, v [.., .., heads, d] -> its o, [.., .., heads, d_v] or
# [.., .., heads d_v]. Where ranks share query heads, it is called once for each range of the rank's
# queries, with the range behind q, k, v.
Attend = Callable[..., Any]


class Call:
    """One call of a layer: what all its steps share.

    Attributes:
        sp_group: The sp group.
        geometry: Which heads and tokens each rank holds.
        schedule: The order of the steps.
        where: Name of the layer, for errors and logs.
        checked: Whether to compare each exchange with a plain one.
        groups: The numbers of the head groups.
        in_flight: The transfers in flight, by exchange.
        by_rank: Those of q, k, v and o whose local tensors have a dimension for the ranks where
            they travel alone (`Geometry.exchange`).
        window: How many head groups are in memory at a time, for a layer that can run by a window;
            None for all.
        rope_tables: (cos, sin) by which the kernels that pack q and k rotate them where they travel
            alone; None if those kernels rotate nothing.
        projections: Those of q, k and v, where they are computed part by part; else None.
        local: The local attention of a call that runs by a window.
        checkpoint: The pass through the checkpoint around such a call, if the checkpoint saves
            attention; else None.
        offloads: Whether the checkpoint saves attention in host memory.
        attended: What the backward of local attention needs, by head group, in such a call.
        autocast: The autocast state of forward, as keywords of ``torch.autocast``.
        empty: An empty tensor without a gradient.
        is_flat: Whether local attention returned o with heads and head dim flattened.
        variant: The operations that were run last, see `plan`.
    """

    by_rank: frozenset[str] = frozenset()
    window: int | None = None
    rope_tables: tuple[Tensor, Tensor] | None = None
    projections: Any = None
    local: LocalAttention
    checkpoint: CheckpointPass | None = None
    offloads = False
    autocast: dict[str, Any]
    empty: Tensor
    variant: Any = None
    is_flat = False

    def __init__(
        self,
        sp_group: SPGroup,
        geometry: Geometry,
        schedule: Schedule,
        where: str,
        checked: bool = False,
    ):
        self.sp_group, self.geometry, self.where, self.checked = sp_group, geometry, where, checked
        self.schedule = schedule
        self.groups = range(geometry.groups)
        self.in_flight: dict[Exchanged, Any] = {}
        self.attended: dict[int, Attended] = {}

    def begin(self, x: Tensor) -> None:
        """Note what all pieces of the call ask for; ``x`` is any tensor of the layer."""
        self.autocast, self.empty = autocast_of(x.device), x.new_empty(0)

    @property
    def form(self) -> tuple:
        """Return what operations are compiled for, beside the inputs of a node."""
        cuts = None if self.projections is None else self.projections.cuts
        folds, casts = self.rope_tables is not None, self.autocast["enabled"]
        return self.geometry, self.schedule, self.by_rank, folds, casts, cuts

    @property
    def folded(self) -> frozenset[Part]:
        """The parts of q and k that are rotated by the kernels that pack them."""
        if self.rope_tables is None:
            return frozenset()
        return frozenset(part for part in self.schedule.alone if part[0] in ("q", "k"))


def with_kv(geometry: Geometry, kind: str, group: int, received: dict[Part, Tensor]) -> Tensor:
    """Return k or v that a group attends to.

    Args:
        geometry: Which heads each rank holds.
        kind: "k" or "v".
        group: The head group.
        received: The k and v that arrived with this group and with earlier groups.

    Returns:
        [s, b, heads, d], or [b, s, heads, d] for batch first. The KV heads that this rank's query
        heads of the group attend to; repeated to one head for each query head where no regular
        ratio assigns KV heads to query heads (`Geometry.kv_expansion`).
    """
    pieces = []
    for sent, start, stop in geometry.kv_pieces(group):
        pieces.append(cut_ranges(received[kind, sent], 2, ((start, stop),)))
    heads = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
    index = geometry.kv_expansion(group)
    if index is None:
        return heads
    return heads.index_select(2, _on_device(index, heads.device))  # guard: indexed without a wait


@functools.lru_cache(maxsize=4096)
def _on_device(index: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy an index to a device, once, since the host waits for such a copy."""
    with torch.inference_mode(False):  # guard: a backward may save it
        return torch.tensor(index, device=device)


def with_head_dim(o: Any, q: Tensor, call: Call) -> Tensor:
    """Give the output of local attention a dimension for its heads.

    Args:
        o: The output for ``q``, [.., .., heads, d_v], or [.., .., heads d_v]; ``d_v`` is its own.
        q: [.., .., heads, d]. The heads of a group that this rank attends with.
        call: The call, which is told the form of ``o``.

    Returns:
        o as [.., .., heads, d_v].

    Raises:
        ValueError: for another type or shape. This rank alone raises, as with any error of local
            attention.
    """
    if not isinstance(o, Tensor):
        raise ValueError(
            f"{call.where}: local attention must return one tensor, got {type(o).__name__}"
        )
    if o.shape == q.shape:
        return o
    if o.dim() == 3 and o.shape[-1] % q.shape[2] == 0:
        o, call.is_flat = o.unflatten(-1, (q.shape[2], -1)), True
    if o.dim() != 4 or o.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{call.where}: local attention of query {list(q.shape)} must return that shape "
            "(another head dim is fine), or the same with heads and head dim flattened, got "
            f"{list(o.shape)}"
        )
    return o


def attend_group(call: Call, attend: Attend, group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run the local attention of a group with `attend_in_pieces`, and join its pieces to one o."""
    return join_pieces(attend_in_pieces(call, attend, group, q, k, v), call.geometry.seq_dim)


def attend_in_pieces(
    call: Call, attend: Attend, group: int, q: Tensor, k: Tensor, v: Tensor
) -> list[Tensor]:
    """Run the local attention of a group, once for each range of this rank's queries.

    Local attention may change q, k and v in place, but not k and v that are read again.

    Returns:
        A list of o, one for each range; of one o for all queries, where no ranks share heads.

    Raises:
        RuntimeError: if attention changed k or v although it may not.
    """
    geometry = call.geometry
    # k and v are read again by a later group, where groups share KV heads on any rank; and by the
    # next range, where ranks share query heads.
    is_last = group == call.schedule.last_attended or not geometry.kv_is_shared
    if is_last and geometry.shares == 1:
        return [with_head_dim(attend(group, q, k, v), q, call)]
    # Inference tensors have no version counter that tells of a change: attention gets copies.
    before = None if k.is_inference() else (k._version, v._version)
    pieces, first, part = [], 0, q
    tokens: list[Range] = []
    for start, stop in geometry.own_queries:
        if geometry.shares > 1:
            part, tokens = q.narrow(geometry.seq_dim, first, stop - start), [(start, stop)]
            first += stop - start
        keys = (k.clone(), v.clone()) if before is None else (k, v)
        pieces.append(with_head_dim(attend(group, part, *keys, *tokens), part, call))
    if before is not None and (k._version, v._version) != before:  # guard: keys stay as they are
        remedy = (
            "set sp_overlap.head_groups to 1"
            if geometry.shares == 1
            else "run with fewer ranks, so that none share query heads"
        )
        raise RuntimeError(
            f"{call.where}: local attention changes k or v in place, and attends to them once more "
            f"afterwards; have it change a copy (k = k * scale), or {remedy}"
        )
    return pieces
