"""What a module's forward computes, told by tracing it with an account of every operation."""
