"""The overlapped layer holds no more memory, at once or until its backward, than DeepSpeed's class on the same layer."""

import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.one_gpu import Emulated, communication
from benchmarks.variants import Layer, Shape, Silent, held_bytes, peak_bytes
from ds_sp_overlap.exchange.channel import SideStream
from ds_sp_overlap.exchange.exchange import Exchange
from ds_sp_overlap.exchange.geometry import Geometry
from tests.helpers import uses
from tests.helpers.streams import Backend


def peak(shape, make, size=2):
    """Most bytes of a step on rank 0, over a wire that moves nothing: the buffers are the same, and no thread frees them late."""
    layer = Layer(shape, 0, size)
    layer.channel = Emulated(size, Silent())
    with communication(size, Silent()):
        return layer.peak_bytes(make(layer))


def test_the_measure_counts_what_is_held_at_once():
    def run():
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(2000, dtype=torch.uint8)
        del first
        return second, torch.empty(500, dtype=torch.uint8)

    assert 3000 <= peak_bytes(run) < 3000 + 4 * 64  # the allocator rounds up


@functools.cache
def stock_peak(shape):
    return peak(shape, lambda layer: layer.stock())


def peaks(shape, groups):
    return peak(shape, lambda layer: layer.ours(head_groups=groups)), stock_peak(shape)


def on_streams(layer):
    """Have the exchanges of ``layer`` carried by streams, as on an accelerator; their stand-in."""
    layer.channel._sides[torch.device("cpu")] = SideStream(Backend(), torch.device("cpu"))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("config", [{}, {"wgrad": False}, {"projections": False}], ids=str)
def test_a_step_peaks_no_higher_on_an_accelerator_than_on_cpu(config, groups):
    """Guards: pack and unpack on the compute stream. Beside it a source is kept until it is packed, and an output until then too."""

    def ours(layer, streams):
        if streams:
            on_streams(layer)
        return layer.ours(head_groups=groups, **config)

    shape = Shape(seq=1024, heads=8, head_dim=32, kv_heads=4, batch=2)
    on_cpu, on_accelerator = (peak(shape, lambda layer: ours(layer, streams)) for streams in (False, True))  # noqa: B023
    assert on_accelerator <= on_cpu, f"{on_accelerator / 2**10:.0f} KiB against {on_cpu / 2**10:.0f}"


class Kept(Silent):
    """A wire that holds what it was given as long as somebody holds its handle, as c10d does."""

    def launch(self, send, recv, *arguments):
        super().launch(send, recv, *arguments)
        handle = Silent()
        handle.held = send, recv
        return handle


def storages(what):
    """Bytes of all memory that the attributes of ``what`` hold, handles left out, each once."""
    tensors = [x for x in tree_leaves(list(vars(what).values())) if isinstance(x, torch.Tensor)]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


# What is sent and what is received lies in memory as it travels, or doesn't: batch first there are two pieces of every part.
LAYOUTS = {f"{kind}, {'batch' if first else 'sequence'} first": (kind, first) for kind in "qo" for first in (True, False)}


@pytest.mark.parametrize("streams", [False, True], ids=["CPU", "accelerator"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exchange_in_flight_holds_what_is_sent_and_what_is_received_and_nothing_else(layout, streams):
    kind, batch_first = LAYOUTS[layout]
    layout = Geometry(2, 0, (30, 30), 2, 4, 4, 1, batch_first).exchange(kind, 0, 8)
    channel = Emulated(2, Kept())
    if streams:
        channel._sides[torch.device("cpu")] = SideStream(Backend(), torch.device("cpu"))
    exchange = Exchange(channel, layout, "layer", kind)
    token = exchange.start(torch.randn(layout.source.shape))
    size = layout.source.elements * 4
    assert storages(exchange.forward) == 2 * size

    held = []
    in_flight, make = exchange.forward, exchange.forward._new_outs

    def new_outs(like):
        held.append(storages(in_flight))
        assert in_flight.handle is None
        return make(like)

    in_flight._new_outs = new_outs
    exchange.finish(token)
    assert held == [size] * in_flight.unpacks  # what was sent is given back before memory is taken for the output


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_peaks_no_higher_than_stock(groups, shared):
    ours, stock = peaks(Shape(seq=2048, heads=16, head_dim=64, kv_heads=16 // shared), groups)
    assert ours <= stock, f"{ours / 2**10:.0f} KiB against {stock / 2**10:.0f}"


@pytest.mark.parametrize("groups", [1, 2])
def test_where_attention_is_the_peak_the_next_group_in_flight_comes_on_top(groups):
    """The send buffer of one group's do, which travels while attention's backward works on the other's; none for one group."""
    shape = Shape(seq=1024, heads=8, head_dim=32, kv_heads=2)
    ours, stock = peaks(shape, groups)
    in_flight = (groups > 1) * shape.seq // 2 * shape.width // groups * shape.dtype.itemsize
    assert ours <= stock + in_flight, f"{ours / 2**10:.0f} KiB against {stock / 2**10:.0f}"


def frozen_projections(layer):
    layer.requires_grad_(False)
    layer["o_proj"].requires_grad_(True)


def lora_of_query_and_value(layer):
    layer.requires_grad_(False)
    for kind in "qv":
        layer[f"{kind}_proj"] = uses.Adapted(layer[f"{kind}_proj"])


CHANGES = [
    None,
    frozen_projections,
    uses.only_query_trains,
    uses.only_input_trains,
    uses.frozen_output,
    lora_of_query_and_value,
    uses.all_adapted,
]


def held(shape, change, make, size=2):
    """Bytes that the forward leaves on rank 0 for the backward, output included, in units of hidden states."""
    layer = Layer(shape, 0, size)
    layer.channel = Emulated(size, Silent())
    if change:
        change(layer.projections)
    attend = make(layer)
    with communication(size, Silent()):
        run = lambda: layer.forward(lambda x: attend(x * 1))  # an input of which nobody else holds the memory
        run()
        return held_bytes(run) / (layer.x.numel() * layer.x.element_size())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__ if change else "all train")
@pytest.mark.parametrize("groups", [1, 2])
def test_what_waits_for_the_backward_is_no_more_than_with_stock(groups, change):
    """Of what no weight needs, nothing is kept: neither the input nor the output of attention."""
    shape = Shape(seq=1024, heads=8, head_dim=32, kv_heads=8)
    ours, stock = (
        held(shape, change, make) for make in (lambda layer: layer.ours(head_groups=groups), lambda layer: layer.stock())
    )
    assert ours <= stock + 0.01, f"{ours:.2f} against {stock:.2f}"  # tokens, a few bytes each
