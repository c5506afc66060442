"""What a layer keeps for its backward over activation checkpoints, in host memory, or recomputes."""
