"""One call of a layer: its projections, its exchanges and its local attention, in the order of a
schedule.
"""
