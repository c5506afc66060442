"""Plays launches on a GPU, event by event, on one rank or on several.

    host        launches one after another; each takes the host a while, and goes into a queue
    queue       first in, first out, of one stream or several. A kernel leaves when the stream's
                earlier kernel is over, a wait when its event has happened, a record at once. Until
                the head leaves, everything behind it waits, of other streams too
    SMs         one block each. Free SMs go to the blocks of higher priority first, then to those
                that came first. A block that waits keeps those behind it waiting. Blocks are never
                taken off their SM
    collective  waits on its SMs until all its blocks have one and all ranks are at the collective
                of the same number on the same stream

Blocks that already wait get a free SM before the next kernel leaves its queue. So a persistent
kernel takes the SMs that an exchange gives back, and the next exchange waits until the kernel is
over.

Left out: clocks, caches, memory bandwidth shared by kernels that run side by side, and where on the
chip an SM lies (the blocks of a cluster start together, but need no neighbours here).

`expected` plays one rank for ``plan --gpu``, and `deadlocks` several.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .constants import Gpu, Grid
from .launches import Launch, Record, Transfer, Wait


class Bar(NamedTuple):
    """A kernel or collective; ``begin`` is when it left its queue, ``started`` its first block."""

    launch: Launch
    begin: float
    started: float
    end: float


@dataclass
class Played:
    """Records what happened on one rank; times in us.

    Attributes:
        bars: Kernels and collectives in the order of their ends.
        host_us: Time at which the host had launched everything.
        starved_us: Time in which the GPU had nothing to do because the host was late.
        stuck: Each launch that never ended, as text, those included that never began; empty unless
            there is a deadlock.
    """

    bars: list[Bar] = field(default_factory=list)
    host_us: float = 0.0
    starved_us: float = 0.0
    stuck: list[str] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Time until everything is over."""
        return max((bar.end for bar in self.bars), default=0.0)


class _Running:
    """A kernel or a collective that left its queue."""

    def __init__(self, launch: Launch, grid: Grid, priority: int, begin: float):
        self.launch, self.grid, self.priority, self.begin = launch, grid, priority, begin
        # Blocks without an SM, pieces of work that nobody has taken, blocks that are on an SM.
        self.waiting, self.left, self.placed = grid.ctas, grid.tiles, 0
        self.started = begin
        self.done = False

    @property
    def is_resident(self) -> bool:
        """Return whether no block waits for an SM any more."""
        return self.waiting == 0


class _Rank:
    """The state of one GPU and its host."""

    def __init__(self, gpu: Gpu, launches: Sequence[Launch]):
        self.gpu, self.launches = gpu, launches
        self.free = int(gpu["sms"])
        self.queues: list[deque[Launch]] = [deque() for _ in range(gpu.queues)]
        # When the head of a queue may be looked at again.
        self.held_until = [0.0] * gpu.queues
        self.queue_of: dict[str, int] = {}
        self.last: dict[str, _Running] = {}
        # By event: the kernel in front of it on its stream; None if there was none.
        self.events: dict[int, _Running | None] = {}
        self.running: list[_Running] = []
        # Collectives in the order of the host, and those that have begun.
        self.collectives = [each for each in launches if isinstance(each, Transfer)]
        self.begun: list[_Running] = []
        self.count: defaultdict[str, int] = defaultdict(int)
        self.played = Played()
        # Launches that the host has begun, and those that are in a queue.
        self.issued = self.arrived = 0
        self.idle_since: float | None = None


