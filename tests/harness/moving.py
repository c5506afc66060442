"""Which kernels move a layer's data, and who writes its send buffers: for a test to choose and to count."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch

from ds_sp_overlap.exchange.copies import copies_of, pack
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


def packed(tensors, sides):
    """Return what travels of ``tensors``."""
    return pack(tensors, copies_of(sides, tuple(x.stride() for x in tensors)), tensors[0].new_empty).view(-1)
