"""One call of a layer's attention in a chain, which one segment hands to the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..attention.runtime.deferred import Wgrads
from ..attention.runtime.execution import Call
from ..exchange.exchange import Exchange
from ..exchange.layout import chunk_of
from ..rotary import Rotary
from ..schedule import Block, Exchanged, O, Step
from .block_layer import BlockLayer, Options
from .recompute_region import RecomputeRegion
from .saved_attention import OutputExchange, Saved, SavedAttention


class LayerCall:
    """One call of a layer's attention, with the exchanges that are under way to it and from it.

    The segment in front makes and starts its q, k and v, `attend` runs it and starts its o, and the
    segment behind it finishes o. So a call is handed from one segment to the next.

    Attributes:
        layer: The layer.
        call: The geometry, the sp group, and the schedule, which is a `Block`.
        options: What the layer was called with.
        mlp_wgrads: Collects the weight gradients of the MLP behind the attention until all chunks
            are through; None where they are computed chunk by chunk.
        exchanges: Exchanges that were started and not finished.
        tokens: The tokens of autograd of these exchanges.
        region: The region that will recompute this attention in backward; None if none will, and
            once the attention has run.
        is_recomputed: Whether this call recomputes an earlier one, in backward.
        is_idle: Whether the call that this one recomputes never attended, since its q, k and v were
            not used; then they are not sent again.
        saved_attention: What was saved of attention; None if attention is recomputed, or nothing.
        saved_tensors: The tensors that attention's backward reads beside q, k, v and o.
        received_o: For each exchange of o (a head group and a chunk), the o that this rank
            received, and whether it has a gradient; None where the segment behind this attention
            will not be recomputed.
    """

    def __init__(self, layer: BlockLayer, call: Call, options: Options):
        self.layer, self.call, self.options = layer, call, options
        self.mlp_wgrads: Wgrads | None = None
        self.exchanges: dict[Exchanged, Exchange] = {}
        self.tokens: dict[Exchanged, Tensor] = {}
        self.region: RecomputeRegion | None = None
        self.is_recomputed = self.is_idle = False
        self.saved_attention: SavedAttention | None = None
        self.saved_tensors: Saved = {}
        self.received_o: dict[Exchanged, tuple[Tensor, bool]] | None = None

    @property
    def block(self) -> Block:
        """The schedule."""
        assert isinstance(self.call.schedule, Block)
        return self.call.schedule

    def recomputed(self) -> LayerCall:
        """Return a new call that recomputes this one; it shares what was saved and received."""
        made = LayerCall(self.layer, self.call, self.options)
        made.saved_attention, made.saved_tensors = self.saved_attention, self.saved_tensors
        made.received_o, made.is_recomputed = self.received_o, True
        return made

    def finish_o(self, step: Step) -> Tensor:
        """Finish the exchange of one head group's o, for a chunk of tokens, and return it.

        Called by the segment behind the attention, in forward; `saved_o` takes its place where that
        segment is recomputed, for which o is noted.
        """
        key = step.exchange
        o = self.exchanges.pop(key).finish(self.tokens.pop(key))
        if self.received_o is not None:
            self.received_o[key] = o.detach(), o.requires_grad
        return o

    def saved_o(self, step: Step) -> Tensor:
        """Return a chunk of o that forward received, in place of `finish_o` in a recomputation."""
        assert self.received_o is not None
        o, has_gradient = self.received_o[step.exchange]
        if self.saved_attention is None:
            return o.detach().requires_grad_(has_gradient)
        # The chunk goes through the finish of its exchange once more, which sends nothing: its node
        # then saves o anew.
        exchange = self.exchange(step)
        assert isinstance(exchange, OutputExchange)
        exchange.received = o
        return exchange.finish(o.new_empty(0).requires_grad_(has_gradient))

    def exchange(self, step: Step) -> Exchange:
        """Make and note the exchange that a step starts, and do not start it."""
        make: Callable[..., Exchange] = Exchange
        if self.saved_attention is not None and step.tensors == O:
            make = partial(OutputExchange, self.saved_attention, step.exchange)
        dims = (self.layer.attention.head_dim,) * len(step.tensors)
        exchange = self.exchanges[step.exchange] = self.call.exchange(step, dims, make)
        return exchange

    def ranges(self) -> list[tuple[int, int]]:
        """Return for each chunk its range of this rank's tokens, [start, stop)."""
        length = self.call.geometry.seq_lens[self.call.geometry.sp_rank]
        return [chunk_of(length, chunk, self.block.chunks) for chunk in range(self.block.chunks)]

    def rotations(self) -> list[Callable[[Tensor], Tensor] | None]:
        """Return for each chunk the function that rotates its q or k; None for no rotation."""
        attention = self.layer.attention
        rope = attention.inputs.rope
        if rope is None:
            return [None] * self.block.chunks
        assert isinstance(rope, Rotary)
        tables = rope.of(self.options.position_embeddings, attention.head_dim)
        if tables is None:
            return [None] * self.block.chunks
        # The tables broadcast to [b, s/P, h, d] or [s/P, b, h, d]: the dimension of the tokens.
        dim = -3 if attention.batch_first else -4

        def rotation(start: int, stop: int) -> Callable[[Tensor], Tensor]:
            mine = []
            for table in tables:
                # One row for all tokens serves every chunk.
                is_shared = table.dim() < -dim or table.shape[dim] == 1
                mine.append(table if is_shared else table.narrow(dim, start, stop - start))
            return lambda heads: rope.rotate(heads, *mine)

        return [rotation(*tokens) for tokens in self.ranges()]
