"""Tests that no resource grows during training; a short form of ``python -m tests.harness.long_run --steps 2000``."""

import pytest

from tests.harness import long_run
from tests.harness.ranks import on_ranks

STEPS = 60


def test_nothing_grows_through_exceptions_evaluations_a_timeline_and_the_choice_of_groups(tmp_path):
    for samples, happened in on_ranks(2, long_run.train, str(tmp_path), STEPS):
        assert len(samples) > 5 and happened == {"exceptions": STEPS // 10, "evaluations": STEPS // 5}
        grown = [sort for sort in long_run.what_grows(samples) if sort != "memory"]  # too few steps to judge memory
        assert not grown, long_run.growth(samples)
    assert (tmp_path / "exchanges.csv").stat().st_size


@pytest.mark.full
def test_a_leak_of_a_tensor_a_thread_and_a_descriptor_in_each_step_is_seen(tmp_path):
    for samples, _ in on_ranks(2, long_run.train, str(tmp_path), 30, True):
        assert {"tensors", "threads", "descriptors"} <= set(long_run.what_grows(samples))
        assert not {"exchanges in flight", "hooks"} & set(long_run.what_grows(samples))
