"""Holds what is known of a GPU, each figure with its source, and how long its kernels take."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..costs import Rates
from .launches import COMPUTE, Attention, Gemm, Launch, Move, Transfer


class Known(NamedTuple):
    """A figure and its source; "assumed" where there is no source."""

    value: float
    source: str


DATA_SHEET = "NVIDIA's H100 SXM data sheet"
HOPPER = {
    "sms": Known(132, "NVIDIA's white paper on the H100, SXM5"),
    "tflops": Known(989.4, f"{DATA_SHEET}, bf16 without sparsity"),
    "memory_gbs": Known(3350.0, DATA_SHEET),
    "gemm_share": Known(0.7, "assumed: share of --tflops that matrix products reach"),
    "attention_share": Known(0.7, "assumed: FlashAttention-3's paper has up to 0.75 in forward"),
    "backward_share": Known(0.55, "assumed"),
    "memory_share": Known(0.8, "assumed"),
    "tile_m": Known(128, "assumed"),
    "tile_n": Known(256, "assumed"),
    "attention_tile": Known(128, "assumed"),
    "nccl_ctas": Known(16, "what the package asks of NCCL, exchange/transport.py"),
    "nccl_cluster": Known(4, "NCCL 2.30's default for cga_cluster_size"),
    "wire_gbs": Known(450.0, f"{DATA_SHEET}, NVLink, one direction; less is reached"),
    "latency_us": Known(1e3 * Rates.latency_ms, "assumed, as by plan without --gpu"),
    "launch_us": Known(6.0, "assumed: the host's time for a kernel or an exchange"),
    "event_us": Known(1.5, "assumed: the host's time for an event"),
    "wait_us": Known(1.0, "assumed: from an event on one stream to work on another"),
}
GPUS = {
    "h100": HOPPER,
    "h200": HOPPER | {"memory_gbs": Known(4800.0, "NVIDIA's H200 data sheet")},
}


class Grid(NamedTuple):
    """The blocks of a kernel; each block takes an SM.

    Attributes:
        ctas: Blocks that are launched.
        tiles: Pieces of work.
        tile_us: Time of a block for one of its turns.
        holds: Whether a block takes the next piece of work itself, and gives its SM back only when
            no work is left. Otherwise ``ctas == tiles``.
    """

    ctas: int
    tiles: int
    tile_us: float
    holds: bool = False


@dataclass(frozen=True)
class Gpu:
    """A GPU, and how it is used.

    Attributes:
        known: Figures with their sources, by name.
        queues: Hardware queues (CUDA_DEVICE_MAX_CONNECTIONS).
        in_order: Whether collectives begin in the order in which the host launches them
            (NCCL_LAUNCH_ORDER_IMPLICIT).
        ctas: SMs of a collective by communicator; ``nccl_ctas`` where a communicator is missing.
        free_wire: Whether transfers take no time and no SM.
    """

    known: dict[str, Known]
    queues: int = 8
    in_order: bool = False
    ctas: dict[str, int] = field(default_factory=dict)
    free_wire: bool = False

    def __getitem__(self, name: str) -> float:
        return self.known[name].value

    def grid(self, launch: Launch) -> Grid:
        """Return the blocks of a kernel."""
        sms = int(self["sms"])
        per_sm = 1e6 * self["tflops"] / sms  # FLOP per us
        if isinstance(launch, Gemm):
            tile_m, tile_n = int(self["tile_m"]), int(self["tile_n"])
            tiles = launch.batch * -(-launch.m // tile_m) * -(-launch.n // tile_n)
            tile_us = 2 * tile_m * tile_n * launch.k / (per_sm * self["gemm_share"])
            # Persistent: as many blocks as SMs, the tiles dealt out beforehand (PyTorch issue
            # 143988). Each block has one turn, which takes the time of all its tiles.
            ctas = min(tiles, sms)
            return Grid(ctas, ctas, -(-tiles // ctas) * tile_us)
        if isinstance(launch, Attention):
            tiles = launch.heads * -(-launch.seq // int(self["attention_tile"]))
            # Pairs of a query and a key: the last query sees ``keys``, each one before sees one
            # less.
            seen = launch.seq * (launch.keys - launch.seq / 2)
            flops = 4 * seen * launch.heads * launch.head_dim
            # Five products instead of two, in many short blocks.
            if launch.backward:
                tile_us = 2.5 * flops / tiles / (per_sm * self["backward_share"])
                return Grid(tiles, tiles, tile_us)
            tile_us = flops / tiles / (per_sm * self["attention_share"])
            # FlashAttention-3's forward is persistent, and its blocks take tile after tile.
            return Grid(min(tiles, sms), tiles, tile_us, holds=True)
        assert isinstance(launch, Move)
        # Eight turns of each SM, so that a few SMs less make it longer by their share.
        whole_us = 1e-3 * launch.n_bytes / (self["memory_gbs"] * self["memory_share"])
        return Grid(8 * sms, 8 * sms, whole_us / 8)

    def transfer(self, launch: Transfer) -> tuple[int, float]:
        """Return the SMs and the time in us of a collective whose ranks are all there."""
        if self.free_wire:
            return 0, 0.0
        ctas = self.ctas.get(launch.stream, int(self["nccl_ctas"]))
        return ctas, self["latency_us"] + 1e-3 * launch.n_bytes / self["wire_gbs"]

    def host_us(self, launch: Launch) -> float:
        """Return the host's time for a launch."""
        is_work = isinstance(launch, (Gemm, Attention, Move, Transfer))
        return self["launch_us"] if is_work else self["event_us"]

    def priority(self, stream: str) -> int:
        """Return 0 for the compute stream, 1 for all others, those of exchanges."""
        return int(stream != COMPUTE)

    def given(self, source: str, **values: float | None) -> Gpu:
        """Return this GPU with figures from elsewhere; None leaves a figure as it is."""
        new = {name: Known(value, source) for name, value in values.items() if value is not None}
        return replace(self, known=self.known | new)


def gpu(name: str, measured: Path | None = None, **use: Any) -> Gpu:
    """Return the GPU of this name.

    Args:
        name: A key of `GPUS`.
        measured: A file of figures that win over the table: JSON, by name.
        use: Attributes of `Gpu`.

    Raises:
        ValueError: if the file is no such file, or names a figure that the table has not.
    """
    found = Gpu(GPUS[name], **use)
    if measured is None:
        return found
    try:
        values = json.loads(measured.read_text())
    except ValueError as error:
        raise ValueError(f"--measured {measured}: not JSON: {error}") from None
    if unknown := sorted(set(values) - set(found.known)):
        raise ValueError(
            f"--measured {measured}: no figure of a GPU is called {', '.join(unknown)}; there are "
            f"{', '.join(found.known)}"
        )
    return found.given(f"measured, {measured}", **values)
