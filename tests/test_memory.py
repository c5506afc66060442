"""A step of the overlapped layer holds no more memory at once than DeepSpeed's class on the same layer."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from one_gpu import Emulated, communication  # noqa: E402
from variants import Layer, Shape, Silent, peak_bytes  # noqa: E402


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


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_peaks_no_higher_than_stock(groups, kv_heads):
    shape = Shape(seq=1024, heads=8, head_dim=32, kv_heads=kv_heads)
    stock = peak(shape, lambda layer: layer.stock())
    ours = peak(shape, lambda layer: layer.ours(head_groups=groups))
    # With groups a weight's gradient has its memory from its first part on, while the other group's dq, dk, dv are under way.
    slack = (groups > 1) * shape.width**2 * shape.dtype.itemsize
    assert ours <= stock + slack, f"{ours / 2**10:.0f} KiB against {stock / 2**10:.0f}"
