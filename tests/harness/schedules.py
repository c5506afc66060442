"""Makes schedules for tests, checks schedules of `by_window`, and parses the names of steps."""

from ds_sp_overlap.schedule import O, Op, Schedule, Step, by_head_groups, by_starts
from ds_sp_overlap.schedule.checked import check_program, check_starts, needs_of
from ds_sp_overlap.schedule.steps import Q


def merged_last(kinds, wgrad_last=True):
    """Make a schedule that finishes all exchanges of o before the first merge."""
    groups, base = range(len(kinds)), by_head_groups(kinds, wgrad_last)
    finishes = [Step(Op.FINISH, O, False, group) for group in groups]
    merges = [Step(Op.MERGE, O, False, group) for group in groups]
    start = base.forward.index(finishes[0])
    return Schedule((*base.forward[:start], *finishes, *merges), base.backward)


def travelling(*sent):
    """Return a schedule function: each string of ``sent``, such as "qk", names tensors that are sent in one exchange.

    A group that sends only some of these tensors sends those together.
    """

    def schedule(kinds, wgrad_last=True):
        starts = (("".join(kind for kind in of if kind in here) for of in sent) for here in kinds)
        made = by_starts(tuple(tuple(of for of in here if of) for here in starts), wgrad_last)
        # Compute the wgrad of q, k and v before their dgrad: both orders are valid.
        other = {Op.DGRAD: Op.WGRAD, Op.WGRAD: Op.DGRAD}
        return Schedule(
            made.forward,
            tuple(step if step.tensors == O else step._replace(op=other.get(step.op, step.op)) for step in made.backward),
        )

    return schedule


def step_of(words):
    """Parse a step as error messages print it, such as "start dqkv 1" or "finish odo 2"."""
    op, what, group = words.split()
    tensors, beside = tuple(what), ()
    grad = op in ("dgrad", "wgrad") or "d" in tensors
    if "d" in tensors:
        beside, tensors = tensors[: tensors.index("d")], tensors[tensors.index("d") + 1 :]
    return Step(Op(op), tensors, grad, int(group), beside)


def check_window(schedule, kinds, last_use, window):
    """Check a schedule of `by_window`, as `check` does for other schedules; return the schedule.

    Attention must run group by group: in order in forward, in reverse order in backward. At most ``window`` groups may be in memory
    at the same time. Raises ValueError for the first fault.
    """
    check_starts(schedule, kinds)
    forward, backward = needs_of(kinds, schedule.starts)
    # Backward recomputes q, k and v.
    restarts = [step for step in schedule.backward if step.op is Op.START and not step.grad]
    for start in restarts:
        projects = [start._replace(op=Op.PROJECT, tensors=(kind,)) for kind in start.tensors]
        backward |= {start: projects, start._replace(op=Op.FINISH): [start]}
        backward |= {project: [] for project in projects}
    for kind, group in schedule.parts:
        if not any((kind, group) in start.parts for start in restarts):
            raise ValueError(f"schedule, backward: start {kind} {group} is missing")
    last, beside = schedule.groups - 1, next((step.beside for step in schedule.backward if step.beside), ())
    for group in range(schedule.groups):
        if group:
            forward[Step(Op.ATTEND, O, False, group)].append(Step(Op.ATTEND, O, False, group - 1))
        # A start of do that also sends o frees the local o. So wgrad o, which reads the local o, must come before.
        if beside:
            backward[Step(Op.START, O, True, group)].append(Step(Op.WGRAD, O, True, group))
        attend_needs = backward[Step(Op.ATTEND, O, True, group)]
        if group < last:
            attend_needs.append(Step(Op.ATTEND, O, True, group + 1))
        # A group reads the q, k and v that are recomputed for it. KV heads that several groups share are
        # recomputed for the last of these groups, see Note [Shared KV heads] in `window`.
        for start in restarts:
            is_shared = start.group < group <= last_use[start.group]
            if start.group == group or start.tensors != Q and is_shared:
                attend_needs.append(start._replace(op=Op.FINISH))

    def with_o(step):
        """Return the step, with o added to the exchange of do if this schedule sends both together."""
        return step._replace(beside=beside) if step.on_wire and step.tensors == O and step.grad else step

    backward = {with_o(step): [with_o(need) for need in needs] for step, needs in backward.items()}
    for name, program, needs in (("forward", schedule.forward, forward), ("backward", schedule.backward, backward)):
        check_program(name, program, needs)
        # The groups in memory: their q is projected, and their attention has not run yet.
        live = set()
        for step in program:
            if step.op is Op.PROJECT and step.tensors == Q:
                live.add(step.group)
            if len(live) > window:
                raise ValueError(f"schedule, {name}: {step} while {len(live) - 1} groups are held; the window is {window}")
            if step.op is Op.ATTEND:
                live.discard(step.group)
    return schedule
