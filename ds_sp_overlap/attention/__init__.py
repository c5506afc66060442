"""Attention layers, which run a schedule: with their projections, or as the drop-in without."""

from collections.abc import Callable
from typing import Any

# Runs a `SelfAttention` by itself in the order of a `Block`; of `chain`, which the package sets.
run_in_chunks: Callable[..., Any]
