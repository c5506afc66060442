"""Measures times: clocks, optimizer steps, and the timeline of what each exchange cost."""
