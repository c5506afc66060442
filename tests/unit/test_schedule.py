"""Tests schedules as values: valid schedules, refusals, drawings, and simulated times."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap import schedule
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.schedule import Op, Schedule, Step, by_head_groups, by_window, check, draw, order, simulate, window, without_o
from ds_sp_overlap.schedule.steps import section
from tests.harness.schedules import check_window, merged_last, step_of

README = Path(__file__).parents[2] / "README.md"


kinds = st.lists(st.sampled_from(["qkv", "q"]), max_size=4).map(lambda more: ("qkv", *more))


@settings(deadline=None)
@given(kinds=kinds, wgrad_last=st.booleans())
def test_every_number_of_groups_and_kv_heads_makes_a_schedule_that_holds(kinds, wgrad_last):
    made = check(by_head_groups(kinds, wgrad_last), kinds)
    assert made.groups == len(kinds) and len(made.parts) == sum(map(len, kinds))
    assert check(merged_last(kinds, wgrad_last), kinds) != made or len(kinds) == 1


def refuses_a_step_missing_or_twice(made, kinds, data, check=check):
    """Assert that ``check`` raises if a step of forward or backward is missing or occurs twice."""
    which = data.draw(st.sampled_from(["forward", "backward"]))
    program = getattr(made, which)
    at = data.draw(st.integers(0, len(program) - 1))
    said = f"^schedule, {which}: (project|start|finish|attend|merge|dgrad|wgrad|its starts) .+ (is|comes|while|send)"
    for changed in (program[:at] + program[at + 1 :], program[: at + 1] + program[at:]):
        with pytest.raises(ValueError, match=said):
            check(replace(made, **{which: changed}), kinds)


@pytest.mark.parametrize("added, fault", [("attend o 0", "there twice"), ("attend o 1", "no step of this layer")])
def test_a_step_that_does_not_belong_is_told_from_one_that_comes_twice(added, fault):
    made = by_head_groups(("qkv",))
    with pytest.raises(ValueError, match=f"^schedule, forward: {added} is {fault}"):
        check(replace(made, forward=(*made.forward, step_of(added))), ("qkv",))


@settings(deadline=None)
@given(kinds=kinds, data=st.data())
def test_a_schedule_with_a_step_missing_or_twice_is_refused(kinds, data):
    refuses_a_step_missing_or_twice(by_head_groups(kinds), kinds, data)


def moved(program, step, before):
    left = [other for other in program if other != step]
    left.insert(left.index(before), step)
    return tuple(left)


# Changes of a schedule with two groups: (program, the moved step, the step before which it is moved, words of the error).
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


def refuses(made, kinds, which, step, before, says, check=check):
    changed = moved(getattr(made, which), step_of(step), step_of(before))
    with pytest.raises(ValueError, match=f"^schedule, {which}: {re.escape(says)}"):
        check(replace(made, **{which: changed}), kinds)


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_that_cannot_be_run_is_refused(name):
    refuses(by_head_groups(("qkv", "qkv")), ("qkv", "qkv"), *REFUSED[name])


@pytest.mark.parametrize(
    "sent,says",
    [
        ([("q", 0), ("k", 0)], "its starts send k 0, q 0; a layer sends k 0, q 0, v 0"),
        ([("qk", 0), ("kv", 0)], "its starts send k 0, k 0, q 0, v 0; a layer sends k 0, q 0, v 0"),
    ],
    ids=["one stays at home", "one travels twice"],
)
def test_exchanges_that_together_are_not_q_k_and_v_are_refused(sent, says):
    made = by_head_groups(("qkv",))
    starts = tuple(Step(Op.START, tuple(of), False, group) for of, group in sent)
    with pytest.raises(ValueError, match=f"^schedule, forward: {says}"):
        check(Schedule((*starts, *section(made.forward, "attention")[:3]), made.backward), ("qkv",))


def test_weight_gradients_come_last_unless_it_is_said_otherwise():
    unsaid, last, beside = (by_head_groups(("qkv", "qkv"), *last).backward for last in ((), (True,), (False,)))
    assert unsaid == last != beside


@settings(deadline=None)
@given(kinds=kinds, others=kinds)
def test_a_schedule_for_other_groups_than_the_layer_has_is_refused(kinds, others):
    if kinds != others:
        with pytest.raises(ValueError, match="^schedule, forward: "):
            check(by_head_groups(others), kinds)


# Schedules with a window of groups.

windows = st.integers(1, 5)
# Geometries with groups that need no new KV head, groups that share a KV head, ranks with unequal numbers of heads; and plain ones.
GEOMETRIES = [
    Geometry(size, 0, (2,) * size, 1, heads, kv_heads, groups)
    for size, heads, kv_heads in (
        (2, 8, 8),
        (2, 8, 4),
        (2, 16, 2),
        (4, 16, 2),
        (4, 4, 1),
        (2, 6, 3),
        (2, 7, 7),
        (3, 14, 2),
        (1, 6, 2),
    )
    for groups in range(1, heads // size + 1)
]


@settings(deadline=None)
@given(geometry=st.sampled_from(GEOMETRIES), most=windows, wgrad_last=st.booleans(), products_last=st.booleans())
def test_every_window_of_every_geometry_makes_a_schedule_that_holds(geometry, most, wgrad_last, products_last):
    what = geometry.kinds, geometry.last_use, most
    made = check_window(by_window(*what, wgrad_last, products_last), *what)
    assert made.groups == geometry.groups
    alone = check_window(without_o(made), *what)
    assert alone.forward == made.forward
    assert [step._replace(beside=()) for step in made.backward] == list(alone.backward)
    # The products are those of the schedule without a window.
    every, whole = set(made.backward), set(by_head_groups(geometry.kinds).backward)
    assert {step for step in every if step.op in (Op.DGRAD, Op.WGRAD)} == {
        step for step in whole if step.op in (Op.DGRAD, Op.WGRAD)
    }


@settings(deadline=None)
@given(kinds=kinds, most=windows, data=st.data())
def test_a_window_holds_wherever_kv_heads_are_used_last(kinds, most, data):
    last = tuple(data.draw(st.integers(group, len(kinds) - 1)) if "k" in kinds[group] else group for group in range(len(kinds)))
    check_window(by_window(kinds, last, most), kinds, last, most)


@settings(deadline=None)
@given(geometry=st.sampled_from(GEOMETRIES), most=windows, data=st.data())
def test_a_windowed_schedule_with_a_step_missing_or_twice_is_refused(geometry, most, data):
    last = geometry.last_use
    checked = partial(check_window, last_use=last, window=most)
    refuses_a_step_missing_or_twice(by_window(geometry.kinds, last, most), geometry.kinds, data, checked)


# The same for four groups with a window of two; the first two groups share KV heads.
REFUSED_OF_A_WINDOW = {
    "more groups held than the window": ("forward", "project q 2", "attend o 0", "project q 2 while 2 groups are held; the window is 2"),
    "more groups held again": ("backward", "project q 1", "attend do 3", "project q 1 while 2 groups are held; the window is 2"),
    "attended before it is there again": ("backward", "attend do 2", "finish qkv 2", "attend do 2 comes before finish qkv 2"),
    "attended before shared keys are there again": ("backward", "attend do 1", "finish kv 0", "attend do 1 comes before finish kv 0"),
    "keys let go that another group attends to": ("backward", "attend do 0", "attend do 1", "attend do 0 comes before"),
    "keys let go in forward that another attends to": ("forward", "attend o 1", "attend o 0", "attend o 1 comes before"),
    "sent again before it is made again": ("backward", "start q 0", "project q 0", "start q 0 comes before project q 0"),
    "attention before o is there": ("backward", "attend do 2", "finish odo 2", "attend do 2 comes before finish odo 2"),
    "o sent before the product that reads it": ("backward", "start odo 3", "wgrad o 3", "start odo 3 comes before wgrad o 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_OF_A_WINDOW)
def test_an_order_in_which_a_window_cannot_be_run_is_refused(name):
    kinds = ("qkv", "q", "qkv", "qkv")
    last = 1, 1, 2, 3
    refuses(by_window(kinds, last, 2), kinds, *REFUSED_OF_A_WINDOW[name], partial(check_window, last_use=last, window=2))


def starts_in_forward(window):
    program = by_window(("qkv",) * 3, (0, 1, 2), window).forward
    return [(step.payload, step.group) for step in program if step.op is Op.START and step.payload != "o"]


def test_q_k_and_v_travel_one_by_one_where_no_attention_hides_them():
    """This applies to the first group, and to every group if the window is one."""
    first = [("q", 0), ("k", 0), ("v", 0)]
    assert starts_in_forward(1) == [*first, ("q", 1), ("k", 1), ("v", 1), ("q", 2), ("k", 2), ("v", 2)]
    assert starts_in_forward(2) == starts_in_forward(3) == [*first, ("qkv", 1), ("qkv", 2)]


def test_what_is_not_made_again_is_missed():
    made = by_window(("qkv", "qkv"), (0, 1), 1)
    without = tuple(step for step in made.backward if step.parts != (("k", 0),) or step.grad)
    with pytest.raises(ValueError, match="^schedule, backward: start k 0 is missing"):
        check_window(replace(made, backward=without), ("qkv", "qkv"), (0, 1), 1)


@given(geometry=st.sampled_from(GEOMETRIES))
def test_a_window_of_one_holds_one_send_buffer_in_backward_but_for_dq_dk_and_dv(geometry):
    under_way: set = set()
    for what in order(*(lambda made: (made, made.backward))(by_window(geometry.kinds, geometry.last_use, 1))):
        kind = what[1:].rstrip("0123456789")
        if kind[0] != "d" or kind == "do":
            under_way.symmetric_difference_update({what[1:]})
        assert len(under_way) <= 1


@given(geometry=st.sampled_from(GEOMETRIES), most=st.integers(2, 5), products_last=st.booleans())
def test_a_wider_window_computes_something_under_every_exchange_but_the_first_and_the_last(geometry, most, products_last):
    """Attention or a product must lie between start and finish of each other exchange.

    In backward, the exceptions are exchanges of the first group that backward computes, and o with do of the last group.
    """
    made = by_window(geometry.kinds, geometry.last_use, most, products_last=products_last)
    for program, ends in ((made.forward, (made.groups - 1,)), (made.backward, (made.groups - 1, 0))):
        begun: dict = {}
        for step in program:
            if step.op is Op.START:
                begun[step[1:]] = False
            elif step.op is Op.FINISH:
                is_input_gradient = step.grad and step.payload != "o"
                assert begun[step[1:]] or step.group in (0, *ends) and not (is_input_gradient and made.groups > 1), step
            else:
                begun = dict.fromkeys(begun, True)


# Drawings.


def drawings(groups):
    """Draw forward and backward, indented as in the docs."""
    made = by_head_groups(("qkv",) * groups)
    return [re.sub("^", "    ", draw(made, program), flags=re.M) for program in (made.forward, made.backward)]


def test_what_is_drawn_in_docstring_and_readme_is_printed_from_the_schedule():
    for groups, text in ((1, schedule.__doc__), (2, schedule.__doc__), (2, README.read_text())):
        for drawing in drawings(groups):
            assert drawing in text, drawing


def pieces(drawing, columns=112):
    """Yield pieces of a drawing with at most ``columns`` columns; cut where both rows have a blank."""
    names, rows = zip(*(row.split(" | ") for row in drawing.splitlines()))
    rows = [row.ljust(max(map(len, rows))) for row in rows]
    while any(rows):
        blank = [at for at in range(columns) if all(row[at : at + 1] in ("", " ") for row in rows)]
        yield "\n".join(f"    {name} | {row[: blank[-1]].rstrip()}" for name, row in zip(names, rows))
        rows = [row[blank[-1] + 1 :] for row in rows]


def test_the_drawing_of_a_window_is_printed_from_its_schedule():
    made = by_window(("qkv",) * 4, (0, 1, 2, 3), 2)
    for name, program, wide in (("forward", made.forward, 120), ("backward", made.backward, 112)):
        drawing = "\n\n".join(pieces(draw(made, program), wide))
        assert f"    {name}\n{drawing}\n" in window.__doc__, drawing


def test_one_exchange_at_a_time_is_on_the_wire_and_waits_are_what_is_exposed():
    made = by_head_groups(("qkv", "qkv"))
    played = simulate(made, made.forward, lambda step: 10 if step.on_wire else 1)
    assert [bar.begin for bar in played.wire] == [1, 11, 21, 31, 41, 51]
    # After Wv1, at 6, compute waits for q0 k0 v0 until 31, for qkv1 from 32 to 41, for o0 until 51, and for o1 until 61.
    assert played.exposed_ms == {"q0": 5, "k0": 10, "v0": 10, "qkv1": 9, "o0": 9, "o1": 9}
    assert played.step_ms == 62
