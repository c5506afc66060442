"""Gathers what every rank must know of the global sequence: positions, documents and masks."""
