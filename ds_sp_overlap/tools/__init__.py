"""Tools that people call: the planner, the timeline of a trace, the self-check, the command line.

The engine imports none of them.
"""
