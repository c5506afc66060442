"""Tests matrix products that read or write slices of a matrix in place, against products with a copy of the slices."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sp_overlap.attention.runtime.slices import _runs, cut_ranges, mm_of_slices, mm_to_slices

PARTS = {  # slices of 24 columns
    "one slice": ((4, 10),),
    "evenly spaced": ((2, 4), (8, 10), (14, 16), (20, 22)),
    "slices that touch": ((0, 2), (2, 4), (12, 16)),
    "of two sizes": ((0, 3), (6, 9), (12, 14), (16, 18), (20, 22)),
    "unevenly spaced": ((1, 3), (4, 6), (9, 11), (12, 14), (23, 24)),
    "all of it": ((0, 8), (8, 16), (16, 24)),
    "descending": ((18, 22), (12, 16), (6, 10), (0, 4)),
    "first descending, then not": ((8, 10), (2, 4), (14, 16), (20, 22)),
    "two, descending": ((12, 18), (2, 8)),
    "nothing": (),
}
OVERLAPPING = {"twice": ((4, 8), (4, 8)), "three times": ((4, 8), (4, 8), (4, 8)), "half of it twice": ((0, 8), (4, 12), (8, 16))}
# In fp64, the product of a slice adds in the same order as the whole; in other dtypes, its blocks may differ.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def random(*shape, dtype):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def is_near(got, expected):
    return (got - expected).abs().max().item() <= TOLERANCE[got.dtype] * 10 if got.numel() else got.shape == expected.shape


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_product_of_slices_is_that_of_their_copy(part, bias, transposed, dtype):
    part, a, whole = PARTS[part], random(5, 7, dtype=dtype), random(7, 24, dtype=dtype)
    whole = whole.t().contiguous().t() if transposed else whole
    b = random(24, dtype=dtype) if bias else None
    expected = a @ cut_ranges(whole, 1, part) if part else a.new_empty(5, 0)
    if bias and part:
        expected = expected + cut_ranges(b, 0, part)
    got = mm_of_slices(a, whole, part, b)
    assert got.is_contiguous() and is_near(got, expected)


def added(a, b, part, onto):
    """Return ``onto`` with ``a @ b`` added at the slices of ``part``; each slice gets the next columns of the product."""
    place = 0
    for start, stop in part:
        onto[:, start:stop] += a @ b[:, place : place + stop - start]
        place += stop - start
    return onto


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_product_into_slices_leaves_the_rest_alone(part, add, transposed, dtype):
    part = PARTS[part]
    a, before = random(5, 7, dtype=dtype), random(5, 24, dtype=dtype)
    b = random(7, sum(stop - start for start, stop in part), dtype=dtype)
    whole = before.t().contiguous().t() if transposed else before.clone()
    mm_to_slices(a, b, whole, part, add=add)
    onto = before.clone()
    for start, stop in part if not add else ():
        onto[:, start:stop] = 0
    assert is_near(whole, added(a, b, part, onto))
    outside = [column for column in range(24) if not any(start <= column < stop for start, stop in part)]
    assert torch.equal(whole[:, outside], before[:, outside])


@pytest.mark.parametrize("part,products", [("evenly spaced", 1), ("slices that touch", 1), ("of two sizes", 2), ("all of it", 1)])
def test_slices_of_one_size_that_are_evenly_spaced_are_one_product(part, products):
    runs = [run for run, _ in _runs(PARTS[part])]
    assert len(runs) == products
    assert [
        (run.start + i * run.step, run.start + i * run.step + run.size) for run in runs for i in range(run.slices)
    ] == list(PARTS[part]) or part in ("slices that touch", "all of it")  # fmt: skip


@pytest.mark.parametrize("part", OVERLAPPING)
def test_slices_that_overlap_are_added_up_one_product_after_the_other(part):
    part = OVERLAPPING[part]
    assert all(run.slices == 1 for run, _ in _runs(part))  # a batched product that writes an element twice would race
    a, b = random(5, 7, dtype=torch.float64), random(7, sum(e - s for s, e in part), dtype=torch.float64)
    whole = torch.zeros(5, 24).double()
    mm_to_slices(a, b, whole, part, add=True)
    assert is_near(whole, added(a, b, part, torch.zeros(5, 24).double()))
    assert torch.equal(cut_ranges(whole, 1, part), torch.cat([whole[:, start:stop] for start, stop in part], 1))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cpu_makes_no_batched_products_of_half_precision(dtype, autocast):
    """CPUs have no such kernel that writes to views: one product took 180 s."""
    part, whole = PARTS["evenly spaced"], random(7, 24, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Operations() as seen:
        mm_of_slices(random(5, 7, dtype=dtype), whole, part)
        mm_to_slices(random(5, 7, dtype=dtype), random(7, 8, dtype=dtype), random(5, 24, dtype=dtype), part, add=True)
    assert bool(seen.names & {"bmm", "baddbmm", "baddbmm_"}) == (dtype == torch.float32 and not autocast)
