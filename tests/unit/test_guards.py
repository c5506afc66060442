"""Tests that each guard of the package is removed by a test (`harness.guards`); these tests stand at the end of test files."""

import ast
from pathlib import Path

import pytest

from tests.harness.guards import guarded, markers, removed
from tests.harness.mutants import PLANTED, planted

TESTS = Path(__file__).parents[1]


def named():
    """Return the markers that tests name in `Watched`; reads the source of all test files, so it needs no framework."""
    nodes = [node for path in TESTS.rglob("test_*.py") for node in ast.walk(ast.parse(path.read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {
        ast.literal_eval(call.args[0]) for call in calls if call.func.id == "Watched" and isinstance(call.args[0], ast.Constant)
    }


def test_every_guard_is_taken_out_by_a_test():
    assert set(markers()) == named()


def test_every_marker_stands_once_in_a_statement():
    for marker in markers():
        guarded(marker)


def test_a_guard_that_the_code_no_longer_holds_is_reported():
    with pytest.raises(LookupError, match="stands 0 times in the package"), removed("it stands nowhere", "pass"):
        pass


def test_every_planted_fault_stands_once_in_the_package():
    assert len(planted()) == len(PLANTED)
