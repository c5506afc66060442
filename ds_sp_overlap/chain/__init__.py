"""Decoder layers as one chain, whose exchanges hide behind the MLPs between their attentions."""
