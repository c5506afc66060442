"""Records some optimizer steps with ``torch.profiler``; the trace shows the cost of exchanges.

In the trace, named ranges mark layers and exchanges (`ranges`). `tools.timeline` evaluates the
trace.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from typing import Any

import torch
from torch.profiler import ProfilerAction

from .. import profiling
from ..config import SpOverlapConfig
from ..warn import inform, warn_once
from .ranges import is_profiled
from .steps import listen, listeners

# The unfinished timelines by folder. Layers whose configs name the same folder share a timeline.
_open: dict[str, Timeline] = {}


class Timeline:
    """Profiles some optimizer steps, writes the trace of this rank into a folder, and stops.

    sp rank 0 also evaluates its trace and writes the result. No rank waits for another rank.

    Args:
        folder: The folder of the files; created if it does not exist.
        steps: First and last optimizer step, counted from 0.
        rank: The sp rank.

    Raises:
        ValueError: if this rank can't write into the folder.
    """

    # The running profiler; None outside the recorded steps.
    profile: Any = None

    def __init__(self, folder: str, steps: list[int], rank: int):
        self.folder, (self.first, self.last), self.rank = folder, steps, rank
        self.trace = os.path.join(folder, f"rank{rank}.json.gz")
        try:
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(
                f"sp_overlap.timeline.path: can't write into {folder!r} ({error.strerror}); "
                "give a folder that can be made"
            ) from None
        self.step, self._nodes = 0, torch._C._autograd._get_sequence_nr()
        listen(self)
        # Write the trace even if the process ends before the last step.
        atexit.register(self.close)
        if self.first == 0:
            self._begin()

    @classmethod
    def of(cls, config: SpOverlapConfig, sp_group: Any) -> Timeline | None:
        """Return the timeline of the folder that a config names; make it if there is none.

        Returns None if the config has no timeline, or if world rank 0 is not in this sp group.
        """
        section = config.timeline
        if section is None or sp_group.ranks[0] != 0:
            return None
        if section.path not in _open:
            _open[section.path] = cls(section.path, section.steps, sp_group.rank)
        timeline = _open[section.path]
        if [timeline.first, timeline.last] != section.steps:
            first, last = section.steps
            warn_once(
                f"sp_overlap.timeline: steps {timeline.first} to {timeline.last} of "
                f"{section.path!r} are recorded already, so steps {first} to {last} are not; "
                "give them another path"
            )
        return timeline

    def note_step(self) -> None:
        """Count an optimizer step; start or stop the profiler at the first and the last step."""
        nodes = torch._C._autograd._get_sequence_nr()
        # Without a forward since the last call of this method, the step is still the same: ZeRO-3
        # calls optimizers once for each sub-group, and a model may have several optimizers.
        if nodes == self._nodes:
            return
        self._nodes = nodes
        self.step += 1
        if self.step > self.last:
            self.close()
        elif self.step == self.first:
            self._begin()
        elif self.profile is not None:
            self.profile.step()

    def _begin(self) -> None:
        if is_profiled():
            inform(
                f"sp_overlap.timeline: a profiler runs in step {self.step} already, and nothing is "
                "recorded beside it; python -m ds_sp_overlap timeline TRACE draws its trace"
            )
            return self.close()
        # Only with a schedule does the trace have ranges ``ProfilerStep#20`` and so on.
        self.profile = torch.profiler.profile(schedule=lambda step: ProfilerAction.RECORD)
        self.profile.step_num = self.step
        self.profile.start()

    def close(self) -> None:
        """Stop the profiler, and write the trace."""
        listeners.discard(self)
        _open.pop(self.folder, None)
        profile, self.profile = self.profile, None
        if profile is not None:
            profile.stop()
            profile.export_chrome_trace(self.trace)
            if self.rank == 0:
                profiling.write_timeline([self.trace])
