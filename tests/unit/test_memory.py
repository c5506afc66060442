"""The overlapped layer holds no more memory, at once or until its backward, than DeepSpeed's class on the same layer."""

import pytest
import torch

from benchmarks.one_gpu import Emulated, communication
from benchmarks.variants import Layer, Shape, Silent, held_bytes, peak_bytes
from tests.helpers import uses


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


def peaks(shape, groups):
    return peak(shape, lambda layer: layer.ours(head_groups=groups)), peak(shape, lambda layer: layer.stock())


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
