"""Writes the results of benchmarks: a table, a CSV, and a JSON of the environment with the command that reproduces the results."""

from __future__ import annotations

import csv
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch


def environment(kind: str) -> dict:
    """Describe where and how something was measured. ``kind`` is the kind of the figures; each kind has its own tables."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return {
        "command": "python " + " ".join(sys.argv),
        "kind": kind,
        "torch": torch.__version__,
        "deepspeed": metadata.version("deepspeed"),
        "python": platform.python_version(),
        "cpu": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


class Rows(list):
    """A list of rows that is written to ``path`` after each new row, so that a run that ends early leaves its rows."""

    def __init__(self, path: Path | None):
        super().__init__()
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, row: dict) -> None:
        super().append(row)
        if self.path is not None:
            with self.path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(key for known in self for key in known)))
                writer.writeheader()
                writer.writerows(self)


def write(out: Path | None, rows: list[dict], kind: str, notes: list[str] = (), **more) -> None:
    """Print ``rows`` as a table; with ``out``, write ``out``.csv, and ``out``.json with the environment and ``more``."""
    from tabulate import tabulate  # imported here, since machines that only write rows may lack it

    print(kind)
    print(tabulate(rows, headers="keys", tablefmt="github"))
    for note in notes:
        print(note)
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
    out.with_suffix(".json").write_text(json.dumps({**environment(kind), **more, "notes": list(notes)}, indent=2) + "\n")
