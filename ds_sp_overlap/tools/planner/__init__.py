"""Predicts the time that overlap would save, by simulating the launches of a layer on a GPU."""
