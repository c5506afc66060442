"""Tests the comparison of check mode, for numbers of any size: the received tensor against the expected tensor."""

import pytest
import torch

from ds_sp_overlap.exchange.check import Expected
from ds_sp_overlap.exchange.sp_group import SPGroup

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def compared(got, expected, rotated):
    Expected(SPGroup(None), "layer dq0", expected, torch.zeros(expected.shape), rotated).compare(got)


def numbers(dtype, size):
    return (torch.randn(64, generator=torch.Generator().manual_seed(0)) * size).to(dtype)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])  # 1e-6: gradients of a mean loss
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_lost_or_exchanged_is_seen_whatever_its_size(dtype, rotated, size):
    expected = numbers(dtype, size)
    rounded = expected * (1 + torch.finfo(dtype).eps / 2) if rotated or dtype.itemsize == 2 else expected
    compared(rounded.to(dtype), expected, rotated)
    for wrong in (torch.zeros_like(expected), expected.roll(1), expected.where(expected != expected.max(), 0)):
        with pytest.raises(RuntimeError, match="^layer dq0: sp_overlap.check: .* differs from the plain one .sp rank 0: off by"):
            compared(wrong, expected, rotated)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_lost_beside_one_large_token_is_seen(dtype, rotated):
    """For instance, the k of an attention sink has a gradient a hundred times as large as that of other tokens."""
    expected = numbers(dtype, 1.0).view(8, 8)
    expected[0] *= 100
    wrong = expected.clone()
    wrong[1:] = 0
    with pytest.raises(RuntimeError, match="differs from the plain one"):
        compared(wrong, expected, rotated)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("overflow", [torch.inf, -torch.inf, torch.nan])
def test_beside_a_number_that_overflows_the_others_are_compared(overflow, rotated):
    """With the first loss scale of fp16, gradients overflow, and the step is skipped: the check must not raise for these numbers.

    But it must still find a fault in the other numbers.
    """
    expected = numbers(torch.float16, 1.0)
    expected[3] = overflow
    compared(expected.clone(), expected, rotated)
    wrong = expected.clone()
    wrong[5] += 1
    with pytest.raises(RuntimeError, match="differs from the plain one"):
        compared(wrong, expected, rotated)
