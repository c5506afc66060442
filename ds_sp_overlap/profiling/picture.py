"""A timeline for people: tables, a trace for Perfetto or chrome://tracing, and one drawing as a page and as a picture."""

from __future__ import annotations

import csv
import html
import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from tabulate import tabulate

from ..say import say

COLOURS = {"compute": "#9bb7d4", "wait": "#d1495b", "pack": "#edae49", "transfer": "#66a182", "unpack": "#edae49"}
WORDS = {"compute": "computing", "wait": "standing still: exposed", "pack": "pack and unpack", "transfer": "in flight"}
ON_COMPUTE = ("compute", "wait")
DRAWN_RANKS = 4
HEADERS = ("exchanges", "MB sent", "exchange ms", "exposed ms", "hidden ms", "relayout ms")


def costs(rows: list) -> dict[tuple, tuple[float, ...]]:
    """Of each exchange of one rank, by (step, layer, what): calls, bytes, and the milliseconds of `HEADERS`."""
    found: dict[tuple, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row.step, row.layer, row.what][row.kind].append(row)
    table: dict[tuple, tuple[float, ...]] = {}
    for key, kinds in found.items():
        if "transfer" not in kinds:
            continue
        took = {kind: sum(row.end - row.begin for row in of) for kind, of in kinds.items()}
        relayout = took["pack"] + took["unpack"]
        exchange = took["transfer"] + relayout
        exposed = min(exchange, took["wait"] + took["pack"])
        size = sum(row.bytes for row in kinds["transfer"])
        table[key] = len(kinds["transfer"]), size, exchange, exposed, exchange - exposed, relayout
    return table


def tables(every: list[list]) -> str:
    """Sums per step, and means of a step per layer and per exchange; milliseconds are means over the ranks."""
    of_ranks = [costs(rows) for rows in every]
    steps = sorted({step for rank in of_ranks for step, *_ in rank})

    def table(title: str, name: str, index: int, per: int) -> str:
        sums: dict[Any, list[float]] = {}
        for rank in of_ranks:
            for key, values in rank.items():
                total = sums.setdefault(key[index], [0.0] * len(values))
                total[:] = [x + y / len(of_ranks) / per for x, y in zip(total, values)]
        lines = [(key, round(n, 1), size / 1e6, *ms) for key, (n, size, *ms) in sums.items()]
        return f"{title}\n{tabulate(lines, headers=(name, *HEADERS), floatfmt=('', 'g', *['.3f'] * 5))}\n"

    return "\n".join(
        (
            f"sp size {len(every)}; exposed: the compute row stood still for it",
            "",
            table("per step", "step", 0, 1),
            table("per exchange, mean of a step, all layers", "exchange", 2, max(len(steps), 1)),
            table("per layer, mean of a step", "layer", 1, max(len(steps), 1)),
        )
    )


def lanes(rows: Iterable) -> list[tuple[int, Any]]:
    """Rows that are in flight together, each in a lane of its own."""
    busy_until: list[float] = []
    placed = []
    for row in sorted(rows, key=lambda row: row.begin):
        lane = next((i for i, until in enumerate(busy_until) if until <= row.begin), len(busy_until))
        busy_until[lane : lane + 1] = [row.end]
        placed.append((lane, row))
    return placed


