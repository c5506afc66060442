"""Print the times that the planner's player computes for all measurements on an H100, beside the measured times.

    python benchmarks/planned.py            print the tables of docs/planning.md
    python benchmarks/planned.py --write    write them to this page

`results/h100/launches.json.gz` has the cases: the launches and host calls of the measured code (17d94d8), recorded by
`tools.planner.gpu.recorder`, and the measured ms, medians. So these tables compare the player and its figures with the
measurements, and don't change with the package's code; `plan` records the present code.

five of eight       G = 1, where compute waits at once for v, o and dv
compiled kernels    the same launches, with permuting copies at the rate of the package's kernels
whole steps         layers alone, without embedding, loss, and host time for transformers and ZeRO; the reduction of gradients
                    between the two ranks is one transfer at the end
two ranks           each rank has half of the GPU
"""

import gzip
import json
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from ds_sp_overlap.tools.planner.gpu import launches as kinds  # noqa: E402
from ds_sp_overlap.tools.planner.gpu.constants import GPUS, Gpu, Known  # noqa: E402
from ds_sp_overlap.tools.planner.gpu.player import Played  # noqa: E402
from ds_sp_overlap.tools.planner.plan import five_of_eight  # noqa: E402

CASES = ROOT / "benchmarks/results/h100/launches.json.gz"
PAGE = ROOT / "docs/planning.md"


# Figures of the H100, with those of host calls that only the measured code makes.
FIGURES = GPUS["h100"] | {
    "stream_us": Known(6.8, "measured, a call: torch.cuda.current_stream, at 17d94d8"),
    "context_us": Known(15.6, "measured, a call: with torch.cuda.stream, at 17d94d8"),
    "custom_us": Known(88.0, "measured: what a layer of ALST takes beyond the rest, by 8 of its ops"),
}


class Row(NamedTuple):
    case: str
    variant: str
    planned_ms: float
    measured_ms: float
    planned_times: float
    measured_times: float


def rows() -> list[Row]:
    """Play every case, and return its rows; "times" are relative to stock's time in the same case."""
    found = []
    for case in json.loads(gzip.decompress(CASES.read_bytes())):
        recorded = {}
        for row in case["rows"]:
            if "launches" in row:
                recorded[row["variant"]] = [getattr(kinds, kind)(*values) for kind, *values in row["launches"]]
        on = Gpu(FIGURES).given("as measured", **case["gpu"])
        compiled = on.given("compiled kernels", permute_share=on["kernel_share"])
        ms = {}
        for row in case["rows"]:
            name, _, kernels = row["variant"].partition(", ")
            launches = five_of_eight(recorded["G = 1"]) if name == "five of eight" else recorded[name]
            ms[row["variant"]] = Played(compiled if kernels else on, launches).us / 1e3, row["measured"]
        for variant, (planned, measured) in ms.items():
            found.append(Row(case["what"], variant, planned, measured, ms["stock"][0] / planned, ms["stock"][1] / measured))
    return found


def tables() -> str:
    """Return both tables as Markdown."""
    lines = [
        "| | variant | planned ms | measured ms | | planned, times stock | measured, times stock |",
        "|---|---|---|---|---|---|---|",
    ]
    case = ""
    for row in rows():
        off, times = row.planned_ms / row.measured_ms - 1, f"{row.planned_times:.2f} | {row.measured_times:.2f}"
        first = "" if row.case == case else row.case
        lines.append(f"| {first} | {row.variant} | {row.planned_ms:.2f} | {row.measured_ms:.2f} | {off:+.1%} | {times} |")
        case = row.case
    lines += ["", "| figure of an H100 | value | source |", "|---|---|---|"]
    lines += [f"| {name} | {known.value:g} | {known.source} |" for name, known in FIGURES.items()]
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the text of the page with new tables."""
    before, mark, rest = page.partition("<!-- planned -->\n")
    after = rest.partition("<!-- end -->")[2]
    return f"{before}{mark}\n{tables()}\n\n<!-- end -->{after}"


if __name__ == "__main__":
    print(tables())
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text()))
