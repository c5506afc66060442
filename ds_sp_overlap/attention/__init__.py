"""Attention layers, which run a schedule: with their projections, or as the drop-in without."""
