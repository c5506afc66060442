"""A GPU on paper: plays the launches of a layer on SMs, hardware queues and communicators."""
