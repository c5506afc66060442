"""Moves k and v in two legs, so that each KV head travels over the network once for each node.

    forward    first leg: a piece of k and v       over the network   from start to finish
               second leg: the piece to siblings   inside the node
    backward   second leg: dk and dv, summed       inside the node
               first leg: the sums                 over the network   from start to finish

Where waiting blocks the host (gloo), the second leg is done at the finish in forward, and at the
start in backward: the layer hides the leg over the network.

Note [Once per node]
~~~~~~~~~~~~~~~~~~~~
Where several ranks of a node need the same KV heads, k and v would travel to each of them, over the
network too. With `Geometry.nodes`, they travel in two legs. In the first, these ranks, m
*siblings*, receive a *piece* each: the i-th of them gets the tokens of ranks i, i + m, i + 2m, ..
of the sp group. In the second, siblings give each other their pieces, inside the node. Gradients go
the same way back: siblings sum those of a piece, and send the sum to the ranks that hold its
tokens. The pieces interleave the ranks so that each sibling receives as much over the network as
the others.

Note [Relay stream]
~~~~~~~~~~~~~~~~~~~
On an accelerator both legs are queued at the start, one behind the other, and are hidden together.
Between them one is unpacked and the other is packed. On the compute stream, this would keep compute
waiting for the first leg. So a relay stream takes the place of the compute stream for both legs: it
packs, waits and unpacks. It begins behind what the compute stream holds, whose memory it reads. And
the compute stream goes on when the first leg has been packed and launched. Memory that the relay
stream allocated returns to it before its next start, which comes after all that compute does with
the memory.
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

# Behind the name of an exchange, that of its leg inside a node.
IN_NODE = "@node"


class Legs(NamedTuple):
    """The two legs of k, v or both, in the order in which they travel; and q, if it goes along.

    Attributes:
        first: The layout of the leg that travels first.
        second: That of the other one.
        query: The layout of q, which travels in one leg; None without q.
        is_gradient: Whether gradients travel, so that the leg inside a node is the first.
    """

    first: Layout
    second: Layout
    query: Layout | None
    is_gradient: bool = False

    def gradient(self, needed: Sequence[bool]) -> Legs | None:
        """Return the legs of those gradients that are needed; None if neither dk nor dv is."""
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
        kinds: What the exchange moves, as for `Geometry.exchange`.
        group: The head group.
        head_dims: ``d`` of each.

    Returns:
        The legs; None without k and v, and where no rank has siblings. All ranks find the same.
    """
    # v travels to the ranks that k travels to.
    siblings = [_siblings(geometry, group, rank) for rank in range(geometry.sp_size)]
    if "k" not in kinds and "v" not in kinds or all(len(ranks) == 1 for ranks in siblings):
        return None
    tokens, own = geometry.local_tokens, geometry.sp_rank
    # For each rank: the tokens of its piece, which are those of every m-th rank; and the tokens
    # that the rank holds before and after the second leg, none unless it is a sibling of this rank.
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


def _siblings(geometry: Geometry, group: int, rank: int) -> list[int]:
    """Return the ranks of the node of ``rank`` that are sent the same heads of k and v.

    ``rank`` is among them; alone if it is sent none, or if nodes don't count.
    """
    nodes, heads = geometry.nodes, geometry.sent_range("k", rank, group)
    if nodes is None or heads[0] >= heads[1]:
        return [rank]
    every = [(node, geometry.sent_range("k", other, group)) for other, node in enumerate(nodes)]
    return [other for other, its_own in enumerate(every) if its_own == every[rank]]


class Relayed:
    """A transfer of k, v or both that travels in two legs, and of q beside them in one.

    See Note [Relay stream].

    Args:
        legs: The layouts of the legs.
        sp_group: The sp group.
        name: Name of the exchange.
        xs: The tensors that are sent: q, if it goes along, and those of the first leg.
        checked: Whether to compare each leg with a plain exchange, as for `InFlight`.
        rope: (cos, sin) by which the first leg rotates what it packs.
        rope_back: (cos, sin) by which the second leg rotates back what it unpacks.
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
            # Compute goes on behind the pack: from here on the caller may change ``xs``.
            packed()  # guard: packed, then changed
            # Where waiting blocks the host, the layer hides the leg over the network.
            if legs.is_gradient or not side.blocks:
                self._pass_on()
            if not side.blocks:
                # The relay stream reads this memory, which the compute stream allocated. So the
                # leg that goes last references it until its own finish.
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
        """Order compute after the transfer; return what arrived, as `InFlight.finish` does."""
        query: Sequence[Tensor] = ()
        if self.query is not None:
            with named(self.name, "finish"):
                query = self.query.finish()
        if self.second is not None:
            self._pass_on()
        with named(self.names[1], "finish"):
            return [*query, *self.leg.finish()]
