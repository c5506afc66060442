"""Tests the comparison of a layer's own forward with the overlapped forward: which results count as different."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_sp_overlap.integrations.inspect import probe
from ds_sp_overlap.integrations.transformers import probe as comparison

BIG = 0.75 * torch.finfo(torch.float16).max


@pytest.mark.parametrize(
    "driven, expected",
    [
        ([1.0, -2.0, torch.inf, torch.nan, BIG], ""),
        ([1.0, -2.0, BIG, torch.inf, torch.inf], ""),  # another order of a sum may overflow
        ([1.0, -2.1, torch.inf, torch.nan, torch.inf], r" differs by [34].\de-02"),
        ([torch.inf, -2.0, torch.inf, torch.nan, torch.inf], " overflows in one of the two alone"),
        ([1.0, -2.0, torch.inf, 1.0, torch.inf], " overflows in one of the two alone"),
        ([1.0, -2.0, -torch.inf, torch.nan, torch.inf], " overflows in one of the two alone"),
        ([1.0, -2.0, torch.inf, torch.nan, -BIG], " overflows in one of the two alone"),
    ],
)
def test_a_comparison_leaves_out_what_overflows_in_both(driven, expected):
    """Numbers may overflow with the first loss scale of fp16, and in the comparison, whose gradients have other magnitudes."""
    own = torch.tensor([1.0, -2.0, torch.inf, torch.nan, torch.inf], dtype=torch.float16)
    assert re.fullmatch(expected, probe._describe_difference(own, torch.tensor(driven, dtype=torch.float16)))


def test_numbers_that_are_not_floating_are_compared_one_by_one():
    own = torch.tensor([1, 2])
    assert probe._describe_difference(own, own.clone()) == ""
    assert probe._describe_difference(own, own + 1) == " differs"


class OneRank:
    """Stands for an sp group of one rank."""

    def gather(self, what, where):
        return [what]


def test_a_call_without_a_finite_number_is_compared_again(monkeypatch):
    nothing, probes = torch.full([4], torch.nan), probe.ProbeSchedule()
    layer = SimpleNamespace(name="layer", module=nn.Identity(), overlap=SimpleNamespace(sp_group=OneRank()))
    layer.reader = SimpleNamespace(probes=probes)
    monkeypatch.setattr(comparison, "difference", lambda driven, *pair: probe.first_difference({"q": pair[:2]}))

    def compared(own, driven):
        assert probes.is_due("layer", False, [4])
        comparison.refuse_difference(layer, own, driven, {})

    compared(nothing, nothing)
    compared(nothing, nothing)
    with pytest.raises(RuntimeError, match="q differs"):
        compared(torch.ones(4), torch.zeros(4))
    compared(torch.ones(4), torch.ones(4))
    assert not probes.is_due("layer", False, [4])


def test_under_autocast_tensors_may_differ_by_the_rounding_of_its_products():
    own = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert probe._describe_difference(own, own * 1.001) == " differs by 1.0e-03"
    with torch.autocast("cpu", torch.bfloat16):
        assert probe._describe_difference(own, own * 1.001) == ""
        assert probe._describe_difference(own, own * 1.1) == " differs by 1.0e-01"
