"""Moves k and v in two legs, so that each KV head travels over the network once for each node.

    forward    first leg: a piece of k and v       over the network   from start to finish
               second leg: the piece to siblings   inside the node
    backward   second leg: dk and dv, summed       inside the node
               first leg: the sums                 over the network   from start to finish

Where waiting blocks the host (gloo), the layer hides only the leg over the network. The leg inside
the node runs at the finish in forward, and at the start in backward.

Note [Once per node]
~~~~~~~~~~~~~~~~~~~~
Let m ranks of a node, called *siblings*, need the same KV heads. In one leg, k and v would travel
to each sibling, over the network too. With `Geometry.nodes`, k and v travel in two legs. In the
first leg, each sibling receives a *piece*: the i-th sibling gets the tokens of ranks i, i + m,
i + 2m, .. of the sp group. In the second leg, siblings send each other their pieces, inside the
node. Gradients take the reverse way: each sibling sums the gradients of its piece, and sends the
sum to the ranks that hold the piece's tokens. The pieces interleave the ranks, so that all siblings
receive equally much over the network.

Note [Relay stream]
~~~~~~~~~~~~~~~~~~~
On an accelerator both legs are queued at the start, one after the other, and are hidden together.
Between them, the first leg is unpacked and the second is packed. On the compute stream, these
copies would make compute wait for the first leg. So a relay stream takes the place of the compute
stream for both legs: it packs, waits and unpacks. The relay stream first waits for the work that is
on the compute stream, since it reads the results of that work. The compute stream waits until the
first leg has been packed and launched. The relay stream reuses its memory only at its next start.
This start waits for all use of that memory on the compute stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from torch import Tensor

from ..profiling.ranges import named
from .geometry import Geometry
from .in_flight import InFlight, Tables
from .layout import Layout, between
from .sp_group import SPGroup

# The suffix of an exchange's name for its leg inside a node.
IN_NODE = "@node"


class Legs(NamedTuple):
    """Holds the layouts of the two legs of k, v or both, and of q if q travels with them.

    Attributes:
        first: The layout of the leg that travels first.
        second: The layout of the leg that travels second.
        query: The layout of q, which travels in one leg; None without q.
        is_gradient: Whether gradients travel; ``first`` is then the leg inside a node.
    """

    first: Layout
    second: Layout
    query: Layout | None
    is_gradient: bool = False

    def gradient(self, needed: Sequence[bool]) -> Legs | None:
        """Return the legs of the needed gradients; None if neither dk nor dv is needed."""
        query, of_kv = self.query, needed
        if query is not None:
            query, of_kv = query.inverse if needed[0] else None, needed[1:]
        if not any(of_kv):
            return None
        return Legs(self.second.only(of_kv).inverse, self.first.only(of_kv).inverse, query, True)


@lru_cache(maxsize=4096)
def legs_of(
    geometry: Geometry, kinds: tuple[str, ...], group: int, head_dims: tuple[int, ...]
) -> Legs | None:
    """Lay out the two legs of k and v of an exchange, see Note [Once per node].

    Args:
        geometry: Which heads of which tokens each rank holds.
        kinds: The tensors that the exchange moves, as for `Geometry.exchange`.
        group: The head group.
        head_dims: ``d`` of each tensor.

    Returns:
        The legs; None if neither k nor v travels, no rank has siblings, or `Geometry.nodes` is
        None. All ranks agree on None.
    """
    # Siblings are the ranks of a node that receive the same heads of k, and so of v. A rank that
    # receives no head has no siblings.
    places = []
    for rank, node in enumerate(geometry.nodes or ()):
        start, stop = geometry.sent_range("k", rank, group)
        places.append((node, start, stop) if start < stop else (rank,))
    siblings = []
    for place in places:
        siblings.append([rank for rank, other in enumerate(places) if other == place])
    if "k" not in kinds and "v" not in kinds or all(len(ranks) == 1 for ranks in siblings):
        return None
    tokens, own = geometry.local_tokens, geometry.sp_rank
    # For each rank: its piece, the tokens of every m-th rank; and the tokens that it holds before
    # and after the second leg, none if it is no sibling of this rank.
    pieces, before, after = [], [], []
    for rank, ranks in enumerate(siblings):
        pieces.append(tokens[ranks.index(rank) :: len(ranks)])
        before.append(pieces[rank] if rank in siblings[own] else ())
        after.append(tokens if rank in siblings[own] else ())
    first, second, query = [], [], None
    for kind, dim in zip(kinds, head_dims):
        if kind == "q":
            query = geometry.exchange("q", group, (dim,))
            continue
        held = partial(geometry.received, kind, group, dim)
        first.append(between(own, geometry.sent(kind, group, dim), held(pieces)))
        second.append(between(own, held(before), held(after)))
    return Legs(Layout.of(first), Layout.of(second), query)


class Relayed:
    """Holds a transfer in flight of k, v or both in two legs, and of q in one leg.

    See Note [Relay stream].

    Args:
        legs: The layouts of the legs.
        sp_group: The sp group.
        name: Name of the exchange.
        xs: The tensors that are sent: q, if ``legs.query`` is given, then k, v or their gradients.
        checked: Whether to compare each leg with a plain exchange (``sp_overlap.check``).
        rope: (cos, sin) by which the pack of the first leg rotates; None for no rotation.
        rope_back: (cos, sin) by which the unpack of the second leg rotates back; None for no
            rotation.
    """

    def __init__(
        self,
        legs: Legs,
        sp_group: SPGroup,
        name: str,
        xs: Sequence[Tensor],
        checked: bool = False,
        rope: Tables | None = None,
        rope_back: Tables | None = None,
    ):
        self.query: InFlight | None = None
        if legs.query is not None:
            with named(name, "start"):
                self.query = InFlight(legs.query, sp_group, name, xs[:1], checked)
            xs = xs[1:]
        names = [name + IN_NODE, name] if legs.is_gradient else [name, name + IN_NODE]
        self.sp_group, self.name, self.names, self.checked = sp_group, name, names, checked
        self.second: Layout | None = legs.second
        self.rope_back, side = rope_back, sp_group.streams(xs[0].device)
        with side.relay() as packed:
            with named(names[0], "start"):
                self.leg = InFlight(legs.first, sp_group, names[0], xs, checked, rope)
            # Compute waits for the pack; after that the caller may change ``xs``.
            packed()  # guard: packed, then changed
            # If waiting blocks the host, the layer hides only the leg over the network.
            if legs.is_gradient or not side.blocks:
                self._pass_on()
            if not side.blocks:
                # The relay stream reads ``xs``, which the compute stream allocated. So the second
                # leg references ``xs`` until its finish.
                self.leg.sources = xs  # guard: kept until it travelled

    def _pass_on(self) -> None:
        """Finish the first leg, and launch the second."""
        first, second = self.names
        assert self.second is not None
        with named(first, "finish"):
            pieces = self.leg.finish()
        with named(second, "start"):
            self.leg = InFlight(
                self.second, self.sp_group, second, pieces, self.checked, rope_back=self.rope_back
            )
        self.second = None

    def finish(self) -> Sequence[Tensor]:
        """Order compute after the transfer; return the received tensors, in the order of ``xs``."""
        query: Sequence[Tensor] = ()
        if self.query is not None:
            with named(self.name, "finish"):
                query = self.query.finish()
        if self.second is not None:
            self._pass_on()
        with named(self.names[1], "finish"):
            return [*query, *self.leg.finish()]
