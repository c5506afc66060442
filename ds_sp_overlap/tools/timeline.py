"""Reads traces of ``torch.profiler``: what each exchange cost, as a table and as a picture.

    compute     | pack q | Wk .......... |           | unpack q | attention ..
    transfer             | q ......................q |
    exposed     |########|               |######################|

An exchange is found by the ranges that every profiler sees around its start and its finish. On a
GPU it consists of the kernels that were launched inside of them: those on a stream that computes
pack and unpack, others transfer. *Exposed* are packing, unpacking, and a transfer as far as no
stream computes meanwhile. Where the host carries the exchange (gloo), its start and its finish are
exposed: the host computes nothing meanwhile.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from ..warn import inform

# Begin and end, in ms.
Span = tuple[float, float]

HALF = re.compile(r"(.+) (\S+) (start|finish)")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COLOURS = {"computing": "#9bb7d4", "exposed": "#d1495b", "transfer": "#66a182"}
DRAWN_RANKS = 4


@dataclass
class Exchange:
    """One exchange of one layer.

    Attributes:
        step: Optimizer step.
        layer: Name of the layer.
        name: Name of the exchange, for instance ``dv0``.
        host: The ranges of its start and of its finish, on the host.
        transfers: Its transfers.
        exposed: The stretches in which it was exposed.
    """

    step: int
    layer: str
    name: str
    host: list[Span]
    transfers: list[Span] = field(default_factory=list)
    exposed: list[Span] = field(default_factory=list)


class Trace(NamedTuple):
    """Holds what the trace of one rank tells.

    Attributes:
        rank: The rank.
        exchanges: The exchanges that were finished, in the order of their starts.
        computing: When the rank computed.
    """

    rank: int
    exchanges: list[Exchange]
    computing: list[Span]


def length(spans: Iterable[Span]) -> float:
    """Return the sum of the lengths of spans."""
    return sum(end - begin for begin, end in spans)


def hull(exchanges: Iterable[Exchange]) -> Span:
    """Return the begin of the first and the end of the last of some exchanges."""
    spans = [span for each in exchanges for span in (*each.transfers, *each.exposed)]
    return min(spans)[0], max(end for _, end in spans)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans that don't overlap, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def without(span: Span, busy: Sequence[Span]) -> list[Span]:
    """Return what is left of ``span`` outside of ``busy``, which is `merged`."""
    begin, end = span
    left = []
    for first, last in busy[max(0, bisect_right(busy, span) - 1) :]:
        if first >= end:
            break
        if first > begin:
            left.append((begin, first))
        begin = max(begin, last)
    return [*left, (begin, end)] if begin < end else left


def read(path: str, index: int = 0) -> Trace:
    """Read the trace of a rank.

    Args:
        path: A file that ``torch.profiler`` exported.
        index: The rank, where the trace names none.

    Raises:
        ValueError: if the file is no such trace.
    """
    try:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            trace = json.load(file)
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no trace of torch.profiler ({error!r})") from None
    events.sort(key=lambda event: event["ts"])
    exchanges, of_launch, by_gloo = _on_host(events)
    computing = _on_device(events, of_launch)
    for exchange in exchanges:
        if not exchange.transfers:
            exchange.exposed = exchange.host
    for exchange, transfer in by_gloo:
        exchange.transfers.append(transfer)
    if exchanges and not computing:
        exposed = merged(span for exchange in exchanges for span in exchange.exposed)
        computing = without(hull(exchanges), exposed)
    rank = trace.get("distributedInfo", {}).get("rank", index)
    return Trace(rank, exchanges, computing)


def _span(event: dict[str, Any]) -> Span:
    return event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3


def _on_host(
    events: list[dict],
) -> tuple[list[Exchange], dict[int, Exchange], list[tuple[Exchange, Span]]]:
    """Find the exchanges that were finished.

    Returns:
        The exchanges; by its number, the exchange of each launch on a device; and the transfers of
        gloo, whose threads take up what was launched in that order.
    """
    step = 0
    exchanges: list[Exchange] = []
    unfinished: dict[tuple[str, str], Exchange] = {}
    of_launch: dict[int, Exchange] = {}
    launched: list[Exchange | None] = []
    transfers: list[Span] = []
    # By thread: the ranges of exchanges around the event, and when they end.
    around: dict[Any, list[tuple[float, Exchange]]] = defaultdict(list)
    for event in events:
        name, span, inside = event["name"], _span(event), around[event["pid"], event["tid"]]
        while inside and inside[-1][0] <= span[0]:
            inside.pop()
        exchange = inside[-1][1] if inside else None
        half = HALF.fullmatch(name) if event.get("cat") == "user_annotation" else None
        if half is not None:
            layer, what, which = half.groups()
            if which == "start":
                exchange = unfinished[layer, what] = Exchange(step, layer, what, [span])
                exchanges.append(exchange)
            elif (layer, what) in unfinished:
                exchange = unfinished.pop((layer, what))
                exchange.host.append(span)
            if exchange is not None:
                inside.append((span[1], exchange))
        elif name.startswith("ProfilerStep#"):
            step = int(name.removeprefix("ProfilerStep#"))
        elif name == "gloo:all_to_all":
            transfers.append(span)
        elif name.startswith("c10d::alltoall"):
            launched.append(exchange)
        elif exchange is not None and "correlation" in event.get("args", ()):
            of_launch[event["args"]["correlation"]] = exchange
    by_gloo = [(exchange, span) for exchange, span in zip(launched, transfers) if exchange]
    return [each for each in exchanges if len(each.host) == 2], of_launch, by_gloo


def _on_device(events: list[dict], of_launch: dict[int, Exchange]) -> list[Span]:
    """Find what exchanges did on a device; return when the device computed, with all relayout."""
    ran = [event for event in events if event.get("cat") in ON_DEVICE]
    computing = []
    for event in ran:
        is_nccl = event["name"].startswith("nccl")
        if (
            event["cat"] == "kernel"
            and not is_nccl
            and event["args"]["correlation"] not in of_launch
        ):
            computing.append(event)
    streams = {event["args"]["stream"] for event in computing}
    busy = merged(_span(event) for event in ran if event["args"]["stream"] in streams)
    for event in ran:
        exchange = of_launch.get(event["args"]["correlation"])
        if exchange is None:
            continue
        if event["args"]["stream"] in streams:
            exchange.exposed.append(_span(event))
        else:
            exchange.transfers.append(_span(event))
            exchange.exposed += without(_span(event), busy)
    return merged(map(_span, computing))


def costs(trace: Trace) -> dict[tuple[int, str, str], list[float]]:
    """Return by step, layer and name of an exchange: its number, ms of transfer, ms exposed."""
    table: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for each in trace.exchanges:
        row = table[each.step, each.layer, each.name]
        row[:] = row[0] + 1, row[1] + length(each.transfers), row[2] + length(each.exposed)
    return table


def summary(traces: list[Trace]) -> str:
    """Return a table of a step: for each exchange the sums of all layers, means over the ranks."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    per = len(traces) * len({each.step for each in traces[0].exchanges})
    for trace in traces:
        for (_, _, name), row in costs(trace).items():
            sums[name] = [total + value / per for total, value in zip(sums[name], row)]
    sums["all"] = [sum(column) for column in zip(*sums.values())]
    headers = ("exchange, a step", "number", "transfer ms", "exposed ms")
    rows = [(name, *row) for name, row in sums.items()]
    return tabulate(rows, headers, floatfmt=("", "g", ".2f", ".2f"))


