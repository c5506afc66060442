"""Simulates a GPU: runs the launches of a layer on SMs, hardware queues and communicators."""
