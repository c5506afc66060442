"""Tests that a forward around attention is recognised if it compares the mask with None: the package always passes a mask."""

import pytest
from torch import nn

from ds_sp_overlap.integrations.transformers.modules import goes_by_mask
from tests.harness.zoo import compiled

COMPARES = {
    "a branch": "return h if attention_mask is None else h * 2",
    "a branch among others": "return h * 2 if cache is not None and attention_mask is not None else h",
    "a flag": "has_mask = attention_mask is not None; return h * has_mask",
    "behind another argument": "return max(h, h if attention_mask is None else -h)",
    "a method": """return self.factor(attention_mask) * h
def factor(self, attention_mask):
    return 1 if attention_mask is None else 2""",
}
PASSES_ON = {
    "in its place": "return self.attention(h, attention_mask, None)",
    "by name": "return self.attention(h, mask=attention_mask, cache=None)",
    "beside a branch by another argument": "h = self.attention(h, attention_mask); return h if cache is None else h * 2",
}


def compares(body):
    functions = {}
    compiled(f"def forward(self, h, attention_mask=None, cache=None):\n    {body}\n", (), functions)
    del functions["__builtins__"]
    return goes_by_mask(type("Layer", (nn.Module,), functions)())


@pytest.mark.parametrize("what", COMPARES)
def test_a_comparison_with_none_is_seen(what):
    assert compares(COMPARES[what])


@pytest.mark.parametrize("what", PASSES_ON)
def test_a_mask_that_is_passed_on_is_fine(what):
    assert not compares(PASSES_ON[what])
