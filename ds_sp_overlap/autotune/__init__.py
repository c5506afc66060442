"""Chooses the number of head groups by timing, in the first steps of training."""
