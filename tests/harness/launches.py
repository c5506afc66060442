"""Counts the launches of one rank in a step of a layer, and the bytes that they write; the other ranks are emulated.

Each launch is of one of these kinds:

weights       copies of a weight or of parts of a weight, and copies of parts of a weight's gradient into the whole gradient
joins         packs of send buffers, and unpacks of receive buffers
activations   all other copies
products      matrix products
rest          all other launches: norms, sums, activation functions
"""

import contextlib
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_sp_overlap
from benchmarks.one_gpu import Emulated
from benchmarks.variants import Layer, Shape, Silent
from ds_sp_overlap.attention.runtime import slices
from ds_sp_overlap.exchange.in_flight import InFlight

COPIES = {"copy_", "clone", "cat"}
# Operations that also count as copies if they read a weight, or write a part of its gradient.
OF_WEIGHTS = COPIES | {"_to_copy", "add_", "index_select", "sum", "stack", "index_add_"}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "addbmm_"}
NO_LAUNCH = frozenset("empty new_empty empty_like empty_strided new_empty_strided detach alias _unsafe_view lift_fresh".split())


class Launches(TorchDispatchMode):
    """Counts the launches of the body by kind (see above).

    weights   tensors whose copies are of the kind "weights"
    """

    def __init__(self, weights):
        super().__init__()
        self.launched, self.written = Counter(), Counter()  # launches and written bytes, by kind
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._joining = 0
        self._copies = []  # for each copy: its memory (kept, so that no address is reused), bytes, kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in NO_LAUNCH:
            return result
        tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        kind = self._kind(name, tensors)
        self.launched[kind] += 1
        if kind != "products" and isinstance(result, torch.Tensor):
            self.written[kind] += result.nbytes
            if name in OF_WEIGHTS:
                self._copies.append((result.untyped_storage(), result.nbytes, kind))
        return result

    def _kind(self, name, tensors):
        if self._joining:
            return "joins"
        if name in PRODUCTS:
            return "products"
        reads = any(x.untyped_storage().data_ptr() in self._weights for x in tensors)
        if reads and name in OF_WEIGHTS:
            return "weights"
        return "activations" if name in COPIES else "rest"

    def settle(self, gradients):
        """Move copies that wrote to the memory of a weight's gradient to the kind "weights"."""
        whole = {gradient.untyped_storage().data_ptr() for gradient in gradients if gradient.dim() > 1}
        for storage, size, kind in self._copies:
            if storage.data_ptr() in whole and kind in ("activations", "rest"):
                self.launched[kind] -= 1
                self.written[kind] -= size
                self.launched["weights"] += 1
                self.written["weights"] += size

    @contextlib.contextmanager
    def joins_apart(self):
        """Count all launches of packing and unpacking as "joins" while the body runs."""

        def counted(method):
            def run(*args, **kwargs):
                self._joining += 1
                result = method(*args, **kwargs)
                self._joining -= 1
                return result

            return run

        with contextlib.ExitStack() as stack:
            for name in ("_packed", "_unpacked"):
                stack.enter_context(mock.patch.object(InFlight, name, counted(getattr(InFlight, name))))
            yield


def counted_step(layer, run, parameters):
    """Run forward and backward once to warm up, once to count; return the counts."""
    parameters = list(parameters)
    for launches in (None, Launches(parameters)):
        x = layer.x.detach().requires_grad_()
        with launches or contextlib.nullcontext(), launches.joins_apart() if launches else contextlib.nullcontext():
            gradients = torch.autograd.grad(run(x), [x, *parameters], layer.dy)
    launches.settle(gradients[1:])
    return launches


def fused(layer, interleaved, **config):
    """Give the layer one projection for q, k and v; return the layer's block.

    The rows of the projection are [all q | all k | all v]. If ``interleaved``, they are, for one KV head after another, [its query
    heads | k | v].
    """
    shape = layer.shape
    heads, shared = shape.heads + 2 * shape.kv_heads, shape.heads // shape.kv_heads
    projections = nn.ModuleDict({
        "qkv_proj": nn.Linear(shape.width, heads * shape.head_dim, bias=False, dtype=shape.dtype), "o_proj": layer.projections["o_proj"],
    })  # fmt: skip
    first_rows = None
    if interleaved:
        blocks = torch.arange(heads).view(shape.kv_heads, -1).mul(shape.head_dim).split((shared, 1, 1), 1)
        first_rows = {kind: tuple(rows.flatten().tolist()) for kind, rows in zip("qkv", blocks)}
    layer.projections = projections
    block = ds_sp_overlap.SelfAttention(
        local_attention=layer.local, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, batch_first=False,
        config=config, first_rows=first_rows, name="layer", heads_alike=True, **projections,
    )  # fmt: skip
    block.layer.sp_group = layer.sp_group
    return block


def of_layer(size, heads, kv_heads, dtype=torch.float32, tokens=4, head_dim=16, form="separate", **config):
    """Count the launches of one of ``size`` ranks in a step of a layer.

    ``form`` is the form of the projections: "separate", "fused" or "interleaved".
    """
    layer = Layer(Shape(size * tokens, heads, head_dim, kv_heads, dtype=dtype), 0, size, sp_group=Emulated(size, Silent()))
    run = layer.ours(**config) if form == "separate" else fused(layer, form == "interleaved", **config)
    with mock.patch.object(slices, "unbatched", set()):  # batch GEMMs as on a GPU
        return counted_step(layer, run, layer.projections.parameters())


def calls_of_layer(groups, **config):
    """Count the calls of the package's functions in a step of a layer on one of eight ranks.

    Two steps run before, so that traces, compiled pieces and comparisons are done.
    """
    layer = Layer(Shape(8 * 4, 32, 16, 8), 0, 8, sp_group=Emulated(8, Silent()))
    run, package, calls = layer.ours(head_groups=groups, **config), str(Path(ds_sp_overlap.__file__).parent), 0

    def count(frame, what, _):
        nonlocal calls
        calls += what == "call" and frame.f_code.co_filename.startswith(package)

    with torch.autograd.set_multithreading_enabled(False):  # `sys.setprofile` does not count in other threads
        for profile in (None, None, count):
            x = layer.x.detach().requires_grad_()
            sys.setprofile(profile)
            try:
                run(x).backward(layer.dy)
            finally:
                sys.setprofile(None)
    return calls
