"""Determines what a module's forward computes: traces it, and checks every operation."""
