"""Runs a gated delta net, which mixes tokens head by head, under sequence parallelism.

Between the projections and the gated norm of a gated delta net every token meets all tokens before
it. The layer is grouped-query attention with the roles of q and v exchanged: v has the many heads,
each with a rate b and a decay a; q and k have the few heads, each for several heads of v. So in
geometry and schedule v takes the place of q, with b and a appended to it, and q takes the place of
v:

    travels as    q          k    v    o
    tensor        v, b, a    k    q    o      started and finished in the order of `schedule`

z, the gate of the output, does not travel; it is projected while the others travel. On the global
sequence, with this rank's heads, run a causal convolution of q, k and v, and the delta rule. Their
parameters are cut by heads: the gradient on a rank is zero for the heads of other ranks, see
Note [Gradients of parts] in `latent`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..exchange.geometry import Geometry
from ..schedule import Part
from .call_geometry import geometry_of
from .layer import LayerRuntime
from .runtime.execution import Call
from .runtime.parts import cut, cut_heads, join_heads
from .runtime.plan import pieces_of
from .runtime.slices import Ranges
from .runtime.walk import Walk

# See `DeltaNet.__call__`.
Mix = Callable[..., Tensor]


@dataclass(eq=False)
class DeltaNet:
    """A gated delta net under sequence parallelism; holds no module and no parameter.

    Each rank has at least one head of v. A head of q and k travels to every rank that has one of
    its heads of v.

    Attributes:
        layer: The runtime of the layer.
        heads: Heads of v and o, ``h``.
        head_dim: Head dim of v and o, ``d_v``.
        key_heads: Heads of q and k, ``h_k``, which divides ``h``.
        key_dim: Head dim of q and k, ``d_k``.
        project: Takes hidden states [b, s/P, m], and returns a function that gives each of these
            tensors once by its name: "q" and "k" [b, s/P, h_k, d_k], "v" and "z" [b, s/P, h, d_v],
            "b" [b, s/P, h], "a" [b, s/P, h], or a decay for each channel [b, s/P, h, n].
        merge: o and z -> the layer's output.
        learned: Gives the parameters of convolution and delta rule: the taps
            [2 h_k d_k + h d_v, ..] of the channels of q, k and v, then any number of tensors
            [h, ..].
        trained: Tells for each parameter of the layer whether it learns; the ranks must agree.
    """

    layer: LayerRuntime
    heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    project: Callable[[Tensor], Callable[[str], Tensor]]
    merge: Callable[[Tensor, Tensor], Tensor]
    learned: Callable[[], tuple[Tensor, ...]]
    trained: Callable[[], list[bool]]

    @torch._disable_dynamo
    def __call__(
        self, hidden_states: Tensor, mix: Mix, sequence_lengths: list[int] | None = None
    ) -> Tensor:
        """Mix the tokens of the global sequence.

        Collective.

        Args:
            hidden_states: [b, s/P, m].
            mix: Called once per head group, on the global sequence, with h' of this rank's heads
                of v: q and k [b, s, h_k', d_k], v with b and a behind it [b, s, h', ..], and
                their slices of the tensors of ``learned`` -> o [b, s, h', d_v].
            sequence_lengths: Local sequence length of every rank; None if all are the same.

        Returns:
            The result of ``merge``.

        Raises:
            ValueError: for tensors that don't fit; on all ranks alike in the layer's first call.
        """

        def describe() -> tuple[Geometry, Callable[[], tuple]]:
            """Describe the call, see `layer.Describe`."""
            if hidden_states.dim() != 3:
                got = list(hidden_states.shape)
                raise ValueError(f"hidden_states must be 3-D, [b, s/P, m], got {got}")
            geometry = geometry_of(
                self.layer,
                hidden_states,
                self.heads,
                self.key_heads,
                True,
                lengths=sequence_lengths,
                extra=(),
                attend="a gated delta net needs all queries at once",
            )

            def types() -> tuple:
                trained = (hidden_states.requires_grad, *self.trained())
                learns = [torch.is_grad_enabled() and one_learns for one_learns in trained]
                words = "gradients of hidden states and parameters"
                return str(hidden_states.dtype), self.key_dim, self.head_dim, words, learns

            return geometry, types

        run, call = self.layer.begin(describe, (hidden_states,))
        # Only a baseline runs without a call, and a delta net has none.
        assert call is not None
        (x,) = run.inputs
        return run.end(self._overlapped(call, x, mix))

    def _overlapped(self, call: Call, x: Tensor, mix: Mix) -> Tensor:
        """Walk the schedule of ``call``; return the layer's output."""
        geometry, projected = call.geometry, self.project(x)
        pieces: dict[Part, Tensor] = {}

        def project(kind: str, group: int) -> Tensor:
            # The first group that asks has all groups projected.
            if (kind, group) not in pieces:
                pieces.update(cut_heads(call, kind, _travelling(kind, projected)))
            return pieces.pop((kind, group))

        taps, *per_head = self.learned()
        # For each parameter, its slices for each group on this rank: the taps by channels, the
        # others by heads of v.
        slices = [cut(taps, 0, [self._channels(geometry, group) for group in call.groups])]
        own = [geometry.query_range(geometry.sp_rank, group) for group in call.groups]
        parts: list[Ranges] = [(heads,) for heads in own]
        slices += [cut(parameter, 0, parts) for parameter in per_head]  # guard: decays of their own

        def attend(group: int, vba: Tensor, k: Tensor, q: Tensor) -> Tensor:
            return mix(q, k, vba, *(of_groups[group] for of_groups in slices))

        walk = Walk(call, x, pieces_of(call.schedule, False, False), attend, project)
        walk.run("inputs")
        # z is projected here, while the exchanges that were started are under way.
        z = projected("z")
        walk.run("attention", "output")
        o = join_heads(call, walk.values)
        return self.merge(o, z)

    def _channels(self, geometry: Geometry, group: int) -> Ranges:
        """Return the rows of the convolution's weight for q, k and v of a group on this rank.

        Called once a group in each call. The query heads of the geometry are those of v; its KV
        heads are those of k, which q has, too (see the top).
        """
        first, last = geometry.kv_range(geometry.sp_rank, group)
        index, keys = geometry.kv_expansion(group), self.key_heads * self.key_dim
        heads = [(first, last)]
        # Where no regular ratio assigns heads of v to those of q and k, `with_kv` has repeated the
        # latter, one for each head of v. Their rows are repeated alike.
        if index is not None:
            heads = [(first + offset, first + offset + 1) for offset in index]
        of_q = [(start * self.key_dim, stop * self.key_dim) for start, stop in heads]
        of_k = [(keys + start, keys + stop) for start, stop in of_q]  # guard: taps of their own
        start, stop = geometry.query_range(geometry.sp_rank, group)
        of_v = 2 * keys + start * self.head_dim, 2 * keys + stop * self.head_dim
        return (*of_q, *of_k, of_v)


def _travelling(kind: str, projected: Callable[[str], Tensor]) -> Tensor:
    """Return the tensor that travels as ``kind``, with a dimension of heads; see the top."""
    if kind != "q":
        return projected({"k": "k", "v": "q"}[kind])
    v, rate, decay = projected("v"), projected("b"), projected("a")
    decay = decay.unsqueeze(-1) if decay.dim() == 3 else decay
    return torch.cat([v, rate.unsqueeze(-1), decay], -1)
