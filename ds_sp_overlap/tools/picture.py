"""Shows a recorded timeline: tables, a trace for Perfetto, and a drawing as a page and a picture.

``every`` below is a list with the `timeline.Row`s of each rank, in rank order.
"""

from __future__ import annotations

import csv
import html
import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

from tabulate import tabulate

from ..warn import inform

COLOURS = {
    "compute": "#9bb7d4",
    "wait": "#d1495b",
    "pack": "#edae49",
    "transfer": "#66a182",
    "unpack": "#edae49",
}
WORDS = {
    "compute": "computing",
    "wait": "standing still: exposed",
    "pack": "pack and unpack",
    "transfer": "in flight",
}
ON_COMPUTE = ("compute", "wait")
DRAWN_RANKS = 4
HEADERS = ("exchanges", "MB sent", "exchange ms", "exposed ms", "hidden ms", "relayout ms")


def costs(rows: list) -> dict[tuple, tuple[float, ...]]:
    """Sum the costs of each exchange of one rank.

    Returns:
        By (step, layer, name of the exchange): calls, bytes, then the milliseconds of `HEADERS`.
    """
    by_exchange: dict[tuple, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_exchange[row.step, row.layer, row.what][row.kind].append(row)
    table: dict[tuple, tuple[float, ...]] = {}
    for key, kinds in by_exchange.items():
        if "transfer" not in kinds:
            continue  # computing, or the bar of a whole layer
        took: dict[str, float] = {}
        for kind, bars_of_kind in kinds.items():
            took[kind] = sum(row.end - row.begin for row in bars_of_kind)
        relayout = took["pack"] + took["unpack"]
        exchange = took["transfer"] + relayout
        # The compute row packs; its wait lasts until it has unpacked.
        exposed = min(exchange, took["wait"] + took["pack"])
        size = sum(row.bytes for row in kinds["transfer"])
        table[key] = len(kinds["transfer"]), size, exchange, exposed, exchange - exposed, relayout
    return table


def tables(every: list[list]) -> str:
    """Return tables: sums per step, and means of a step per exchange and per layer.

    All numbers are means over the ranks.
    """
    of_ranks = [costs(rows) for rows in every]
    steps = {step for step, *_ in chain(*of_ranks)}
    n_steps = max(len(steps), 1)

    def table(title: str, name: str, index: int, per: int) -> str:
        """Return a table with a line for each value at ``index`` of the keys, sums over ``per``."""
        sums: dict[Any, list[float]] = {}
        for rank in of_ranks:
            for key, values in rank.items():
                total = sums.setdefault(key[index], [0.0] * len(values))
                total[:] = [x + y / len(of_ranks) / per for x, y in zip(total, values)]
        lines = [(key, round(n, 1), size / 1e6, *ms) for key, (n, size, *ms) in sums.items()]
        formats = ("", "g", *[".3f"] * 5)
        return f"{title}\n{tabulate(lines, headers=(name, *HEADERS), floatfmt=formats)}\n"

    return "\n".join(
        (
            f"sp size {len(every)}; exposed: the compute row stood still for it",
            "",
            table("per step", "step", 0, 1),
            table("per exchange, mean of a step, all layers", "exchange", 2, n_steps),
            table("per layer, mean of a step", "layer", 1, n_steps),
        )
    )


def lanes(rows: Iterable) -> list[tuple[int, Any]]:
    """Place rows that are in flight together into different lanes, each row in the first free one.

    Returns:
        (lane, row) for each row, sorted by begin.
    """
    busy_until: list[float] = []
    placed = []
    for row in sorted(rows, key=lambda row: row.begin):
        free = [lane for lane, until in enumerate(busy_until) if until <= row.begin]
        lane = free[0] if free else len(busy_until)
        # Replaces the lane's end, or adds a lane behind the last.
        busy_until[lane : lane + 1] = [row.end]
        placed.append((lane, row))
    return placed


def trace(every: list[list]) -> dict:
    """Return the trace in the JSON format of chrome://tracing, which Perfetto reads.

    Each rank is a process. Its threads are the compute row, the lanes of transfers, and one for
    packing and unpacking.
    """
    events = []
    for rank, rows in enumerate(every):
        threads = {0: "compute"}
        for row in rows:
            if row.kind in ON_COMPUTE:
                waits = "waits for " if row.kind == "wait" else ""
                events.append(_event(row, rank, 0, f"{row.layer} {waits}{row.what}"))
        for lane, row in lanes(row for row in rows if row.kind == "transfer"):
            threads[1 + lane] = "side" if lane == 0 else f"side, also in flight {lane}"
            events.append(_event(row, rank, 1 + lane, f"{row.layer} {row.what}"))
        thread = len(threads)
        for row in rows:
            if row.kind in ("pack", "unpack"):
                threads[thread] = "relayout"
                events.append(_event(row, rank, thread, f"{row.layer} {row.kind} {row.what}"))
        events.append(_name_event("process_name", rank, 0, f"sp rank {rank}"))
        for thread, word in threads.items():
            events.append(_name_event("thread_name", rank, thread, word))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(row: Any, rank: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event of a bar; times in microseconds."""
    return {
        "name": name,
        "cat": row.kind,
        "ph": "X",
        "ts": row.begin * 1e3,
        "dur": (row.end - row.begin) * 1e3,
        "pid": rank,
        "tid": thread,
        "args": {"step": row.step, "layer": row.layer, "bytes": row.bytes},
    }


def _name_event(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


class Panel(NamedTuple):
    """A section of the timeline that is drawn.

    Attributes:
        title: Title of the panel.
        spans: Begin and end for each rank, in ms on the rank's own clock.
    """

    title: str
    spans: list[tuple[float, float]]

    @property
    def duration(self) -> float:
        """The longest span, in ms."""
        return max(end - begin for begin, end in self.spans)


def panels(every: list[list]) -> list[Panel]:
    """Choose what is drawn: the last step, and forward and backward of one of its layers.

    The layer is the one with the longest waits on rank 0.
    """
    step = max(row.step for row in every[0])
    shown = []
    spans = []
    for rows in every[:DRAWN_RANKS]:
        of_step = [row for row in rows if row.step == step]
        shown.append(of_step)
        spans.append((min(row.begin for row in of_step), max(row.end for row in of_step)))
    drawn = [Panel(f"step {step}", spans)]
    waited: dict[str, float] = defaultdict(float)
    for row in shown[0]:
        waited[row.layer] += (row.end - row.begin) * (row.kind == "wait")
    worst = max(waited, key=waited.__getitem__)
    for direction in ("forward", "backward"):
        spans = []
        for rows in shown:
            calls = [row for row in rows if (row.layer, row.kind) == (worst, direction)]
            spans += [(row.begin, row.end) for row in calls[:1]]
        # Not drawn unless every rank has recorded the layer.
        if len(spans) == len(shown):
            drawn.append(Panel(f"{worst}, {direction}, step {step}", spans))
    return drawn


def bars(every: list[list], panel: Panel) -> tuple[list[str], list[tuple[int, float, float, Any]]]:
    """Place the bars of a panel, cut where the panel begins and ends.

    Each rank has a compute line and a side line; below them are lines without a name for further
    lanes of transfers. Packing and unpacking are drawn on the side line.

    Returns:
        The names of the lines; and (line, begin, end, row) of every bar, in ms since the begin of
        the panel on the bar's rank.
    """
    names: list[str] = []
    placed: list[tuple[int, float, float, Any]] = []
    for rank, (rows, (begin, end)) in enumerate(zip(every, panel.spans)):
        seen = [row for row in rows if row.end > begin and row.begin < end]
        side = lanes(row for row in seen if row.kind == "transfer")
        lines = [(len(names), row) for row in seen if row.kind in ON_COMPUTE]
        lines += [(len(names) + 1 + lane, row) for lane, row in side]
        lines += [(len(names) + 1, row) for row in seen if row.kind in ("pack", "unpack")]
        further_lanes = max((lane for lane, _ in side), default=0)
        names += [f"rank {rank} compute", f"rank {rank} side", *[""] * further_lanes]
        for line, row in lines:
            first, last = max(row.begin, begin), min(row.end, end)
            placed.append((line, first - begin, last - begin, row))
    return names, placed


def draw(every: list[list]) -> Any:
    """Draw the panels as a matplotlib figure.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [(panel, *bars(every, panel)) for panel in panels(every)]
    heights = [len(names) for _, names, _ in shown]
    figure = Figure(figsize=(14, 1.5 * len(shown) + 0.35 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (panel, names, placed) in zip(axes, shown):
        alike: dict[tuple[int, str], list] = defaultdict(list)
        for line, begin, end, row in placed:
            alike[line, row.kind].append((begin, end - begin))
            # A letter takes about 0.8 % of the width.
            fits = end - begin > 0.008 * len(row.what) * panel.duration
            if row.kind in ("compute", "transfer") and fits:
                axis.text((begin + end) / 2, line, row.what, ha="center", va="center", fontsize=7)
        for (line, kind), spans in alike.items():
            half = 0.2 if kind in ("pack", "unpack") else 0.4
            axis.broken_barh(
                spans,
                (line - half, 2 * half),
                facecolor=COLOURS[kind],
                edgecolor="white",
                linewidth=0.3,
            )
        axis.set(
            title=panel.title,
            xlabel="ms, each rank on its own clock",
            xlim=(0, panel.duration),
            ylim=(len(names) - 0.5, -0.5),
        )
        axis.set_yticks(range(len(names)), names)
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=word) for kind, word in WORDS.items()],
        loc="outside upper right",
        ncols=4,
    )
    return figure


def page(figure: Any, text: str) -> str:
    """Return the figure and the tables as one self-contained HTML page."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    # Text stays text.
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(
            drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    drawing = drawn.getvalue()
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>ds_sp_overlap timeline</title>'
        "<style>svg {width: 100%; height: auto}</style>"
        f"{drawing[drawing.index('<svg') :]}<pre>{html.escape(text)}</pre></html>\n"
    )


def write(folder: str, every: list[list]) -> None:
    """Write the timeline of all ranks into a folder; sp rank 0 does so after the recorded steps.

    Writes timeline.txt, exchanges.csv and trace.json; with matplotlib also timeline.html and
    timeline.png.

    Args:
        folder: The folder, which is made if it is not there.
        every: The rows of each rank, in rank order.
    """
    os.makedirs(folder, exist_ok=True)

    def path(name: str) -> str:
        return os.path.join(folder, name)

    text = tables(every)
    with open(path("timeline.txt"), "w") as file:
        file.write(text)
    with open(path("exchanges.csv"), "w", newline="") as file:
        lines = csv.writer(file)
        columns = ("sp_rank", "step", "layer", "exchange", "calls", "bytes")
        lines.writerow((*columns, *(header.replace(" ", "_") for header in HEADERS[2:])))
        for rank, rows in enumerate(every):
            lines.writerows((rank, *key, *values) for key, values in costs(rows).items())
    with open(path("trace.json"), "w") as file:
        json.dump(trace(every), file)
    try:
        figure = draw(every)
    except ImportError:
        inform(
            f"sp_overlap: timeline in {folder}; "
            "pip install matplotlib for timeline.html and timeline.png"
        )
        return
    figure.savefig(path("timeline.png"), dpi=110)
    with open(path("timeline.html"), "w") as file:
        file.write(page(figure, text))
    inform(f"sp_overlap: timeline in {folder}")
