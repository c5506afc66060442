"""What a layer saves for backward: over checkpoints, in host memory, or to recompute the rest."""
