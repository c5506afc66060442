"""Tests the verdict of the convergence benchmark: it must be able to fail, by every quantity and in every step."""

import time

import numpy as np
import pytest

from benchmarks.convergence import verdict
from benchmarks.convergence.run import told
from benchmarks.convergence.verdict import FACTOR, Run

STEPS = 20
STOCK = np.stack([np.linspace(5.0, 3.0, STEPS), np.linspace(4.0, 1.0, STEPS)], axis=1)
GROWING = np.geomspace(1e-6, 1e-3, STEPS)[:, None]


def verdict_on(curve, distance=1e-3, noise=STOCK * (1 + GROWING), stock=STOCK, role="judged"):
    runs = {"stock": Run(stock, 0.0), "split": Run(noise, 1e-3), "G": Run(curve, distance)}
    rows = verdict.judge("fp32", runs, {"split": "noise", "G": role}, STEPS)
    assert verdict.page({"fp32": runs}, rows).count("\n| fp32") == 2
    return rows[-1]


@pytest.mark.parametrize("share", [0, 0.5, 1, 0.99 * FACTOR, -0.99 * FACTOR])
def test_inside_the_bound_passes(share):
    row = verdict_on(STOCK * (1 + share * GROWING))
    assert row.verdict == "PASS" and not row.failed and row.of_floor <= FACTOR


@pytest.mark.parametrize("column, what", list(enumerate(verdict.QUANTITIES)))
@pytest.mark.parametrize("step", [0, STEPS // 2, STEPS - 1])
def test_one_step_of_one_quantity_outside_the_bound_fails(column, what, step):
    curve = STOCK.copy()
    curve[step, column] *= 1 - 1.01 * FACTOR * GROWING[step, 0]
    assert verdict_on(curve).verdict == f"FAIL: {what}"


def test_early_difference_is_held_against_early_noise():
    curve = STOCK.copy()
    curve[0] *= 1 + GROWING[-1]  # within the noise of the last step, but not within that of the first
    assert verdict_on(curve).failed


def test_floor_never_falls_with_time():
    noise = STOCK.copy()
    noise[3] *= 1 + 1e-3
    level = verdict.floor([noise], STOCK)
    assert np.allclose(level[:3], verdict.FP32_ULP) and np.allclose(level[3:], 1e-3)


def test_parameters_that_end_elsewhere_fail():
    assert verdict_on(STOCK, distance=1.01e-3 * FACTOR).verdict == "FAIL: parameters"


def test_nan_fails_wherever_it_is():
    curve = STOCK.copy()
    curve[STEPS // 2, 1] = np.nan
    assert verdict_on(curve).verdict == "FAIL: not finite"
    assert verdict_on(STOCK, distance=np.nan).verdict == "FAIL: not finite"
    assert verdict_on(STOCK, noise=curve).failed and verdict_on(STOCK, stock=curve).failed


def test_missing_steps_fail_wherever_they_are():
    assert verdict_on(STOCK[:-1]).verdict == "FAIL: 19 of 20 steps"
    assert verdict_on(STOCK, noise=STOCK[:-1]).failed and verdict_on(STOCK, stock=STOCK[:-1]).failed


def test_no_noise_is_no_verdict():
    assert "BLIND" in verdict_on(STOCK, noise=STOCK).verdict


def test_a_variant_that_is_only_shown_does_not_fail():
    assert verdict_on(2 * STOCK, role="shown").verdict == "not judged"


def test_distance_is_in_units_of_the_way_stock_went():
    initial, stock, other = ([np.full(4, x, np.float32)] for x in (0.0, 2.0, 2.5))
    assert verdict.distance(other, initial, stock) == 0.25 and verdict.distance(stock, initial, stock) == 0


def test_the_last_line_begins_with_the_verdict():
    passed, failed = verdict_on(STOCK), verdict_on(STOCK, distance=1.01e-3 * FACTOR)
    assert verdict.summary([passed]).startswith("PASS: 1 runs train as stock does")
    assert verdict.summary([passed, failed]).startswith("FAIL: ") and verdict.summary([passed, failed]).endswith(
        ": fp32 G (parameters)"
    )
    assert verdict.summary([verdict_on(STOCK, role="shown")]) == "FAIL: nothing was judged"


def test_a_long_start_says_every_while_that_it_goes_on(capsys):
    with told("compiling", every_s=0.01):
        time.sleep(0.2)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "compiling" and others and all(line.startswith("  for ") for line in others)
