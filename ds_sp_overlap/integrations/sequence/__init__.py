"""Gathers positions, documents and masks of the global sequence on every rank."""
