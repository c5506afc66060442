"""Measures times: clocks, optimizer steps, and the trace of what each exchange cost."""

from collections.abc import Callable

# Evaluates traces, given their paths, and writes the result beside the first trace. The package
# sets this to a function of `tools.timeline`.
write_timeline: Callable[[list[str]], None]
