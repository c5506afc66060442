"""Draw the pictures of benchmarks/results from the CSV and JSON files beside them; measures nothing.

    python benchmarks/pictures.py        draw all pictures again

`link.py`, `training_steps.py` and `memory.py` draw their own pictures at the end of a run.
"""

from __future__ import annotations

import csv
import json
import textwrap
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
OURS, STOCK, LIMIT = "tab:blue", "tab:orange", "lightgrey"
ON_CPUS = "Measured on CPUs, not on a GPU"
# {variant in the tables: its name in pictures}.
NAMES = {
    "stock ALST": "DeepSpeed",
    "stock, free wire": "DeepSpeed, if communication were free",
    "five of eight": "DeepSpeed's pull request 5691",
    "side by side": "lower bound: computing beside unrelated communication",
}


def draw(out: Path) -> None:
    """Write ``out``.png from ``out``.csv and ``out``.json."""
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    kind = json.loads(out.with_suffix(".json").read_text())["kind"]
    path = out.with_suffix(".png")
    if "step / limit" in rows[0]:
        lines(rows, path, f"One attention layer, forward and backward. {ON_CPUS}: {kind}")
    elif "median ms" in rows[0]:
        panels = _panels(rows, "Mbit/s", "median ms")
        title, axis = f"Training steps. {ON_CPUS}: {kind}", "time of a training step, ms (median, and line from least to most)"
        bars(panels, path, title, axis, ends=("min ms", "max ms"))
    else:
        title = f"Peak memory of one attention layer, forward and backward. {ON_CPUS}: {kind}"
        bars(_panels(rows, "heads", "peak"), path, title, "peak memory / size of the layer's input on this rank")


def _panels(rows: list[dict], column: str, value: str) -> dict[str, list[dict]]:
    """Return {value of ``column``: rows}; leave out rows without a ``value`` to draw."""
    panels: dict[str, list[dict]] = {}
    for row in rows:
        name = f"{float(row[column]):g} {column}" if column == "Mbit/s" else row[column]
        panels.setdefault(name, []).append({**row, "value": float(row[value])})
    return panels


def bars(panels: dict[str, list[dict]], path: Path, title: str, axis: str, ends: tuple[str, ...] = ()) -> None:
    """Draw a panel for each key of ``panels``, and in it a bar with its value for each row.

    Args:
        ends: The columns with the smallest and the largest measured value of a row.
    """
    most = max(len(rows) for rows in panels.values())
    figure, every = _subplots(1, len(panels), figsize=(1.5 + 5 * len(panels), 1.6 + 0.36 * most), squeeze=False)
    for axes, (name, rows) in zip(every[0], panels.items()):
        rows = rows[::-1]
        values = [row["value"] for row in rows]
        spread = [[abs(row["value"] - float(row[end])) for row in rows] for end in ends] or None
        colours = [
            LIMIT if "free" in row["variant"] else STOCK if row["variant"].startswith(("stock", "DeepSpeed")) else OURS
            for row in rows
        ]
        drawn = axes.barh(
            [named(row["variant"]) for row in rows], values, xerr=spread, color=colours, ecolor="black", error_kw={"linewidth": 0.8}
        )
        axes.bar_label(drawn, labels=[f"{value:g}" for value in values], label_type="center", fontsize=9)
        axes.set_title(name, fontsize=10)
    figure.supxlabel(axis, fontsize=9)
    _save(figure, path, title)


def lines(rows: list[dict], path: Path, title: str) -> None:
    """Draw for each variant its time, in multiples of that of perfect overlap, over the time of communication."""
    figure, axes = _subplots(figsize=(10, 5))
    rows = [row for row in rows if row["step / limit"] and "off" not in row["variant"]]
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = sorted((float(row["exchange / compute"]), float(row["step / limit"])) for row in rows if row["variant"] == name)
        style = {"side by side": "k:", "DeepSpeed": "s-", "five of eight": "^-"}.get(name, "o-")
        axes.plot(*zip(*points), style, label=named(name))
    phases = {
        float(row["exchange / compute"]): float(row["step / limit"]) / float(row["step / phase limit"])
        for row in rows
        if row["exposed ms"]
    }
    label = "lower bound: forward and backward can't hide each other's communication"
    axes.plot(*zip(*sorted(phases.items())), "k--", linewidth=0.8, label=label)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("communication time / compute time, each alone")
    axes.set_ylabel("step time / time with perfect overlap")
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    _save(figure, path, title)


def named(variant: str) -> str:
    """Return the name of a variant in pictures."""
    groups, comma, more = variant.removeprefix("G = ").partition(",")
    if groups == variant.partition(",")[0]:
        return NAMES.get(variant, variant)
    said = {"1": "1 head group", "auto": "head groups by timing"}.get(groups, f"{groups} head groups")
    return f"ours, {said}{comma}{more}"


def for_readme(path: Path) -> None:
    """Draw whole steps on a GPU, cases in which the overlap is faster than DeepSpeed alone, and cases in which it is slower."""
    with (RESULTS / "h100" / "whole_steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    panels: dict[str, list[dict]] = {}
    for row in rows:
        kind = "4 layers of Llama-8B" if row["hidden"] == "4096" else "8 layers, 1B-like"
        panel = panels.setdefault(f"{kind}, {row['tokens a rank']} tokens/rank", [])
        if not row["variant"].startswith("block"):
            panel.append({**row, "value": float(row["step ms"])})
    title = (
        "Forward and backward of a LLaMA under DeepSpeed ZeRO-1, bf16, over NCCL: two ranks that share one H100 (MPS). "
        "The larger layers gain up to 7 %; the small ones lose, because Python takes longer than the GPU"
    )
    axis = "time of a step, ms (median of nine, and line from least to most)"
    bars(panels, path, title, axis, ends=("least ms", "most ms"))


def _subplots(*shape, **options):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(*shape, layout="constrained", **options)


def _save(figure, path: Path, title: str) -> None:
    """Write the picture; break its title into lines that fit."""
    figure.suptitle("\n".join(textwrap.wrap(title[0].upper() + title[1:], width=int(13 * figure.get_figwidth()))), fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    for path in sorted(RESULTS.glob("*.png")):
        if path.with_suffix(".csv").exists():
            draw(path.with_suffix(""))
    for_readme(RESULTS / "readme.png")


if __name__ == "__main__":
    main()
