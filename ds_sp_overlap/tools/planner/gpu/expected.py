"""Prints what a GPU is expected to do with a layer: ``plan --gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tabulate import tabulate

from ..costs import LayerShape
from .constants import Gpu
from .deadlocks import WEIGHTS, search, with_gathers
from .launches import GATE, Launch, Move, Record, Wait
from .player import play
from .recorder import LAYERS, record

# Random delays that are tried for two communicators, and the SMs of the second: the most that
# NCCL's send and receive takes.
SEEDS, OTHER_CTAS = range(20), 32


def without_gate(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches as they would be if compute did not wait for the launch of exchanges."""
    gates = {each.event for each in launches if isinstance(each, Record) and each.stream == GATE}
    kept = []
    for each in launches:
        waits_for_gate = isinstance(each, Wait) and each.event in gates
        if each.stream != GATE and not waits_for_gate:
            kept.append(each)
    return kept


def expect(launches: Sequence[Launch], gpu: Gpu) -> dict[str, float]:
    """Return the ms of a step on ``gpu``, and what they would be if one thing were different.

    The keys are columns of `describe`.
    """
    ways = {
        "step": gpu,
        "free wire": replace(gpu, free_wire=True),
        "one queue": replace(gpu, queues=1),
    }
    found = {name: play(way, launches).us / 1e3 for name, way in ways.items()}
    found["no gate"] = play(gpu, without_gate(launches)).us / 1e3
    played = play(gpu, launches)
    return found | {"host": played.host_us / 1e3, "starved": played.starved_us / 1e3}


def describe(layer: LayerShape, gpu: Gpu, groups: Sequence[int]) -> str:
    """Return the expectations as text, of the attention layer; with an MLP, of whole layers."""
    recorded = {f"G = {g}": record(layer, g) for g in groups}
    last = recorded[f"G = {groups[-1]}"]
    what = "attention layer"
    if layer.intermediate:
        what = f"{LAYERS} layers with MLP, one behind the other"
    found = {way: expect(launches, gpu) for way, launches in recorded.items()}
    rows = []
    for way, launches in recorded.items():
        times = [f"{ms:.3f}" for ms in found[way].values()]
        rows.append((way, *times, len(launches), _copied(launches)))
    best = min(found, key=lambda way: found[way]["step"])
    # Each product is taken to gather a square weight.
    gathered = with_gathers(last, layer.width**2 * layer.element_bytes // layer.sp_size)
    both = replace(gpu, ctas={WEIGHTS: OTHER_CTAS})
    stuck = search([both] * 2, [gathered] * 2, SEEDS)
    figures = "\n".join(f"  {name} = {k.value:g}: {k.source}" for name, k in gpu.known.items())
    return "\n".join(
        (
            f"{what}, forward and backward, by the launches made, on a GPU on paper (no GPU has "
            "run it); ms",
            tabulate(
                rows,
                headers=("", *found[best], "launches", "copied MB"),
                tablefmt="simple",
                stralign="right",
            ),
            f"shortest: {best}, {found[best]['step'] - found[best]['free wire']:.3f} ms longer "
            "than over a wire that costs nothing",
            f"two communicators (exchanges and gathers of weights, {int(gpu['nccl_ctas'])} and "
            f"{OTHER_CTAS} SMs), two ranks, {len(SEEDS)} random delays: "
            + (f"DEADLOCK with seeds {list(stuck)}: {stuck}" if stuck else "no deadlock"),
            "columns: step as it is; wire that costs nothing; CUDA_DEVICE_MAX_CONNECTIONS=1; "
            "compute that does not wait for the launch of exchanges; time at which the host is "
            "done; time in which the GPU waits for the host",
            f"figures:\n{figures}",
        )
    )


def _copied(launches: Sequence[Launch]) -> str:
    """Return the MB that kernels beside products and attention copy: read once, written once."""
    return f"{sum(each.n_bytes for each in launches if isinstance(each, Move)) / 2e6:.0f}"
