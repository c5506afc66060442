"""Pack and unpack, bit for bit against index arithmetic that is written out here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap.relayout.ops import pack, unpack
from tests.helpers import layers
from tests.helpers.guards import Guard, Watched, must_notice

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

PARTS = {
    "equal tiles": [(0, 2), (2, 4), (4, 6)],
    "equal but no cover": [(0, 2), (2, 4)],
    "unequal tiles": [(0, 1), (1, 5), (5, 6)],
    "one part": [(0, 6)],
    "a part of no size": [(0, 3), (3, 3), (3, 6)],
    "no part covers all": [(1, 3), (4, 5)],
    "overlapping": [(0, 4), (2, 6), (0, 6)],
    "equal and overlapping": [(0, 3), (0, 3)],
    "nothing at all": [(2, 2), (0, 0)],
}


def travelling_order(shape, dim, parts):
    """Index of the tensor for every element of the wire, in order."""
    others = [range(n) for n in shape]
    order = []
    for start, stop in parts:
        ranges = [*others]
        ranges[dim] = range(start, stop)
        order += [tuple(index) for index in _product(ranges)]
    return order


def _product(ranges):
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in _product(ranges[1:]):
            yield (first, *rest)


def tensor(shape, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def poisoned(*shape, dtype=torch.float64):
    return torch.full(shape, math.nan, dtype=dtype)


def wire_size(shape, dim, parts):
    return sum(stop - start for start, stop in parts) * math.prod(shape) // shape[dim]


def starts_stops(parts):
    return [start for start, _ in parts], [stop for _, stop in parts]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_pack_lays_the_parts_end_to_end(parts, dim, dtype):
    shape = [3, 2, 4, 5]
    shape[dim] = 6
    x, out = tensor(shape, dtype), poisoned(wire_size(shape, dim, parts), dtype=dtype)
    before = x.clone()
    pack(x, dim, *starts_stops(parts), out)
    assert torch.equal(out, torch.stack([x[i] for i in order]) if (order := travelling_order(shape, dim, parts)) else out[:0])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_unpack_puts_every_part_in_its_place_and_writes_all_of_a_poisoned_output(parts, dim, dtype):
    shape = [3, 2, 4, 5]
    shape[dim] = 6
    wire, out = tensor([wire_size(shape, dim, parts)], dtype), poisoned(*shape, dtype=dtype)
    before = wire.clone()
    unpack(wire, dim, *starts_stops(parts), out)
    exact = torch.zeros(shape, dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    for element, index in zip(wire, travelling_order(shape, dim, parts)):
        exact[index] += element
    assert torch.equal(out, exact.to(dtype))
    assert torch.equal(wire, before)


def tiles_that_do_not_cover():
    """Guard: `_equal_tiles` makes sure that the parts cover the dimension."""
    x, wire, back = tensor((2, 6)), poisoned(8), poisoned(2, 6)
    pack(x, 1, [0, 2], [2, 4], wire)
    unpack(wire, 1, [0, 2], [2, 4], back)
    whole = torch.cat((x[:, :4], torch.zeros(2, 2)), 1)
    return [] if torch.equal(back, whole) else [f"{back} instead of {whole}"]


def test_equal_parts_that_do_not_cover_are_no_tiles():
    """Guard: `_equal_tiles` makes sure that the parts cover the dimension."""
    assert tiles_that_do_not_cover() == []


@given(st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_unpack_undoes_pack_for_parts_that_tile(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=4)))
    parts = list(zip([0, *cuts], [*cuts, shape[dim]]))
    x, wire, back = tensor(shape), poisoned(math.prod(shape)), poisoned(*shape)
    pack(x, dim, *starts_stops(parts), wire)
    unpack(wire, dim, *starts_stops(parts), back)
    assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_overlapping_halves_are_summed_in_fp32(dtype):
    """Guard: `_copy_in` sums in fp32. 64 times 1/128 of the spacing at 1 is lost if each addition rounds to half."""
    assert halves_summed_in_fp32(dtype) == []


def halves_summed_in_fp32(dtype=torch.bfloat16):
    small = torch.finfo(dtype).eps / 16
    wire, out = torch.tensor([1.0] + [small] * 64, dtype=dtype), poisoned(1, dtype=dtype)
    unpack(wire, 0, [0] * 65, [1] * 65, out)
    expected = torch.tensor([1.0 + 64 * small]).to(dtype)
    assert expected.item() != 1.0  # else this could not fail
    return [] if torch.equal(out, expected) else [f"sum is {out.item()}, not {expected.item()}"]


@pytest.mark.parametrize("parts", [PARTS["equal tiles"], PARTS["unequal tiles"], PARTS["overlapping"]])
def test_tensors_with_other_strides_are_packed_and_unpacked_alike(parts):
    shape = (2, 3, 6, 4)
    x = tensor((6, 2, 4, 3)).permute(1, 3, 0, 2)
    assert tuple(x.shape) == shape and not x.is_contiguous()
    strided, plain = (poisoned(wire_size(shape, 2, parts)) for _ in range(2))
    pack(x, 2, *starts_stops(parts), strided)
    pack(x.contiguous(), 2, *starts_stops(parts), plain)
    assert torch.equal(strided, plain)
    back, out = poisoned(6, 2, 4, 3).permute(1, 3, 0, 2), poisoned(*shape)
    unpack(plain, 2, *starts_stops(parts), back)
    unpack(plain, 2, *starts_stops(parts), out)
    assert torch.equal(back, out)


@pytest.mark.parametrize("op", [pack, unpack], ids=["pack", "unpack"])
@pytest.mark.parametrize("elements", [23, 25])
def test_a_wire_buffer_of_another_size_is_refused_with_both_sizes(op, elements):
    x, wire = tensor((4, 6)), tensor([elements])
    first, second = (x, wire) if op is pack else (wire, x)
    with pytest.raises(ValueError, match=rf"hold 24 elements, the wire buffer has shape \[{elements}\]"):
        op(first, 1, [0, 1], [1, 6], second)


@pytest.mark.parametrize("op", [pack, unpack], ids=["pack", "unpack"])
def test_equal_tiles_in_a_wire_buffer_of_another_size_are_refused(op):
    x, wire = tensor((4, 6)), tensor([20])
    first, second = (x, wire) if op is pack else (wire, x)
    with pytest.raises((ValueError, RuntimeError), match="20"):
        op(first, 1, [0, 3], [3, 6], second)


# Guards.


def unequal_parts():
    """Parts as many times the first one as there are, but not all alike: local sequences of 2, 1 and 3 tokens."""
    x, wire, back = torch.arange(12.0).view(2, 6), torch.empty(12), torch.empty(2, 6)
    parts = [0, 2, 3], [2, 3, 6]
    pack(x, 1, *parts, wire)
    unpack(wire, 1, *parts, back)
    expected = torch.cat([x[:, start:stop].flatten() for start, stop in zip(*parts)])
    return layers.faults(0, pack=(wire, expected), unpack=(back, x))


WATCHED = {
    "halves are summed in fp32": Watched(
        Guard("relayout.ops:_copy_in", "half = out.dtype in (torch.float16, torch.bfloat16)", "half = False"),
        halves_summed_in_fp32,
        ranks=0,
    ),
    "parts are tiles only if they lie in order": Watched(
        Guard("relayout.ops:_are_equal_tiles", "count * size == extent and all", "count * size == extent or False and all"),
        unequal_parts,
        ranks=0,
    ),
}


@pytest.mark.parametrize("name", WATCHED)
def test_the_suite_notices_without_the_guard_that(name):
    must_notice(WATCHED[name])
