"""Writes docs/sweep.md, with a short row for each model type, and docs/sweep.csv, with the full messages.

The sweep (`tests/frameworks/test_sweep.py`) calls `write`. After a change of this file, write the page again from the CSV:

    python -m tests.harness.sweep_page
"""

from __future__ import annotations

import collections
import csv
import re
import subprocess
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FILE = DOCS / "sweep.md", DOCS / "sweep.csv"
COLUMNS = "type", "config", "verdict", "why", "largest error, logits / gradients", "stock's"
RUN = "(the run)"  # the "type" in rows that are not about a type: versions of packages, and counts of verdicts on odd configs
ERROR = re.compile(r"[\d.e+-]+ / [\d.e+-]+|inf / .*")

SHORT = [  # patterns of messages, and the shorter text on the page
    (r"^sp_overlap: \S+ \([^)]*\):? ", ""),
    ("; not supported with sequence parallelism", ""),
    (r"^\w+: ", ""),
    (r"^mixes tokens without.*", "mixes tokens outside attention functions"),
    (r'^attention "eager" needs.*', "needs sdpa or flash attention"),
    (r"^\w+ takes no position_ids.*", "counts each rank's tokens from 0"),
    (r"^its attention is not causal", "attention is not causal"),
    (r"^its forward calls its attention more than once.*", "attention called more than once"),
    (r"^its forward looks at the dtype or device.*", "forward looks at a dtype"),
    (r"^its forward computes what is not known here: ", "forward computes "),
    (r"^its forward uses (\w+) .*", r"forward uses \1"),
    (r"^its forward may run (\w+), which.*", r"forward may run \1"),
    (r"^its forward gives (\w+) more.*", r"forward calls \1"),
    (r"^its forward ", "forward "),
    (r"^(\w+) is no norm that is alike for all heads", r"\1 differs between heads"),
    (r"^o_proj is not given.*", "output changed before o_proj"),
    (r"^apply_rotary_pos_emb is no rotary.*", "unknown rotary embedding"),
    (r"^latents of .*", "latents save nothing"),
    (r"^a mask with or_masks.*", "mask with or_masks"),
    (r"^\d+ parameters with the sizes.*", "too large for the test"),
    (r"^\w+ requires the (\w+) library.*", r"needs the library \1"),
    (r"^expected scalar type.*", "no fp64"),
    (
        r"^(inputs_embeds and shared_kv_states cannot be None|Class validation error|The set of layer types|'\w+' object has no attribute).*",
        "no tiny config",
    ),
]


def write(rows: list[dict[str, str]]) -> None:
    """Write the CSV and the page."""
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(page(rows))


def rows_of(verdicts: dict, odd: dict) -> list[dict[str, str]]:
    """Return the rows of the CSV for {type: `Verdict`} and {type: `Odd`} of a sweep."""
    here = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=DOCS, capture_output=True, text=True).stdout.strip()
    counts = [sum(getattr(found, what) for found in odd.values()) for what in ("right", "refused", "not_run")]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "deepspeed", "torch"))
    said = f"{versions}, and this package at commit {here}."
    odd_said = "{} are right, {} refused; of {} the model can't be built or run.".format(*counts)
    rows = [
        dict.fromkeys(COLUMNS, "") | {"type": RUN, "why": said},
        dict.fromkeys(COLUMNS, "") | {"type": RUN, "config": "odd", "why": odd_said},
    ]
    for kind, found in sorted(verdicts.items()):
        rows.append(dict(zip(COLUMNS, (kind, "", found.word, found.why, found.ours, found.stock))))
    for kind, found in sorted(odd.items()):
        rows += [dict(zip(COLUMNS, (kind, name, *said, "-", "-"))) for name, said in found.otherwise.items()]
    return rows


def page(rows: list[dict[str, str]]) -> str:
    """Return the text of the page, with its figures and tables replaced by those of the CSV's ``rows``."""
    said = {row["config"]: row["why"] for row in rows if row["type"] == RUN}
    types = [row for row in rows if row["type"] != RUN and not row["config"]]
    odd = [row for row in rows if row["type"] != RUN and row["config"]]
    count = collections.Counter(row["verdict"] for row in types)
    worst = max(float(x) for row in types for x in row["largest error, logits / gradients"].split(" / ") if x != "-")
    stock = [row["stock's"] for row in types if row["stock's"] != "-"]
    compared = [max(map(float, text.split(" / "))) for text in stock if ERROR.fullmatch(text)]
    right = sum(error <= 1e-10 for error in compared)
    state = (
        f"Tried with {said['']} {', '.join(f'{number} {word}' for word, number in count.most_common())}. "
        f"Largest error of what is overlapped: {worst:.0e}.\nDeepSpeed's own `UlyssesSPAttentionHF`, on the first config and batch: "
        f"{right} types right, {len(compared) - right} wrong, {len(stock) - len(compared)} raise."
    )
    odd_rows = [(row["type"], row["config"], row["verdict"], reason(row["why"])) for row in odd]
    made = (
        state,
        _table(("type", "verdict", "reason"), [(row["type"], row["verdict"], reason(row["why"])) for row in types]),
        f"Of the odd configs {said['odd']}",
        _table(("type", "config", "verdict", "reason"), odd_rows),
    )
    paragraphs = PAGE.read_text().strip().split("\n\n")
    beginnings = {text[:18]: text for text in made}
    return "\n\n".join(beginnings.get(old[:18], old) for old in paragraphs) + "\n"


def reason(message: str) -> str:
    """Shorten a message by the patterns of `SHORT`."""
    for pattern, short in SHORT:
        message = re.sub(pattern, short, message)
    return message


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    every = (header, ("---",) * len(header), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in every)


if __name__ == "__main__":
    with FILE.open(newline="") as file:
        write(list(csv.DictReader(file)))
