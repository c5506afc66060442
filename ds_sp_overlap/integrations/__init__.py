"""Adapters to frameworks: each finds its attention layers in a model and rebinds their forward."""
