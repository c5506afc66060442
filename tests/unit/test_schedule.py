"""The schedule as a value: what is refused, what is drawn, and one more of them that a real layer runs by."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap import schedule
from ds_sp_overlap.schedule import Schedule, Step, by_head_groups, check, draw, play
from tests.helpers.schedules import merged_last, step_of

README = Path(__file__).parents[2] / "README.md"


kinds = st.lists(st.sampled_from(["qkv", "q"]), max_size=4).map(lambda more: ("qkv", *more))


@settings(deadline=None)
@given(kinds=kinds, wgrad_last=st.booleans())
def test_every_number_of_groups_and_kv_heads_makes_a_schedule_that_holds(kinds, wgrad_last):
    made = check(by_head_groups(kinds, wgrad_last), kinds)
    assert made.groups == len(kinds) and len(made.parts) == sum(map(len, kinds))
    assert check(merged_last(kinds, wgrad_last), kinds) != made or len(kinds) == 1


@settings(deadline=None)
@given(kinds=kinds, data=st.data())
def test_a_schedule_with_a_step_missing_or_twice_is_refused(kinds, data):
    made = by_head_groups(kinds)
    which = data.draw(st.sampled_from(["forward", "backward"]))
    program = getattr(made, which)
    at = data.draw(st.integers(0, len(program) - 1))
    for changed in (program[:at] + program[at + 1 :], program[: at + 1] + program[at:]):
        with pytest.raises(ValueError, match=f"^schedule, {which}: (project|start|finish|attend|merge|dgrad|wgrad) .+ (is|comes)"):
            check(Schedule(**{"forward": made.forward, "backward": made.backward, which: changed}), kinds)


def moved(program, step, before):
    left = [other for other in program if other != step]
    left.insert(left.index(before), step)
    return tuple(left)


# What is moved in front of what, in a schedule of two groups, and what is said.
REFUSED = {
    "started before it is made": ("forward", "start v 0", "project v 0", "start v 0 comes before project v 0"),
    "finished before it is started": ("forward", "finish q 0", "start q 0", "finish q 0 comes before start q 0"),
    "attended before its keys are there": ("forward", "attend o 1", "finish qkv 1", "attend o 1 comes before finish qkv 1"),
    "merged before it is there": ("forward", "merge o 1", "finish o 1", "merge o 1 comes before finish o 1"),
    "backward of attention before its gradient": ("backward", "attend do 0", "finish do 0", "attend do 0 comes before finish do 0"),
    "keys of a group sent before all that attend": ("backward", "start dk 0", "attend do 0", "start dk 0 comes before attend do 0"),
    "a dgrad before its gradient": ("backward", "dgrad v 1", "finish dqkv 1", "dgrad v 1 comes before finish dqkv 1"),
    "attention among the projections": ("forward", "finish q 0", "project v 1", "its sections are inputs, attention, inputs, attention, output"),
    "starts in another order than autograd's": ("backward", "start dq 0", "start dv 0", "start dq 0, where autograd has start dv 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_that_cannot_be_run_is_refused(name):
    which, step, before, says = REFUSED[name]
    made = by_head_groups(("qkv", "qkv"))
    changed = moved(getattr(made, which), step_of(step), step_of(before))
    with pytest.raises(ValueError, match=f"^schedule, {which}: {re.escape(says)}"):
        check(Schedule(**{"forward": made.forward, "backward": made.backward, which: changed}), ("qkv", "qkv"))


@pytest.mark.parametrize(
    "sent,says",
    [
        ([("q", 0), ("k", 0)], "start v 0 is missing"),
        ([("qk", 0), ("kv", 0)], "start k 0 is there twice"),
    ],
    ids=["one stays at home", "one travels twice"],
)
def test_exchanges_that_together_are_not_q_k_and_v_are_refused(sent, says):
    made = by_head_groups(("qkv",))
    starts = tuple(Step("start", *part) for part in sent)
    with pytest.raises(ValueError, match=f"^schedule, forward: {says}"):
        check(Schedule((*starts, *made.attention[0]), made.backward), ("qkv",))


@settings(deadline=None)
@given(kinds=kinds, others=kinds)
def test_a_schedule_for_other_groups_than_the_layer_has_is_refused(kinds, others):
    if kinds != others:
        with pytest.raises(ValueError, match="^schedule, forward: "):
            check(by_head_groups(others), kinds)


def drawings(groups):
    """Both, as they stand in a text."""
    made = by_head_groups(("qkv",) * groups)
    return [re.sub("^", "    ", draw(made, program), flags=re.M) for program in (made.forward, made.backward)]


def test_what_is_drawn_in_docstring_and_readme_is_printed_from_the_schedule():
    for groups, text in ((1, schedule.__doc__), (2, schedule.__doc__), (2, README.read_text())):
        for drawing in drawings(groups):
            assert drawing in text, drawing


def test_a_drawing_has_every_exchange_once_behind_what_made_it():
    for drawing in drawings(4):
        _, wire = drawing.splitlines()
        names = re.findall(r"[dqkvo]+\d", wire)
        assert len(names) == len(set(names)) == 10
    compute, wire = drawings(4)[0].splitlines()
    assert wire.index("qkv3") == compute.index("attention 0")


def test_one_exchange_at_a_time_is_on_the_wire_and_waits_are_what_is_exposed():
    made = by_head_groups(("qkv", "qkv"))
    played = play(made, made.forward, lambda step: 10 if step.on_wire else 1, held=lambda step: 3)
    assert [bar.begin for bar in played.wire] == [1, 11, 21, 31, 41, 51]
    # Behind Wv1, at 6, it waits for q0 k0 v0 until 31, attends until 32, waits for qkv1 until 41, and for o0, o1 until 51 and 61.
    assert played.exposed_ms == {"q0": 5, "k0": 10, "v0": 10, "qkv1": 9, "o0": 9, "o1": 9}
    assert (played.step_ms, played.compute_ms, played.wire_ms, played.held) == (62, 10, 60, 12)
