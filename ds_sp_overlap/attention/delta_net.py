"""A gated delta net: between its projections and its gated norm every token meets all before it,
head by head.

It is grouped-query attention in a mirror. v has the many heads, each with a rate b and a decay a; q
and k have the few, each for several heads of v. So in geometry and schedule v, with b and a behind
it, takes the place of q, and q that of v:

    travels as    q          k    v    o
    what          v, b, a    k    q    o      started and finished in the order of `schedule`

z, the gate of the output, stays where it is, and is projected while the others travel. Over the
whole sequence, with this rank's heads, come a causal convolution of q, k and v, and the delta rule.
What these learn is cut by heads: the gradient on a rank is zero for the heads of others, and the
sum over the sp group, which is made of every gradient, is the whole one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..exchange.geometry import Geometry
from .layer import LayerRuntime, with_head_dim
from .runtime.execution import Call
from .runtime.recorded import Recorded, join_heads
from .runtime.slices import Ranges, cut

Mix = Callable[..., Tensor]


class DeltaNet:
    """A gated delta net under sequence parallelism; holds no module and no parameter.

    heads, head_dim     of v and o: h, d_v
    key_heads, key_dim  of q and k: h_k, which divides h, and d_k
    project             hidden states [b, s/P, m] -> what gives, asked for once each, "q" and "k"
                        [b, s/P, h_k, d_k], "v" and "z" [b, s/P, h, d_v], "b" and "a" [b, s/P, h]
    merge               o and z -> what is returned
    learned             parameters: taps [h_k d_k + h_k d_k + h d_v, ..] of the channels of q, k and
                        v, and any of [h]
    trained             of each parameter of the layer whether it learns, which ranks must agree on

    Each rank has at least one head of v. A head of q and k travels to every rank that has a head of
    v that it is for.
    """

    def __init__(
        self,
        layer: LayerRuntime,
        *,
        heads: int,
        head_dim: int,
        key_heads: int,
        key_dim: int,
        project: Callable[[Tensor], Callable[[str], Tensor]],
        merge: Callable[[Tensor, Tensor], Tensor],
        learned: Callable[[], tuple[Tensor, ...]],
        trained: Callable[[], list[bool]],
    ):
        self.layer = layer
        self.heads, self.head_dim, self.key_heads, self.key_dim = (
            heads,
            head_dim,
            key_heads,
            key_dim,
        )
        self.project, self.merge, self.learned, self.trained = project, merge, learned, trained

    @torch.compiler.disable
    def __call__(
        self, hidden_states: Tensor, mix: Mix, sequence_lengths: list[int] | None = None
    ) -> Tensor:
        """
        hidden_states     [b, s/P, m]
        mix               k and q [b, s, h_k', d_k], v with b and a behind it [b, s, h', d_v + 2] of
                          some heads and the whole sequence, and their part of what is `learned` ->
                          o [b, s, h', d_v]; once per head group
        sequence_lengths  local length of every rank, where they are not all the same
        """
        run, call = self.layer.begin(
            lambda: self._describe(hidden_states, sequence_lengths), (hidden_states,), None, False
        )
        assert call is not None  # no baseline computes this
        (x,) = run.inputs
        return run.end(self._overlapped(call, x, mix))

    def _overlapped(self, call: Call, x: Tensor, mix: Mix) -> Tensor:
        geometry, made = call.geometry, self.project(x)
        parts: dict[tuple[str, int], Tensor] = {}

        def project(kind: str, group: int) -> Tensor:
            if (kind, group) not in parts:
                those = [part for part in call.schedule.parts if part[0] == kind]
                parts.update(
                    zip(
                        those,
                        cut(
                            _as_it_travels(kind, made),
                            2,
                            [geometry.heads_of(*part) for part in those],
                        ),
                    )
                )
            return parts.pop((kind, group))

        taps, *per_head = self.learned()
        of_groups = [cut(taps, 0, [self._channels(geometry, group) for group in call.groups])]
        own = [geometry.query_range(geometry.sp_rank, group) for group in call.groups]
        of_groups += [
            cut(parameter, 0, [(heads,) for heads in own]) for parameter in per_head
        ]  # guard: decays of their own

        def attend(group: int, vba: Tensor, k: Tensor, q: Tensor) -> Tensor:
            return with_head_dim(
                mix(q, k, vba, *(parts[group] for parts in of_groups)), vba, self.layer.where
            )

        runner = Recorded(call, attend, project)
        runner.walk(call.schedule.inputs)
        z = made("z")
        runner.walk((*call.schedule.attention, *call.schedule.output))
        o = join_heads(call, runner.outputs)
        return self.merge(o, z)

    def _channels(self, geometry: Geometry, group: int) -> Ranges:
        """Rows of the taps of the heads that ``mix`` is called with for ``group`` on this rank: of
        q, of k, of v.
        """
        first, last = geometry.kv_range(geometry.sp_rank, group)
        index, keys = geometry.kv_expansion(group), self.key_heads * self.key_dim
        heads = (
            ((first, last),)
            if index is None
            else tuple((first + at, first + at + 1) for at in index)
        )
        of_q = tuple((start * self.key_dim, stop * self.key_dim) for start, stop in heads)
        start, stop = geometry.query_range(geometry.sp_rank, group)
        of_v = 2 * keys + start * self.head_dim, 2 * keys + stop * self.head_dim
        return (
            *of_q,
            *((keys + start, keys + stop) for start, stop in of_q),
            of_v,
        )  # guard: taps of their own

    def _describe(
        self, hidden: Tensor, lengths: list[int] | None
    ) -> tuple[Geometry, Callable[[], tuple]]:
        if hidden.dim() != 3:
            raise ValueError(f"hidden_states must be 3-D, [b, s/P, m], got {list(hidden.shape)}")
        geometry = self.layer.geometry(hidden, self.heads, self.key_heads, True, lengths, ())

        def types() -> tuple:
            learns = [
                torch.is_grad_enabled() and trained
                for trained in (hidden.requires_grad, *self.trained())
            ]
            return (
                str(hidden.dtype),
                self.key_dim,
                self.head_dim,
                "gradients of hidden states and parameters",
                learns,
            )

        return geometry, types


def _as_it_travels(kind: str, made: Callable[[str], Tensor]) -> Tensor:
    if kind != "q":
        return made({"k": "k", "v": "q"}[kind])
    return torch.cat([made("v"), made("b").unsqueeze(-1), made("a").unsqueeze(-1)], -1)
