"""Overlaps the attention layers and mixers of transformers models."""
