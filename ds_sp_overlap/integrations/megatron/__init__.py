"""Megatron-DeepSpeed: its attention layers and decoder layers, and the bridge to current DeepSpeed."""
