"""Tests messages: the package's logger prints them, on rank 0; only commands print without the logger."""

import ast
import io
import logging
from pathlib import Path
from unittest import mock

import pytest
from tqdm import tqdm

from ds_sp_overlap.warn import LOGGER, inform, say, warn_once
from tests.harness.listening import listening

PACKAGE = Path(__file__).parents[2] / "ds_sp_overlap"
PRINTS = {"tools.cli", "tools.doctor", "tools.planner.command"}  # commands


@pytest.mark.parametrize("rank,level", [("0", logging.WARNING), ("1", logging.DEBUG), ("63", logging.DEBUG)])
def test_rank_0_warns_and_the_others_say_it_at_debug_level(rank, level, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with listening(level + 1) as above, listening(level) as messages:
        say("sp_overlap: x")
    assert above == [] and messages == ["sp_overlap: x"]


def test_what_is_said_once_is_said_once():
    with listening() as messages:
        for text in ("sp_overlap: once", "sp_overlap: once", "sp_overlap: twice"):
            warn_once(text)
    assert messages == ["sp_overlap: once", "sp_overlap: twice"]


@pytest.mark.parametrize("saying", [say, warn_once, inform])
def test_a_message_names_the_place_it_is_from(saying):
    places = [record.filename for record in records(lambda: saying(f"sp_overlap: of {saying}"))]
    assert places == ["test_say.py"]


def records(act):
    """Return the records that the logger passes to its handlers while ``act`` runs, at its default level."""
    found, handler = [], logging.Handler()
    handler.emit = found.append
    with mock.patch.object(LOGGER, "handlers", [handler]):
        act()
    return found


def test_the_report_is_printed_as_it_is_and_a_warning_with_its_level(capsys):
    inform("sp_overlap: x")
    say("sp_overlap: y")
    assert capsys.readouterr().out == "sp_overlap: x\n[WARNING] sp_overlap: y\n"


def test_a_level_of_warnings_silences_what_is_only_information(capsys):
    logger = logging.getLogger("ds_sp_overlap")
    level = logger.level
    logger.setLevel(logging.WARNING)
    inform("sp_overlap: x")
    say("sp_overlap: y")
    logger.setLevel(level)
    assert capsys.readouterr().out == "[WARNING] sp_overlap: y\n"


def test_beside_a_progress_bar_a_message_begins_on_a_line_of_its_own(capsys):
    with tqdm(total=2, file=io.StringIO()):
        inform("sp_overlap: x")
    assert capsys.readouterr().out == "\nsp_overlap: x\n"


@pytest.mark.parametrize("rank,names", [("0", ["INFO"]), ("1", [])])
def test_information_is_seen_on_rank_0_under_its_own_name(rank, names, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    assert [record.levelname for record in records(lambda: inform("sp_overlap: x"))] == names


def calls_of(source):
    """Return the names of functions that a file calls to print or warn without the logger."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {ast.unparse(function) for function in calls} & {"print", "warnings.warn", "warn", "log_dist"}


def test_nothing_else_prints_or_warns():
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        assert calls_of(path.read_text()) <= ({"print"} if module in PRINTS else set()), module
    assert calls_of("def f():\n    warnings.warn('x')\n    print()") == {"print", "warnings.warn"}
