"""What each exchange cost in some steps of training: what was exposed, what was hidden, relayout and bytes.

Where an exchange is marked; ``C`` on the compute stream, ``S`` on the transfer stream, all of them on the host's clock on CPU:

    compute  | .. issued C | pack | packed C, launched C | Wk Wv ..  wait C | stands still | unpacking C | unpack | done C, go C
    transfer |                                 started S | ..transfer.. | arrived S

    exchange   pack + transfer + unpack
    exposed    how long the compute row did nothing else: pack, and go - wait, with the unpack
    hidden     exchange - exposed

Nothing waits for a device before the last of the steps is over. Then each rank leaves its rows in the store of the world, and
sp rank 0 writes all of them (`picture`) once they are there. So no rank waits for another one, whichever optimizers each steps.
What ran on the compute row is read off the layer's schedule, see `computing`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ..config import SpOverlapConfig
from ..schedule import Block, Program, Schedule
from . import picture
from .clocks import clock_of
from .steps import OptimizerSteps
from .timed import Timed


class Row(NamedTuple):
    """A bar on one of the two rows of a rank, in ms since the rank's first mark.

    kind   "compute", "wait", "pack", "transfer" or "unpack"; "forward" and "backward" of a whole layer
    what   for instance ``dv0`` or ``attention 0``
    """

    step: int
    layer: str
    what: str
    kind: str
    begin: float
    end: float
    bytes: int = 0


class Track:
    """The marks of one exchange, ``layers.7 dv0``; ``bytes`` go to other ranks."""

    def __init__(self, clock: Any, step: int, name: str, bytes: int):
        self.clock, self.step, self.bytes = clock, step, bytes
        self.at: dict[str, Any] = {}
        self.layer, self.what = name.rsplit(" ", 1)

    def mark(self, event: str) -> None:
        self.at[event] = self.clock.mark()

    def follow(self, handle: Any) -> None:
        """Mark the arrival on the host's clock; on a device it is marked on the transfer stream."""
        if hasattr(self.clock, "backend") or not hasattr(handle, "get_future"):
            return
        handle.get_future().then(lambda _: self.mark("arrived"))


class Untracked:
    """Null object: no marks."""

    mark = follow = staticmethod(callable)  # a builtin: costs the host less than a function that does nothing


UNTRACKED = Untracked()
_open: dict[str, Timeline] = {}  # not yet written, by path: the layers of a process write one


@atexit.register
def _write_what_there_is() -> None:
    for timeline in list(_open.values()):
        timeline.close()


class Timeline:
    """Records the exchanges of some steps, then writes them into a folder and stops.

    folder   of the files
    steps    first and last, counted in optimizer steps from 0
    rank     of the sp group; 0 writes
    size     of the sp group
    """

    made = itertools.count()  # alike on every rank of the sp group, since its ranks make their timelines in one order

    def __init__(self, folder: str, steps: tuple[int, int], rank: int, size: int):
        self.folder, (self.first, self.last), self.rank, self.size = folder, steps, rank, size
        name = f"sp_overlap timeline {next(self.made)}"
        self.store: Any = dist.PrefixStore(name, _get_default_store()) if size > 1 else None  # takes bytes, which its stub denies
        self.steps: OptimizerSteps | None = OptimizerSteps()  # None when the recording is over
        self.clock: Any = None
        self.tracks: list[Track] = []
        self.layers: list[tuple[int, str, str, Any, Any]] = []
        self.schedules: dict[tuple[int, str, bool], Schedule] = {}  # by step and layer, in a block or by itself
        self.left: list[Row] = []  # of this rank, when the recording is over

    @classmethod
    def of(cls, config: SpOverlapConfig, channel: Any) -> Timeline | None:
        """The timeline that a config asks for; None on ranks of other sp groups than the first."""
        section = config.timeline
        if section is None or not channel.holds_first_rank:
            return None
        if section.path not in _open:
            first, last = section.steps
            _open[section.path] = cls(section.path, (first, last), channel.rank, channel.size)
        return _open[section.path]

    def check(self) -> None:
        """Raises ValueError where the files can't be written."""
        if self.rank or self.steps is None:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(os.path.join(self.folder, "exchanges.csv"), "a"):
                pass
        except OSError as error:
            raise ValueError(
                f"sp_overlap.timeline.path: can't write into {self.folder!r} ({error.strerror}); give a folder that can be made"
            ) from None

    def recording(self) -> bool:
        return self.steps is not None and self.first <= self.steps.now()  # past the last step, `look` has ended the recording

    # While it records.

    def exchange(self, name: str, bytes: int, x: Tensor) -> Track | Untracked:
        """Follow an exchange of ``x``."""
        if not self.recording():
            return UNTRACKED
        self.clock = self.clock or clock_of(x.device)
        assert self.steps is not None
        track = Track(self.clock, self.steps.now(), name, bytes)
        self.tracks.append(track)
        return track

    def follow(self, where: str, schedule: Schedule) -> None:
        """The layer ``where`` is about to run by ``schedule``."""
        if self.recording():
            assert self.steps is not None
            self.schedules[self.steps.now(), where, isinstance(schedule, Block)] = schedule

    def layer(self, where: str, device: torch.device) -> Timed:
        """What marks a call of the layer ``where``."""
        self.clock = self.clock or clock_of(device)
        assert self.steps is not None
        step = self.steps.now()
        return Timed(
            self.clock,
            lambda *marks: self.layers.append((step, where, "forward", *marks)),
            lambda *marks: self.layers.append((step, where, "backward", *marks)),
        )

    # Afterwards.

    def look(self) -> None:
        """Leave this rank's rows once the last step is over; sp rank 0 writes when every rank has left its own."""
        if self.folder not in _open or self.steps is not None and self.steps.now() <= self.last:
            return
        if self.steps is not None:
            self._stop()
        if self.rank:
            self.store.set(str(self.rank), pickle.dumps(self.left))
            del _open[self.folder]
        elif self.store is None or self.store.check([str(rank) for rank in range(1, self.size)]):
            self._write()

    def close(self) -> None:
        """Write what there is, of this rank and of those that have left their rows, and stop."""
        if self.steps is not None:
            self._stop()
        if self.folder in _open and self.rank == 0 and self.left:
            self._write()
        _open.pop(self.folder, None)

    def _stop(self) -> None:
        assert self.steps is not None
        self.left = self.rows()
        self.steps.close()
        self.steps, self.tracks, self.layers, self.schedules = None, [], [], {}

    def _write(self) -> None:
        every = [self.left]
        with contextlib.suppress(RuntimeError):  # at exit the store may be gone
            others = (str(rank) for rank in range(1, self.size))
            every += [pickle.loads(self.store.get(rank)) for rank in others if self.store.check([rank])]
        del _open[self.folder]
        picture.write(self.folder, every)

    def rows(self) -> list[Row]:
        """What was recorded, as bars."""
        complete = [track for track in self.tracks if {"done", "go"} <= track.at.keys()]
        marks = [mark for *_, begin, end in self.layers for mark in (begin, end)]
        marks += [track.at["issued"] for track in complete]
        if not marks:
            return []
        base = marks[0]
        for mark in marks:  # on any of them, the first may not be the earliest
            base = mark if self.clock.between_ms(base, mark) < 0 else base

        def ms(mark: Any) -> float:
            return self.clock.between_ms(base, mark)

        rows = [Row(step, layer, layer, kind, ms(begin), ms(end)) for step, layer, kind, begin, end in self.layers]
        for track in complete:
            at = {event: ms(mark) for event, mark in track.at.items()}
            arrived = min(at.get("arrived", at["unpacking"]), at["unpacking"])

            def bar(kind: str, begin: float, end: float, bytes: int = 0) -> None:
                rows.append(Row(track.step, track.layer, track.what, kind, begin, max(begin, end), bytes))  # noqa: B023

            bar("issue", at["issued"], at["launched"])
            bar("pack", at["issued"], at["packed"])
            bar("transfer", at["started"], arrived, track.bytes)
            bar("unpack", at["unpacking"], at["done"])
            bar("wait", at["wait"], at["go"])
        return rows + [row for step in sorted({row.step for row in rows}) for row in computing(rows, step, self.schedules)]


