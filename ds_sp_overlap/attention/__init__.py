"""Attention layers, which run a schedule: the block that drives its projections, and the drop-in."""
