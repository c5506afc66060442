"""Finds out what a module's forward computes: traces it, and accounts for every operation."""
