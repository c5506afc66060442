"""Tests a user's schedule: a layer runs it, it can be drawn and simulated, and a schedule that can't run is refused."""

import pytest

from ds_sp_overlap.schedule import Schedule, by_head_groups, by_window, draw, order, simulate
from tests.harness import layers
from tests.harness.layers import Shape
from tests.harness.ranks import refusal
from tests.harness.schedules import merged_last, step_of
from tests.harness.transports import Recording


@pytest.mark.parametrize("kv_heads, kinds", [(4, ("qkv", "qkv")), (2, ("qkv", "q"))])
def test_a_schedule_that_is_added_is_run_recorded_drawn_and_played(kv_heads, kinds, rank):
    made, mover = merged_last(kinds), Recording()
    shape = Shape(kv_heads=kv_heads, config={"head_groups": 2}, schedule=merged_last)
    assert layers.block_faults(rank, shape, transport=mover) == []
    assert mover.log == order(made, made.forward) + order(made, made.backward)
    assert made.forward[-4:] == tuple(map(step_of, ("finish o 0", "finish o 1", "merge o 0", "merge o 1")))
    one, other = (simulate(s, s.forward, lambda step: 2.0 if step.on_wire else 1.0) for s in (by_head_groups(kinds), made))
    assert other.exposed_ms["o1"] == one.exposed_ms["o1"] + 1, "the first merge no longer hides it"
    assert draw(made, made.forward) != draw(by_head_groups(kinds), by_head_groups(kinds).forward)


WRONG = {
    "too early": (
        lambda kinds: Schedule(by_head_groups(kinds).forward[1:], by_head_groups(kinds).backward),
        "schedule, forward: start q 0 comes before project q 0",
    ),
    "of a window": (
        lambda kinds: by_window(kinds, (0, 1), 1),
        "schedule= makes a windowed schedule, whose backward makes q, k and v again",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_layer_refuses_a_schedule_that_cannot_be_run(what, rank):
    shape = Shape(schedule=lambda kinds, wgrad_last: WRONG[what][0](kinds))
    _, attend, x, _ = layers.mine(rank, shape)
    kind, said = refusal(layers.call_block, shape, attend, rank, x)
    assert kind == "ValueError" and said.startswith(WRONG[what][1])
