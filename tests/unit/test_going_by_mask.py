"""Modules around a layer whose forward goes by the mask being None, which it never is here."""

import pytest
from torch import nn

from ds_sp_overlap.integrations.transformers.modules import goes_by_mask


class Branch(nn.Module):
    def forward(self, h, attention_mask=None):
        return h if attention_mask is None else h * 2


class BranchAmongOthers(nn.Module):
    def forward(self, h, other, attention_mask=None):
        if other is not None and attention_mask is not None:
            h = h * 2
        return h


class Flag(nn.Module):
    def forward(self, h, attention_mask=None):
        has_mask = attention_mask is not None
        return h * has_mask


class BehindAnotherArgument(nn.Module):
    def forward(self, h, attention_mask=None):
        return max(h, h if attention_mask is None else -h)


class Method(nn.Module):
    def forward(self, h, attention_mask=None):
        return self.factor(attention_mask) * h

    def factor(self, attention_mask):
        return 1 if attention_mask is None else 2


class PassesOn(nn.Module):
    def forward(self, h, attention_mask=None):
        return self.attention(h, attention_mask, None)


class PassesOnByName(nn.Module):
    def forward(self, h, attention_mask=None):
        return self.attention(h, mask=attention_mask, cache=None)


class OtherArgument(nn.Module):
    def forward(self, h, attention_mask=None, cache=None):
        h = self.attention(h, attention_mask)
        return h if cache is None else h * 2


@pytest.mark.parametrize("kind", [Branch, BranchAmongOthers, Flag, BehindAnotherArgument, Method])
def test_a_comparison_with_none_is_seen(kind):
    assert goes_by_mask(kind())


@pytest.mark.parametrize("kind", [PassesOn, PassesOnByName, OtherArgument])
def test_a_mask_that_is_passed_on_is_fine(kind):
    assert not goes_by_mask(kind())
