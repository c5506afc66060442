"""Holds the figures of a GPU and its host, with their sources; computes the times of launches."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .launches import Attention, Gemm, Host, Launch, Move, Transfer, Wait


class Known(NamedTuple):
    """Holds a figure and its source; the source is "assumed" if there is none."""

    value: float
    source: str


DATA_SHEET = "NVIDIA's H100 SXM data sheet"
# "measured" means on an H100, see docs/planning.md.
HOST = "measured, a call"
PROFILE = "measured, from a profile of a layer's step"
HOPPER = {
    "sms": Known(132, "NVIDIA's white paper on the H100, SXM5"),
    "tflops": Known(989.4, f"{DATA_SHEET}, bf16 without sparsity"),
    "memory_gbs": Known(3350.0, DATA_SHEET),
    "gemm_share": Known(0.69, "measured, 8192 x 4096 x 4096: share of tflops"),
    "attention_share": Known(0.57, "measured, 65,536 tokens without a wire; backward is alike"),
    "memory_share": Known(0.85, "measured, a copy of 64 and 256 MB"),
    "permute_share": Known(0.45, "measured, PyTorch's permuting copy of 2-byte elements"),
    "kernel_share": Known(0.81, "measured, our pack and unpack: 92 to 100 % of a copy"),
    "tile_m": Known(128, "assumed"),
    "tile_n": Known(256, "assumed"),
    "attention_tile": Known(128, "assumed"),
    "nccl_ctas": Known(16, "what the package asks of NCCL, exchange/transport.py"),
    "wire_gbs": Known(450.0, f"{DATA_SHEET}, NVLink, one direction; less is reached"),
    "latency_us": Known(20.0, "assumed: an exchange of nothing"),
    "launch_us": Known(9.5, f"{HOST}: add_, copy_"),
    "gemm_us": Known(16.0, f"{HOST}: torch.mm"),
    "attention_us": Known(60.0, PROFILE),
    "transfer_us": Known(25.0, PROFILE),
    "record_us": Known(1.8, HOST),
    "event_wait_us": Known(1.7, HOST),
    "empty_us": Known(4.5, HOST),
    "view_us": Known(3.0, f"{PROFILE}: 2.3 to 5.8"),
    "accelerator_us": Known(1.0, f"{PROFILE}: torch's current stream, read or set"),
    "call_us": Known(3.0, "measured: a function of Python; from the host's time of four layers"),
    "cold": Known(1.5, "measured: a layer's host in a training step over one in a loop of its own"),
}
GPUS = {"h100": HOPPER, "h200": HOPPER | {"memory_gbs": Known(4800.0, "NVIDIA's H200 data sheet")}}


class Grid(NamedTuple):
    """Describes the blocks of a kernel. Each block holds an SM, and processes tiles one by one.

    Measured on an H100: an exchange that is launched after a matrix product, an attention kernel
    (forward or backward) or a copy gets its first SM when the earlier kernel ends.

    Attributes:
        ctas: The number of blocks.
        tiles: The number of tiles, the units of work.
        tile_us: The time of a block for one tile.
    """

    ctas: int
    tiles: int
    tile_us: float


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU with its host.

    Attributes:
        known: Figures with their sources, by name.
    """

    known: dict[str, Known]

    def __getitem__(self, name: str) -> float:
        return self.known[name].value

    def grid(self, launch: Launch) -> Grid:
        """Return the blocks of a kernel or an exchange."""
        sms = int(self["sms"])
        per_sm = 1e6 * self["tflops"] / sms  # FLOP per us
        if isinstance(launch, Gemm):
            tile_m, tile_n = int(self["tile_m"]), int(self["tile_n"])
            tiles = launch.batch * -(-launch.m // tile_m) * -(-launch.n // tile_n)
            tile_us = 2 * tile_m * tile_n * launch.k / (per_sm * self["gemm_share"])
        elif isinstance(launch, Attention):
            tiles = launch.heads * -(-launch.seq // int(self["attention_tile"]))
            # The number of pairs of a query and a key: the last query attends to ``keys`` keys, and
            # each earlier query to one key less. Backward computes five products instead of two.
            seen = launch.seq * (launch.keys - launch.seq / 2)
            flops = 4 * seen * launch.heads * launch.head_dim
            share = self["attention_share"] / (2.5 if launch.backward else 1)
            tile_us = flops / tiles / (per_sm * share)
        elif isinstance(launch, Move):
            # Eight tiles for each SM: the time then grows smoothly if other kernels hold a few SMs.
            tiles = 8 * sms
            share = self["permute_share" if launch.permutes else "memory_share"]
            tile_us = 1e-3 * launch.n_bytes / (self["memory_gbs"] * share) / 8
        else:
            assert isinstance(launch, Transfer)
            moved_us = self["latency_us"] + 1e-3 * launch.n_bytes / self["wire_gbs"]
            return Grid(int(self["nccl_ctas"]), 1, moved_us)
        return Grid(min(tiles, sms), tiles, tile_us)

    def host_us(self, launch: Launch) -> float:
        """Return the host's time for a launch, or for the work in a `Host`, in us."""
        if isinstance(launch, Host):
            return launch.times * self[f"{launch.name}_us"] * self["cold"]
        renamed = {Move: "launch", Wait: "event_wait"}
        name = renamed.get(type(launch), type(launch).__name__.lower())
        return self[f"{name}_us"] * self["cold"]

    def with_free_wire(self) -> Gpu:
        """Return this GPU with exchanges that take no time and no SM."""
        return self.given("free", wire_gbs=math.inf, latency_us=0, nccl_ctas=0)

    def given(self, source: str, **values: float | None) -> Gpu:
        """Return this GPU with other figures (``values``) from ``source``; None keeps a figure."""
        new = {name: Known(value, source) for name, value in values.items() if value is not None}
        return Gpu(self.known | new)


def gpu(name: str, measured: Path | None = None) -> Gpu:
    """Return the GPU called ``name``.

    Args:
        name: A key of `GPUS`.
        measured: A JSON file with figures by name, which override the table; or None.

    Raises:
        ValueError: if the file can't be read, or names a figure that the table does not have.
    """
    found = Gpu(GPUS[name])
    if measured is None:
        return found
    try:
        values = json.loads(measured.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--measured {measured}: {error}") from None
    if unknown := sorted(set(values) - set(found.known)):
        raise ValueError(
            f"--measured {measured}: no figure of a GPU is called {', '.join(unknown)}; there are "
            f"{', '.join(found.known)}"
        )
    return found.given(f"measured, {measured}", **values)
