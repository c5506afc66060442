"""Chooses the kernels that pack and unpack, counts their calls, and lets projections' GEMMs write the send buffers."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch

from ds_sp_overlap.exchange.copies import copies_of, pack, unpack
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.relayout import kernels, ops
from tests.harness import relayout

OPERATORS = {"reference": relayout, "compiled": torch.ops.ds_sp_overlap}
kinds = pytest.mark.parametrize(
    "kind",
    [
        "reference",
        pytest.param(
            "compiled",
            marks=pytest.mark.skipif(kernels.library().path is None, reason=f"no compiled kernels: {kernels.library().reason}"),
        ),
    ],
)
# Let a projection's GEMM write the send buffer even if the heads of a group are adjacent in its output.
always = mock.patch.object(Geometry, "in_slices", property(lambda self: frozenset(filter(self.divides, "qkv"))))


def counted(seen, folds, operators=relayout):
    """Replace pack and unpack by ``operators``, and count their calls in ``seen``.

    folds   whether the operators also rotate
    """

    def count(name):
        def move(*args):
            seen[name] += 1
            getattr(operators, name)(*args)

        return move

    moves = {name: count(name) for name in ops.Relayout._fields[:4]}
    return mock.patch.object(ops, "implementation", lambda which: ops.Relayout(**moves, folds=folds))


@contextlib.contextmanager
def moving(kernels, direct):
    """Choose pack and unpack while the body runs; yield the counts of their calls.

    ``kernels`` is "torch" or a key of `OPERATORS`, whose operators also rotate. With ``direct``, the projections' GEMM writes
    the send buffers.
    """
    seen = Counter()
    with contextlib.ExitStack() as stack:
        if kernels != "torch":
            stack.enter_context(counted(seen, True, OPERATORS[kernels]))
        if direct:
            stack.enter_context(always)
        yield seen


def moved(layouts, tensors):
    """Return for each rank the tensors that it receives, if rank r sends ``tensors[r]`` in ``layouts[r]``."""
    pieces, received = [], []
    for layout, xs in zip(layouts, tensors):
        wire = pack(xs, copies_of(layout.sources, tuple(x.stride() for x in xs)), xs[0].new_empty)
        pieces.append(wire.view(-1).split(layout.sources.sizes))
    for rank, layout in enumerate(layouts):
        assert [len(of_rank[rank]) for of_rank in pieces] == list(layout.targets.sizes)
        received.append([torch.full(shape, torch.nan, dtype=torch.float64) for shape in layout.targets.shapes])
        unpack(torch.cat([of_rank[rank] for of_rank in pieces]), copies_of(layout.targets), received[-1])
    return received
