"""One all-to-all with its relayout: who holds what, over which group and stream, moved by what, and how it is checked."""
