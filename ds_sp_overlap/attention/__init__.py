"""Runs attention layers by a schedule, with their projections or, as a drop-in, without them."""
