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


def _forward(text: str) -> Program:
    """Read a program of one head group from text: ``project q, start q``."""
    return tuple(Step(Op(op), (of,), False, 0) for op, of in map(str.split, text.split(", ")))


def _backward(text: str) -> Program:
    """Read a program of backward from text: ``start q`` sends dq."""
    return tuple(step._replace(grad=True) for step in _forward(text))


def _waiting(program: Program) -> Program:
    """Return the program in which every exchange is waited for where it is started."""
    steps: list[Step] = []
    for step in program:
        if step.op is not Op.FINISH:
            steps.append(step)
        if step.op is Op.START:
            steps.append(step._replace(op=Op.FINISH))
    return tuple(steps)


# DeepSpeed's class as it stands, between projections that are called whole.
BASELINE = Schedule(
    _waiting(
        _forward(
            "project q, project k, project v, start q, start k, start v, attend o, start o, merge o"
        )
    ),
    _waiting(
        _backward(
            "wgrad o, dgrad o, start o, attend o, start v, start k, start q, "
            "dgrad v, wgrad v, dgrad k, wgrad k, dgrad q, wgrad q"
        )
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
        run: list[Launch],
        whole: list[Launch] | None = None,
        groups: int = 0,
        window: int | None = None,
    ) -> Row:
        """Play one variant; ``whole`` is what whole layers launch."""
        # Ours permute by the compiled kernels.
        share = gpu["kernel_share"] if groups else None
        on = gpu.given("our kernels", permute_share=share)
        played, free = play(on, run), play(replace(on, free_wire=True), run)
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
            whole_ms=None if whole is None else play(on, whole).us / 1e3 / LAYERS,
        )

    def recorded(config: dict[str, Any] | None) -> tuple[list[Launch], list[Launch] | None]:
        return record(alone, config), record(layer, config) if layer.intermediate else None

    ours = {groups: recorded({"head_groups": groups}) for groups in GROUPS if groups <= most}
    if stock_runs(layer):
        rows = [row("stock", *recorded(None))]
    else:
        run, whole = ours[1]
        whole = None if whole is None else in_one_stream(whole)
        rows = [row("no overlap", in_one_stream(run), whole)]
    if with_all:
        rows.append(row("five of eight", five_of_eight(ours[1][0])))
    for groups, (run, whole) in ours.items():
        rows.append(row(f"G = {groups}", run, whole, groups))
    for groups, window in WINDOWS if with_all else ():
        if groups <= most:
            run = record(alone, {"head_groups": groups, "window": window})
            rows.append(row(f"G = {groups}, W = {window}", run, None, groups, window))
    return rows


def ours_of(rows: Sequence[Row]) -> list[Row]:
    """Return our rows, without windows."""
    return [row for row in rows if row.groups and row.window is None]


def best_of(rows: Sequence[Row]) -> Row:
    """Return the row to choose: stock's, unless ours save at least `WORTH` of it.

    Of ours the one with the fewest groups that comes close to the shortest step.
    """
    ours = ours_of(rows)
    shortest = min(map(_decides_ms, ours))
    best = next(row for row in ours if _decides_ms(row) <= (1 + CLOSE) * shortest)
    is_worth = _decides_ms(best) <= (1 - WORTH) * _decides_ms(rows[0])
    return best if is_worth or rows[0].variant != "stock" else rows[0]


def _decides_ms(row: Row) -> float:
    return row.step_ms if row.whole_ms is None else row.whole_ms


def verdict(rows: Sequence[Row]) -> str:
    """Return what to do, and what it brings."""
    base, best = rows[0], best_of(rows)
    what = "an attention layer" if base.whole_ms is None else "a whole layer with its MLP"
    ours = ours_of(rows)
    few = "" if len(ours) > 1 else "; a rank has one query head, so nothing hides v, o and dv"
    if base.variant != "stock":
        saved = 1 - _decides_ms(best) / _decides_ms(base)
        return (
            f'"head_groups": {best.groups}, since stock can\'t run: overlap saves {saved:.1%} of '
            f"{what}{few}"
        )
    if best is not base:
        times = f"{what} takes {_decides_ms(best):.1f} ms instead of {_decides_ms(base):.1f}"
        return (
            f'overlap, with "head_groups": {best.groups}: {times} '
            f"({_decides_ms(base) / _decides_ms(best):.2f} times as fast){few}"
        )
    nearest = min(ours, key=_decides_ms)
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
        f"don't overlap: {nearest.variant} takes {_decides_ms(nearest):.1f} ms for {what}, "
        f"{base.variant} {_decides_ms(base):.1f}; {why}{few}"
    )
