"""Messages go through DeepSpeed's logger, on rank 0; and nothing but the commands and the table prints."""

import ast
import logging
from pathlib import Path

import pytest

from ds_sp_overlap.warn import inform, say, warn_once
from tests.harness.listening import listening

PACKAGE = Path(__file__).parents[2] / "ds_sp_overlap"
PRINTS = {
    "tools.cli",
    "tools.doctor",
    "tools.planner.command",
    "relayout.build",
    "integrations.deepspeed.initialize",
}  # commands; the table of layers


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
    """What DeepSpeed's logger passes on while ``act`` runs, at the level that it has by default."""
    found, handler = [], logging.Handler(logging.WARNING)
    handler.emit = found.append
    logging.getLogger("DeepSpeed").addHandler(handler)
    try:
        act()
    finally:
        logging.getLogger("DeepSpeed").removeHandler(handler)
    return found


@pytest.mark.parametrize("rank,names", [("0", ["INFO"]), ("1", [])])
def test_information_is_seen_on_rank_0_under_its_own_name(rank, names, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    assert [record.levelname for record in records(lambda: inform("sp_overlap: x"))] == names


def calls_of(source):
    """Names of what a file calls to say something by itself."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {ast.unparse(function) for function in calls} & {"print", "warnings.warn", "warn", "log_dist"}


def test_nothing_else_prints_or_warns():
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        assert calls_of(path.read_text()) <= ({"print"} if module in PRINTS else set()), module
    assert calls_of("def f():\n    warnings.warn('x')\n    print()") == {"print", "warnings.warn"}
