"""A schedule of one's own, and steps in words."""

from ds_sp_overlap.schedule import O, Op, Schedule, Step, by_head_groups, by_starts


def merged_last(kinds, wgrad_last=True):
    """All exchanges of o are finished before the first merge."""
    groups, base = range(len(kinds)), by_head_groups(kinds, wgrad_last)
    finishes = [Step(Op.FINISH, O, False, group) for group in groups]
    merges = [Step(Op.MERGE, O, False, group) for group in groups]
    start = base.forward.index(finishes[0])
    return Schedule((*base.forward[:start], *finishes, *merges), base.backward)


def travelling(*sent):
    """A schedule in which those of ``sent`` travel together in every group, as far as they travel with it."""

    def schedule(kinds, wgrad_last=True):
        starts = (("".join(kind for kind in of if kind in here) for of in sent) for here in kinds)
        made = by_starts(tuple(tuple(of for of in here if of) for here in starts), wgrad_last)
        # The wgrad of q, k and v in front of their dgrad: either may be.
        other = {Op.DGRAD: Op.WGRAD, Op.WGRAD: Op.DGRAD}
        return Schedule(
            made.forward,
            tuple(step if step.tensors == O else step._replace(op=other.get(step.op, step.op)) for step in made.backward),
        )

    return schedule


def step_of(words):
    """The step that messages call so: "start dqkv 1", "finish odo 2"."""
    op, what, group = words.split()
    tensors, beside = tuple(what), ()
    grad = op in ("dgrad", "wgrad") or "d" in tensors
    if "d" in tensors:
        beside, tensors = tensors[: tensors.index("d")], tensors[tensors.index("d") + 1 :]
    return Step(Op(op), tensors, grad, int(group), beside)
