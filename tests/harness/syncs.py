"""Finds operations that would make the host wait for a GPU; runs on CPU, and recognises the operations by name.

Misses copies to the host by ``to(torch.device("cpu"))``: on CPU, they look like a ``to`` that copies nothing.
"""

import contextlib
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# The host reads the result of these operations, or the size of the result.
READ = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.bincount,
}  # fmt: skip
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # with a mask as index, these run `nonzero`

_HERE = {"torch", "numpy", "contextlib.py", "syncs.py"}


class Wait(NamedTuple):
    what: str
    where: str  # file:function of the innermost frame outside of torch


def _waits(op, args, kwargs):
    if op.overloadpacket in INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if op is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return op.overloadpacket in READ or op is aten.lift_fresh.default  # `lift_fresh` runs whenever a tensor is made from host data


def _where():
    frame = sys._getframe(1)
    while not _HERE.isdisjoint(Path(frame.f_code.co_filename).parts):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


class _Operations(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if _waits(op, args, kwargs or {}):
            self.seen.append(Wait(op.overloadpacket.__name__, _where()))
        return op(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits():
    """Yield a list that collects the waits of the body.

    Includes waits in backward: on CPU, backward runs in the same thread.
    """
    seen = []

    def watched(method):
        def call(x, *args, **kwargs):
            if method.__name__ != "to" or "cpu" in (*args, kwargs.get("device")):
                seen.append(Wait(method.__name__, _where()))
            return method(x, *args, **kwargs)

        return mock.patch.object(torch.Tensor, method.__name__, call)

    with _Operations(seen), contextlib.ExitStack() as stack:
        for method in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.to):  # `_Operations` can't see these on CPU
            stack.enter_context(watched(method))
        yield seen
