"""Tests the runs of the convergence benchmark: each must train as its name says. `unit/test_verdict.py` tests the verdict."""

import numpy as np
import pytest

from benchmarks.convergence import run, training, verdict
from benchmarks.convergence.verdict import Run
from tests.harness.cases import full
from tests.harness.ranks import on_ranks


def test_batches_read_the_text_without_gaps_and_start_over():
    args = run.arguments(["--seq", "4", "--batch", "2"])
    corpus = np.arange(42, dtype=np.uint8)  # ten rows of 4; the rest is not read
    read = [training.batch(corpus, step, args, group, 2) for step in range(3) for group in range(2)]
    assert np.concatenate(read).ravel().tolist() == [*range(40), *range(8)]


def short_runs(rank, plant, *more):
    args = run.arguments(["--steps", "3", "--seq", "64", *more])
    corpus, reference, runs = training.text(), None, {}
    for variant in training.variants([1, 2], training.MODELS[args.model][3] // args.sp, args.sp):
        args.plant_error = plant if variant.groups == 2 else 0.0
        curve, before, after = training.train(variant, "fp32", corpus, args, lambda: None)
        reference = reference or (before, after)
        runs[variant.name] = Run(curve, verdict.distance(after, *reference) if rank == 0 else 0.0)
    return runs


@pytest.mark.parametrize(
    "ranks, more, passes, fails",
    [
        (2, [], ["stock, again", "sp = 1", "G = 1"], ["G = 2"]),
        full(4, ["--sp", "4", "--model", "few"], ["sp = 1, again", "G = 1"], ["G = 2, r = P", "window, kept"]),
    ],
    ids=["stock splits the heads", "more ranks than heads"],
)
def test_every_variant_trains_the_same_model_and_a_planted_fault_is_caught(ranks, more, passes, fails):
    runs = on_ranks(ranks, short_runs, 1e-3, *more)[0]
    roles = {name: "noise" if name in training.NOISE else "judged" for name in list(runs)[1:]}
    verdicts = {row.variant: row.verdict for row in verdict.judge("fp32", runs, roles, 3)}
    assert {verdicts[name] for name in passes} == {"PASS"} and all(verdicts[name].startswith("FAIL") for name in fails), verdicts
    assert ranks == 4 or np.array_equal(runs["stock, again"].curve, runs["stock"].curve)


def test_a_fault_that_was_not_planted_is_no_control():
    with pytest.raises(RuntimeError, match="G = 2: nothing was planted"):
        training.Watch(1e-3).check(training.Variant("G = 2", groups=2), layers=1, passes=3)


def test_a_run_that_did_not_overlap_is_refused():
    variants = {variant.name: variant for variant in training.variants([2])}
    watch = training.Watch(0.0)
    with pytest.raises(RuntimeError, match="G = 2: expected 8 kinds .* launched {}"):
        watch.check(variants["G = 2"], layers=1, passes=3)
    for kind in "qkvo":
        watch.launched["layer", kind] = watch.launched["layer", "d" + kind] = 6
    watch.check(variants["G = 2"], layers=1, passes=3)
    with pytest.raises(RuntimeError, match="stock: expected 0"):
        watch.check(variants["stock"], layers=1, passes=3)
    watch.launched["layer", "do"] = 5
    with pytest.raises(RuntimeError, match="expected 8"):
        watch.check(variants["G = 2"], layers=1, passes=3)
