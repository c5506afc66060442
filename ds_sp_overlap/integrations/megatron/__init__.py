"""Overlaps attention layers of Megatron-DeepSpeed, and lets it run with a newer DeepSpeed."""
