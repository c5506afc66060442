"""Moves k and v in two legs, so that each KV head travels over the network once for each node.

    forward    first leg: a piece of k and v       over the network   from start to finish
               second leg: the piece to siblings   inside the node
    backward   second leg: dk and dv, summed       inside the node
               first leg: the sums                 over the network   from start to finish

See Note [Once per node] in `legs`. Where waiting blocks the host (gloo), the second leg is done
at the finish in forward, and at the start in backward: the layer hides the leg over the network.

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
from typing import Any

from torch import Tensor

from ..profiling.ranges import named
from .in_flight import InFlight, Tables
from .layout import Layout, joint
from .legs import Legs
from .sp_group import SPGroup

# Behind the name of an exchange, that of its leg inside a node.
IN_NODE = "@node"


class Relayed:
    """A transfer of k, v or both that travels in two legs, see Note [Relay stream].

    Args:
        legs: The layouts of the legs.
        sp_group: As for `InFlight`, as are all arguments that follow.
        name: Of the exchange.
        xs: What the first leg sends.
        checked: As said.
        rope: (cos, sin) by which the first leg rotates.
        rope_back: (cos, sin) by which the second leg rotates back.
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
        names = [name + IN_NODE, name] if legs.is_gradient else [name, name + IN_NODE]
        self.sp_group, self.names, self.checked = sp_group, names, checked
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
        if self.second is not None:
            self._pass_on()
        with named(self.names[1], "finish"):
            return self.leg.finish()


class PartlyRelayed:
    """A transfer of q, k and v of which q travels in one leg, and k or v, or both, in two.

    Args:
        layout: The layout of all; q is the first tensor.
        legs: The legs of k and v.
        rest: Further arguments of `InFlight`.
    """

    def __init__(
        self,
        layout: Layout,
        legs: Legs,
        sp_group: SPGroup,
        name: str,
        xs: Sequence[Tensor],
        *rest: Any,
    ):
        self.name, of_query = name, joint(layout.each[:1], layout.apart)
        with named(name, "start"):
            self.query = InFlight(of_query, sp_group, name, xs[:1], *rest)
        self.keys = Relayed(legs, sp_group, name, xs[1:], *rest)

    def finish(self) -> Sequence[Tensor]:
        """Order compute after both; return what arrived, as `InFlight.finish` does."""
        with named(self.name, "finish"):
            query = self.query.finish()
        return [*query, *self.keys.finish()]
