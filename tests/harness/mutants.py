"""Checks that tests fail for wrong code: changes the package in one place at a time, and finds the test that fails.

    python -m tests.harness.mutants map                 find the tests of `make test` that reach each changed place, and times
    python -m tests.harness.mutants run                 run each mutant with these tests, fastest first; an interrupted run goes on
    python -m tests.harness.mutants run --everything    run survivors with all tests of `make test-all` in the files of these
    python -m tests.harness.mutants table               print which mutants the tests killed

A mutant is the package with one change: a comparison turned, a number off by one, a statement dropped, operands swapped, or a
default changed. A seed draws the mutants. With ``map --planted``, the mutants are the faults of `PLANTED` instead. Mutants are made
in copies of the checkout under ``--folder``. If a cache lets code run only once in a process, only the test that ran the code
counts as reaching it.
"""

import argparse
import ast
import json
import math
import os
import queue
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", re.M)
ROOMS = "schedule", "exchange", "attention", "integrations"
FATES = "make test", "make test-all", "nobody"
TURNED = dict(Lt="LtE", LtE="Lt", Gt="GtE", GtE="Gt", Eq="NotEq", NotEq="Eq", In="NotIn", NotIn="In", Is="IsNot", IsNot="Is")
ORDERED = ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult
PLANTED = {  # one fault of each kind: file, a text that occurs once and begins a statement, the text that replaces it
    "wrong head": (
        "exchange/heads.py",
        'ranges = self.heads_of("q" if kind == "o" else kind, group)',
        'ranges = self.heads_of("q" if kind == "o" else kind, self.groups - 1 - group)',
    ),
    "missing wait": (
        "exchange/in_flight.py",
        "self.handle.wait()  # guard: waits before it reads",
        "pass  # guard: waits before it reads",
    ),
    "buffer freed early": (
        "exchange/in_flight.py",
        "side, mark = self.side, self.received\n",
        "side, mark, self.send = self.side, self.received, None\n",
    ),
    "gradient missing on one rank": (
        "attention/runtime/operations.py",
        "return in_flight.finish()",
        'return [None for _ in in_flight.finish()] if call.sp_group.rank and name.startswith(" d") else in_flight.finish()',
    ),
    "silent refusal": (
        "integrations/registry.py",
        'warn_once(f"sp_overlap: {layer.name} is left as it is: {layer.lacks}")',
        "pass",
    ),
}
PROBE = """import os, pathlib
seen = set()
def _hit(mutant):
    folder, test = os.environ.get("MUTANTS"), os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if folder and (mutant, test) not in seen:
        seen.add((mutant, test))
        with open(pathlib.Path(folder, f"hits.{os.getpid()}"), "a") as file:
            print(mutant, test, sep="\\t", file=file)
"""


def changes(node):
    """Yield the possible changes of ``node``: for each, the kind, the node to replace, the new text."""
    if isinstance(node, ast.Compare) and (turned := TURNED.get(type(node.ops[0]).__name__)):
        yield (
            "comparison turned",
            node,
            ast.unparse(ast.Compare(node.left, [getattr(ast, turned)(), *node.ops[1:]], node.comparators)),
        )
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", node, str(node.value + 1)
    elif isinstance(node, (ast.AugAssign, ast.Delete)) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement dropped", node, "pass"
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        yield "statement dropped", node, "pass"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ORDERED):
        yield "operands swapped", node, f"({ast.unparse(ast.BinOp(node.right, node.op, node.left))})"
    elif isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func) not in ("max", "min"):
        if not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            yield "operands swapped", node, ast.unparse(ast.Call(node.func, [*node.args[1::-1], *node.args[2:]], node.keywords))
    elif isinstance(node, ast.FunctionDef):
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant) and (default.value is None or isinstance(default.value, bool)):
                yield "wrong default", default, str(not default.value)


def mutants_of(path):
    """Return all mutants of a file; only code inside functions is changed.

    A mutant is (kind, file, line of the statement, first line, first column, last line, last column, new text).
    """
    text, found = path.read_text(), []

    def walk(node, statement, inside):
        if isinstance(node, ast.stmt) and inside and not text.splitlines()[node.lineno - 1].lstrip().startswith("elif "):
            statement = node
        is_function = isinstance(node, ast.FunctionDef)
        for kind, old, new in changes(node) if inside or is_function else ():
            at = node.body[min(1, len(node.body) - 1)] if kind == "wrong default" else statement  # the line after a docstring
            if "#" not in ast.get_source_segment(text, old) and not getattr(at, "decorator_list", None):
                span = old.lineno, old.col_offset, old.end_lineno, old.end_col_offset
                found.append((kind, str(path.relative_to(ROOT)), at.lineno, *span, new))
        for name, below in ast.iter_fields(node) if not isinstance(node, (ast.Raise, ast.JoinedStr)) else ():
            for child in below if isinstance(below, list) else [below]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list", "args" * is_function):
                    walk(child, statement, inside or is_function)

    walk(ast.parse(text), None, False)
    return found


