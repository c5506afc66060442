"""Records what each exchange cost in some steps of training: exposed time, and hidden time.

The marks of an exchange; ``C`` on the compute stream, ``S`` on the transfer stream, all of them on
the host's clock on CPU:

    compute    issued C | pack | packed C, launched C | Wk Wv ..
    transfer                                started S | transfer ... | arrived S

    compute    .. wait C | stands still | unpacking C | unpack | done C

    exchange   pack + transfer + unpack
    exposed    the time in which the compute row did nothing else: pack, and from wait to done,
               which includes unpack
    hidden     exchange - exposed

Nothing waits for a device before the last of the steps is over. Then each rank leaves its rows in
the store of the world, and sp rank 0 writes the rows of all ranks (`tools.picture`) once they are
there. So no rank waits for another rank, whichever optimizers each of them steps. The layer's
schedule says what ran on the compute row between the marks, see `computing`.
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

from .. import profiling
from ..config import SpOverlapConfig
from ..schedule import Op, Program, Schedule, Step, stop_of
from ..warn import warn_once
from .clocks import clock_of
from .steps import OptimizerSteps
from .timed import Timed


class Row(NamedTuple):
    """A bar on one of the two rows of a rank.

    Attributes:
        step: Optimizer step, counted from 0.
        layer: Name of the layer.
        what: Name of the exchange or of the work, for instance ``dv0`` or ``attention 0``.
        kind: "compute", "issue", "wait", "pack", "transfer" or "unpack"; "forward" and "backward"
            of a whole layer.
        begin: In ms since the rank's first mark.
        end: In ms since the rank's first mark.
        bytes: Bytes that a transfer sends to other ranks.
    """

    step: int
    layer: str
    what: str
    kind: str
    begin: float
    end: float
    bytes: int = 0


class Track:
    """The marks of one exchange.

    Args:
        clock: Makes the marks.
        step: Optimizer step, counted from 0.
        name: Name of the exchange, for instance ``layers.7 dv0``.
        bytes: Bytes that go to other ranks.

    Attributes:
        at: Each event of the drawing above, with its mark.
    """

    def __init__(self, clock: Any, step: int, name: str, bytes: int):
        self.clock, self.step, self.bytes = clock, step, bytes
        self.at: dict[str, Any] = {}
        self.layer, self.what = name.rsplit(" ", 1)

    def mark(self, event: str) -> None:
        """Mark the time of an event."""
        self.at[event] = self.clock.mark()

    def follow(self, handle: Any) -> None:
        """Mark the arrival on the host's clock; a device marks it on its transfer stream."""
        if hasattr(self.clock, "backend") or not hasattr(handle, "get_future"):
            return
        handle.get_future().then(lambda _: self.mark("arrived"))


# Behind the name of an exchange, its leg inside a node, which no schedule has
# (`exchange.relayed`).
IN_NODE = "@node"
# Timelines that are not yet written, by path: all layers of a process record into one.
_open: dict[str, Timeline] = {}


@atexit.register
def _write_what_there_is() -> None:
    """Write timelines of a process that ends before their last step."""
    for timeline in list(_open.values()):
        timeline.close()


