"""Tests exchanges in flight: lifetime of buffers, misuse, and the names in errors.

Each test names its guard, as in `test_hazards`.
"""

import gc
import weakref

import torch

from benchmarks.variants import Silent
from ds_sp_overlap.exchange.exchange import Exchange
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.in_flight import InFlight
from ds_sp_overlap.exchange.sp_group import SPGroup
from tests.harness import layers
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import refusal


class FailingAtLaunch(Silent):
    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        if name.endswith("do0"):
            raise RuntimeError("connection reset by peer")
        return super().launch(send, recv, send_sizes, recv_sizes, group, name)


def test_a_launch_that_fails_names_its_exchange(rank):
    """A launch fails, for instance, if the communicator was aborted before."""
    shape = Shape()
    _, attend, x, dy = layers.mine(rank, shape, FailingAtLaunch())
    _, message = refusal(layers.call_block(shape, attend, rank, x.requires_grad_()).backward, dy)
    expected = f"layer do0: the exchange over the sp group (size 2) failed on sp rank {rank}; look for the first error"
    assert message.startswith(expected)


def test_a_source_lives_as_long_as_it_is_read_and_no_longer(rank):
    """Guards `InFlight.sources`: a packed source is freed at once, and a source that is the send buffer after the exchange."""
    for batch_first, kind in ((True, "q"), (False, "o")):
        geometry = Geometry(2, rank, (3, 3), 1, 4, 4, 1, batch_first)
        exchange = Exchange(SPGroup(torch.distributed.group.WORLD), geometry.exchange(kind, 0, (8,)), "layer", kind)
        with torch.no_grad():
            x = torch.randn(exchange.layout.sources.shapes[0])
            source = weakref.ref(x)
            token = exchange.start(x)
            del x
            gc.collect()
            assert (source() is None) == (kind == "q"), f"{kind}, in flight"
            exchange.finish(token)
            gc.collect()
            assert source() is None, f"{kind}: the source is kept after the exchange"


def in_flight():
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is InFlight]


def test_nothing_in_flight_is_reachable_through_a_graph(rank):
    """Guards finish: it removes the transfer from the call. Else the graph would hold a reference cycle that is never freed."""
    shape = Shape(kv_heads=2)
    _, attend, x, dy = layers.mine(rank, shape)
    before = {id(o) for o in in_flight()}
    y = layers.call_block(shape, attend, rank, x.requires_grad_())
    assert [o.name for o in in_flight() if id(o) not in before] == [], "between forward and backward"
    y.backward(dy, retain_graph=True)
    assert [o.name for o in in_flight() if id(o) not in before] == [], "after backward"


def test_a_half_out_of_place_is_refused(rank):
    geometry = Geometry(2, rank, (3, 3), 1, 4, 4)
    exchange = Exchange(SPGroup(torch.distributed.group.WORLD), geometry.exchange("q", 0, (8,)), "layers.7", "q")
    token = exchange.start(torch.zeros(3, 1, 4, 8))
    exchange.finish(token)
    together = "gradients of a layer's inputs and of its weights come of one backward, ask for them together"
    twice = f"layers.7 q: finished without having been started, or finished twice; {together}"
    assert refusal(exchange.finish, token) == ("RuntimeError", twice)
    wide = "layers.7 q: expected a tensor of shape [3, 1, 4, 8], got [3, 1, 4, 9]"
    assert refusal(exchange.start, torch.zeros(3, 1, 4, 9)) == ("ValueError", wide)


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched("packed, so let go", "pass", test_a_source_lives_as_long_as_it_is_read_and_no_longer),
    Watched("the transfer is let go", "in_flight = call.in_flight.get(key)", test_nothing_in_flight_is_reachable_through_a_graph),
    Watched("this half belongs here", "if False:", test_a_half_out_of_place_is_refused),
    Watched("a failed launch has a name", "except LookupError as error:", test_a_launch_that_fails_names_its_exchange),
)
