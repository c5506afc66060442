"""Saves what backward needs: over activation checkpoints, in host memory, or for recompute."""