class Timeline:
    """Records the exchanges of some steps, then writes them into a folder and stops.

    Args:
        folder: Folder of the files.
        steps: First and last optimizer step, counted from 0.
        rank: The sp rank; rank 0 writes.
        size: The sp size.
    """

    # Alike on every rank of the sp group, whose ranks make their timelines in one order.
    made = itertools.count()

    def __init__(self, folder: str, steps: tuple[int, int], rank: int, size: int):
        self.folder, (self.first, self.last), self.rank, self.size = folder, steps, rank, size
        name = f"sp_overlap timeline {next(self.made)}"
        # Any: the store's stub denies that the store takes bytes.
        self.store: Any = dist.PrefixStore(name, _get_default_store()) if size > 1 else None
        # Counts optimizer steps; None when the recording is over.
        self.steps: OptimizerSteps | None = OptimizerSteps()
        self.clock: Any = None
        self.tracks: list[Track] = []
        # Step, layer, "forward" or "backward", and the marks of its begin and end.
        self.layers: list[tuple[int, str, str, Any, Any]] = []
        # By step and layer.
        self.schedules: dict[tuple[int, str], Schedule] = {}
        # The rows of this rank, when the recording is over.
        self.left: list[Row] = []

    @classmethod
    def of(cls, config: SpOverlapConfig, sp_group: Any) -> Timeline | None:
        """Return the timeline that a config asks for, one for each path.

        None if the config asks for none, or if this rank is not in the sp group of rank 0.
        """
        section = config.timeline
        if section is None or sp_group.ranks[0] != 0:
            return None
        first, last = section.steps
        if section.path not in _open:
            _open[section.path] = cls(section.path, (first, last), sp_group.rank, sp_group.size)
        timeline = _open[section.path]
        if (timeline.first, timeline.last) != (first, last):
            warn_once(
                f"sp_overlap.timeline: steps {timeline.first} to {timeline.last} of "
                f"{section.path!r} are recorded already, so steps {first} to {last} are not; give them another path"
            )
        return timeline

    def check(self) -> None:
        """Check on sp rank 0 that the files can be written; makes the folder.

        Called where the ranks agree, which raises the error on all of them.

        Raises:
            ValueError: if they can't.
        """
        if self.rank or self.steps is None:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(os.path.join(self.folder, "exchanges.csv"), "a"):
                pass
        except OSError as error:
            raise ValueError(
                f"sp_overlap.timeline.path: can't write into {self.folder!r} ({error.strerror}); "
                "give a folder that can be made"
            ) from None

    def recording(self) -> bool:
        """Return whether the current step is recorded."""
        # After the last step, `write_if_over` has ended the recording.
        return self.steps is not None and self.first <= self.steps.now()

    # While it records.

    def exchange(self, name: str, bytes: int, x: Tensor) -> Track:
        """Return the object that marks an exchange of ``x`` in a recorded step."""
        self.clock = self.clock or clock_of(x.device)
        assert self.steps is not None
        track = Track(self.clock, self.steps.now(), name, bytes)
        self.tracks.append(track)
        return track

    def follow(self, where: str, schedule: Schedule) -> None:
        """Note that the layer ``where`` is about to run by ``schedule``."""
        if self.recording():
            assert self.steps is not None
            self.schedules[self.steps.now(), where] = schedule

    def layer(self, where: str, device: torch.device) -> Timed:
        """Return the object that marks a call of the layer ``where``."""
        self.clock = self.clock or clock_of(device)
        assert self.steps is not None
        step = self.steps.now()
        return Timed(
            self.clock,
            lambda *marks: self.layers.append((step, where, "forward", *marks)),
            lambda *marks: self.layers.append((step, where, "backward", *marks)),
        )

    # Afterwards.

    def write_if_over(self) -> None:
        """Write the timeline once its last step is over: ranks leave their rows for sp rank 0.

        Called in every call of a layer; waits for no rank.
        """
        if self.folder not in _open or self.steps is not None and self.steps.now() <= self.last:
            return
        if self.steps is not None:
            self._stop()
        if self.rank:
            self.store.set(str(self.rank), pickle.dumps(self.left))
            del _open[self.folder]
        # Where a rank has not left its rows yet, sp rank 0 asks again in its next call.
        elif self.store is None or self.store.check([str(rank) for rank in range(1, self.size)]):
            self._write()

    def close(self) -> None:
        """Stop, and write the rows of this rank and of ranks that have left theirs."""
        if self.steps is not None:
            self._stop()
        if self.folder in _open and self.rank == 0 and self.left:
            self._write()
        _open.pop(self.folder, None)

    def _stop(self) -> None:
        """End the recording, and turn the marks into the rows that are left to be written."""
        assert self.steps is not None
        self.left = self.rows()
        self.steps.close()
        self.steps, self.tracks, self.layers, self.schedules = None, [], [], {}

    def _write(self) -> None:
        """Write the rows of this rank, and of the ranks that have left theirs, into the folder."""
        every = [self.left]
        # At exit the store may be gone.
        with contextlib.suppress(RuntimeError):
            for rank in range(1, self.size):
                if self.store.check([str(rank)]):
                    every.append(pickle.loads(self.store.get(str(rank))))
        del _open[self.folder]
        profiling.write_timeline(self.folder, every)

    def rows(self) -> list[Row]:
        """Return what was recorded, as bars; waits for the device."""
        # Without exchanges that were launched and never finished.
        complete = [track for track in self.tracks if "done" in track.at]
        marks = [track.at["issued"] for track in complete]
        for *_, begin, end in self.layers:
            marks += begin, end
        if not marks:
            return []
        base = marks[0]
        # Marks lie on several streams: the first mark may not be the earliest.
        for mark in marks:
            base = mark if self.clock.between_ms(base, mark) < 0 else base

        def ms(mark: Any) -> float:
            return self.clock.between_ms(base, mark)

        rows = [
            Row(step, layer, layer, kind, ms(begin), ms(end))
            for step, layer, kind, begin, end in self.layers
        ]
        for track in complete:
            at = {event: ms(mark) for event, mark in track.at.items()}
            arrived = min(at.get("arrived", at["unpacking"]), at["unpacking"])

            def bar(kind: str, begin: float, end: float, bytes: int = 0) -> None:
                of = track.step, track.layer, track.what  # noqa: B023
                rows.append(Row(*of, kind, begin, max(begin, end), bytes))

            bar("issue", at["issued"], at["launched"])
            bar("pack", at["issued"], at["packed"])
            bar("transfer", at["started"], arrived, track.bytes)
            bar("unpack", at["unpacking"], at["done"])
            bar("wait", at["wait"], at["done"])
        computed: list[Row] = []
        for step in sorted({row.step for row in rows}):
            computed += computing(rows, step, self.schedules)
        return rows + computed


