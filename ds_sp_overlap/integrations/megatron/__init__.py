"""Adapter to Megatron-DeepSpeed: its attention layers, and its use with newer DeepSpeed."""
