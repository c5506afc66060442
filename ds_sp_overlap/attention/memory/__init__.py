"""Saves results of attention over activation checkpoints or in host memory, or recomputes them."""
