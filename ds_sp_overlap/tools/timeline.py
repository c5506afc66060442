"""Computes the cost of each exchange from traces of ``torch.profiler``; writes a table and a chart.

    compute     | pack q | Wk .......... |           | unpack q | attention ..
    transfer             | q ......................q |
    exposed     |########|               |######################|

An exchange is identified by the profiler ranges around its start and its finish. On a GPU, the
exchange consists of the kernels that were launched inside these ranges: pack and unpack on streams
that also run other work, transfers on all other streams. Pack, unpack, and the part of a transfer
during which no stream computes are *exposed*. If the host carries the exchange (gloo), start and
finish are exposed, since the host computes nothing meanwhile.
"""

from __future__ import annotations

import csv
import gzip
import json
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from ..exchange.layout import Range, joined, total
from ..warn import inform

HALF = re.compile(r"(.+) (\S+) (start|finish)")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Exchange:
    """Holds the times of one exchange of one layer.

    Attributes:
        rank: The rank.
        step: The optimizer step.
        layer: The name of the layer.
        name: The name of the exchange, for instance ``dv0``.
        host: The ranges of its start and of its finish on the host, in ns.
        transfer_ns: The time of its transfers, in ns.
        exposed_ns: The time for which the exchange was exposed, in ns.
    """

    rank: int
    step: int
    layer: str
    name: str
    host: list[Range]
    transfer_ns: float = 0
    exposed_ns: float = 0


def read(path: str, index: int = 0) -> list[Exchange]:
    """Return the finished exchanges of a rank, in the order of their starts.

    Args:
        path: A file that ``torch.profiler`` exported.
        index: The rank to report if the trace names no rank.

    Raises:
        ValueError: if the file is not a trace of ``torch.profiler``.
    """
    try:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            trace = json.load(file)
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no trace of torch.profiler ({error!r})") from None
    events.sort(key=lambda event: event["ts"])
    rank = trace.get("distributedInfo", {}).get("rank", index)
    exchanges, of_launch = _on_host(events, rank)
    _on_device(events, of_launch)
    if not of_launch:
        for exchange in exchanges:
            exchange.exposed_ns = total(exchange.host)
    return exchanges


def _range(event: dict[str, Any]) -> Range:
    """Return the begin and the end of an event, converted from us to ns."""
    return round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))


def _on_host(events: list[dict], rank: int) -> tuple[list[Exchange], dict[int, Exchange]]:
    """Find the finished exchanges in the host's events, with the times of gloo's transfers.

    Returns:
        The exchanges; and, for the correlation number of each launch on a device, its exchange.
    """
    step = 0
    exchanges = []
    unfinished = {}
    of_launch = {}
    launched = []
    transfers = []
    # For each thread: the end and the exchange of each range around the current event.
    around: dict[Any, list[tuple[int, Exchange]]] = defaultdict(list)
    for event in events:
        name, span, inside = event["name"], _range(event), around[event["pid"], event["tid"]]
        while inside and inside[-1][0] <= span[0]:
            inside.pop()
        exchange = inside[-1][1] if inside else None
        half = HALF.fullmatch(name) if event.get("cat") == "user_annotation" else None
        if half is not None:
            layer, what, which = half.groups()
            if which == "start":
                exchange = unfinished[layer, what] = Exchange(rank, step, layer, what, [])
                exchanges.append(exchange)
            else:
                exchange = unfinished.pop((layer, what), None)
            if exchange is not None:
                exchange.host.append(span)
                inside.append((span[1], exchange))
        elif name.startswith("ProfilerStep#"):
            step = int(name.removeprefix("ProfilerStep#"))
        elif name == "gloo:all_to_all":
            transfers.append(span)
        elif name.startswith("c10d::alltoall"):
            launched.append(exchange)
        elif exchange is not None and "correlation" in event.get("args", ()):
            of_launch[event["args"]["correlation"]] = exchange
    # Pair launches with transfers in order, since gloo's threads run exchanges in launch order.
    for exchange, span in zip(launched, transfers):
        if exchange is not None:
            exchange.transfer_ns += total([span])
    return [each for each in exchanges if len(each.host) == 2], of_launch


