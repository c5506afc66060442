"""Compares pack and unpack, bit for bit, with `harness/relayout.py`, which copies part by part."""

import functools
import itertools
import math

import pytest
import torch

from ds_sp_overlap.exchange import copies
from ds_sp_overlap.exchange.copies import copies_of
from ds_sp_overlap.exchange.layout import Side, Sides
from tests.harness import relayout
from tests.harness.guards import Watched, notices

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
    "tiles that several ranks need": [(0, 3), (0, 3), (3, 6), (3, 6)],
    "tiles that not all ranks need alike": [(0, 3), (0, 3), (0, 3), (3, 6)],
    "one tile that all need": [(0, 6), (0, 6), (0, 6)],
    "nothing at all": [(2, 2), (0, 0)],
}


def tensor(shape, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def poisoned(*shape, dtype=torch.float64):
    return torch.full(shape, math.nan, dtype=dtype)


def wire_size(shape, dim, parts):
    return sum(stop - start for start, stop in parts) * math.prod(shape) // shape[dim]


def starts_stops(parts):
    return [start for start, _ in parts], [stop for _, stop in parts]


def cut(x, dim, parts):
    """Return the `Sides` of an exchange that sends ``x`` alone."""
    return Sides((side(x, dim, parts),))


def side(x, dim, parts):
    """Return the `Side` of ``x``, cut into parts along one dimension."""
    blocks = []
    for part in parts:
        block = [(0, size) for size in x.shape]
        block[dim] = part
        blocks.append((tuple(block),))
    return Side(tuple(x.shape), tuple(blocks))


def pack(x, dim, starts, stops, wire):
    wire.copy_(copies.pack([x], copies_of(cut(x, dim, zip(starts, stops)), (x.stride(),)), x.new_empty).view(-1))


def unpack(wire, dim, starts, stops, out):
    sides = cut(out, dim, zip(starts, stops))
    copies.unpack(wire, copies_of(sides, (out.stride(),)), [out])
    # `unpacked` allocates its result: it must give the same.
    for made in copies.unpacked(wire, copies_of(sides)):
        assert torch.equal(made, out) and made.data_ptr() != wire.data_ptr() and made.is_contiguous()


def laid_out(x, order):
    """Return ``x`` with the same shape, but with its dimensions in another memory order."""
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parts_are_laid_end_to_end_and_put_in_their_places_where_all_of_a_poisoned_output_is_written(parts, dim, dtype, order):
    shape = [3, 2, 4, 5]
    shape[dim] = 6
    x = laid_out(tensor(shape, dtype), order)
    before, (wire, expected) = x.clone(), poisoned(2, wire_size(shape, dim, parts), dtype=dtype)
    pack(x, dim, *starts_stops(parts), wire)
    relayout.pack(before, dim, *starts_stops(parts), expected)
    assert torch.equal(wire, expected) and torch.equal(x, before)
    wire = tensor(wire.shape, dtype)
    before, out, expected = wire.clone(), laid_out(poisoned(*shape, dtype=dtype), order), poisoned(*shape, dtype=dtype)
    unpack(wire, dim, *starts_stops(parts), out)
    relayout.unpack(before, dim, *starts_stops(parts), expected)
    assert torch.equal(out, expected) and torch.equal(wire, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_overlapping_halves_are_summed_in_fp32(dtype):
    """Guards the sum of `unpack` in fp32: 64 small numbers are added to 1, and would be lost if each sum were rounded.

    Checks equal parts, and parts of two lengths, which are added one by one.
    """
    small = torch.finfo(dtype).eps / 16
    expected = torch.tensor([1.0 + 64 * small]).to(dtype)
    assert expected.item() != 1.0  # else the test could not fail
    one, two = (0, 1), (0, 2)
    for parts, values in (([one] * 65, [small] * 64), ([one, *[two, one] * 32], [small, 0.0, small] * 32)):
        wire, out = torch.tensor([1.0, *values], dtype=dtype), poisoned(max(parts)[1], 1, dtype=dtype)
        unpack(wire, 0, *starts_stops(parts), out)
        assert torch.equal(out[0], expected)


# Guards.


def unpacked_and_split(kinds, bits=False):
    """Unpack tensors of these kinds of ``PARTS``, each from its own transfer and all from one; return the kinds that are wrong.

    bits   whether zeros must keep their signs, as in a copy; a sum that begins with 0 loses the sign
    """
    x = tensor((2, 3, 6, 4))
    x[0] = -0.0
    outs = [poisoned(*x.shape) for _ in kinds * 2]
    for kind, out in zip(kinds, outs):
        unpack(torch.cat([x[:, :, slice(*part)].flatten() for part in PARTS[kind]]), 2, *starts_stops(PARTS[kind]), out)
    of_peers = itertools.chain(*zip(*(PARTS[kind] for kind in kinds)))
    wire = torch.cat([x[:, :, slice(*part)].flatten() for part in of_peers])
    sides = Sides(tuple(side(x, 2, PARTS[kind]) for kind in kinds))
    copies.unpack(wire, copies_of(sides), outs[len(kinds) :])
    wrong = []
    for kind, out in zip(kinds * 2, outs):
        expected = x * torch.tensor([[sum(start <= head < stop for start, stop in PARTS[kind])] for head in range(6)])
        if not (torch.equal(out.view(torch.int64), expected.view(torch.int64)) if bits else torch.equal(out, expected)):
            wrong.append(kind)
    return wrong


UNEQUAL = [
    functools.partial(unpacked_and_split, ["unequal tiles", "unequal tiles"], bits=True),
    functools.partial(unpacked_and_split, ["overlapping"]),
    functools.partial(unpacked_and_split, ["unequal tiles", "overlapping"]),
]


@pytest.mark.parametrize("check", UNEQUAL, ids=["copied", "summed", "one of each"])
def test_of_unequal_parts_only_tiles_are_copied_as_they_are(check):
    assert check() == []


test_the_suite_notices_without_the_guard = notices(
    *(
        Watched("disjoint parts need no sum", f"disjoint = {alike}", check)
        for alike, check in ((False, UNEQUAL[0]), (True, UNEQUAL[1]), (True, UNEQUAL[2]))
    ),
    Watched(
        "halves are summed in fp32",
        "totals = [torch.zeros_like(x) for x in tensors]",
        functools.partial(test_overlapping_halves_are_summed_in_fp32, torch.bfloat16),
    ),
)
