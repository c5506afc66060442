"""Saves for backward: over checkpoints, in host memory, or enough to recompute the rest."""