def computing(rows: list[Row], step: int, schedules: dict[tuple[int, str, bool], Schedule]) -> list[Row]:
    """What the compute row did between its stops: starts and finishes of exchanges, begin and end of layers.

    Between two stops of a layer the row did what the layer's schedule has between them.
    """
    stops: list[tuple[float, float, str, Row]] = []
    for row in rows:
        if row.step == step and row.kind in ("issue", "wait"):
            stops.append((row.begin, row.end, (">" if row.kind == "issue" else "<") + row.what, row))
        elif row.step == step and row.kind in ("forward", "backward"):
            stops += [(row.begin, row.begin, "[", row), (row.end, row.end, "]", row)]
    stops.sort(key=lambda stop: stop[:2])
    exchanged: dict[str, set[str]] = {}
    for *_, row in stops:
        exchanged.setdefault(row.layer, set()).add(row.what)
    between = list(zip(stops, stops[1:]))
    followed = {
        first.layer
        for (*_, before, first), (*_, after, second) in between
        if before[:2] == "<o" and after[:2] == ">q" and before.partition(".")[2] == after.partition(".")[2]
    }
    names: dict[str, dict[tuple[str, str], str]] = {}
    for (at, layer, _), schedule in schedules.items():
        if at == step and layer in exchanged:
            if isinstance(schedule, Block):  # between two stops may lie the end of one layer and the beginning of the next
                schedule = schedule.chain(2 if layer in followed else 1)
            for program in (schedule.forward, schedule.backward):
                names.setdefault(layer, {}).update(_between(schedule, program, exchanged[layer]))
    chained = {layer for at, layer, is_chained in schedules if at == step and is_chained}
    found = []
    for (_, begin, before, first), (end, _, after, second) in between:
        layers = dict.fromkeys((first.layer, second.layer))
        known = layers if len(layers) == 1 or layers.keys() <= chained else ()
        name = next((name for layer in known if (name := names.get(layer, {}).get((before, after)))), None)
        if name and end > begin:
            found.append(Row(step, first.layer, name, "compute", begin, end))
    return found


def _between(schedule: Schedule, program: Program, exchanged: set[str]) -> dict[tuple[str, str], str]:
    """What a program computes between two of its stops that follow one another, for the exchanges that there were."""
    found: dict[tuple[str, str], str] = {}
    labels: list[str] = []
    before = "["
    for step in program:
        name = schedule.name(step.of, step.group, step.chunk)
        if step.on_wire and name in exchanged:
            stop = (">" if step.act == "start" else "<") + name
            found[before, stop], before, labels = ", ".join(labels), stop, []
        elif not step.on_wire:
            of = schedule.exchange_of.get((step.of, step.group))
            is_done = of is None or step.act == "project" or "d" + schedule.name(of, step.group) in exchanged
            labels += [label for label in [schedule.label(step)] if is_done and label not in labels]
    if before != "[":
        found[before, "]"] = ", ".join(labels)
    return found
