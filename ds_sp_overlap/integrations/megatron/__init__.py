"""Overlaps Megatron-DeepSpeed's attention, and lets Megatron run with a newer DeepSpeed."""
