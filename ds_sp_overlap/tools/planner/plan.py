"""Predicts what overlap would save, before anything is run: ``python -m ds_sp_overlap plan``.

Every variant's launches are recorded from the code that makes them (`gpu.recorder`) and played on a
GPU with its host (`gpu.player`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...autotune.trial import CLOSE, GROUPS
from ...schedule import Op, Program, Schedule, Step, schedule_of
from .costs import WINDOWS, LayerShape, Sizes
from .gpu.constants import Gpu
from .gpu.launches import COMPUTE, Host, Launch, Record, Transfer, Wait
from .gpu.player import play
from .gpu.recorder import LAYERS, record

# A step that would be shorter by less than this share is not worth the bother.
WORTH = 0.02


def program(text: str, grad: bool = False) -> Program:
    """Read a program of one head group: ``project q, start q``; with ``grad``, ``start q`` sends dq."""
    steps = [each.split() for each in text.split(", ")]
    return tuple(Step(Op(op), (of,), grad, 0) for op, of in steps)


# DeepSpeed's class as it stands, between projections that are called whole.
BASELINE = Schedule(
    program(
        "project q, project k, project v, start q, finish q, start k, finish k, start v, finish v, "
        "attend o, start o, finish o, merge o"
    ),
    program(
        "wgrad o, dgrad o, start o, finish o, attend o, start v, finish v, start k, finish k, "
        "start q, finish q, dgrad v, wgrad v, dgrad k, wgrad k, dgrad q, wgrad q",
        grad=True,
    ),
)


@dataclass(frozen=True)
class Row:
    """A variant of the layer, forward and backward, as it is played; times in ms.

    Attributes:
        variant: Its name.
        groups: G; 0 if it isn't ours.
        window: W; None without a window.
        step_ms: The attention layer.
        host_ms: When the host is done with it.
        exposed_ms: What the layer would be shorter over a wire that costs nothing.
        starved_ms: How long the GPU waits for its host.
        peak_bytes: The most bytes in memory, without x, dy and the weights.
        whole_ms: A whole layer with its MLP, of several; None if it was not played.
    """

    variant: str
    groups: int
    window: int | None
    step_ms: float
    host_ms: float
    exposed_ms: float
    starved_ms: float
    peak_bytes: int
    whole_ms: float | None = None


def five_of_eight(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches of G = 1 as those pull requests would order them.

    Compute waits for v, o and dv where they are launched.
    """
    changed: list[Launch] = []
    for launch in launches:
        changed.append(launch)
        if isinstance(launch, Transfer) and launch.name in ("v", "o", "dv"):
            # Numbers of events below 0, which the layer's own events don't have.
            event = -len(changed)
            changed += [Record(launch.stream, event), Wait(COMPUTE, event)]
    return changed


def in_one_stream(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches without overlap: everything on the compute stream."""
    changed: list[Launch] = []
    for launch in launches:
        if isinstance(launch, Host):
            changed.append(launch)
        elif not isinstance(launch, (Record, Wait)):
            changed.append(launch._replace(stream=COMPUTE))
    return changed


def stock_runs(layer: LayerShape) -> bool:
    """Return whether DeepSpeed's class splits the layer's heads evenly over the ranks."""
    return layer.heads % layer.sp_size == 0 and (
        layer.kv_heads % layer.sp_size == 0 or layer.sp_size % layer.kv_heads == 0
    )


def plan(layer: LayerShape, gpu: Gpu, with_all: bool = True) -> list[Row]:
    """Play every variant of a layer; the first row is without overlap.

    Args:
        layer: Shape of the layer. With an MLP, whole layers are played as well.
        gpu: The GPU.
        with_all: Whether to play five of eight and windows, too.
    """
    alone = replace(layer, intermediate=0)
    most = layer.geometry(1).max_groups

    def row(
        variant: str,
        runs: Sequence[list[Launch]],
        groups: int = 0,
        window: int | None = None,
    ) -> Row:
        """Play a variant: what the attention layer launches, then what whole layers do if given."""
        # Ours permute by the compiled kernels.
        on = gpu.given("our kernels", permute_share=gpu["kernel_share"] if groups else None)
        played, free = play(on, runs[0]), play(replace(on, free_wire=True), runs[0])
        sizes = Sizes(alone, max(groups, 1))
        schedule = schedule_of(sizes.geometry, window) if groups else BASELINE
        return Row(
            variant,
            groups,
            window,
            step_ms=played.us / 1e3,
            host_ms=played.host_us / 1e3,
            exposed_ms=(played.us - free.us) / 1e3,
            starved_ms=played.starved_us / 1e3,
            peak_bytes=max(sizes.memory_bytes(schedule, is_baseline=not groups)),
            whole_ms=play(on, runs[1]).us / 1e3 / LAYERS if len(runs) > 1 else None,
        )

    def recorded(config: dict[str, Any] | None) -> list[list[Launch]]:
        return [
            record(each, config) for each in ((alone, layer) if layer.intermediate else (alone,))
        ]

    ours = {groups: recorded({"head_groups": groups}) for groups in GROUPS if groups <= most}
    if stock_runs(layer):
        rows = [row("stock", recorded(None))]
    else:
        rows = [row("no overlap", list(map(in_one_stream, ours[1])))]
    if with_all:
        rows.append(row("five of eight", [five_of_eight(ours[1][0])]))
    rows += [row(f"G = {groups}", runs, groups) for groups, runs in ours.items()]
    for groups, window in WINDOWS if with_all else ():
        if groups <= most:
            run = record(alone, {"head_groups": groups, "window": window})
            rows.append(row(f"G = {groups}, W = {window}", [run], groups, window))
    return rows


def ours_of(rows: Sequence[Row]) -> list[Row]:
    """Return our rows, without windows."""
    return [row for row in rows if row.groups and row.window is None]


def decides_ms(row: Row) -> float:
    """Return the time by which rows are compared: of a whole layer, if it was played."""
    return row.step_ms if row.whole_ms is None else row.whole_ms


def best_of(rows: Sequence[Row]) -> Row:
    """Return the row to choose: stock's, unless ours save at least `WORTH` of it.

    Of ours the one with the fewest groups that comes close to the shortest step.
    """
    ours = ours_of(rows)
    shortest = min(map(decides_ms, ours))
    best = next(row for row in ours if decides_ms(row) <= (1 + CLOSE) * shortest)
    is_worth = decides_ms(best) <= (1 - WORTH) * decides_ms(rows[0])
    return best if is_worth or rows[0].variant != "stock" else rows[0]


def verdict(rows: Sequence[Row]) -> str:
    """Return what to do, and what it brings."""
    base, best, ours = rows[0], best_of(rows), ours_of(rows)
    what = "an attention layer" if base.whole_ms is None else "a whole layer with its MLP"
    few = "" if len(ours) > 1 else "; a rank has one query head, so nothing hides v, o and dv"
    base_ms, best_ms = decides_ms(base), decides_ms(best)
    if best is not base:
        why, without = "", ""
        if base.variant != "stock":
            why, without = ", since stock can't run", " without overlap"
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
