"""Checks that tests notice the removal of a guard, a statement of the package that a comment marks:

    self.handle.wait()  # guard: waits before it reads

Each marker occurs once. `Watched` names a guard and a check. `must_notice` replaces the statement while the check runs: then the
check must fail. With the guard in place, the check must pass.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import ds_sp_overlap
from ds_sp_overlap.attention.runtime import plan
from tests.harness import cases
from tests.harness.ranks import leaves, on_ranks

PACKAGE = Path(ds_sp_overlap.__file__).parent


@functools.cache
def markers():
    """Return {marker: its places} for all markers of the package; a place is (file, line)."""
    places: dict[str, list[tuple[Path, int]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for marker in re.findall(r"# guard: (.+)", line):
                places.setdefault(marker, []).append((path, number))
    return places


@functools.cache
def _statements(path):
    """Return (first line, last line) of each statement; of a statement with a body, only the lines before the body."""
    statements = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.stmt, ast.excepthandler))]
    return [(node.lineno, node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno) for node in statements]


def guarded(marker):
    """Return the file, first line and last line of the statement that contains ``marker``; see `_statements`."""
    places = markers().get(marker, [])
    if len(places) != 1:
        raise LookupError(f"# guard: {marker} stands {len(places)} times in the package; follow the code in the tests")
    [(path, at)] = places
    around = [(first, last) for first, last in _statements(path) if first <= at <= last]
    if not around:
        raise LookupError(f"# guard: {marker} stands in no statement ({path.name}, line {at}); put it behind one")
    return path, *max(around)


def _outermost_function(tree, line):
    """Return the outermost function that contains ``line``, and the parts of its qualified name."""
    node, names = tree, []
    while not isinstance(node, ast.FunctionDef):
        node = next(
            each
            for each in node.body
            if isinstance(each, (ast.ClassDef, ast.FunctionDef)) and each.lineno <= line <= each.end_lineno
        )
        names.append(node.name)
    return node, names


@contextlib.contextmanager
def removed(marker, without):
    """Run the body with the guard replaced by ``without``; replace the function's code in place, for all references to it."""
    path, first, last = guarded(marker)
    lines = path.read_text().splitlines()
    indent = re.match(" *", lines[first - 1]).group()
    lines[first - 1 : last] = textwrap.indent(without, indent).splitlines()
    node, names = _outermost_function(ast.parse("\n".join(lines)), first)
    node.decorator_list = []
    tree = ast.Module([ast.parse("from __future__ import annotations").body[0], node], [])

    found = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    for name in names:
        found = getattr(found, name)

    def clear_cache():
        wrapper = found
        while wrapper is not None:
            getattr(wrapper, "cache_clear", lambda: None)()
            wrapper = getattr(wrapper, "__wrapped__", None)
        plan.pieces_of.cache_clear()  # its pieces were compiled before this change of the code

    function = inspect.unwrap(found)
    namespace: dict = {}
    exec(compile(tree, str(path), "exec"), function.__globals__, namespace)
    code, function.__code__ = function.__code__, namespace[names[-1]].__code__
    clear_cache()
    try:
        yield
    finally:
        function.__code__ = code
        clear_cache()


class Watched(NamedTuple):
    """Describes a guard, and the check that notices its removal.

    marker   the text behind ``# guard:``, on any line of the guarded statement
    without  the statement that replaces the guarded one, as if somebody had removed the guard
    check    a test that passes with the guard; or a function that, with the guard, returns None or only errors below ``limit``
    ranks    the number of ranks, if the check takes a rank
    raises   whether the check raises without the guard; if False, the check must give a wrong result instead
    says     for a check that returns a refusal: words in this refusal while the guard is there
    """

    marker: str
    without: str
    check: Callable
    ranks: int = 2
    raises: bool = False
    says: str = ""
    limit: float = 1e-10

    def __str__(self):
        return self.marker


CRASHED = "crashed: "


def size_of(watched):
    """Return the number of ranks that the check runs on; 0 for a check without a rank."""
    parameters = inspect.signature(watched.check).parameters.values()
    return watched.ranks * any(parameter.default is parameter.empty for parameter in parameters)


def found(rank, watched):
    """Return the findings of the check: wrong results and failed assertions; other exceptions begin with `CRASHED`."""
    try:
        result = watched.check(**{"rank": rank} if size_of(watched) else {})
        if result is None and not watched.says:
            return []
        if watched.says:
            return [] if watched.says in str(result) else [f"{result}, without {watched.says!r}"]
        errors = [f"off by {x}" if isinstance(x, float) and not x < watched.limit else x for x in leaves(result)]
        return [x for x in errors if not isinstance(x, float)]
    except (AssertionError, pytest.fail.Exception) as error:
        return [str(error)]
    except Exception as error:
        return [CRASHED + repr(error)]


def found_without(rank, watched):
    with removed(watched.marker, watched.without):
        return found(rank, watched)


def must_notice(watched):
    """Assert that the check finds something while the guard is removed.

    With ``--all``, also assert that the check finds nothing before and afterwards.
    """

    def everywhere(function):
        size = size_of(watched)
        return on_ranks(size, function, watched, timeout_s=60) if size else [function(0, watched)]

    before = everywhere(found) if cases.everything() else []
    assert not any(before), before
    findings = [finding for each in everywhere(found_without) for finding in each]
    assert findings, "nobody noticed"
    assert watched.raises == any(str(finding).startswith(CRASHED) for finding in findings), findings
    assert not (cases.everything() and any(everywhere(found))), "the guard was not put back"


def notices(*watched):
    """Return a test with a case for each of ``watched``."""

    @pytest.mark.parametrize("watched", watched, ids=str)
    def of_each(watched):
        must_notice(watched)

    return of_each
