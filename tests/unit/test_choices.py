"""What ``"memory": "auto"`` tries and keeps; and that a config can ask for it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap.autotune.choices import candidates_of
from ds_sp_overlap.autotune.costs import LayerShape, Sizes
from ds_sp_overlap.autotune.trial import OFF, Trial
from ds_sp_overlap.config import SpOverlapConfig
from ds_sp_overlap.schedule import schedule_of
from tests.harness.cases import examples

# Llama3-8B on four ranks. With a million tokens attention takes 200 times as long as a projection, with 16K three times.
LONG = LayerShape(4096, 32, 8, 128, 2**20, 4)
SHORT = replace(LONG, seq=2**14)


def peak(layer, way):
    sizes = Sizes(layer, way[0] if isinstance(way, tuple) else way)
    return max(sizes.memory_bytes(schedule_of(sizes.geometry, way[1] if isinstance(way, tuple) else None)))


def test_of_a_long_sequence_windows_are_tried_and_the_one_that_holds_least_is_where_it_begins():
    candidates, default = candidates_of(LONG, None, None, False, False, 8)
    assert candidates[0] == (8, 1) and default == (8, 2) and {1, 2, 4} < set(candidates)
    assert [peak(LONG, way) for way in candidates] == sorted(peak(LONG, way) for way in candidates)
    assert candidates_of(LONG, None, None, False, True, 8).candidates[-1] == OFF


def test_of_a_short_one_no_window_is():
    candidates, default = candidates_of(SHORT, None, None, False, True, 8)
    assert set(candidates) == {1, 2, 4, OFF} and default in (2, 4)


@pytest.mark.parametrize("most", range(4, 9))
@pytest.mark.parametrize("off", [False, True])
def test_no_more_are_tried_than_there_are_steps_for(most, off):
    """The one that it begins with always, and groups without a window before windows, of which those that hold least."""
    candidates, default = candidates_of(LONG, None, None, False, off, most)
    assert len(candidates) == min(most, 8 + off)
    assert {default, *((1, 2, 4) if most - off > 3 else (2, 4))} <= set(candidates)
    windows = [
        way for way in candidates_of(LONG, None, None, False, off, 20).candidates if isinstance(way, tuple) and way != default
    ]
    assert [way for way in candidates if isinstance(way, tuple) and way != default] == windows[: max(0, most - off - 4)]


def test_what_is_given_is_kept():
    assert set(candidates_of(LONG, 4, None, False, False, 8).candidates) == {4, (4, 1), (4, 2)}
    assert set(candidates_of(LONG, 2, None, False, False, 8).candidates) == {2, (2, 1)}
    assert candidates_of(LONG, 1, None, False, False, 8) == ((1,), 1)
    assert candidates_of(LONG, None, 1, False, False, 8) == ((8, 4, 2, 1), 8)
    assert candidates_of(LONG, 4, 2, False, False, 8) == ((4,), 4)


@st.composite
def layers(draw):
    sp_size, kv_heads = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 2, 3, 8]))
    heads = kv_heads * draw(st.integers(-(-sp_size // kv_heads), 4 + sp_size))
    return LayerShape(64 * heads, heads, kv_heads, 64, sp_size * 2 ** draw(st.integers(4, 18)), sp_size)


@settings(max_examples=examples(50), deadline=None)
@given(layer=layers(), again=st.booleans(), off=st.booleans())
def test_for_any_layer(layer, again, off):
    candidates, default = candidates_of(layer, None, None, again, off, 8)
    possible = layer.geometry(1).max_groups
    assert default in candidates and default != OFF and len(set(candidates)) == len(candidates) <= 8
    assert all((way[0] if isinstance(way, tuple) else way) <= possible for way in candidates if way != OFF)
    assert {groups for groups in (1, 2, 4) if groups <= possible} <= set(candidates) and (OFF in candidates) == off


def decided(times, frugal=True):
    trial = Trial("it", tuple(times), next(iter(times)), 16, frugal)
    trial.slowest_ms = dict(times)
    trial.decide()
    return trial


# In the order of what they hold.
TIMES = {(8, 1): 110.0, (8, 2): 100.9, 4: 100.0, 2: 100.0, OFF: 120.0}


def test_the_first_that_takes_no_longer_than_the_fastest_is_kept_and_said():
    assert decided(TIMES).chosen == (8, 2)
    assert decided({**TIMES, (8, 2): 101.1}).chosen == 4
    assert decided({**TIMES, (8, 1): 101.0}).chosen == (8, 1)
    assert decided({**TIMES, OFF: 90.0}).chosen == OFF
    assert decided(TIMES, frugal=False).chosen == 4
    assert "G = 8, W = 2 100.90 ms" in (line := str(decided(TIMES)))
    assert line.endswith("kept: G = 8, W = 2, which holds least of those within 1%")
    assert str(decided({**TIMES, OFF: 90.0})).endswith("kept: off, stock is fastest here")


def test_a_config_asks_for_it_and_null_does_not():
    assert SpOverlapConfig.parse({"memory": "auto"}).memory == "auto"
    for section in ({}, {"memory": None}, {"head_groups": "auto", "window": "auto", "checkpointing": "auto"}):
        assert SpOverlapConfig.parse(section) == SpOverlapConfig()
    with pytest.raises(ValueError, match='^sp_overlap.memory must be null or "auto", got 8$'):
        SpOverlapConfig.parse({"memory": 8})
