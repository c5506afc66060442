"""What the steps of a layer take and hold, by arithmetic from its shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..exchange.geometry import Geometry
from ..exchange.layout import Layout
from ..schedule import MLP, Played, Schedule, Step, Tensor, by_head_groups, by_window, held, play


@dataclass(frozen=True)
class LayerShape:
    """Shape of a transformer layer. Raises ValueError where no sp group of this size can hold it.

    width           model dim m
    heads, kv_heads, head_dim
    seq             global sequence, tokens; divides by the sp size
    sp_size         P
    batch
    element_bytes   of what is exchanged
    intermediate    width of a gated MLP that shares the layer's time and hides nothing; 0: the attention layer alone
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

    def __post_init__(self) -> None:
        if self.seq % self.sp_size:
            raise ValueError(f"{self.seq} tokens do not divide by sp size {self.sp_size}; take a multiple of it")
        self.geometry(1)

    def geometry(self, groups: int) -> Geometry:
        lengths = (self.seq // self.sp_size,) * self.sp_size
        return Geometry(self.sp_size, 0, lengths, self.batch, self.heads, self.kv_heads, groups)


@dataclass(frozen=True)
class Rates:
    """What the machine does.

    matmul, attention   FLOP/s of projections and of causal attention (the masked half is not counted)
    wire                bytes/s that a rank sends to the others in an all-to-all, while it receives as many
    latency_ms          of an exchange of nothing
    """

    matmul: float
    attention: float
    wire: float
    latency_ms: float = 0.02


class Sizes:
    """What a layer in G head groups holds, on rank 0, the rank with the most heads."""

    def __init__(self, layer: LayerShape, groups: int):
        self.layer, self.geometry = layer, layer.geometry(groups)

    def held(self, schedule: Schedule, is_stock: bool = False) -> list[int]:
        """Bytes over x, dy and the weights while each step runs: of forward, of the rest of the layer, of backward.

        is_stock   q, k and v are variables of the layer's forward, which has them until it returns
        """
        attends = {group: [sent for sent, start, stop in self.geometry.kv_pieces(group)] for group in range(self.geometry.groups)}
        return held(schedule, cache(self.size), attends.__getitem__, is_stock)

    def size(self, tensor: Tensor) -> int:
        """Bytes of what `schedule.held` names."""
        what, of, group = tensor
        layer = self.layer
        if what in ("send", "recv"):
            layout = self._layout(of, group)
            there = layout.source if what == "send" else layout.target
            if not layout.also and there.is_wire_layout:
                return 0
            return layer.element_bytes * (layout.sources.elements if what == "send" else layout.targets.elements)
        x = self._tokens * layer.width * layer.element_bytes
        if what in ("y", "dx"):
            return x
        if what == "more dx" and self.geometry.groups == 1:  # those of more groups are summed in place
            return x
        if what == "dW":
            return layer.width * layer.head_dim * (layer.kv_heads if of in ("k", "v") else layer.heads) * layer.element_bytes
        if what not in ("local", "rows", "global", "more global", "lse", "work"):
            return 0
        kind = of[-1].replace("o", "q")
        if what == "rows":
            return layer.width * self._local_heads(kind, group) * layer.head_dim * layer.element_bytes
        if what == "local":
            return self._tokens * self._local_heads(kind, group) * layer.head_dim * layer.element_bytes
        start, stop = self.geometry.sent_range(kind, 0, group)
        heads = layer.seq * layer.batch * max(stop - start, 0)
        if what == "lse":
            return heads * max(4, layer.element_bytes)
        if what == "work":
            return self._work(heads * layer.head_dim)
        return heads * layer.head_dim * layer.element_bytes

    def _work(self, elements: int) -> int:
        """Of 2-byte elements flash-attn's backward sums dq in fp32, and where query heads share KV heads it makes dk and dv of each."""
        layer = self.layer
        if layer.element_bytes != 2:  # no kernel for GPUs; PyTorch's for CPU takes a few blocks
            return 0
        return elements * (4 + 2 * layer.element_bytes * (layer.heads != layer.kv_heads))

    @property
    def _tokens(self) -> int:
        return self.layer.seq // self.layer.sp_size * self.layer.batch

    def _local_heads(self, kind: str, group: int) -> int:
        return sum(stop - start for start, stop in self.geometry.heads_of(kind, group))

    def _layout(self, of: str, group: int) -> Layout:
        """Of an exchange, q, dqkv or odo; what travels with do travels as do does."""
        kinds = "oo" if of == "odo" else of.removeprefix("d")
        layout = self.geometry.together(kinds, group, (self.layer.head_dim,) * len(kinds))
        return layout.inverse if of[0] == "d" or of == "odo" else layout


class Costs(Sizes):
    """What every step of a layer takes there."""

    def __init__(self, layer: LayerShape, rates: Rates, groups: int):
        super().__init__(layer, groups)
        self.rates = rates

    def ms(self, step: Step) -> float:
        """Duration on the compute row; of the transfer, for a start."""
        layer, tokens = self.layer, self._tokens
        if step.act == "start":
            layout = self._exchange(step)
            sent, got = (sum(sizes[1:]) for sizes in (layout.sources.sizes, layout.targets.sizes))
            return self.rates.latency_ms + 1e3 * layer.element_bytes * max(sent, got) / self.rates.wire
        if step == MLP:  # forward, and a backward that takes twice as long
            return 1e3 * 2 * tokens * layer.width * 3 * layer.intermediate * 3 / self.rates.matmul
        if step.act == "attend":  # the backward makes five products of the forward's two
            start, stop = self.geometry.query_range(0, step.group)
            forward = 1e3 * 2 * layer.seq**2 * layer.batch * (stop - start) * layer.head_dim / self.rates.attention
            return forward * (2.5 if step.of == "do" else 1)
        heads = self._local_heads("q" if step.of == "o" else step.of, step.group)
        return 1e3 * 2 * tokens * layer.width * heads * layer.head_dim / self.rates.matmul

    def _exchange(self, step: Step) -> Layout:
        return self._layout(step.of, step.group)

    def played(self, schedule: Schedule, is_stock: bool = False) -> Played:
        """A whole transformer layer: forward, the MLP, and backward; see `held`."""
        return play(schedule, (*schedule.forward, MLP, *schedule.backward), self.ms, self.held(schedule, is_stock))


WINDOWS = ((2, 1), (4, 1), (4, 2), (8, 1), (8, 2))  # (G, W) that are tried: more groups in flight than these save little


def schedule_of(geometry: Geometry, window: int | None = None, wgrad_last: bool = True) -> Schedule:
    """What a layer runs by in the groups of ``geometry``, where it says nothing else."""
    if window is None:
        return by_head_groups(geometry.kinds, wgrad_last)
    few_kv = geometry.heads >= 4 * geometry.kv_heads
    return by_window(geometry.kinds, geometry.last_use, window, wgrad_last, few_kv)