class Player:
    """Plays the launches of every rank.

    Args:
        gpus: The GPU of each rank.
        launches: What each host launches, in its order.
        delay: Called with a rank for each launch of its host; returns how many us longer it takes.
        stretch: Called with a rank for each compute kernel; returns a factor for the time of its
            tiles.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        launches: Sequence[Sequence[Launch]],
        delay: Callable[[int], float] = lambda rank: 0.0,
        stretch: Callable[[int], float] = lambda rank: 1.0,
    ):
        self.ranks = [_Rank(*each) for each in zip(gpus, launches)]
        self.delay, self.stretch = delay, stretch
        self.now = 0.0
        # Acts that are planned, by time and then in the order of planning.
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        # By communicator and the number of a collective on it: ranks whose blocks are all there.
        self.meetings: defaultdict[tuple[str, int], list[tuple[int, _Running]]] = defaultdict(list)

    def play(self) -> list[Played]:
        """Play until nothing happens any more; return what happened on each rank.

        Called once for each object. Does not raise for a deadlock (`Played.stuck`).
        """
        for rank in range(len(self.ranks)):
            self._issue(rank)
        while self.heap:
            self.now, _, act = heapq.heappop(self.heap)
            act()
        for state in self.ranks:
            left = [each.launch for each in state.running]
            for queue in state.queues:
                left += queue
            state.played.stuck = [str(each) for each in left]
        return [rank.played for rank in self.ranks]

    def _at(self, time: float, act: Callable[[], None]) -> None:
        # Of acts at the same time, the one that was planned first comes first.
        heapq.heappush(self.heap, (time, next(self.order), act))

    def _issue(self, index: int) -> None:
        """Let the host launch the next of its list, and come back for the one after it."""
        rank = self.ranks[index]
        if rank.issued == len(rank.launches):
            return
        launch = rank.launches[rank.issued]
        rank.issued += 1

        def arrive() -> None:
            """Put the launch into the queue of its stream, once the host's time for it is over."""
            queue = rank.queue_of.setdefault(launch.stream, len(rank.queue_of) % rank.gpu.queues)
            rank.queues[queue].append(launch)
            rank.arrived += 1
            rank.played.host_us = self.now
            if rank.idle_since is not None:
                rank.played.starved_us += self.now - rank.idle_since
                rank.idle_since = None
            self._pump(index)
            self._issue(index)

        self._at(self.now + rank.gpu.host_us(launch) + self.delay(index), arrive)

    def _pump(self, index: int) -> None:
        """Let all launches that can leave their queues do so; note when the GPU falls idle."""
        rank = self.ranks[index]
        # A launch that leaves may be what another queue waits for: look at all queues again.
        is_moving = True
        while is_moving:
            is_moving = False
            for number, queue in enumerate(rank.queues):
                while queue and rank.held_until[number] <= self.now and self._leaves(index, number):
                    is_moving = True
        is_idle = not rank.running and not any(rank.queues)
        # Before the first launch and after the last one, nobody waits for the host.
        if is_idle and 0 < rank.arrived < len(rank.launches) and rank.idle_since is None:
            rank.idle_since = self.now

    def _leaves(self, index: int, number: int) -> bool:
        """Let the head of queue ``number`` leave it; return whether it could."""
        rank, launch = self.ranks[index], self.ranks[index].queues[number][0]
        last = rank.last.get(launch.stream)
        if isinstance(launch, Record):
            rank.events[launch.event] = last
        elif isinstance(launch, Wait):
            if launch.event not in rank.events:
                return False
            until = rank.events[launch.event]
            # An event that was recorded behind nothing, or behind a kernel that is over, has
            # happened.
            if until is not None and not until.done:
                return False
            if until is not None:
                rank.held_until[number] = self.now + rank.gpu["wait_us"]
                self._at(rank.held_until[number], lambda: self._pump(index))
        else:
            if last is not None and not last.done:
                return False
            # A collective leaves after those before it in the host's order, once they have SMs.
            if isinstance(launch, Transfer) and rank.gpu.in_order:
                first = rank.collectives[len(rank.begun)]
                if launch is not first or not all(each.is_resident for each in rank.begun):
                    return False
            self._begin(index, launch)
        rank.queues[number].popleft()
        return True

    def _begin(self, index: int, launch: Launch) -> None:
        """Begin a kernel or a collective, whose blocks now wait for SMs."""
        rank = self.ranks[index]
        if isinstance(launch, Transfer):
            ctas, _ = rank.gpu.transfer(launch)
            grid = Grid(ctas, ctas, 0.0)
        else:
            grid = rank.gpu.grid(launch)
            grid = grid._replace(tile_us=grid.tile_us * self.stretch(index))
        running = _Running(launch, grid, rank.gpu.priority(launch.stream), self.now)
        rank.last[launch.stream] = running
        rank.running.append(running)
        rank.running.sort(key=lambda each: -each.priority)  # stable: then by age
        if isinstance(launch, Transfer):
            rank.begun.append(running)
            # Without blocks (`Gpu.free_wire`), it need not wait for SMs.
            if grid.ctas == 0:
                self._arrived(index, running)
        self._place(index)

    def _place(self, index: int) -> None:
        """Give free SMs to blocks that wait for one."""
        rank = self.ranks[index]
        for each in list(rank.running):
            if each.waiting == 0:
                continue
            count = min(rank.free, each.waiting, each.left)
            if isinstance(each.launch, Transfer):
                cluster = int(rank.gpu["nccl_cluster"])
                # Blocks of a cluster get their SMs together.
                count -= count % cluster if each.grid.ctas % cluster == 0 else 0
            if count:
                # The first blocks of the kernel get their SMs.
                if each.placed == 0 and each.waiting == each.grid.ctas:
                    each.started = self.now
                rank.free -= count
                each.waiting -= count
                each.placed += count
                if isinstance(each.launch, Transfer):
                    if each.is_resident:
                        self._arrived(index, each)
                else:
                    self._turn(index, each, count)
            if each.waiting:
                # SMs are kept for the blocks that come first.
                return

    def _turn(self, index: int, kernel: _Running, count: int) -> None:
        """Let ``count`` blocks of a kernel, which have an SM, work on one tile each."""
        kernel.left -= count
        if kernel.left == 0:
            # No tile is left for the blocks that have no SM yet, so they wait no longer.
            kernel.waiting = 0

        def over() -> None:
            """End the tiles: blocks take the next ones, or give their SMs back."""
            rank = self.ranks[index]
            staying = min(count, kernel.left) if kernel.grid.holds else 0
            if staying:
                self._turn(index, kernel, staying)
            kernel.placed -= count - staying
            rank.free += count - staying
            if kernel.placed == 0 and kernel.waiting == 0:
                self._end(index, kernel)
            self._place(index)
            self._pump(index)

        self._at(self.now + kernel.grid.tile_us, over)

    def _arrived(self, index: int, collective: _Running) -> None:
        """Note that all blocks of a collective are there; it ends if this rank is the last."""
        rank, launch = self.ranks[index], collective.launch
        assert isinstance(launch, Transfer)
        meeting = self.meetings[launch.stream, rank.count[launch.stream]]
        rank.count[launch.stream] += 1
        meeting.append((index, collective))
        if len(meeting) < len(self.ranks):
            return

        def over() -> None:
            """End the collective on all ranks."""
            for other, running in meeting:
                self.ranks[other].free += running.placed
                self._end(other, running)
            # Blocks that wait for an SM come before kernels that are still in a queue.
            for other, _ in meeting:
                self._place(other)
            for other, _ in meeting:
                self._pump(other)

        self._at(self.now + rank.gpu.transfer(launch)[1], over)

    def _end(self, index: int, running: _Running) -> None:
        """Note that a kernel or a collective is over; its SMs were given back before."""
        rank = self.ranks[index]
        running.done = True
        rank.running.remove(running)
        rank.played.bars.append(Bar(running.launch, running.begin, running.started, self.now))


def play(gpu: Gpu, launches: Sequence[Launch]) -> Played:
    """Play the launches of one rank, whose peers are always there.

    Raises:
        RuntimeError: if something never ends.
    """
    (played,) = Player([gpu], [launches]).play()
    if played.stuck:
        raise RuntimeError(f"these launches never end: {', '.join(played.stuck)}")
    return played
