"""Adapts models of several frameworks: finds their attention layers and rebinds their forward."""