def trace(every: list[list]) -> dict:
    """In the JSON format of chrome://tracing, which Perfetto reads: a process a rank, its rows as threads."""
    events = []
    for rank, rows in enumerate(every):

        def event(row: Any, thread: int, name: str) -> None:
            events.append(
                {
                    "name": name, "cat": row.kind, "ph": "X", "ts": row.begin * 1e3, "dur": (row.end - row.begin) * 1e3,
                    "pid": rank, "tid": thread, "args": {"step": row.step, "layer": row.layer, "bytes": row.bytes},  # noqa: B023
                }
            )  # fmt: skip

        threads = {0: "compute"}
        for row in rows:
            if row.kind in ON_COMPUTE:
                event(row, 0, f"{row.layer} {'waits for ' if row.kind == 'wait' else ''}{row.what}")
        for lane, row in lanes(row for row in rows if row.kind == "transfer"):
            threads[1 + lane] = "side" if lane == 0 else f"side, also in flight {lane}"
            event(row, 1 + lane, f"{row.layer} {row.what}")
        thread = len(threads)
        for row in rows:
            if row.kind in ("pack", "unpack"):
                threads[thread] = "relayout"
                event(row, thread, f"{row.layer} {row.kind} {row.what}")
        names: dict[str, dict[Any, str]] = {"process_name": {None: f"sp rank {rank}"}, "thread_name": threads}
        for name, words in names.items():
            for thread, word in words.items():
                events.append({"name": name, "ph": "M", "pid": rank, "tid": thread or 0, "args": {"name": word}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class Panel(NamedTuple):
    """A stretch of the timeline: its title, and its begin and end on each rank's own clock."""

    title: str
    spans: list[tuple[float, float]]

    @property
    def duration(self) -> float:
        return max(end - begin for begin, end in self.spans)


def panels(every: list[list]) -> list[Panel]:
    """What is drawn: the last step, and the layer in it that is exposed most on rank 0, both ways."""
    step = max(row.step for row in every[0])
    shown = [[row for row in rows if row.step == step] for rows in every[:DRAWN_RANKS]]
    drawn = [Panel(f"step {step}", [(min(r.begin for r in rows), max(r.end for r in rows)) for rows in shown])]
    waited: dict[str, float] = defaultdict(float)
    for row in shown[0]:
        waited[row.layer] += (row.end - row.begin) * (row.kind == "wait")
    worst = max(waited, key=waited.__getitem__)
    for direction in ("forward", "backward"):
        spans = [next(((r.begin, r.end) for r in rows if (r.layer, r.kind) == (worst, direction)), None) for rows in shown]
        found = [span for span in spans if span is not None]
        if len(found) == len(spans):
            drawn.append(Panel(f"{worst}, {direction}, step {step}", found))
    return drawn


def bars(every: list[list], panel: Panel) -> tuple[list[str], list[tuple[int, float, float, Any]]]:
    """Names of the lines; (line, begin, end, row) of every bar, in ms since the panel's begin on its rank."""
    names: list[str] = []
    placed: list[tuple[int, float, float, Any]] = []
    for rank, (rows, (begin, end)) in enumerate(zip(every, panel.spans)):
        seen = [row for row in rows if row.end > begin and row.begin < end]
        side = lanes(row for row in seen if row.kind == "transfer")
        lines = [(len(names), row) for row in seen if row.kind in ON_COMPUTE]
        lines += [(len(names) + 1 + lane, row) for lane, row in side]
        lines += [(len(names) + 1, row) for row in seen if row.kind in ("pack", "unpack")]
        names += [f"rank {rank} compute", f"rank {rank} side"] + [""] * max((lane for lane, _ in side), default=0)
        placed += [(line, max(row.begin, begin) - begin, min(row.end, end) - begin, row) for line, row in lines]
    return names, placed


def draw(every: list[list]) -> Any:
    """The panels as a matplotlib figure. Raises ImportError without matplotlib."""
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
            if row.kind in ("compute", "transfer") and end - begin > 0.008 * len(row.what) * panel.duration:
                axis.text((begin + end) / 2, line, row.what, ha="center", va="center", fontsize=7)
        for (line, kind), spans in alike.items():
            half = 0.2 if kind in ("pack", "unpack") else 0.4
            axis.broken_barh(spans, (line - half, 2 * half), facecolor=COLOURS[kind], edgecolor="white", linewidth=0.3)
        axis.set(
            title=panel.title, xlabel="ms, each rank on its own clock", xlim=(0, panel.duration), ylim=(len(names) - 0.5, -0.5)
        )
        axis.set_yticks(range(len(names)), names)
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=word) for kind, word in WORDS.items()], loc="outside upper right", ncols=4
    )
    return figure


def page(figure: Any, text: str) -> str:
    """The figure and the tables in one self-contained HTML page."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawing = drawn.getvalue()
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>ds_sp_overlap timeline</title>'
        "<style>svg {width: 100%; height: auto}</style>"
        f"{drawing[drawing.index('<svg') :]}<pre>{html.escape(text)}</pre></html>\n"
    )


def write(folder: str, every: list[list]) -> None:
    """Write ``every`` rank's rows into ``folder``: timeline.txt, exchanges.csv, trace.json; with matplotlib timeline.html, timeline.png."""
    os.makedirs(folder, exist_ok=True)

    def path(name: str) -> str:
        return os.path.join(folder, name)

    text = tables(every)
    with open(path("timeline.txt"), "w") as file:
        file.write(text)
    with open(path("exchanges.csv"), "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("sp_rank", "step", "layer", "exchange", "calls", "bytes", *(h.replace(" ", "_") for h in HEADERS[2:])))
        for rank, rows in enumerate(every):
            lines.writerows((rank, *key, *values) for key, values in costs(rows).items())
    with open(path("trace.json"), "w") as file:
        json.dump(trace(every), file)
    try:
        figure = draw(every)
    except ImportError:
        say(f"sp_overlap: timeline in {folder}; pip install matplotlib for timeline.html and timeline.png")
        return
    figure.savefig(path("timeline.png"), dpi=110)
    with open(path("timeline.html"), "w") as file:
        file.write(page(figure, text))
    say(f"sp_overlap: timeline in {folder}")