def sample(rooms, seed, count):
    """Draw about the same number of mutants from each of ``rooms``, of all kinds in turn.

    A room is a folder or a file of the package.
    """
    chosen, draw = [], random.Random(seed)
    for room in rooms:
        place = ROOT / "ds_sp_overlap" / room
        found = [mutant for path in sorted(place.rglob("*.py")) or [place] for mutant in mutants_of(path)]
        kinds = [[mutant for mutant in found if mutant[0] == kind] for kind in sorted({mutant[0] for mutant in found})]
        drawn = sorted((i, mutant) for kind in kinds for i, mutant in enumerate(draw.sample(kind, len(kind))))
        chosen += [mutant for _, mutant in drawn[: count // len(rooms)]]
    return chosen


def planted():
    """Return `PLANTED` as mutants; raise LookupError for a text that doesn't occur exactly once in its file."""
    found = []
    for kind, (path, old, new) in PLANTED.items():
        path = ROOT / "ds_sp_overlap" / path
        before, *rest = path.read_text().split(old)
        if len(rest) != 1:
            raise LookupError(f"{kind}: {old!r} stands {len(rest)} times in {path.name}; plant it anew")
        lines, column = before.count("\n") + 1, len(before) - before.rfind("\n") - 1
        last, end = lines + old.count("\n"), len(old) - old.rfind("\n") - 1 if "\n" in old else column + len(old)
        found.append((kind, str(path.relative_to(ROOT)), lines, lines, column, last, end, new))
    return found


def checkout(folder, name):
    """Make a copy of the checkout, with the compiled kernels; return its folder."""
    files = subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True)
    (folder / name).mkdir(exist_ok=True)
    for some in (files.split(), ["ds_sp_overlap/_kernels.so", "ds_sp_overlap/_kernels.json"]):
        subprocess.run(["cp", "--parents", *some, folder / name], cwd=ROOT, stderr=subprocess.DEVNULL)
    return folder / name


def pytest_in(copy, *arguments, timeout_s=None, **variables):
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(copy), **variables}
    return subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=timeout_s)


def map_tests(folder, mutants, tests):
    copy = checkout(folder, "mapped")
    (copy / "ds_sp_overlap/mutants_probe.py").write_text(PROBE)  # in the package, so that the package doesn't refuse it
    for path in {mutant[1] for mutant in mutants}:
        lines = (copy / path).read_text().splitlines()
        top = next(s.lineno for s in ast.parse("\n".join(lines)).body[1:] if getattr(s, "module", "") != "__future__")
        probes = [
            (top, "from ds_sp_overlap.mutants_probe import _hit"),
            *((m[2], f"_hit({i})") for i, m in enumerate(mutants) if m[1] == path),
        ]
        for line, probe in sorted(probes, reverse=True):
            lines.insert(line - 1, re.match(" *", lines[line - 1]).group() + probe)
        (copy / path).write_text("\n".join(lines) + "\n")
    stored = "--store-durations", f"--durations-path={folder / 'seconds.json'}"
    done = pytest_in(copy, "-n2", "--dist=worksteal", *stored, *tests, MUTANTS=str(folder))
    (folder / "failed.json").write_text(json.dumps(FAILED.findall(done.stdout)))  # `run` skips tests that fail without a mutant
    print(done.stdout[-5000:], done.stderr[-2000:])


def killer(copy, mutant, tests, seconds, *options):
    """Return the first of ``tests`` that fails with ``mutant``; empty if none fails."""
    _, path, _, first, column, last, end, new = mutant
    original = (copy / path).read_text()
    lines = original.splitlines(keepends=True)
    lines[first - 1 : last] = [lines[first - 1][:column] + new + lines[last - 1][end:]]
    (copy / path).write_text("".join(lines))
    (copy / "tests.txt").write_text("\n".join(tests))
    try:
        done = pytest_in(copy, "-x", *options, "@tests.txt", timeout_s=120 + 4 * sum(map(seconds.get, tests)))
        return (FAILED.findall(done.stdout) or [f"exit {done.returncode}"])[0] if done.returncode else ""
    except subprocess.TimeoutExpired:
        return "a hang"
    finally:
        (copy / path).write_text(original)


