"""Predicts, without a GPU, the time that overlap would save: ``python -m ds_sp_overlap plan``.

`gpu.recorder` records the launches of each variant from the code that makes them; `gpu.player`
simulates these launches on a GPU with its host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...autotune.trial import CLOSE, GROUPS
from ...integrations.transformers.layers import mixing_layers
from .costs import WINDOWS, LayerShape, Way
from .gpu.constants import Gpu
from .gpu.launches import COMPUTE, Host, Launch, Record, Transfer, Wait
from .gpu.player import Played
from .gpu.recorder import LAYERS, record, record_mixer

# The smallest saving, as a share of the step, for which the plan recommends overlap.
WORTH = 0.02


@dataclass(frozen=True)
class Row:
    """Holds the simulated times, in ms, of forward and backward of a variant of the layer.

    Attributes:
        variant: The name of the variant.
        groups: G, for ``"head_groups"``; 0 for a variant that isn't ours, or that has a window.
        step_ms: The time of the attention layer.
        host_ms: The time after which the host has launched everything.
        exposed_ms: The time that would be saved if exchanges took no time and no SM.
        starved_ms: The time for which the GPU waits for its host.
        peak_bytes: The peak memory, without x, dy and the weights.
        whole_ms: The time of a whole layer with its MLP, the mean of several; None if it was not
            simulated.
    """

    variant: str
    groups: int
    step_ms: float
    host_ms: float
    exposed_ms: float
    starved_ms: float
    peak_bytes: int
    whole_ms: float | None = None


def five_of_eight(launches: Sequence[Launch]) -> list[Launch]:
    """Reorder the launches of G = 1 as in pull requests DeepSpeed 5691 and Megatron-DeepSpeed 415.

    In these pull requests, the compute stream waits for each exchange of v, o or dv right after the
    exchange is launched.
    """
    changed = []
    for launch in launches:
        changed.append(launch)
        if isinstance(launch, Transfer) and launch.name in ("v", "o", "dv"):
            # The layer's own events count from 0, so a negative number is free.
            event = -len(changed)
            changed += [Record(launch.stream, event), Wait(COMPUTE, event)]
    return changed


def in_one_stream(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches without overlap, all of them on the compute stream."""
    left = (each for each in launches if not isinstance(each, (Record, Wait)))
    return [each if isinstance(each, Host) else each._replace(stream=COMPUTE) for each in left]


def stock_runs(layer: LayerShape) -> bool:
    """Return whether DeepSpeed's class splits the layer's heads evenly over the ranks."""
    size, kv_heads = layer.sp_size, layer.kv_heads
    return layer.heads % size == 0 and 0 in (kv_heads % size, size % kv_heads)


def plan(layer: LayerShape, gpu: Gpu, with_all: bool = True) -> list[Row]:
    """Simulate every variant of a layer; the first row is without our overlap.

    Args:
        layer: The shape of the layer. If it has an MLP, whole layers are simulated as well.
        gpu: The GPU.
        with_all: Whether to include windows, and the variant "five of eight" (`five_of_eight`).
    """
    alone, most = replace(layer, intermediate=0), layer.geometry(1).max_groups

    def row(
        way: Way,
        variant: str = "",
        change: Callable[[Sequence[Launch]], Sequence[Launch]] = list,
    ) -> Row:
        """Simulate a variant of the attention layer.

        Args:
            way: How the layer runs.
            variant: The name of a variant that is not ours; empty for ours, named after ``way``.
            change: Turns the recorded launches into the launches to simulate.
        """
        kernels = None if variant else gpu["kernel_share"]
        on = gpu.given("our kernels", permute_share=kernels)
        recorded, whole_ms = record(alone, way), None
        launches = change(recorded.launches)
        played = Played(on, launches)
        if layer.intermediate and not way.window and change is not five_of_eight:
            whole_ms = Played(on, change(record(layer, way).launches)).us / 1e3 / LAYERS
        return Row(
            variant or str(way),
            groups=0 if variant or way.window else way.groups,
            step_ms=played.us / 1e3,
            host_ms=played.host_us / 1e3,
            exposed_ms=(played.us - Played(on.with_free_wire(), launches).us) / 1e3,
            starved_ms=played.starved_us / 1e3,
            peak_bytes=max(recorded.held),
            whole_ms=whole_ms,
        )

    rows = [row(Way(0), "stock") if stock_runs(layer) else row(Way(1), "no overlap", in_one_stream)]
    ways = [Way(groups) for groups in GROUPS]
    if with_all:
        rows.append(row(Way(1), "five of eight", five_of_eight))
        ways += WINDOWS
    return rows + [row(way) for way in ways if way.groups <= most]


