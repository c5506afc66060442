"""A schedule of one's own, and steps in words."""

from ds_sp_overlap.schedule import Schedule, Step, by_head_groups


def merged_last(kinds, wgrad_last=True):
    """All exchanges of o are finished before the first merge."""
    groups, base = range(len(kinds)), by_head_groups(kinds, wgrad_last)
    finishes = [Step("finish", "o", group) for group in groups]
    merges = [Step("merge", "o", group) for group in groups]
    start = base.forward.index(finishes[0])
    return Schedule((*base.forward[:start], *finishes, *merges), base.backward)


def travelling(*sent):
    """A schedule in which those of ``sent`` travel together in every group, as far as they travel with it."""

    def schedule(kinds, wgrad_last=True):
        groups, forward, backward = range(len(kinds)), [], []
        starts = [[of for of in ("".join(kind for kind in of if kind in here) for of in sent) if of] for here in kinds]
        for group in groups:
            for of in starts[group]:
                forward += [Step("project", kind, group) for kind in of] + [Step("start", of, group)]
        for group in groups:
            forward += [Step("finish", of, group) for of in starts[group]]
            forward += [Step("attend", "o", group), Step("start", "o", group)]
        forward += [Step(act, "o", group) for group in groups for act in ("finish", "merge")]
        backward += [Step(act, of, group) for group in groups for act, of in (("wgrad", "o"), ("dgrad", "o"), ("start", "do"))]
        for group in reversed(groups):
            backward += [Step("finish", "do", group), Step("attend", "do", group)]
            backward += [Step("start", "d" + of, group) for of in reversed(starts[group])]
        for group in reversed(groups):
            for of in reversed(starts[group]):
                backward += [Step("finish", "d" + of, group)]
                backward += [Step(act, kind, group) for kind in of for act in ("wgrad", "dgrad")]
        return Schedule(tuple(forward), tuple(backward))

    return schedule


def step_of(words):
    act, of, group = words.split()
    return Step(act, of, int(group))
