"""Tools that people call: the planner, pictures of the timeline, the self-check, the command line.

The engine imports none of them.
"""
