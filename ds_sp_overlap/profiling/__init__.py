"""Measures times: clocks, optimizer steps, and the timeline of what each exchange cost."""

from collections.abc import Callable

# Writes a timeline, the rows of all ranks, into a folder; a tool, which the package sets.
write_timeline: Callable[[str, list], None]
