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
from itertools import islice
from typing import Any

from torch import Tensor

from .exchange import Exchange
from .in_flight import InFlight, Tables
from .layout import Layout, joint
from .sp_group import SPGroup

# Behind the name of an exchange, that of its leg inside a node.
IN_NODE = "@node"


class RelayedExchange(Exchange):
    """An exchange of k, v or both, in two legs.

    Args:
        legs: The layouts of the legs (`legs.legs_of`).
        exchange: Arguments of `Exchange`. Their layout says what is sent and received in all.
    """

    def __init__(self, legs: tuple[Layout, Layout], *exchange: Any):
        super().__init__(*exchange)
        self.first, self.second = legs

    def start_forward(self, xs: Sequence[Tensor]) -> None:
        side = self.sp_group.streams(xs[0].device)
        with side.relay() as packed:
            first = self._leg(self.first, self.name, rope=self.rope)
            self.forward = first.launch(xs, self.checked)
            # Compute goes on behind the pack: from here on the caller may change ``xs``.
            packed()  # guard: packed, then changed
            if not side.blocks:
                self._pass_on()
                # The relay stream reads this memory, which the compute stream allocated. So the
                # leg that goes last references it until its own finish.
                self.forward.sources = xs  # guard: kept until it travelled

    def finish_forward(self) -> tuple[Tensor, ...]:
        # Where waiting does not block the host, the start has passed the pieces on.
        if self.forward is not None and self.forward.side.blocks:
            self._pass_on()
        return super().finish_forward()

    def _pass_on(self) -> None:
        """Finish the first leg of forward, and launch the second."""
        pieces = super().finish_forward()
        self.forward = self._leg(self.second, self.name + IN_NODE).launch(pieces, self.checked)

    def start_gradient(self, dys: Sequence[Tensor]) -> None:
        name, side = f"d{self.name}", self.sp_group.streams(dys[0].device)
        with side.relay() as packed:
            second = self._leg(self.second.only(self.needed).inverse, name + IN_NODE)
            second.launch(dys, self.checked)
            # Compute goes on behind the pack, as in `start_forward`.
            packed()
            first = self._leg(self.first.only(self.needed).inverse, name, rope_back=self.rope)
            self.gradient = first.launch(second.finish(), self.checked)
            if not side.blocks:
                self.gradient.sources = dys

    def _leg(self, layout: Layout, name: str, **rope: Tables | None) -> InFlight:
        """Make the transfer of a leg; only a leg to or from local tensors rotates (``rope``)."""
        return InFlight(self.sp_group, layout, f"{self.where} {name}", **rope)


class PartlyRelayed(Exchange):
    """An exchange of q, k and v of which q travels in one leg, and k and v in two.

    Args:
        legs: As for `RelayedExchange`.
        sp_group: As for `Exchange`.
        layout: As for `Exchange`; q is the first tensor.
        rest: Further arguments of `Exchange`.

    Each call goes to q's exchange, then to that of k and v, each with its slice of the tensors.
    """

    def __init__(self, legs: tuple[Layout, Layout], sp_group: SPGroup, layout: Layout, *rest: Any):
        super().__init__(sp_group, layout, *rest)
        of_query = Exchange(sp_group, joint(layout.each[:1], layout.apart), *rest)
        of_keys = RelayedExchange(legs, sp_group, joint(layout.each[1:], layout.apart), *rest)
        self._members = (of_query, slice(1)), (of_keys, slice(1, None))

    def start_forward(self, xs: Sequence[Tensor]) -> None:
        for exchange, place in self._members:
            exchange.start_forward(xs[place])

    def finish_forward(self) -> tuple[Tensor, ...]:
        received: list[Tensor] = []
        for exchange, _ in self._members:
            received += exchange.finish_forward()
        return tuple(received)

    def start_gradient(self, dys: Sequence[Tensor]) -> None:
        remaining = iter(dys)
        for exchange, place in self._members:
            exchange.needed = self.needed[place]
            # ``dys`` holds only the gradients that are `needed`, so each member takes its own.
            if any(exchange.needed):
                exchange.start_gradient(list(islice(remaining, sum(exchange.needed))))

    def finish_gradient(self) -> tuple[Tensor | None, ...]:
        gradients = list[Tensor | None]()
        for exchange, _ in self._members:
            if any(exchange.needed):
                gradients += exchange.finish_gradient()
            else:
                gradients += [None] * len(exchange.needed)
        return tuple(gradients)


def relayed(legs: tuple[Layout, Layout], sp_group: SPGroup, layout: Layout, *rest: Any) -> Exchange:
    """Return the exchange whose k and v travel in two legs, with q or without.

    Args:
        legs: As for `RelayedExchange`.
        sp_group: As for `Exchange`.
        layout: As for `Exchange`; q is the first tensor, if it travels too.
        rest: Further arguments of `Exchange`.
    """
    has_query = len(layout.each) > len(legs[0].each)
    return (PartlyRelayed if has_query else RelayedExchange)(legs, sp_group, layout, *rest)
