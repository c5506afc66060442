"""One call of one attention layer: its exchanges, and what each head group attends to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...exchange.exchange import Exchange, Half
from ...exchange.geometry import Geometry
from ...exchange.sp_group import SPGroup
from ...schedule import Exchanged, Part, Schedule, Step

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # a group and its q, k, v -> o


class Call:
    """What the steps of one call have in common: its geometry, its schedule and its exchanges.

    sp_group      the sp group
    geometry     who holds what
    schedule     what happens when
    where        name of the layer, for errors and logs
    checked      compare each exchange with a plain one
    by_rank      those of q, k, v and o whose local tensors have a dimension for the ranks, if they
                 travel alone (`Geometry.exchange`)
    window       groups that are held at a time, of a layer that can run by a window; None for all
    rope_tables  (cos, sin) for q and k to be rotated by on their way out, if they travel alone
                 (`Exchange`)
    """

    by_rank: frozenset[str] = frozenset()
    window: int | None = None
    rope_tables: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        sp_group: SPGroup,
        geometry: Geometry,
        schedule: Schedule,
        where: str,
        checked: bool = False,
    ):
        self.sp_group, self.geometry, self.where, self.checked = sp_group, geometry, where, checked
        self.run_by(schedule)
        self.groups = range(geometry.groups)
        self.exchanges: dict[Exchanged, Exchange] = {}  # that were started

    def run_by(self, schedule: Schedule) -> None:
        """From now on."""
        self.schedule = schedule
        if self.sp_group.timeline is not None:
            self.sp_group.timeline.follow(self.where, schedule)

    @property
    def folded(self) -> frozenset[Part]:
        """What is rotated by the kernels that pack it."""
        if self.rope_tables is None:
            return frozenset()
        return frozenset(part for part in self.schedule.alone if part[0] in ("q", "k"))

    def start(self, step: Step, *tensors: Tensor) -> Tensor:
        """Start the exchange of one or several of q, k, v of a group; returns its token."""
        return self.exchanging(step, tensors).start(*tensors)

    def exchanging(self, step: Step, tensors: Sequence[Tensor]) -> Exchange:
        """The exchange that a step starts, of one or several of q, k, v of a group, or of o."""
        dims = tuple([x.shape[-1] for x in tensors[: len(step.tensors)]])
        exchange = self.exchanges[step.exchange] = self.exchange(step, dims)
        return exchange

    def starting(self, step: Step, tensors: tuple[Tensor, ...]) -> Half:
        """The start of an exchange, to be run `run_halves` with what follows."""
        return Half(self.exchanging(step, tensors), tensors, starts=True)

    def exchange(self, step: Step, head_dims: tuple[int, ...]) -> Exchange:
        """One exchange of a group, not started: of q, k, v or o, or of several in one.

        Of a gradient it is the exchange of the values, which carries the gradient the other way. o
        beside do goes to attention, as q does.
        """
        tables, name = None, self.schedule.names_of_values[step.exchange]
        if step.beside:
            name = self.schedule.name(step)
            layout = self.geometry.joint_exchange(("q", "q"), step.group, head_dims)
        elif len(step.tensors) > 1:
            layout = self.geometry.joint_exchange(step.tensors, step.group, head_dims)
        else:
            (kind,) = step.tensors
            layout = self.geometry.exchange(kind, step.group, head_dims[0], kind in self.by_rank)
            tables = self.rope_tables if kind in ("q", "k") else None
        return Exchange(self.sp_group, layout, self.where, name, self.checked, tables)


def with_kv(geometry: Geometry, kind: str, group: int, received: dict[Part, Tensor]) -> Tensor:
    """k or v that a group attends to, put together from the pieces that arrived with it or before
    it.
    """
    pieces = []
    for sent, start, stop in geometry.kv_pieces(group):
        piece = received[kind, sent]
        pieces.append(
            piece if stop - start == piece.shape[2] else piece.narrow(2, start, stop - start)
        )
    heads = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
    index = geometry.kv_expansion(group)
    return (
        heads if index is None else heads.index_select(2, _on_device(index, heads.device))
    )  # guard: indexed without a wait


@functools.lru_cache(maxsize=4096)
def _on_device(index: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once: the host waits for such a copy."""
    with torch.inference_mode(False):  # guard: a backward may save it
        return torch.tensor(index, device=device)


def attend_group(call: Call, attend: Attend, group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``attend`` of a group, which may change in place what no other group reads, on whatever rank.

    Raises RuntimeError if it changes k or v where there are KV heads that two groups share.
    """
    if group == call.schedule.last_attended or not call.geometry.kv_is_shared:
        return attend(group, q, k, v)
    if k.is_inference():  # nobody counts its versions
        return attend(group, q, k.clone(), v.clone())
    before = k._version, v._version
    o = attend(group, q, k, v)
    if (k._version, v._version) != before:  # guard: keys stay as they are
        raise RuntimeError(
            f"{call.where}: local attention changes k or v in place, and another head group attends to them as well; have it "
            "change a copy (k = k * scale), or set sp_overlap.head_groups to 1"
        )
    return o
