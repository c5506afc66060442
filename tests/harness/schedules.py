"""A schedule of one's own, and steps in words."""

from ds_sp_overlap.schedule import Schedule, Step, by_head_groups, by_starts


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
        starts = (("".join(kind for kind in of if kind in here) for of in sent) for here in kinds)
        made = by_starts(tuple(tuple(of for of in here if of) for here in starts), wgrad_last)
        # The wgrad of q, k and v in front of their dgrad: either may be.
        other = {"dgrad": "wgrad", "wgrad": "dgrad"}
        return Schedule(
            made.forward,
            tuple(step if step.of == "o" else step._replace(act=other.get(step.act, step.act)) for step in made.backward),
        )

    return schedule


def step_of(words):
    act, of, at = words.split()
    group, _, chunk = at.partition(".")
    return Step(act, of, int(group), int(chunk or 0))
