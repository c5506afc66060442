"""Draw the pictures of benchmarks/results from the CSV and JSON files beside them; nothing is measured.

    python benchmarks/pictures.py

draws each picture there anew. `link.py`, `training_steps.py` and `memory.py` draw theirs at the end of a run.
"""

from __future__ import annotations

import csv
import json
import textwrap
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
OURS, STOCK, LIMIT = "tab:blue", "tab:orange", "lightgrey"


def draw(out: Path) -> None:
    """Write ``out``.png from ``out``.csv and ``out``.json."""
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    kind = json.loads(out.with_suffix(".json").read_text())["kind"]
    path = out.with_suffix(".png")
    if "step / limit" in rows[0]:
        lines(rows, path, f"One attention layer, forward and backward; {kind}")
    elif "median ms" in rows[0]:
        panels = _panels(rows, "Mbit/s", "median ms")
        bars(panels, path, kind, "time of a training step, ms: median, and line from least to most", ends=("min ms", "max ms"))
    else:
        panels = _panels(rows, "heads", "peak")
        bars(
            panels,
            path,
            f"One attention layer, forward and backward: {kind}",
            "most memory held, in units of the layer's input on this rank",
        )


def _panels(rows: list[dict], column: str, value: str) -> dict[str, list[dict]]:
    """Rows by what they have in ``column``, with a ``value`` to draw."""
    panels: dict[str, list[dict]] = {}
    for row in rows:
        name = f"{float(row[column]):g} {column}" if column == "Mbit/s" else row[column]
        panels.setdefault(name, []).append({**row, "value": float(row[value])})
    return panels


def bars(panels: dict[str, list[dict]], path: Path, title: str, axis: str, ends: tuple[str, ...] = ()) -> None:
    """Draw a bar with its value for each row, and a panel for each key of ``panels``.

    Args:
        ends: the columns with the least and the most of a row's value.
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
            [row["variant"] for row in rows], values, xerr=spread, color=colours, ecolor="black", error_kw={"linewidth": 0.8}
        )
        axes.bar_label(drawn, labels=[f"{value:g}" for value in values], label_type="center", fontsize=9)
        axes.set_title(name, fontsize=10)
    figure.supxlabel(axis, fontsize=9)
    _save(figure, path, title)


def lines(rows: list[dict], path: Path, title: str) -> None:
    """Draw the step of each variant over the exchange, in multiples of what is possible and of the arithmetic."""
    figure, axes = _subplots(figsize=(8, 5))
    rows = [row for row in rows if row["step / limit"]]
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = sorted((float(row["exchange / compute"]), float(row["step / limit"])) for row in rows if row["variant"] == name)
        style = {"side by side": "k:", "DeepSpeed": "s-", "five of eight": "^-"}.get(name, "--" if "off" in name else "o-")
        axes.plot(*zip(*points), style, label=name)
    phases = {
        float(row["exchange / compute"]): float(row["step / limit"]) / float(row["step / phase limit"])
        for row in rows
        if row["exposed ms"]
    }
    axes.plot(*zip(*sorted(phases.items())), "k--", linewidth=0.8, label="forward and backward, each perfect")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("time of the exchanges alone / time of the arithmetic alone")
    axes.set_ylabel("step / the longer of the two (1 is perfect)")
    axes.legend(fontsize=8)
    _save(figure, path, title)


def for_readme(path: Path) -> None:
    """Draw stock's training step and ours over the slowest link of `training_steps.csv`."""
    with (RESULTS / "training_steps.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file) if row["Mbit/s"] == "200"}
    names = {"stock ALST": "stock DeepSpeed", "G = 4": "with ds_sp_overlap", "stock, free wire": "if communication were free"}
    chosen = [{**rows[name], "variant": said, "value": float(rows[name]["median ms"])} for name, said in names.items()]
    title = (
        "A whole training step over a slow link, ms. Measured between two CPU processes on a link that is limited to 200 Mbit/s, "
        "not on a GPU: LLaMA of 2 layers, hidden 512, 8 heads, 4096 tokens, fp32, ZeRO 1"
    )
    bars(
        {"": chosen},
        path,
        title,
        "time of a training step, ms: median of 3 steps, and line from least to most",
        ends=("min ms", "max ms"),
    )


def _subplots(*shape, **options):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(*shape, **options)


def _save(figure, path: Path, title: str) -> None:
    """Write the picture, with its title broken into lines that fit."""
    figure.suptitle("\n".join(textwrap.wrap(title[0].upper() + title[1:], width=int(13 * figure.get_figwidth()))), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    for path in sorted(RESULTS.glob("*.png")):
        if path.with_suffix(".csv").exists():
            draw(path.with_suffix(""))
    for_readme(RESULTS / "readme.png")


if __name__ == "__main__":
    main()
