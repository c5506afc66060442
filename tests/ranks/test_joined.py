"""Tests several of q, k and v in one exchange, for all heads, lengths and layouts, also if some of them are frozen."""

import contextlib
import functools
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from ds_sp_overlap.exchange.exchange import Exchange
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.in_flight import InFlight
from ds_sp_overlap.exchange.sp_group import SPGroup
from tests.harness import layers, transports
from tests.harness.cases import pairs, singles
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.moving import moving
from tests.harness.schedules import travelling

SENT = {"all together": ("qkv",), "k with v": ("q", "kv"), "q with k": ("qk", "v"), "v with q": ("qv", "k")}
SHAPES = [
    Shape(heads, kv_heads, 4, batch, lengths[:2], batch_first, config={"head_groups": groups, "check": batch == 1})
    for heads, kv_heads in ((8, 8), (8, 2), (7, 7), (6, 3), (4, 1))
    for batch, batch_first, lengths in ((1, True, (3, 3)), (1, False, (5, 2)), (3, True, (1, 1)), (2, False, (3, 3)))
    for groups in (1, 2)
]


@contextlib.contextmanager
def counting():
    """Yield a list that collects the names of exchanges of several tensors while the body runs; leaves out gradients."""
    start, joined = InFlight.__init__, []

    def started(self, layout, sp_group, name, xs, *more, **rope):
        joined.extend([name] * (len(xs) > 1 and " d" not in name))
        start(self, layout, sp_group, name, xs, *more, **rope)

    with mock.patch.object(InFlight, "__init__", started):
        yield joined


def faults(rank, sent, shapes, **kwargs):
    found = []
    with counting() as joined:
        for shape in (replace(shape, schedule=travelling(*sent)) for shape in shapes):
            before = len(joined)
            found += [f"{shape}: {fault}" for fault in layers.block_faults(rank, shape, **kwargs)]
            found += [f"{shape}: BLIND, nothing travelled together"] * (len(joined) == before)
    return found


@pytest.mark.parametrize("sent", SENT)
def test_what_travels_together_equals_the_reference(sent, rank):
    assert faults(rank, SENT[sent], pairs(SHAPES)) == []


@pytest.mark.ranks(4)
def test_so_it_does_between_four_ranks(rank):
    """Checks KV heads that several ranks need, and ranks with different numbers of heads."""
    shapes = [Shape(9, 3, 4, 2, (2, 1, 2, 3)), Shape(8, 2, 4, 1, (2,) * 4), Shape(4, 1, 4, 2, (1,) * 4, batch_first=False)]
    assert faults(rank, ("qkv",), shapes) == []


@pytest.mark.parametrize("kernels", ["torch", "reference"])  # "reference" also rotates, but only tensors that are sent alone
def test_no_buffer_is_read_too_early_or_after_its_use(kernels, rank):
    with moving(kernels, True), transports.spoiled_buffers():
        mover = transports.Late()
        assert faults(rank, ("qkv",), singles(SHAPES[:16]), transport=mover) + mover.faults + mover.unfinished() == []


def only_trained(layer, kinds):
    for kind in "qkv":
        layer[f"{kind}_proj"].requires_grad_(kind in kinds)


def of_a_frozen_input(call, layer, x, dy):
    y = call(x.detach())
    y.backward(dy)
    return {"output": y}


def frozen(rank, kinds, use, groups=1):
    """Train only the projections of ``kinds``; return the faults, and the numbers of elements of exchanged gradients.

    Also returns the number of elements of one local tensor.
    """
    sent, launched = [], transports.Recording()

    def launch(send, recv, send_sizes, *others):
        if others[-1].split()[-1].startswith("dq") or others[-1].split()[-1].startswith("dk"):
            sent.append(send.numel())
        return transports.Recording.launch(launched, send, recv, send_sizes, *others)

    mover = mock.Mock(launch=launch)
    shape = Shape(config={"head_groups": groups})
    found = faults(rank, ("qkv",), [shape], use=use, transport=mover, change=lambda layer: only_trained(layer, kinds))
    return found, sent, shape.batch * shape.lengths[rank] * shape.width


@pytest.mark.parametrize("kinds", ["".join(k) for n in (1, 2, 3) for k in itertools.combinations("qkv", n)])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_travel_for_those_that_need_one(groups, kinds, rank):
    found, sent, of_one = frozen(rank, kinds, of_a_frozen_input, groups)
    assert found == [] and sent == [of_one * len(kinds) // groups] * groups


@pytest.mark.parametrize("kinds", ["", "q", "kv"])
def test_gradients_of_the_input_need_all_of_them(kinds, rank):
    found, sent, of_one = frozen(rank, kinds, layers.backward)
    assert found == [] and sent == [of_one * 3]


def test_tensors_of_several_dtypes_and_head_dims_arrive_as_they_left(rank):
    for lengths, batch_first in (((3, 3), True), ((5, 2), False)):
        geometry = Geometry(2, rank, lengths, 2, 6, 6, batch_first=batch_first)
        layout = geometry.exchange("qkv", 0, (8, 8, 4))
        dtypes = torch.float32, torch.bfloat16, torch.bfloat16
        xs = [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in zip(layout.sources.shapes, dtypes)]
        sp_group = SPGroup(torch.distributed.group.WORLD)
        ys = InFlight(layout, sp_group, "layer qkv", [x.detach() for x in xs], checked=True).finish()
        alone = []
        for kind, x in zip("qkv", xs):
            one = Exchange(sp_group, geometry.exchange(kind, 0, (x.shape[-1],)), "layer", kind)
            alone.append(one.finish(one.start(x)))
        dys = [torch.randn_like(y) for y in ys]
        dxs = InFlight(layout.inverse, sp_group, "layer dqkv", dys, checked=True).finish()
        for got, expected in zip([*ys, *dxs], [*alone, *torch.autograd.grad(alone, xs, dys)]):
            assert got.dtype == expected.dtype and torch.equal(got, expected), lengths


# Guards.


test_the_suite_notices_without_the_guard = notices(
    Watched(
        "to those that need it",
        "needed = step.parts",
        functools.partial(frozen, kinds="k", use=of_a_frozen_input),
        raises=True,
        says="([], ",
    )
)