def draw(traces: list[Trace]) -> Any:
    """Draw the call of a layer that was most exposed on the first rank, in the last step.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    step = min(max(each.step for each in trace.exchanges) for trace in traces)
    figure = Figure(figsize=(14, 2 + len(traces)), layout="constrained")
    axis, worst = figure.subplots(), 0
    for line, trace in enumerate(traces):
        of_step = (each for each in trace.exchanges if each.step == step)
        calls = [list(call) for _, call in groupby(of_step, lambda each: each.layer)]
        if line == 0:
            exposed = [sum(length(each.exposed) for each in call) for call in calls]
            worst = exposed.index(max(exposed))
            first, last = calls[worst][0], calls[worst][-1]
            axis.set_title(f"step {step}, {first.layer}, {first.name} to {last.name}")
        # Ranks make the same calls, but a trace may end early.
        _draw_rank(axis, 2 * line, trace, hull(calls[min(worst, len(calls) - 1)]))
    lines = [f"rank {trace.rank} {what}" for trace in traces for what in ("compute", "transfer")]
    axis.set(xlabel="ms, each rank on its own clock", ylim=(len(lines) - 0.5, -0.5))
    axis.set_xlim(left=0)
    axis.set_yticks(range(len(lines)), lines)
    handles = [Patch(color=colour, label=word) for word, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)
    return figure


def _draw_rank(axis: Any, line: int, trace: Trace, span: Span) -> None:
    """Draw the two lines of a rank, from ``line`` on, in a span of its clock."""
    begin, end = span

    def bars(kind: str, spans: Iterable[Span], top: float, height: float = 0.8) -> None:
        seen = merged((max(a, begin), min(b, end)) for a, b in spans if a < end and b > begin)
        places = [(a - begin, b - a) for a, b in seen]
        axis.broken_barh(places, (top - 0.4, height), facecolor=COLOURS[kind])

    bars("computing", trace.computing, line)
    bars("exposed", (span for each in trace.exchanges for span in each.exposed), line)
    for index, each in enumerate(trace.exchanges):
        # One above the other, since gloo carries two at a time.
        top = line + 1 + 0.4 * (index % 2)
        bars("transfer", each.transfers, top, height=0.38)
        for a, b in each.transfers:
            # A letter takes about 0.8 % of the width.
            if begin <= a and b <= end and b - a > 0.008 * len(each.name) * (end - begin):
                middle = (a + b) / 2 - begin
                axis.text(middle, top - 0.2, each.name, ha="center", va="center", fontsize=7)


def write(paths: Sequence[str]) -> str:
    """Write what traces tell, one of each rank, beside the first: exchanges.csv and timeline.png.

    Returns:
        A table of a step, in words.

    Raises:
        ValueError: as `read` does.
    """
    traces = [read(path, index) for index, path in enumerate(paths)]
    traces.sort(key=lambda trace: trace.rank)
    folder = Path(paths[0]).parent
    with open(folder / "exchanges.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow("rank step layer exchange calls transfer_ms exposed_ms".split())
        for trace in traces:
            lines.writerows((trace.rank, *key, *row) for key, row in costs(trace).items())
    drawn = [trace for trace in traces if trace.exchanges]
    if not drawn:
        inform(f"sp_overlap: no exchange of an overlapped layer in {paths[0]}")
        return ""
    try:
        draw(drawn[:DRAWN_RANKS]).savefig(folder / "timeline.png", dpi=110)
    except ImportError:
        inform("sp_overlap: pip install matplotlib for timeline.png")
    inform(f"sp_overlap: timeline in {folder}")
    return summary(drawn)