def _on_device(events: list[dict], of_launch: dict[int, Exchange]) -> None:
    """Add the times of transfers and the exposed times on a device to the exchanges.

    Counts an exchange's kernel as pack or unpack if its stream also runs kernels of other work.
    """
    ran = [event for event in events if event.get("cat") in ON_DEVICE]
    streams = set()
    for event in ran:
        is_exchange = event["args"]["correlation"] in of_launch or event["name"].startswith("nccl")
        if event["cat"] == "kernel" and not is_exchange:
            streams.add(event["args"]["stream"])
    busy = joined(_range(event) for event in ran if event["args"]["stream"] in streams)
    # ``computed`` gives, for each time in ``edges``, the busy time from 0 to that time.
    edges = [0, *chain(*busy)]
    lengths = np.diff(edges)
    lengths[::2] = 0
    computed = np.cumsum([0, *lengths])
    for event in ran:
        exchange = of_launch.get(event["args"]["correlation"])
        if exchange is None:
            continue
        begin, end = _range(event)
        exchange.exposed_ns += end - begin
        if event["args"]["stream"] not in streams:
            exchange.transfer_ns += end - begin
            hidden_from, hidden_to = np.interp((begin, end), edges, computed)
            exchange.exposed_ns -= hidden_to - hidden_from


def costs(exchanges: Iterable[Exchange], *of: str) -> dict[Any, list[float]]:
    """Group exchanges by the values of the attributes ``of``, and sum the costs of each group.

    Returns:
        For the values of these attributes: [number of exchanges, ms of transfer, ms exposed].
    """
    table: dict[Any, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for each in exchanges:
        row = table[operator.attrgetter(*of)(each)]
        row[:] = row[0] + 1, row[1] + each.transfer_ns / 1e6, row[2] + each.exposed_ns / 1e6
    return table


def draw(rows: dict[str, list[float]]) -> Any:
    """Draw the costs of each exchange in a step as bars.

    Args:
        rows: For the name of each exchange: number of exchanges, ms of transfer, ms exposed.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    _, transfer, exposed = zip(*rows.values())
    figure = Figure(figsize=(10, 2 + 0.3 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.barh(list(rows), transfer, color="#9bb7d4", label="transfer")
    axis.barh(list(rows), exposed, 0.4, color="#d1495b", label="exposed: nothing is computed")
    axis.set(
        xlabel="ms in a step, all layers", title=f"{sum(exposed):.3g} ms of exchanges are exposed"
    )
    axis.invert_yaxis()
    axis.legend()
    return figure


def write(paths: Sequence[str]) -> str:
    """Write exchanges.csv and timeline.png for some traces, into the folder of the first trace.

    Args:
        paths: The trace files, one for each rank.

    Returns:
        A table of the costs in one step, as text.

    Raises:
        ValueError: if a file is not a trace of ``torch.profiler``.
    """
    exchanges = [each for at, path in enumerate(paths) for each in read(path, at)]
    exchanges.sort(key=operator.attrgetter("rank"))
    table = costs(exchanges, "rank", "step", "layer", "name")
    folder = Path(paths[0]).parent
    with open(folder / "exchanges.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow("rank step layer exchange calls transfer_ms exposed_ms".split())
        lines.writerows((*key, *row) for key, row in table.items())
    if not table:
        inform(f"sp_overlap: no exchange of an overlapped layer in {paths[0]}")
        return ""
    # Sum over the layers, average over ranks and steps.
    steps = len(costs(exchanges, "rank", "step"))
    by_name = costs(exchanges, "name").items()
    rows = {name: [value / steps for value in row] for name, row in by_name}
    try:
        draw(rows).savefig(folder / "timeline.png", dpi=110)
    except ImportError:
        inform("sp_overlap: pip install matplotlib for timeline.png")
    inform(f"sp_overlap: timeline in {folder}")
    rows["all"] = [sum(column) for column in zip(*rows.values())]
    headers = ("exchange, a step", "number", "transfer ms", "exposed ms")
    cells = [(name, *row) for name, row in rows.items()]
    return tabulate(cells, headers, floatfmt=("", "g", ".2f", ".2f"))
