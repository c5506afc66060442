"""Plays launches on one GPU, event by event; the peers of its exchanges are always there.

    host        launches one after another; each takes the host a while, and goes into the queue of
                its stream
    queue       first in, first out. A kernel leaves when the stream's earlier kernel is over, a
                wait when its event has happened, a record at once
    SMs         one block each. Free SMs go to the blocks of higher priority first, then to those
                that came first. A block that waits keeps those behind it waiting. Blocks are never
                taken off their SM
    exchange    moves its bytes once all its blocks have an SM

Blocks that already wait get a free SM before the next kernel leaves its queue. So a kernel whose
blocks take tile after tile takes the SMs that an exchange gives back, and the next exchange waits
until the kernel is over.

Left out: clocks, caches, memory bandwidth shared by kernels that run side by side, and where on the
chip an SM lies.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from .constants import Gpu, Grid
from .launches import COMPUTE, Host, Launch, Queued, Record, Transfer, Wait


class Bar(NamedTuple):
    """A kernel or exchange; ``started`` is when its first block had an SM."""

    launch: Queued
    started: float
    end: float


class _Running:
    """A kernel or an exchange that left its queue."""

    def __init__(self, launch: Queued, grid: Grid, begin: float):
        self.launch, self.grid, self.started = launch, grid, begin
        # Blocks without an SM, tiles that nobody has taken, blocks that are on an SM.
        self.waiting, self.left, self.placed = grid.ctas, grid.tiles, 0


class Played:
    """Plays the launches of one step, which begins behind a synchronisation; times in us.

    Attributes:
        bars: Kernels and exchanges in the order of their ends.
        host_us: Time at which the host had launched everything, and was done.
        starved_us: Time in which the GPU had nothing to do because the host was late.
        us: Time until the host is done and everything is over.

    Raises:
        RuntimeError: if something never ends.
    """

    host_us = starved_us = 0.0

    def __init__(self, gpu: Gpu, launches: Iterable[Launch]):
        self.gpu, self.launches = gpu, iter(launches)
        self.now, self.free = 0.0, int(gpu["sms"])
        self.bars: list[Bar] = []
        self.queues: defaultdict[str, deque[Queued]] = defaultdict(deque)
        self.last: dict[str, _Running] = {}
        # By event: the kernel in front of it on its stream; None if there was none.
        self.events: dict[int, _Running | None] = {}
        self.running: list[_Running] = []
        self.idle_since: float | None = None
        # Acts that are planned, by time and then in the order of planning.
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self._issue()
        while self.heap:
            self.now, _, act = heapq.heappop(self.heap)
            act()
        left = [str(each) for queue in self.queues.values() for each in queue]
        if left:
            raise RuntimeError(f"these launches never end: {', '.join(left)}")
        self.us = max(self.host_us, *(bar.end for bar in self.bars))

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (time, next(self.order), act))

    def _issue(self) -> None:
        """Let the host launch the next of its list, and come back for the one after it."""
        us = 0.0
        for launch in self.launches:
            us += self.gpu.host_us(launch)
            if not isinstance(launch, Host):
                self._at(self.now + us, partial(self._arrive, launch))
                return
        self.host_us = self.now + us

    def _arrive(self, launch: Queued) -> None:
        """Put a launch into the queue of its stream."""
        self.queues[launch.stream].append(launch)
        if self.idle_since is not None:
            self.starved_us += self.now - self.idle_since
            self.idle_since = None
        self._pump()
        self._issue()

    def _pump(self) -> None:
        """Let all launches that can leave their queues do so; note when the GPU falls idle."""
        # A launch that leaves may be what another queue waits for: look at all queues again.
        is_moving = True
        while is_moving:
            is_moving = False
            for queue in self.queues.values():
                while queue and self._leaves(queue[0]):
                    queue.popleft()
                    is_moving = True
        if not self.running and not any(self.queues.values()) and self.idle_since is None:
            self.idle_since = self.now

    def _leaves(self, launch: Queued) -> bool:
        """Return whether the head of a queue can leave it; it then does its work, or begins to."""
        last = self.last.get(launch.stream)
        if isinstance(launch, Record):
            self.events[launch.event] = last
        elif isinstance(launch, Wait):
            return launch.event in self.events and self.events[launch.event] not in self.running
        elif last in self.running:
            return False
        else:
            running = _Running(launch, self.gpu.grid(launch), self.now)
            self.last[launch.stream] = running
            self.running.append(running)
            # Streams of exchanges have priority; then age. The sort is stable.
            self.running.sort(key=lambda each: each.launch.stream == COMPUTE)
            self._place()
        return True

    def _place(self) -> None:
        """Give free SMs to blocks that wait for one."""
        for each in list(self.running):
            is_transfer = isinstance(each.launch, Transfer)
            count = min(self.free, each.waiting)
            if count and each.placed == 0:
                each.started = self.now
            self.free -= count
            each.waiting -= count
            each.placed += count
            # An exchange turns once all its blocks have an SM; without blocks, at once.
            if is_transfer and each.waiting == 0 and each.left:
                each.left = 0
                self._at(self.now + each.grid.tile_us, partial(self._end, each))
            elif count and not is_transfer:
                self._turn(each, count)
            if each.waiting:
                # SMs are kept for the blocks that come first.
                return

    def _turn(self, kernel: _Running, count: int) -> None:
        """Let ``count`` blocks of a kernel, which have an SM, work on one tile each."""
        kernel.left -= count
        # Where all tiles are taken, blocks that have no SM yet wait no longer.
        kernel.waiting = min(kernel.waiting, kernel.left)
        self._at(self.now + kernel.grid.tile_us, partial(self._turned, kernel, count))

    def _turned(self, kernel: _Running, count: int) -> None:
        """End ``count`` tiles: their blocks take the next ones, or give their SMs back."""
        staying = min(count, kernel.left)
        if staying:
            self._turn(kernel, staying)
        kernel.placed -= count - staying
        self.free += count - staying
        if kernel.placed == 0:
            self._end(kernel)
        else:
            self._place()
            self._pump()

    def _end(self, running: _Running) -> None:
        """End a kernel or an exchange."""
        self.free += running.placed
        self.running.remove(running)
        self.bars.append(Bar(running.launch, running.started, self.now))
        # Blocks that wait for an SM come before kernels that are still in a queue.
        self._place()
        self._pump()