def run(folder, mutants, fate, patience_s, jobs):
    """For each surviving mutant, run the tests that reach it, fastest first, until one fails; record this test.

    fate         "make test": the tests that the map names; "make test-all": the other tests in the same files
    patience_s   longest time for the tests of one mutant; if it is too short for all tests, and none fails, nothing is recorded
    """
    known = ROOT / "tests/durations.json", folder / "seconds.json", folder / "failed.json"
    of_all, seconds, failed = (json.loads(path.read_text()) for path in known)
    seconds, everything = {**of_all, **seconds}, fate == FATES[1]
    hits, copies, options = defaultdict(set), queue.SimpleQueue(), ["--all"] * everything
    for job in range(jobs):
        copies.put(checkout(folder, f"job{job}"))
    tests = {line for line in pytest_in(folder / "job0", "--collect-only", *options).stdout.splitlines() if "::" in line}
    tests = tests.intersection(seconds).difference(failed)
    for mutant, test in (line.split("\t") for path in folder.glob("hits.*") for line in path.read_text().splitlines()):
        hits[int(mutant)].add(test)
    (folder / "results.jsonl").touch()
    done = {i for i, of, by, _ in map(json.loads, open(folder / "results.jsonl")) if by or of == fate}

    def reaching(i):
        files = {test.partition("::")[0] for test in hits[i]}
        return {test for test in tests - hits[i] if test.partition("::")[0] in files} if everything else tests & hits[i]

    def attack(i):
        every, copy = sorted(reaching(i), key=seconds.get), copies.get()
        tests = [test for test, total in zip(every, accumulate(map(seconds.get, every))) if total <= patience_s]
        begin = time.monotonic()
        by = killer(copy, mutants[i], tests, seconds, *options) if tests else ""
        took_s = time.monotonic() - begin
        copies.put(copy)
        if by or tests == every:
            with open(folder / "results.jsonl", "a") as file:
                print(json.dumps([i, fate, by, took_s]), file=file)

    left = [i for i in range(len(mutants)) if i not in done]
    with ThreadPoolExecutor(jobs) as pool:
        list(tqdm(pool.map(attack, left), total=len(left)))


def table(folder, mutants):
    found = {i: (fate, by, s) for i, fate, by, s in map(json.loads, open(folder / "results.jsonl")) if by}
    killed, counts = {i: fate for i, (fate, *_) in found.items()}, defaultdict(Counter)
    for i, mutant in enumerate(mutants):
        for name in (mutant[1].split("/")[1], mutant[0], "all"):
            counts[name][killed.get(i, FATES[2])] += 1
        if killed.get(i) != FATES[0]:
            print(f"{i}: {mutant[0]}, {mutant[1]}:{mutant[3]}, killed by {killed.get(i, FATES[2])}: {mutant[-1]}")
    if {mutant[0] for mutant in mutants} <= set(PLANTED):
        rows = [(mutants[i][0], f"`{by}`", f"{s:.0f}") for i, (_, by, s) in sorted(found.items())]
        print(tabulate(rows, headers=["fault", "noticed by", "after s"], tablefmt="github"))
        return
    rows = [(name, count.total(), *(count[fate] for fate in FATES)) for name, count in sorted(counts.items())]
    print(tabulate(rows, headers=["", "mutants", *(f"killed by {fate}" for fate in FATES)], tablefmt="github"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("map", "run", "table"))
    parser.add_argument("--patience", type=float, default=math.inf, help="run: seconds of tests, at most, that a mutant is given")
    parser.add_argument("--everything", action="store_true", help="run: what `make test` let live, against all other tests")
    parser.add_argument("--folder", type=Path, default=ROOT / "results/mutants")
    parser.add_argument("--planted", action="store_true", help="map: the faults of PLANTED, none drawn")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="map: folders or files of the package to draw from")
    parser.add_argument("--seed", type=int, default=0, help="map: of the sample")
    parser.add_argument("--count", type=int, default=120, help="map: mutants, shared evenly among rooms")
    parser.add_argument("--tests", nargs="+", default=(), help="map: files of tests; all of `make test` without")
    parser.add_argument("--jobs", type=int, default=2, help="run: mutants side by side")
    given = parser.parse_args()
    given.folder = given.folder.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    drawn = given.folder / "mutants.json"  # later steps use the same mutants, even if the package changes
    if given.step == "map":
        drawn.write_text(json.dumps(planted() if given.planted else sample(given.rooms, given.seed, given.count)))
    steps = {
        "map": lambda *where: map_tests(*where, given.tests),
        "run": lambda *where: run(*where, FATES[given.everything], given.patience, given.jobs),
        "table": table,
    }
    steps[given.step](given.folder, json.loads(drawn.read_text()))
