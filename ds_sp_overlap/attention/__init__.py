"""Attention layers, which run a schedule: with their projections, or as the drop-in without."""

from collections.abc import Callable
from typing import Any

# Runs a `SelfAttention` by itself in the order of a `Block`: `chain.block.run_alone`, which the
# package sets here so that this folder does not import `chain`.
run_in_chunks: Callable[..., Any]
