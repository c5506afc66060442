"""Runs one call of a layer: projections, exchanges and local attention, in schedule order."""
