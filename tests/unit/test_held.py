"""What a layer holds while its programs run: counted by hand, and for any layer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap.schedule import MLP, by_head_groups, by_window
from ds_sp_overlap.tools.planner.costs import LayerShape, Sizes
from ds_sp_overlap.tools.planner.memory import Tensor
from tests.harness.cases import examples

# One head a rank: q, k, v, o of it, local or global, are 8 bytes each; so is x, and a weight. The log-sum-exp is 16.
ONE = LayerShape(width=2, heads=2, kv_heads=2, head_dim=1, seq=4, sp_size=2, element_bytes=2)


def steps(schedule):
    return [str(step)[:-2] for step in (*schedule.forward, MLP, *schedule.backward)]


def test_one_head_is_held_as_counted_by_hand(monkeypatch):
    monkeypatch.setattr(Sizes, "_work", lambda self, elements: 0)
    schedule = by_head_groups(("qkv",))
    found = list(zip(steps(schedule), Sizes(ONE, 1).memory_bytes(schedule)))
    # A projection; its start takes a buffer at each end, and lets go of it. What is received is where it is to lie.
    forward = [("project q", 8), ("start q", 24), ("project k", 24), ("start k", 40), ("project v", 40), ("start v", 56)]
    # Each finish lets go of what was sent. o and its 16 come to q, k and v; what is received of o is put together beside.
    forward += [("finish q", 48), ("finish k", 40), ("finish v", 32), ("attend o", 48), ("start o", 56), ("finish o", 64)]
    forward += [("merge o", 64)]  # q, k, v, o, 16, local o, and y
    # do in three places; then dWo, after which local o goes.
    backward = [("dgrad o", 72), ("start do", 88), ("wgrad o", 88), ("finish do", 80)]
    # dq, dk and dv beside all that they are made of, which is let go.
    backward += [("attend do", 96), ("start dv", 48), ("start dk", 56), ("start dq", 64)]
    # dv is put together, and goes into dx and dWv; dk beside them.
    backward += [("finish dv", 64), ("dgrad v", 64), ("wgrad v", 72), ("finish dk", 64)]
    assert found[: len(forward) + 1] == [*forward, ("MLP ", 64)]
    assert found[len(forward) + 1 :][: len(backward)] == backward


@st.composite
def layers(draw):
    sp_size, kv_heads = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(-(-sp_size // kv_heads), 4 + sp_size))
    return LayerShape(
        64, heads, kv_heads, draw(st.integers(1, 8)), sp_size * draw(st.integers(1, 64)), sp_size, draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([2, 4, 8])),
    )  # fmt: skip


@settings(max_examples=examples(100), deadline=None)
@given(layer=layers(), data=st.data())
def test_for_any_layer(layer, data):
    groups = data.draw(st.integers(1, layer.geometry(1).max_groups))
    window = data.draw(st.integers(1, groups))
    sizes = Sizes(layer, groups)
    size, each, geometry = sizes.size, range(groups), sizes.geometry
    whole, few = by_head_groups(geometry.kinds), by_window(geometry.kinds, geometry.last_use, window)
    y, ends = size(Tensor("y")), size(Tensor("dx")) + sum(size(Tensor("dW", of)) for of in "qkvo")
    o = sum(size(Tensor("local", "o", group)) + size(Tensor("lse", "o", group)) for group in each)
    qkvo = sum(
        size(Tensor("global", kind, group)) for kind in "qkvo" for group in each if kind not in "kv" or "k" in geometry.kinds[group]
    )
    # Between forward and backward.
    assert sizes.memory_bytes(whole)[len(whole.forward)] == y + o + qkvo
    assert sizes.memory_bytes(few)[len(few.forward)] == y + o
    for schedule in (whole, few):
        found = sizes.memory_bytes(schedule)
        assert len(found) == len(steps(schedule)) and min(found) > 0
        # During the last step there is nothing but what the caller asked for, and what it reads.
        last = schedule.backward[-1]
        local = size(Tensor("local", *last.parts[0], grad=True))
        assert found[-1] == y + ends + local or schedule is few and y + ends < found[-1] <= y + 2 * ends + local


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_the_fewer_groups_in_flight_and_the_more_there_are_the_less_is_held(kv_heads):
    """Of long sequences, where weights are little."""
    layer = LayerShape(512, 32, kv_heads, 16, 2**20, 4, element_bytes=4)

    def peak(groups, window):
        sizes = Sizes(layer, groups)
        return max(sizes.memory_bytes(by_window(sizes.geometry.kinds, sizes.geometry.last_use, window)))

    for groups in (2, 4, 8):
        found = [peak(groups, window) for window in (1, min(2, groups), groups)]
        assert found == sorted(found)
    for window in (1, 2):
        assert peak(8, window) < peak(4, window) < peak(2, window)
