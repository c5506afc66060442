"""Simulates launches on one GPU, event by event; the peers of its exchanges never cause a wait.

    host        issues one launch after another. Each launch takes the host some time, and enters
                the queue of its stream
    queue       first in, first out. A kernel leaves when the stream's earlier kernel has ended, a
                wait when its event has happened, a record at once
    SMs         run one block each. Free SMs go to the blocks of higher priority first, then to the
                earliest blocks. A block that waits for an SM holds up all blocks after it. A block
                keeps its SM until it ends
    exchange    moves its bytes once all its blocks have an SM

Blocks that already wait get a free SM before the next kernel leaves its queue. So a kernel whose
blocks process one tile after another also takes the SMs that an exchange frees, and the next
exchange waits until the kernel ends.

Not simulated: clocks, caches, the sharing of memory bandwidth by concurrent kernels, and the
location of an SM on the chip.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial

from .constants import Gpu, Grid
from .launches import COMPUTE, Host, Launch, Queued, Record, Transfer, Wait


class Running:
    """Holds the state of a kernel or an exchange that has left its queue.

    Attributes:
        launch: The launch.
        started: The time at which its first block got an SM, in us.
        end: The time at which it ended, in us; infinite before.
    """

    end = math.inf

    def __init__(self, launch: Queued, grid: Grid, begin: float):
        self.launch, self.grid, self.started = launch, grid, begin
        # The numbers of blocks that wait for an SM, of tiles not begun, and of blocks on an SM.
        self.waiting, self.left, self.placed = grid.ctas, grid.tiles, 0


class Played:
    """Simulates the launches of one step, which begins on an idle GPU; times in us.

    Attributes:
        bars: Kernels and exchanges in the order of their ends.
        host_us: The time at which the host has launched everything.
        starved_us: The time for which the GPU was idle because the host was late.
        us: The time at which the host and all kernels and exchanges are done.

    Raises:
        RuntimeError: if some launch never runs.
    """

    host_us = starved_us = 0.0

    def __init__(self, gpu: Gpu, launches: Iterable[Launch]):
        self.gpu, self.now, self.free = gpu, 0.0, int(gpu["sms"])
        self.bars: list[Running] = []
        self.queues: defaultdict[str, deque[Queued]] = defaultdict(deque)
        self.last: dict[str, Running] = {}
        # For each recorded event: the last kernel before it on its stream, or None.
        self.events: dict[int, Running | None] = {}
        self.running: list[Running] = []
        # Planned actions, ordered by time, then by the order of planning.
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        for launch in launches:
            self.host_us += gpu.host_us(launch)
            if not isinstance(launch, Host):
                self._at(self.host_us, partial(self._arrive, launch))
        while self.heap:
            time, _, act = heapq.heappop(self.heap)
            # There is no queue before the first launch, and until then the GPU is not starved.
            if self.queues and not self.running:
                self.starved_us += time - self.now
            self.now = time
            act()
        left = [str(each) for queue in self.queues.values() for each in queue]
        if left:
            raise RuntimeError(f"these launches never end: {', '.join(left)}")
        # ``now`` is the time of the last action, the end of a kernel or of an exchange.
        self.us = max(self.host_us, self.now)

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (time, next(self.order), act))

    def _arrive(self, launch: Queued) -> None:
        """Put a launch into the queue of its stream."""
        self.queues[launch.stream].append(launch)
        self._pump()

    def _pump(self) -> None:
        """Let launches leave their queues as far as possible."""
        # A launch that leaves may release launches of other queues: repeat until none can leave.
        is_moving = True
        while is_moving:
            is_moving = False
            for queue in self.queues.values():
                while queue and self._leaves(queue[0]):
                    queue.popleft()
                    is_moving = True

    def _leaves(self, launch: Queued) -> bool:
        """Return whether the launch at the head of a queue can leave; if so, start it."""
        last = self.last.get(launch.stream)
        if isinstance(launch, Record):
            self.events[launch.event] = last
        elif isinstance(launch, Wait):
            return launch.event in self.events and self.events[launch.event] not in self.running
        elif last in self.running:
            return False
        else:
            running = Running(launch, self.gpu.grid(launch), self.now)
            self.last[launch.stream] = running
            self.running.append(running)
            # Streams of exchanges have priority; otherwise the older launch comes first, since the
            # sort is stable.
            self.running.sort(key=lambda each: each.launch.stream == COMPUTE)
            self._place()
        return True

    def _place(self) -> None:
        """Give free SMs to waiting blocks."""
        for each in list(self.running):
            is_transfer = isinstance(each.launch, Transfer)
            count = min(self.free, each.waiting)
            if count and each.placed == 0:
                each.started = self.now
            self.free -= count
            each.waiting -= count
            each.placed += count
            # An exchange moves its bytes once all its blocks have an SM; without blocks, at once.
            if is_transfer and each.waiting == 0 and each.left:
                each.left = 0
                self._at(self.now + each.grid.tile_us, partial(self._end, each))
            elif count and not is_transfer:
                self._turn(each, count)
            if each.waiting:
                # Later blocks must not overtake the waiting ones.
                return

    def _turn(self, kernel: Running, count: int) -> None:
        """Let ``count`` blocks of a kernel, which have an SM, process one tile each."""
        kernel.left -= count
        # Drop waiting blocks for which no tile is left.
        kernel.waiting = min(kernel.waiting, kernel.left)
        self._at(self.now + kernel.grid.tile_us, partial(self._turned, kernel, count))

    def _turned(self, kernel: Running, count: int) -> None:
        """End ``count`` tiles: their blocks take the next tiles, or free their SMs."""
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

    def _end(self, running: Running) -> None:
        """End a kernel or an exchange."""
        self.free += running.placed
        self.running.remove(running)
        running.end = self.now
        self.bars.append(running)
        # First give SMs to waiting blocks, then let kernels leave their queues.
        self._place()
        self._pump()
