"""A schedule of one's own, and steps in words."""

from ds_sp_overlap.schedule import Schedule, Step, by_head_groups


def merged_last(kinds, wgrad_last=True):
    """All exchanges of o are finished before the first merge."""
    groups, base = range(len(kinds)), by_head_groups(kinds, wgrad_last)
    finishes = [Step("finish", "o", group) for group in groups]
    merges = [Step("merge", "o", group) for group in groups]
    start = base.forward.index(finishes[0])
    return Schedule((*base.forward[:start], *finishes, *merges), base.backward)


def step_of(words):
    act, of, group = words.split()
    return Step(act, of, int(group))
