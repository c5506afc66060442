"""Tools for users: the planner, the timeline of a trace, the self-check, the command line.

Training imports none of these modules, except the timeline when it writes a trace.
"""
