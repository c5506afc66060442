"""Write docs/sweep.md, a short row for each type, and docs/sweep.csv, which has the messages.

The sweep (`tests/frameworks/test_sweep.py`) calls `write`. To write the page again from the CSV alone, after a change of this file:

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
RUN = "(the run)"  # in the place of a type: what was run, and how many odd configs came to what
ERROR = re.compile(r"[\d.e+-]+ / [\d.e+-]+|inf / .*")

SHORT = [  # of a message, what the page says instead
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

HEAD = """# Which causal models work

Look your type up in [the table](#types). The full messages, the errors and stock's result stand in [sweep.csv](sweep.csv).
{state}

| verdict | what you get |
|---|---|
| whole | all eight exchanges of an attention layer are overlapped, with its projections |
| attention function | the exchanges are overlapped; the projections stay the layer's own |
| latent attention | the same, and latents travel in place of the heads that are made of them |
| delta rule | gated delta nets, whose convolution and delta rule see the whole sequence; the exchanges around them are overlapped |
| selective scan | Mamba 1, whose scan sees the whole sequence by channels, over the same exchanges |
| states | [mixers](mixers.md) that scan each rank's own tokens; the states that they leave are exchanged |
| tokens before | short convolutions on each rank's own tokens and the few before them, which are exchanged |
| refused | an error on every rank, at the latest at the end of the first forward |
| not built | the test could make no tiny model |

Reason: why a type is refused or not driven whole, and which of its configs are refused.

## Types

"""

METHOD = """
## How it was tried

Every type of `AutoModelForCausalLM` is run as a tiny model of random weights in fp64, on the whole sequence and on two ranks. Logits and every gradient are compared on each rank.
Beside the first config: one KV head, a KV head for each query head, tied embeddings, no biases, no windows, and linear, dynamic, yarn, llama3, longrope and partial rotary
embeddings, where the type has them. Beside the first batch: packed documents, a mask of ones, padding on the right and on the left. One and two head groups.

An error is relative to the largest magnitude, and may be 1e-10. What the models compute in fp32 (norms, routers, rotary tables) is computed in fp64 here. Each type that is overlapped
was also run with one element of an exchange off by 1e-6, forward and backward, and the error was seen.

`pytest --all -m sweep tests/frameworks/test_sweep.py` runs it and writes both files.

## Odd configs

Each number and flag that a type's attention, decoder layers and masks read is moved to two other values, with weights times 8, and compared in the same way. None is wrong.
The table has the configs with which something else is overlapped than with the type's own.

"""


def write(rows: list[dict[str, str]]) -> None:
    """Write both files."""
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(page(rows))


def rows_of(verdicts: dict, odd: dict) -> list[dict[str, str]]:
    """Rows of the CSV: {type: `Verdict`} and {type: `Odd`} of a sweep."""
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
    """Markdown of the rows of the CSV."""
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
    table = _table(("type", "verdict", "reason"), [(row["type"], row["verdict"], reason(row["why"])) for row in types])
    odd_rows = [(row["type"], row["config"], row["verdict"], reason(row["why"])) for row in odd]
    odd_table = _table(("type", "config", "verdict", "reason"), odd_rows)
    return HEAD.replace("{state}", state) + table + METHOD + said["odd"] + "\n\n" + odd_table


def reason(message: str) -> str:
    """The message in a few words."""
    for pattern, short in SHORT:
        message = re.sub(pattern, short, message)
    return message


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    every = (header, ("---",) * len(header), *rows)
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in every)


if __name__ == "__main__":
    with FILE.open(newline="") as file:
        write(list(csv.DictReader(file)))
