"""Holds the state of one call of an attention layer, and runs attention of one head group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...exchange.geometry import Geometry
from ...exchange.sp_group import SPGroup
from ...schedule import Exchanged, Part, Schedule
from ..arguments import LocalAttention
from ..memory.checkpoint_cache import CheckpointPass
from ..memory.forward_state import autocast_of
from ..memory.recompute import Attended, join_pieces
from .slices import cut_ranges

# The local attention of a call: (group, q, k, v) -> o. The group is an index; q, k, v are [.., ..,
# heads, d]; o is [.., .., heads, d_v] or [.., .., heads d_v]. If ranks share query heads, a rank
# calls the attention once for each range of its queries, with the range as a fifth argument.
Attend = Callable[..., Any]


class Call:
    """Holds the state that all steps of one call of a layer share.

    Args:
        x: A tensor on the device of the call.

    Attributes:
        sp_group: The sp group.
        geometry: The heads and tokens of each rank.
        schedule: The order of the steps.
        where: Name of the layer, for errors and logs.
        checked: Whether to compare each exchange's result with that of a plain all-to-all.
        groups: The indices of the head groups.
        in_flight: For each exchange in flight, its transfer.
        by_rank: Those of "q", "k", "v" and "o" whose local tensor, if exchanged alone, has a
            dimension for the ranks (`Geometry.exchange`).
        rope_tables: (cos, sin), if the kernels that pack q and k also rotate; else None. A kernel
            rotates only a tensor that is exchanged alone.
        projections: The `InputModules` of the call, if q, k and v are computed part by part; else
            None.
        local: In a call with a window: the `LocalAttention`.
        attend: In a call with a window: the same attention, as an `Attend`.
        agree: In a call with a window: `LayerRuntime.agree_on_o`.
        checkpoint: In a call with a window: the pass through the checkpoint around the call, if the
            checkpoint saves attention; else None.
        offloads: Whether the config asks for checkpoints that save attention in host memory.
        attended: In a call with a window: the state for the backward of each group's attention.
        autocast: The autocast state of forward, as keywords of ``torch.autocast``.
        empty: An empty tensor that needs no gradient.
        is_flat: Whether local attention returned o with heads and head dim flattened.
        variant: The `plan.Variant` of the piece that ran last; None before the first piece.
    """

    by_rank: frozenset[str] = frozenset()
    rope_tables: tuple[Tensor, Tensor] | None = None
    projections: Any = None
    local: LocalAttention
    attend: Attend
    agree: Callable[[tuple, bool, str], bool]
    checkpoint: CheckpointPass | None = None
    offloads = False
    variant: Any = None
    is_flat = False

    def __init__(
        self,
        sp_group: SPGroup,
        geometry: Geometry,
        schedule: Schedule,
        where: str,
        x: Tensor,
        checked: bool = False,
    ):
        self.sp_group, self.geometry, self.where, self.checked = sp_group, geometry, where, checked
        self.schedule = schedule
        self.groups = range(geometry.groups)
        self.in_flight: dict[Exchanged, Any] = {}
        self.attended: dict[int, Attended] = {}
        self.autocast, self.empty = autocast_of(x.device), x.new_empty(0)

    @property
    def form(self) -> tuple:
        """Return the properties of the call on which the compiled operations depend."""
        cuts = None if self.projections is None else self.projections.cuts
        folds, casts = self.rope_tables is not None, self.autocast["enabled"]
        return self.geometry, self.schedule, self.by_rank, folds, casts, cuts

    @property
    def folded(self) -> frozenset[Part]:
        """Return the parts of q and k that the packing kernels rotate."""
        if self.rope_tables is None:
            return frozenset()
        return frozenset(part for part in self.schedule.alone if part[0] in ("q", "k"))


def with_kv(geometry: Geometry, group: int, received: dict[Part, Tensor]) -> list[Tensor]:
    """Return the k and the v that a head group attends to on this rank.

    Args:
        geometry: The heads of each rank.
        group: The head group.
        received: The k and v that arrived with this group and with earlier groups.

    Returns:
        k and v with the KV heads of the group's query heads, each [s, b, heads, d], or
        [b, s, heads, d] for batch first. If the KV heads serve different numbers of query heads,
        each KV head is repeated for every query head that it serves (`Geometry.kv_expansion`).
    """
    both, index = [], geometry.kv_expansion(group)
    for kind in "kv":
        pieces = []
        for sent, start, stop in geometry.kv_pieces(group, geometry.sp_rank):
            pieces.append(cut_ranges(received[kind, sent], 2, ((start, stop),)))
        heads = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
        if index is not None:
            places = _on_device(index, heads.device)  # guard: indexed without a wait
            heads = heads.index_select(2, places)
        both.append(heads)
    return both


@functools.lru_cache(maxsize=4096)
def _on_device(index: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``index`` as a tensor on a device; cached, since the host waits for the copy."""
    with torch.inference_mode(False):  # guard: a backward may save it
        return torch.tensor(index, device=device)


def with_head_dim(o: Any, q: Tensor, call: Call) -> Tensor:
    """Give the output of local attention a dimension for its heads.

    Args:
        o: The output for ``q``, [.., .., heads, d_v] or [.., .., heads d_v].
        q: [.., .., heads, d]. The query heads of a group on this rank.
        call: The call. If ``o`` is 3-D, ``call.is_flat`` is set.

    Returns:
        o as [.., .., heads, d_v].

    Raises:
        ValueError: for another type or shape of ``o``; on this rank alone, as with any error of
            local attention.
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
    """Run the local attention of a group; return o for all queries (`attend_in_pieces`, joined)."""
    return join_pieces(attend_in_pieces(call, attend, group, q, k, v), call.geometry.seq_dim)


def attend_in_pieces(
    call: Call, attend: Attend, group: int, q: Tensor, k: Tensor, v: Tensor
) -> list[Tensor]:
    """Run the local attention of a group, once for each range of this rank's queries.

    Local attention may change q in place. Local attention may change k and v in place only if no
    later call of it reads them.

    Returns:
        o for each range; if ranks share no query heads, one o for all queries.

    Raises:
        RuntimeError: if attention changed k or v that a later call of it reads.
    """
    geometry = call.geometry
    # k and v are read again by a later group if groups share KV heads on any rank, and by the next
    # range if ranks share query heads.
    is_last = group == call.schedule.last_attended or not geometry.kv_is_shared
    if is_last and geometry.shares == 1:
        return [with_head_dim(attend(group, q, k, v), q, call)]
    # A version counter detects changes. Inference tensors have none, so attention gets copies.
    before = None if k.is_inference() else (k._version, v._version)
    parts: Sequence[Tensor] = [q]
    if geometry.shares > 1:
        sizes = [stop - start for start, stop in geometry.own_queries]
        # Autograd treats these parts as separate tensors, so attention may change each in place.
        parts = q.unsafe_split_with_sizes(sizes, geometry.seq_dim)
    pieces = []
    for tokens, part in zip(geometry.own_queries, parts):
        keys = (k.clone(), v.clone()) if before is None else (k, v)
        queries = [tokens] if geometry.shares > 1 else []
        pieces.append(with_head_dim(attend(group, part, *keys, *queries), part, call))
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
