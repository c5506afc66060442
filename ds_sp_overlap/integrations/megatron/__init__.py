"""Megatron-DeepSpeed: its attention layers and decoder layers, and its use with newer DeepSpeed."""
