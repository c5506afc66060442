"""Tools for users: the planner, the timeline of a trace, the self-check, the command line.

Training imports only one of these modules: the timeline, to evaluate a trace.
"""
