"""Measures times: by clocks, and by traces that show the cost of each exchange."""

from collections.abc import Callable

# Evaluates traces, given their paths, and writes the result beside the first trace. The package
# sets this to a function of `tools.timeline`.
write_timeline: Callable[[list[str]], None]