def hybrid(
    layer: LayerShape, gpu: Gpu, model: nn.Module, rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """Return the times of a model's attention layers and mixers in a step; empty without mixers.

    Args:
        layer: The shape of the attention layers.
        gpu: The GPU.
        model: The model, on the meta device.
        rows: The rows of `plan` for an attention layer.

    Returns:
        A dict for each class of layers, and a last dict for all classes: the name, the number of
        layers, and their times in ms.
    """
    base, best = rows[0], min(ours_of(rows), key=lambda row: row.step_ms)
    found: list[dict[str, Any]] = []
    for name, modules in mixing_layers(model).items():
        (module, mixer), number = modules[0], len(modules)
        without, step, exposed = base.step_ms, best.step_ms, best.exposed_ms
        if mixer is not None:
            launches = record_mixer(layer, module, mixer).launches
            without = Played(gpu, in_one_stream(launches)).us / 1e3
            step = Played(gpu, launches).us / 1e3
            exposed = step - Played(gpu.with_free_wire(), launches).us / 1e3
        ms = dict(without_ms=without, step_ms=step, exposed_ms=exposed)
        found.append({"layers": name, "number": number} | {k: number * v for k, v in ms.items()})
    if found:
        found.append({"layers": "all"} | {k: sum(row[k] for row in found) for k in ("number", *ms)})
    return found


def ours_of(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of our variants, without windows."""
    return [row for row in rows if row.groups]


def decides_ms(row: Row) -> float:
    """Return the time to compare rows by: the whole layer's if simulated, else attention's."""
    return row.step_ms if row.whole_ms is None else row.whole_ms


def best_of(rows: Sequence[Row]) -> Row:
    """Return our best row; or the row of DeepSpeed's own class, if ours saves less than `WORTH`.

    Our best row is the row with the fewest groups whose time is close to our shortest time. If
    DeepSpeed's class can't run, our best row is returned even if it saves nothing.
    """
    ours = ours_of(rows)
    shortest = min(map(decides_ms, ours))
    best = next(row for row in ours if decides_ms(row) <= (1 + CLOSE) * shortest)
    is_worth = decides_ms(best) <= (1 - WORTH) * decides_ms(rows[0])
    return best if is_worth or rows[0].variant != "stock" else rows[0]


def verdict(rows: Sequence[Row]) -> str:
    """Return, in words, whether to overlap, and the time of a layer with and without overlap."""
    base, best, ours = rows[0], best_of(rows), ours_of(rows)
    what = "an attention layer" if base.whole_ms is None else "a whole layer with its MLP"
    few = "" if len(ours) > 1 else "; a rank has one query head, so nothing hides v, o and dv"
    base_ms, best_ms = decides_ms(base), decides_ms(best)
    if best is not base:
        is_stock = base.variant == "stock"
        why, without = ("", "") if is_stock else (", since stock can't run", " without overlap")
        return (
            f'overlap, with "head_groups": {best.groups}{why}: {what} takes {best_ms:.1f} ms '
            f"instead of {base_ms:.1f}{without} ({base_ms / best_ms:.2f} times as fast){few}"
        )
    nearest = min(ours, key=decides_ms)
    if nearest.host_ms > nearest.step_ms / 2:
        why = (
            f"the GPU waits for its host: {nearest.variant} needs {nearest.host_ms:.1f} ms of it a "
            f"layer, {base.variant} {base.host_ms:.1f}; more tokens a rank would change that"
        )
    elif base.exposed_ms < 2 * WORTH * base.step_ms:
        why = f"exchanges are {base.exposed_ms / base.step_ms:.1%} of an attention layer's time"
    else:
        why = "what could hide the exchanges is too short"
    return (
        f"don't overlap: {nearest.variant} takes {decides_ms(nearest):.1f} ms for {what}, "
        f"{base.variant} {base_ms:.1f}; {why}{few}"
    )
