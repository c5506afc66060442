"""One call of one attention layer: walk its schedule forward. The backward of the middle section falls out of autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..exchange.channel import Channel
from ..exchange.exchange import Exchange, Half, together
from ..exchange.geometry import Geometry
from ..profiling.ranges import NOTHING, is_profiled, named
from ..schedule import Schedule, Step

T = TypeVar("T")
Part = tuple[str, int]  # q, k, v or o of a head group; of an exchange also several of q, k, v
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # a group and its q, k, v -> o


class Call:
    """What the steps of one call have in common: its geometry, its schedule and its exchanges.

    channel      the sp group
    geometry     who holds what
    schedule     what happens when
    where        name of the layer, for errors and logs
    checked      compare each exchange with a plain one
    by_rank      those of q, k, v and o whose local tensors have a dimension for the ranks, if they travel alone (`Geometry.exchange`)
    window       groups that are held at a time, of a layer that can run by a window; None for all
    rope_tables  (cos, sin) for q and k to be rotated by on their way out, if they travel alone (`Exchange`)
    """

    by_rank: frozenset[str] = frozenset()
    window: int | None = None
    rope_tables: tuple[Tensor, Tensor] | None = None

    def __init__(self, channel: Channel, geometry: Geometry, schedule: Schedule, where: str, checked: bool = False):
        self.channel, self.geometry, self.where, self.checked = channel, geometry, where, checked
        self.run_by(schedule)
        self.groups = range(geometry.groups)
        self.exchanges: dict[Part, Exchange] = {}  # that were started

    def run_by(self, schedule: Schedule) -> None:
        """From now on."""
        self.schedule = schedule
        if self.channel.timeline is not None:
            self.channel.timeline.follow(self.where, schedule)

    @property
    def folded(self) -> frozenset[Part]:
        """What is rotated by the kernels that pack it."""
        if self.rope_tables is None:
            return frozenset()
        return frozenset(part for part in self.schedule.starts if part[0] in ("q", "k"))

    def start(self, of: str, group: int, *tensors: Tensor) -> Tensor:
        """Start the exchange of one or several of q, k, v of a group; returns its token."""
        return self.exchanging(of, group, tensors).start(*tensors)

    def exchanging(self, of: str, group: int, tensors: Sequence[Tensor]) -> Exchange:
        """The exchange of one or several of q, k, v of a group, or of o, which the caller starts."""
        exchange = self.exchanges[of, group] = self.exchange(of, group, tuple([x.shape[-1] for x in tensors[: len(of)]]))
        return exchange

    def starting(self, of: str, group: int, tensors: tuple[Tensor, ...]) -> Half:
        """The start of an exchange, to be run `together` with what follows."""
        return Half(self.exchanging(of, group, tensors), tensors, starts=True)

    def finishing(self, part: Part, tokens: dict[Part, Tensor]) -> Half:
        return Half(self.exchanges[part], (tokens[part],))

    def exchange(self, of: str, group: int, head_dims: tuple[int, ...]) -> Exchange:
        """One exchange of a group, not started: of q, k, v or o, or of several in one; "odo" is o again, beside do."""
        tables = None
        if len(of) > 1:
            layout = self.geometry.together("qq" if of == "odo" else of, group, head_dims)
        else:
            layout = self.geometry.exchange(of, group, head_dims[0], of in self.by_rank)
            tables = self.rope_tables if of in ("q", "k") else None
        return Exchange(self.channel, layout, self.where, self.schedule.name(of, group), self.checked, tables)

    def named(self, step: Step) -> Any:
        """A range of a profiler, named as in the drawing of the schedule."""
        return named(self.where, self.schedule.label(step)) if is_profiled() else NOTHING

    def run(self, step: Step, body: Callable[..., T], *args: Any) -> T:
        """``body(*args)`` in that range."""
        if not is_profiled():
            return body(*args)
        with self.named(step):
            return body(*args)


def start_inputs(call: Call, project: Callable[[str, int], Tensor]) -> dict[Part, Tensor]:
    """Walk the section of the inputs; returns the token of every exchange.

    project   kind, group -> q, k or v of the group, [s/P, b, h_g, d]
    """
    tokens: dict[Part, Tensor] = {}
    projected: dict[Part, Tensor] = {}
    for step in call.schedule.inputs:  # guard: starts in the order drawn
        if step.act == "project":
            projected[step.of, step.group] = call.run(step, project, step.of, step.group)
        else:
            of = step.of, step.group
            tokens[of] = call.start(*of, *[projected.pop((kind, step.group)) for kind in step.of])
    return tokens


def attend_groups(
    call: Call, tokens: dict[Part, Tensor], attend: Attend, arrive: Callable[[str, Tensor], Tensor] | None = None
) -> dict[Part, Tensor]:
    """Walk the section of attention; returns the tokens of the exchanges of o.

    attend   a group and its q, k, v -> o, [s, b, h_g/P, d] each
    arrive   what is done with q, k or v on arrival, [s, b, h_g/P, d]; RoPE where the caller wants it after the exchange
    """
    received: dict[Part, Tensor] = {}
    attended: dict[int, tuple[Tensor, ...]] = {}  # o, and q, k, v of which it was computed
    started: dict[Part, Tensor] = {}
    for node in call.schedule.attention:
        step = node[0]
        if step.act == "attend":
            group = step.group
            q = received.pop(("q", group))
            k, v = with_kv(call.geometry, "k", group, received), with_kv(call.geometry, "v", group, received)
            attended[group] = call.run(step, attend_group, call, attend, group, q, k, v), q, k, v
            del q, k, v  # before the next are put together
            continue
        # Alone where something is done on arrival: under the exchanges that are still on their way.
        for steps in (node,) if arrive is None else [(step,) for step in node]:
            halves = [
                call.starting("o", group, attended.pop(group)) if act == "start" else call.finishing((of, group), tokens)
                for act, of, group, _ in steps
            ]
            for (act, of, group, _), made in zip(steps, together(halves)):
                if act == "start":
                    (started["o", group],) = made
                else:
                    received.update({(kind, group): x if arrive is None else arrive(kind, x) for kind, x in zip(of, made)})
            del halves, made  # they hold o, q, k, v
    return started


def finish_output(call: Call, tokens: dict[Part, Tensor], merge: Callable[[int, Tensor], None]) -> None:
    """Walk the section of the output.

    merge   takes a group and its o, [s/P, b, h_g, d]
    """
    received: dict[int, Tensor] = {}
    for step in call.schedule.output:
        if step.act == "finish":
            part = "o", step.group
            received[step.group] = call.exchanges[part].finish(tokens[part])
        else:
            call.run(step, merge, step.group, received.pop(step.group))


def with_kv(geometry: Geometry, kind: str, group: int, received: dict[Part, Tensor]) -> Tensor:
    """k or v that a group attends to, put together from the pieces that arrived with it or before it."""
    pieces = []
    for sent, start, stop in geometry.kv_pieces(group):
        piece = received[kind, sent]
        pieces.append(piece if stop - start == piece.shape[2] else piece.narrow(2, start, stop - start))
    heads = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
    index = geometry.kv_expansion(group)
    return heads if index is None else heads.index_select(2, _on_device(index, heads.device))  # guard: indexed without a wait


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
