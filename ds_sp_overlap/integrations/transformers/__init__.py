"""Adapter to transformers: its attention layers and its decoder layers."""
