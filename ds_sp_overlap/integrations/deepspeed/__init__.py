"""Adapter to DeepSpeed's config, and to Accelerate, which passes that config on."""
