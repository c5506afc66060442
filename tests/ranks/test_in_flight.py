"""What is in flight: in which order streams wait for each other, how long buffers live, what a failure is called.

Each test names the guard it watches, as in `test_hazards`.
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
from tests.harness.ranks import no_faults, refusal


class FailingAtLaunch(Silent):
    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        if name.endswith("do0"):
            raise RuntimeError("connection reset by peer")
        return super().launch(send, recv, send_sizes, recv_sizes, group, name)


def launch_that_fails(rank):
    """As of a communicator that was aborted before."""
    shape = Shape()
    _, attend, x, dy = layers.mine(rank, shape, FailingAtLaunch())
    _, message = refusal(layers.call_block(shape, attend, rank, x.requires_grad_()).backward, dy)
    expected = f"layer do0: the exchange over the sp group (size 2) failed on sp rank {rank}; look for the first error"
    return [] if message.startswith(expected) else [message]


def test_a_launch_that_fails_names_its_exchange():
    no_faults(2, launch_that_fails)


def held_until_finished(rank):
    """The source of an exchange that sends it as it lies lives until it is finished; one that was packed has been read."""
    found = []
    for batch_first, kind in ((True, "q"), (False, "o")):
        geometry = Geometry(2, rank, (3, 3), 1, 4, 4, 1, batch_first)
        exchange = Exchange(SPGroup(torch.distributed.group.WORLD), geometry.exchange(kind, 0, (8,)), "layer", kind)
        with torch.no_grad():
            x = torch.randn(exchange.layout.sources.shapes[0])
            source = weakref.ref(x)
            token = exchange.start(x)
            del x
            gc.collect()
            if (source() is None) != (kind == "q"):
                found.append(f"{kind}: the source was {'dropped' if source() is None else 'kept'} in flight")
            exchange.finish(token)
            gc.collect()
            if source() is not None:
                found.append(f"{kind}: the source is kept after the exchange")
    return found


def test_a_source_lives_as_long_as_it_is_read_and_no_longer():
    """Guard: `InFlight.sources`."""
    no_faults(2, held_until_finished)


def in_flight():
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is InFlight]


def nothing_stays_in_flight(rank):
    """Between a forward and its backward, and after it, no record of a transfer is alive, graph or no graph."""
    shape = Shape(kv_heads=2)
    _, attend, x, dy = layers.mine(rank, shape)
    before = {id(o) for o in in_flight()}
    y = layers.call_block(shape, attend, rank, x.requires_grad_())
    found = [f"after forward: {o.name}" for o in in_flight() if id(o) not in before]
    y.backward(dy, retain_graph=True)
    return found + [f"after backward: {o.name}" for o in in_flight() if id(o) not in before]


def test_nothing_in_flight_is_reachable_through_a_graph_that_is_kept():
    """Guard: a finish takes the transfer off the call; left there, it would be a cycle through the graph that is never freed."""
    no_faults(2, nothing_stays_in_flight)


def finished_twice(rank):
    geometry = Geometry(2, rank, (3, 3), 1, 4, 4)
    exchange = Exchange(SPGroup(torch.distributed.group.WORLD), geometry.exchange("q", 0, (8,)), "layers.7", "q")
    token = exchange.start(torch.zeros(3, 1, 4, 8))
    exchange.finish(token)
    seen = refusal(exchange.finish, token), refusal(exchange.start, torch.zeros(3, 1, 4, 9))
    expected = (
        (
            "RuntimeError",
            "layers.7 q: finished without having been started, or finished twice; gradients of a layer's inputs and of its "
            "weights come of one backward, ask for them together",
        ),
        ("ValueError", "layers.7 q: expected a tensor of shape [3, 1, 4, 8], got [3, 1, 4, 9]"),
    )
    return [] if seen == expected else [str(seen)]


def test_a_half_out_of_place_is_refused():
    no_faults(2, finished_twice)


# Guards.

WATCHED = [
    Watched("packed, so let go", "pass", held_until_finished),
    Watched("the transfer is let go", "in_flight = call.in_flight.get(key)", nothing_stays_in_flight),
    Watched("this half belongs here", "if False:", finished_twice),
    Watched("a failed launch has a name", "except LookupError as error:", launch_that_fails),
]


test_the_suite_notices_without_the_guard = notices(WATCHED)
