"""Computes the memory of each step of a layer, from the layer's shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ...exchange.geometry import Geometry
from ...exchange.layout import Layout
from ...schedule import Schedule, Step
from .memory import Tensor, memory_bytes


@dataclass(frozen=True)
class LayerShape:
    """Shape of a transformer layer.

    Attributes:
        width: Model dim ``m``.
        heads: Query heads, ``h``.
        kv_heads: KV heads, ``h_kv``.
        head_dim: ``d``.
        seq: Global sequence, in tokens; divides by the sp size.
        sp_size: ``P``.
        batch: ``b``.
        element_bytes: Bytes of an element that is exchanged.
        intermediate: Width of a gated MLP, which counts towards the layer's time and hides nothing;
            0: the attention layer alone.
        shares: Ranks that share their query heads, ``r``.

    Raises:
        ValueError: where no sp group of this size can hold the layer.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    sp_size: int
    batch: int = 1
    element_bytes: int = 2
    intermediate: int = 0
    shares: int = 1

    def __post_init__(self) -> None:
        if self.seq % self.sp_size:
            raise ValueError(
                f"{self.seq} tokens do not divide by sp size {self.sp_size}; take a multiple of it"
            )
        self.geometry(1)

    def geometry(self, groups: int) -> Geometry:
        """Return the geometry of rank 0 with ``groups`` head groups."""
        lengths = (self.seq // self.sp_size,) * self.sp_size
        heads = self.heads, self.kv_heads, groups
        return Geometry(self.sp_size, 0, lengths, self.batch, *heads, shares=self.shares)


@dataclass(frozen=True)
class Rates:
    """Rates of one GPU.

    Attributes:
        matmul: FLOP/s of projections and of the MLP.
        attention: FLOP/s of causal attention; the masked half is not counted as work.
        wire: bytes/s that a rank sends to the others in an all-to-all, while it receives as many.
        latency_ms: Duration of an empty exchange, in ms; the default is assumed.
    """

    matmul: float
    attention: float
    wire: float
    latency_ms: float = 0.02


class Sizes:
    """Memory of a layer in G head groups on rank 0, the rank with the most heads."""

    def __init__(self, layer: LayerShape, groups: int):
        self.layer, self.geometry = layer, layer.geometry(groups)

    def memory_bytes(self, schedule: Schedule, is_baseline: bool = False) -> list[int]:
        """Return the most bytes in memory during each step, without x, dy and the weights.

        Args:
            schedule: The order of the steps.
            is_baseline: Whether the layer is DeepSpeed's own, whose forward has variables for q, k
                and v, so that they live until forward returns.

        Returns:
            Bytes for each step of forward; then what waits for backward while the rest of the model
            runs; then bytes for each step of backward.
        """

        def kv_groups_of(group: int) -> list[int]:
            return [sent for sent, _, _ in self.geometry.kv_pieces(group)]

        return memory_bytes(schedule, cache(self.size), kv_groups_of, is_baseline)

    def size(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor on rank 0, whose role is one of the table in `memory`; 0
        for roles that take no memory.
        """
        role, name, group, _, exchange = tensor
        layer = self.layer
        if exchange is not None:
            # A buffer; none where the tensor itself has the layout of the transfer.
            layout = self._exchange(exchange)
            end = layout.source if role == "send" else layout.target
            if not layout.also and end.is_wire_layout:
                return 0
            sides = layout.sources if role == "send" else layout.targets
            return sides.elements * layer.element_bytes
        x = self._tokens * layer.width * layer.element_bytes
        if role in ("y", "dx"):
            return x
        # The next term of dx takes memory until it is added; terms of several groups are added in
        # place.
        if role == "more dx" and self.geometry.groups == 1:
            return x
        # Bytes of one head of one token.
        head = layer.head_dim * layer.element_bytes
        if role == "dW":
            return layer.width * head * (layer.kv_heads if name in ("k", "v") else layer.heads)
        if role not in ("local", "rows", "global", "more global", "lse", "work"):
            return 0
        kind = "q" if name == "o" else name
        if role == "rows":
            return layer.width * self._local_heads(kind, group) * head
        if role == "local":
            return self._tokens * self._local_heads(kind, group) * head
        start, stop = self.geometry.sent_range(kind, 0, group)
        heads = self._global_tokens(kind) * layer.batch * (stop - start)
        if role == "lse":
            return heads * max(4, layer.element_bytes)
        if role == "work":
            return self._work(heads * layer.head_dim)
        return heads * head

    def _work(self, elements: int) -> int:
        """Return the bytes that the backward of attention allocates for ``elements`` of q."""
        layer = self.layer
        # Other elements have no kernel for GPUs; PyTorch's kernel for CPU allocates a few blocks.
        if layer.element_bytes != 2:
            return 0
        # flash-attn's backward sums dq in fp32, of 4 bytes. Where query heads share KV heads, it
        # makes dk and dv for each query head.
        return elements * (4 + 2 * layer.element_bytes * (layer.heads != layer.kv_heads))

    @property
    def _tokens(self) -> int:
        """Tokens of this rank, in all sequences of the batch."""
        return self.layer.seq // self.layer.sp_size * self.layer.batch

    def _global_tokens(self, kind: str) -> int:
        """Tokens of q, k or v on the global side of an exchange, in one sequence."""
        if kind != "q":
            return self.layer.seq
        return sum(stop - start for start, stop in self.geometry.own_queries)

    def _local_heads(self, kind: str, group: int) -> int:
        """Heads of q, k or v that leave a rank with a group."""
        return sum(stop - start for start, stop in self.geometry.heads_of(kind, group))

    def _exchange(self, step: Step) -> Layout:
        """Return the layout of an exchange; what travels beside do travels as do does."""
        kinds = (*step.beside, *step.tensors)
        dims = (self.layer.head_dim,) * len(kinds)
        layout = self.geometry.exchange(kinds, step.group, dims)
        return layout.inverse if step.grad else layout


# The windows (G, W) that `plan` shows. Windows of more groups save little memory.
WINDOWS = ((2, 1), (4, 1), (4, 2), (8, 1), (8, 2))
