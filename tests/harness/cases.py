"""Products of options take hours: by default each pair of options is tried, with ``--all`` every combination."""

import itertools
import os
from dataclasses import fields, is_dataclass

import pytest

ALL = "DS_SP_OVERLAP_TEST_ALL"  # in the environment, so that ranks and scripts of a test know too


def everything():
    """Whether ``--all`` was given (`tests/conftest.py`), for a test that draws its cases itself."""
    return ALL in os.environ


def full(*case):
    """A case of ``parametrize`` that only ``--all`` runs."""
    return pytest.param(*case, marks=pytest.mark.full)


def _options(row):
    """The options of a case by name: those of a tuple by place, of a dataclass by field, of what these hold in the same way."""
    if is_dataclass(row):
        parts = {field.name: getattr(row, field.name) for field in fields(row)}
    elif isinstance(row, dict):
        parts = row
    elif isinstance(row, tuple):
        parts = dict(enumerate(row))
    else:
        parts = {}
    if not parts:
        return {"": str(row)}
    return {f"{name}.{inner}": option for name, part in parts.items() for inner, option in _options(part).items()}


def covering(rows, together):
    """Few of ``rows``, in order, that hold whatever ``together`` options one of them holds; chosen greedily."""
    rows = list(rows)
    held = [set(itertools.combinations(sorted(_options(row).items()), together)) for row in rows]
    missing, kept = set().union(*held), set()
    while missing:
        best = max(range(len(rows)), key=lambda at: len(held[at] & missing))
        missing -= held[best]
        kept.add(best)
    return [rows[at] for at in sorted(kept)]


def pairs(rows):
    """All of ``rows`` with ``--all``, else few that hold every pair of options."""
    return list(rows) if everything() else covering(rows, 2)
