"""The schedule of an attention layer: program order, and nothing else.

Forward with two head groups, as it is written in `overlapped` (a wire carries one exchange at a time):

    compute | Wq0 Wk0 Wv0 Wq1 Wk1 Wv1 | attention 0 | attention 1 | Wo0 | Wo1 |
    wire    |     q0  k0  v0  q1  k1    v1            o0            o1

Backward, which falls out of it (autograd runs nodes that are ready in the reverse order of their creation):

    compute | Wo1 dgrad | Wo0 dgrad | Wo wgrad | attention 1 | attention 0 | Wv1 Wk1 Wq1 | Wv0 Wk0 Wq0 |
    wire    |             do1         do0        .             dv1 dk1 dq1   dv0 dk0 dq0

With one group (a rank with one query head has no choice) v, o and dv have only each other to hide behind:

    compute | Wq Wk Wv |       | attention |      | Wo |      | Wo dgrad | Wo wgrad |     | attention | Wv | Wk | Wq |
    wire    |    q  k    v                   o                             do                           dv   dk   dq

The starts and finishes in the order that is drawn (``>`` start, ``<`` finish), which a test holds against a recording:

    G = 1   forward    >q >k >v <q <k <v >o <o
            backward   >do <do >dv >dk >dq <dv <dk <dq
    G = 2   forward    >q0 >k0 >v0 >q1 >k1 >v1 <q0 <k0 <v0 >o0 <q1 <k1 <v1 >o1 <o0 <o1
            backward   >do1 >do0 <do1 >dv1 >dk1 >dq1 <do0 >dv0 >dk0 >dq0 <dv1 <dk1 <dq1 <dv0 <dk0 <dq0
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from .channel import Channel
from .clock import named
from .exchange import Exchange, finish_together
from .layout import Geometry


class Call:
    """One call of one attention layer: its geometry and its exchanges.

    channel    the sp group
    geometry   who holds what
    where      name of the layer, for errors and logs
    checked    compare each exchange with a plain one
    by_rank    those of q, k, v and o whose local tensors have a dimension for the ranks (`Geometry.exchange`)
    turn       (cos, sin) for q and k to be rotated by on their way out (`Exchange`)
    """

    by_rank: frozenset[str] = frozenset()
    turn: tuple[Tensor, Tensor] | None = None

    def __init__(self, channel: Channel, geometry: Geometry, where: str, checked: bool = False):
        self.channel, self.geometry, self.where, self.checked = channel, geometry, where, checked
        self.groups = range(geometry.groups)
        self.parts = geometry.parts
        self.exchanges: dict[tuple[str, int], Exchange] = {}  # that were started, by kind and group

    def start(self, kind: str, group: int, x: Tensor, *of: Tensor) -> Tensor:
        """Start the exchange of one group of q, k, v or o, which was computed ``of`` others; returns its token."""
        layout = self.geometry.exchange(kind, group, x.shape[-1], kind in self.by_rank)
        what = kind if self.geometry.groups == 1 else f"{kind}{group}"
        turn = self.turn if kind in "qk" else None
        exchange = self.exchanges[kind, group] = Exchange(self.channel, layout, self.where, what, self.checked, turn)
        return exchange.start(x, *of)

    def finish(self, kinds: str, group: int, tokens: list[Tensor]) -> tuple[Tensor, ...]:
        """Finish exchanges of a group; returns what was received."""
        return finish_together([self.exchanges[kind, group] for kind in kinds], tokens)

    def named(self, what: str, group: int) -> Any:
        """A range of a profiler, named as in the drawing above."""
        return named(self.where, what + str(group) if self.geometry.groups > 1 else what.rstrip())

    def with_kv(self, group: int, received: dict[int, Tensor]) -> Tensor:
        """The KV heads that a group attends to, put together from the pieces that arrived with it or before it."""
        pieces = [
            received[sent] if stop - start == received[sent].shape[2] else received[sent].narrow(2, start, stop - start)
            for sent, start, stop in self.geometry.kv_pieces(group)
        ]
        heads = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
        index = self.geometry.kv_expansion(group)
        return heads if index is None else heads.index_select(2, torch.tensor(index, device=heads.device))

    def attended(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``attend(q, k, v)`` of a group, which may change in place what no other group reads, on whatever rank.

        Raises RuntimeError if it changes k or v where there are KV heads that two groups share.
        """
        if group == self.groups[-1] or not self.geometry.kv_is_shared:
            return attend(q, k, v)
        if k.is_inference():  # nobody counts its versions
            return attend(q, k.clone(), v.clone())
        before = k._version, v._version
        o = attend(q, k, v)
        if (k._version, v._version) != before:
            raise RuntimeError(
                f"{self.where}: local attention changes k or v in place, and another head group attends to them as well; have it "
                "change a copy (k = k * scale), or set sp_overlap.head_groups to 1"
            )
        return o


Project = Callable[[str, int], Tensor]
Merge = Callable[[int, Tensor], None]


def overlapped(
    call: Call,
    inputs: Callable[[Callable[[Project], list[Tensor]]], list[Tensor]],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    output: Callable[[list[Tensor], Callable[[list[Tensor], Merge], None]], Tensor],
    arrive: Callable[[str, Tensor], Tensor] | None = None,
) -> Tensor:
    """Run an attention layer in the order drawn above.

    inputs   runs a program in a place where ``project(kind, group)`` gives q, k or v of a group, ``[s/P, b, h_g, d]``
    arrive   what is done with q, k or v on arrival, ``[s, b, h_g/P, d]``; RoPE where the caller wants it after the exchange
    attend   q, k, v -> o of a group, ``[s, b, h_g/P, d]`` each
    output   runs a program in a place where ``merge(group, o)`` takes o of a group, ``[s/P, b, h_g, d]``; gives the result

    Collective: every rank of the sp group calls it with the same layer at the same time.
    """

    def start_inputs(project: Project) -> list[Tensor]:
        tokens = []
        for kind, group in call.parts:
            with call.named(f"W{kind}", group):
                x = project(kind, group)
            tokens.append(call.start(kind, group, x))
        return tokens

    tokens = dict(zip(call.parts, inputs(start_inputs)))

    keys, values, started = {}, {}, []
    for group in call.groups:
        received = {}
        for kinds in (call.geometry.kinds_of(group),) if arrive is None else call.geometry.kinds_of(group):
            received.update(zip(kinds, call.finish(kinds, group, [tokens[kind, group] for kind in kinds])))
            if arrive is not None:  # under the exchanges that are still on their way
                received[kinds] = arrive(kinds, received[kinds])
        q = received.pop("q")
        if received:
            keys[group], values[group] = received["k"], received["v"]
        qkv = q, call.with_kv(group, keys), call.with_kv(group, values)
        with call.named("attention ", group):
            o = call.attended(attend, group, *qkv)
        started.append(call.start("o", group, o, *qkv))
        del qkv  # before the next are put together

    def finish_output(tokens: list[Tensor], merge: Merge) -> None:
        for group in call.groups:
            (o,) = call.finish("o", group, [tokens[group]])
            with call.named("Wo", group):
                merge(group, o)

    return output(started, finish_output)
