"""Chooses cases among products of options: by default, a few that cover every option or pair of options; with ``--all``, all."""

import importlib.metadata
import itertools
import os
from collections import Counter
from dataclasses import fields, is_dataclass

import pytest
from packaging.version import Version

ALL = "DS_SP_OVERLAP_TEST_ALL"  # an environment variable, so that ranks and scripts that a test starts inherit the choice


def everything():
    """Return whether pytest runs with ``--all`` (`tests/conftest.py`); for tests that draw their own cases."""
    return ALL in os.environ


def examples(count):
    """Return the number of examples that hypothesis draws: ``count`` with ``--all``, else a fifth of it."""
    return count if everything() else count // 5


def since_transformers(version):
    """Skip a test with a transformers older than ``version``, for which it has no cases."""
    old = Version(importlib.metadata.version("transformers")) < Version(version)
    return pytest.mark.skipif(old, reason=f"its cases are written for transformers {version} and newer")


def full(*case):
    """Mark a case of ``parametrize`` that only ``--all`` runs."""
    return pytest.param(*case, marks=pytest.mark.full)


def _options(row):
    """Return the options of a case by name; a name joins dict keys, tuple indices and dataclass fields by dots."""
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


def beyond(rows, together):
    """Return the indices of rows to leave out; the rest cover every combination of options.

    A combination is a set of ``together`` options that occurs in some row. Rows are kept greedily:
    the row with the most combinations that are missing so far; among equals, the row whose options
    were used least.
    """
    options = [sorted(_options(row).items()) for row in rows]
    held = [set(itertools.combinations(each, together)) for each in options]
    missing, kept, used = set().union(*held), set(), Counter()
    while missing:
        best = max(range(len(rows)), key=lambda at: (len(held[at] & missing), -sum(used[option] for option in options[at])))
        missing -= held[best]
        kept.add(best)
        used.update(options[best])
    return set(range(len(rows))) - kept


def singles(rows, together=1):
    """Return all ``rows`` with ``--all``, else a few rows that contain every option."""
    rows = list(rows)
    left_out = set() if everything() else beyond(rows, together)
    return [row for at, row in enumerate(rows) if at not in left_out]


def pairs(rows):
    """Return all ``rows`` with ``--all``, else a few rows that contain every pair of options."""
    return singles(rows, 2)
