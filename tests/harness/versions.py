"""Tests the package with other versions of its dependencies, each combination in its own venv; writes docs/versions.md.

    make versions                                   test all combinations whose Python is installed
    python -m tests.harness.versions --only 4.56    test the combinations that have some package or Python 4.56

A test of a combination replaces its row of the page; the other rows stay. CI does not run this.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/versions.md"
NEWEST = ""  # the version that pip chooses
# Versions of Python, torch, DeepSpeed and transformers.
COMBINATIONS = [
    ("3.10", "2.10.0", "0.19.7", "4.56.2"),
    ("3.11", "2.13.0", "0.19.8", "4.56.2"),
    ("3.11", "2.13.0", "0.19.8", "5.0.0"),
    ("3.11", "2.13.0", "0.19.8", "5.23.0"),  # the last transformers before it renamed caches
    ("3.12", NEWEST, NEWEST, NEWEST),
    ("3.13", NEWEST, NEWEST, NEWEST),
]
NAMES = ("torch", "deepspeed", "transformers")
# Packages pinned for old versions of transformers, which can't be imported with the newest accelerate and peft.
BESIDE = {"4.56.2": ["accelerate==1.12.0", "peft==0.18.0"], "5.0.0": ["accelerate==1.12.0", "peft==0.18.0"]}
TESTS = {
    "unit tests": ["-m", "pytest", "-q", "tests/unit"],
    "doctor": ["-m", "ds_sp_overlap", "doctor"],
    "layers": ["-m", "pytest", "-q", "tests/ranks/test_equivalence.py"],
    "models, DeepSpeed": ["-m", "pytest", "-q", "tests/frameworks/test_deepspeed.py", "tests/frameworks/test_masks.py"],
}


def python_of(venv):
    return venv / "bin/python"


def made(combination, folder):
    """Make a venv with the combination, unless the venv exists; return its folder."""
    python, *versions = combination
    venv = folder / "-".join(["py" + python, *(f"{name}{version or 'newest'}" for name, version in zip(NAMES, versions))])
    if not (venv / "ready").exists():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([f"python{python}", "-m", "venv", venv], check=True)
        pip = [python_of(venv), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wanted = [f"{name}=={version}" if version else name for name, version in zip(NAMES, versions)]
        subprocess.run([*pip, "setuptools", "wheel"], check=True)
        subprocess.run([*pip, wanted[0]], check=True)
        subprocess.run(
            [*pip, "--no-build-isolation", *wanted, *BESIDE.get(versions[2], ["accelerate", "peft"])],
            check=True, env={**os.environ, "DS_BUILD_OPS": "0"},
        )  # fmt: skip
        of_tests = "pytest hypothesis markdown-it-py matplotlib pydantic tabulate tqdm packaging numpy wrapt".split()
        subprocess.run([*pip, *of_tests], check=True)
        (venv / "ready").touch()
    return venv


def outcome(venv, words):
    """Run Python with the arguments ``words`` in a venv; return the counts that a test run prints last."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
    }
    ran = subprocess.run([python_of(venv), *words], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (venv / f"{words[-1].replace('/', '.')}.log").write_text(ran.stdout)
    # Find pytest's summary; libraries may print more lines after it.
    lines = re.findall(r"^(?:PASS|FAIL(?!ED)|BLIND|.*\b(?:passed|failed|errors?)\b.* in [\d.]+s).*", ran.stdout, re.M)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)\b|PASS|FAIL|BLIND", lines[-1] if lines else "")
    return ", ".join(counts) or f"exit {ran.returncode}"


def row_of(venv):
    code = (
        "import platform, importlib.metadata as m; "
        f"print(platform.python_version(), *(m.version(name) for name in {(*NAMES, 'accelerate')!r}))"
    )
    found = subprocess.check_output([python_of(venv), "-c", code], text=True).split()
    return [*found, *(outcome(venv, words) for words in TESTS.values())]


def write(rows):
    """Put ``rows`` into the page; a new row replaces the row with the same versions."""
    text, _, rest = PAGE.read_text().partition("| Python ")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines()[2:]]
    found = {tuple(row[:5]): row for row in lines + rows}
    head = ["Python", *NAMES, "accelerate", *TESTS]
    table = [head, ["---"] * len(head), *(found[key] for key in sorted(found))]
    PAGE.write_text(text + "".join(f"| {' | '.join(row)} |\n" for row in table))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="VERSION")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions")
    given = parser.parse_args()
    for combination in COMBINATIONS:
        if not any(version.startswith(given.only) for version in combination):
            continue
        if subprocess.run(["sh", "-c", f"python{combination[0]} --version"], capture_output=True).returncode:
            print(f"{combination}: no python{combination[0]} here", file=sys.stderr)
            continue
        print(f"{combination}: installing, then testing", flush=True)
        write([row_of(made(combination, given.folder.resolve()))])


if __name__ == "__main__":
    main()
