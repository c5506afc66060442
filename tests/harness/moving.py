"""Which kernels move a layer's data, and who writes its send buffers: for a test to choose and to count."""

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
# Also where the heads of a group lie together.
always = mock.patch.object(Geometry, "in_slices", property(lambda self: {kind for kind in "qkv" if self.divides(kind)}))


def counted(seen, folds, operators=relayout):
    """Put in place an implementation that counts what is called."""

    def count(name):
        def move(*args):
            seen[name] += 1
            getattr(operators, name)(*args)

        return move

    moves = {name: count(name) for name in ops.Relayout._fields[:4]}
    return mock.patch.object(ops, "implementation", lambda which: ops.Relayout(**moves, folds=folds))


@contextlib.contextmanager
def moving(kernels, direct):
    """Run with an implementation of pack and unpack, which rotates in them unless it is "torch"; with send buffers written by
    the projections' GEMM if ``direct``."""
    seen = Counter()
    with contextlib.ExitStack() as stack:
        if kernels != "torch":
            stack.enter_context(counted(seen, True, OPERATORS[kernels]))
        if direct:
            stack.enter_context(always)
        yield seen


def moved(layouts, tensors):
    """Return what each rank receives where rank r sends ``tensors[r]`` in ``layouts[r]``."""
    pieces, received = [], []
    for layout, xs in zip(layouts, tensors):
        wire = pack(xs, copies_of(layout.sources, tuple(x.stride() for x in xs)), xs[0].new_empty)
        pieces.append(wire.view(-1).split(layout.sources.sizes))
    for rank, layout in enumerate(layouts):
        assert [len(of_rank[rank]) for of_rank in pieces] == list(layout.targets.sizes)
        received.append([torch.full(shape, torch.nan, dtype=torch.float64) for shape in layout.targets.shapes])
        unpack(torch.cat([of_rank[rank] for of_rank in pieces]), copies_of(layout.targets), received[-1])
    return received
