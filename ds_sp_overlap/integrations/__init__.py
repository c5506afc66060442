"""Frameworks: where their attention layers are, and what has to be rebound to overlap them. One file or more a framework."""
