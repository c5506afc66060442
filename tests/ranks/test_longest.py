"""Measures the peak memory of a decoder layer's step, over a transport that moves no data: lower in tiles, and as planned."""

import functools

import pytest
import torch

from benchmarks.longest import REHEARSAL, Measure, alone, running, step
from benchmarks.variants import Silent, held_over_time
from ds_sp_overlap.tools.planner import fits
from ds_sp_overlap.tools.planner.costs import LayerShape, Way
from ds_sp_overlap.tools.planner.fits import Model, held_by_model
from ds_sp_overlap.tools.planner.gpu import recorder

TOKENS = 4096  # of a rank; so many that the buffers of PyTorch's CPU attention, whose size is fixed, hardly count
# Elements whose memory does not grow with tokens: gradients of the MLP, in bf16 and summed in fp32.
WEIGHTS = 3 * REHEARSAL.hidden * REHEARSAL.intermediate
X = 2 * TOKENS * REHEARSAL.hidden


@functools.cache
def peak_of(way):
    return Measure(REHEARSAL, torch.device("cpu")).peak(way, TOKENS)[0]


@pytest.mark.parametrize(
    "way, planned, activations",
    [("W = 1, recomputed", Way(8, 1), "checkpointed"), ("W = 1", Way(8, 1), "keep"), ("ALST", Way(0), "checkpointed")],
)
def test_the_planner_is_within_five_percent_of_what_is_measured(monkeypatch, way, planned, activations):
    monkeypatch.setattr(recorder, "flash_bytes", lambda q, k: 0)  # PyTorch's CPU kernel needs almost no memory of its own
    monkeypatch.setattr(fits, "record", recorder.record.__wrapped__)
    shape = LayerShape(REHEARSAL.hidden, REHEARSAL.heads, REHEARSAL.kv_heads, REHEARSAL.hidden // REHEARSAL.heads, 2 * TOKENS, 2)
    predicted = held_by_model(shape, Model(1, 0), planned)[activations] + WEIGHTS * (2 if way == "ALST" else 6)
    peak = peak_of(way)
    assert abs(peak - predicted) <= 0.05 * peak, (peak / X, predicted / X)


def test_tiles_and_a_window_are_below_a_third_and_half():
    """Compares our window with the plain model, and with DeepSpeed's tiled MLP; without the gradients of weights."""
    whole, tiled, ours = (peak_of(way) - 6 * WEIGHTS for way in ("ALST, the model as it is", "ALST", "W = 1"))
    assert 3 * ours < whole and 2 * ours < tiled and ours < 9.3 * X


def test_the_first_step_holds_no_more_than_later_ones():
    """A first call compares the layer with its own forward, on a few tokens, so that this needs little memory."""
    measure = Measure(REHEARSAL, torch.device("cpu"))
    run = functools.partial(step, measure.net, REHEARSAL, TOKENS, measure.device, False)
    with alone(REHEARSAL.ranks, Silent()), running("W = 1", measure.net, REHEARSAL, TOKENS):
        first, later = (max(held_over_time(run)) for _ in range(2))
    assert first <= 1.05 * later