def computing(rows: list[Row], step: int, schedules: dict[tuple[int, str], Schedule]) -> list[Row]:
    """Name what the compute row did between its stops.

    Stops are the starts and finishes of exchanges, and the begin and end of layers. Between two
    stops the row did the work that the layer's schedule has between them. As in `stop_of`, ">q0" is
    a start and "<q0" a finish; "[" and "]" are the begin and the end of a layer.

    Args:
        rows: All other rows of this rank.
        step: The optimizer step to look at.
        schedules: By step and layer.

    Returns:
        Rows of kind "compute"; none between stops whose work is not known.
    """
    # Begin, end, name, and the row that the stop comes from.
    stops: list[tuple[float, float, str, Row]] = []
    for row in rows:
        if row.what.endswith(IN_NODE):
            continue
        if row.step == step and row.kind in ("issue", "wait"):
            stops.append(
                (row.begin, row.end, (">" if row.kind == "issue" else "<") + row.what, row)
            )
        elif row.step == step and row.kind in ("forward", "backward"):
            stops += [(row.begin, row.begin, "[", row), (row.end, row.end, "]", row)]
    stops.sort(key=lambda stop: stop[:2])
    exchanged: dict[str, set[str]] = {}
    for *_, row in stops:
        exchanged.setdefault(row.layer, set()).add(row.what)
    # By layer, then by the names of two successive stops: the work between them.
    names: dict[str, dict[tuple[str, str], str]] = {}
    for (at, layer), schedule in schedules.items():
        if at != step or layer not in exchanged:
            continue
        # Between the same two stops all programs compute the same.
        for program in (schedule.forward, schedule.backward, schedule.recompute):
            names.setdefault(layer, {}).update(_between(schedule, program, exchanged[layer]))
    computed = []
    for (_, begin, before, first), (end, _, after, second) in zip(stops, stops[1:]):
        name = names.get(first.layer, {}).get((before, after), "")
        if name and end > begin and first.layer == second.layer:
            computed.append(Row(step, first.layer, name, "compute", begin, end))
    return computed


def _between(
    schedule: Schedule, program: Program, exchanged: set[str]
) -> dict[tuple[str, str], str]:
    """Return what a program computes between each two successive stops, by their names.

    Exchanges that did not take place, because they are not in ``exchanged``, are no stops.
    """
    names: dict[tuple[str, str], str] = {}
    labels: list[str] = []
    before = "["
    for step in program:
        if step.on_wire and schedule.name(step) in exchanged:
            stop = stop_of(schedule, step)
            names[before, stop], before, labels = ", ".join(labels), stop, []
        elif not step.on_wire and _is_done(schedule, step, exchanged):
            label = schedule.label(step)
            if label not in labels:
                labels.append(label)
    # A program without any stop did not run. But where attention is kept over a checkpoint, what
    # runs again (``recompute``) has no exchanges: it fills the layer from its begin to its end.
    if before != "[" or program == schedule.recompute:
        names[before, "]"] = ", ".join(labels)
    return names


def _is_done(schedule: Schedule, step: Step, exchanged: set[str]) -> bool:
    """Return whether a step ran: dgrad and wgrad of q, k and v only if their gradient arrived."""
    if step.op not in (Op.DGRAD, Op.WGRAD):
        return True
    start = schedule.exchange_of.get(step.parts[0])
    return start is None or schedule.name(start._replace(grad=True)) in exchanged
