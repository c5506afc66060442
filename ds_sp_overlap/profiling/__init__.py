"""Measures times: by clocks, and by traces that show the cost of each exchange."""

from collections.abc import Callable

# Evaluates the traces at the given paths, and writes the result beside the first trace. The
# package's ``__init__`` sets this variable, to a function that calls `tools.timeline`.
write_timeline: Callable[[list[str]], None]
