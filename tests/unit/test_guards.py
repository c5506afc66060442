"""Taking guards out (`harness.guards`): each test file has its own at its end."""

import ast
from pathlib import Path

import pytest

from tests.harness.guards import Guard, guarded, markers, removed
from tests.harness.mutants import PLANTED, planted

TESTS = Path(__file__).parents[1]


def named():
    """The markers of all guards that tests take out; of files that import frameworks, too."""
    texts = [text for path in TESTS.rglob("*.py") if "Guard(" in (text := path.read_text())]
    calls = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    guards = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Guard"]
    return {call.args[0].value for call in guards if isinstance(call.args[0], ast.Constant)}


def test_every_guard_is_taken_out_by_a_test():
    assert set(markers()) == named()


def test_every_marker_stands_once_in_a_statement():
    for marker in markers():
        guarded(marker)


def test_a_guard_that_the_code_no_longer_holds_is_reported():
    nowhere = "it stands nowhere"
    with pytest.raises(LookupError, match="stands 0 times in the package"), removed(Guard(nowhere, "pass")):
        pass


def test_every_planted_fault_stands_once_in_the_package():
    assert len(planted()) == len(PLANTED)
