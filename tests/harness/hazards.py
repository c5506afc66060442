"""Say for each hazard in tests/README.md how many tests there are, and how long they take.

    make test ARGS="--store-durations --durations-path=/tmp/seconds.json"
    python -m tests.harness.hazards /tmp/seconds.json

Rewrites three columns of its table: what pytest collects by the row's own command, by default and with ``--all``, and the seconds of
the former in the run above. A hazard without a test by default is an error.
"""

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS / "README.md"
BEGIN = "| hazard | "


def collected(*options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    printed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
    return [line for line in printed.splitlines() if "::" in line]


def chosen(command, tests):
    """Return those of ``tests`` that the command ``pytest FILES`` or ``pytest -k WORD`` runs."""
    words = command.split()
    name = words[words.index("-k") + 1] if "-k" in words else ""
    files = [word for word in words if word.startswith("tests/")]
    return [test for test in tests if name in test and (not files or test.partition("::")[0] in files)]


def main():
    quick, every, seconds = collected(), collected("--all"), json.loads(Path(sys.argv[1]).read_text())
    lines = PAGE.read_text().splitlines()
    first = 2 + next(at for at, line in enumerate(lines) if line.startswith(BEGIN))
    last = lines.index("", first)
    for at in range(first, last):
        hazard, how, _, _, _, command = lines[at].strip("| ").split(" | ")
        shown = chosen(command.split("`")[1], quick)
        assert shown, f"no test by default for: {hazard}"
        took = sum(seconds.get(test, 0) for test in shown)
        counts = len(shown), len(chosen(command.split("`")[1], every)), f"{took:.0f}"
        lines[at] = f"| {' | '.join(map(str, (hazard, how, *counts, command)))} |"
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
