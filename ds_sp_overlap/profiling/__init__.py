"""Measures times: clocks, optimizer steps, and the trace of what each exchange cost."""

from collections.abc import Callable

# Writes what traces tell, given their paths, beside the first; a tool, which the package sets.
write_timeline: Callable[[list[str]], None]
