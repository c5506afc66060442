"""Products of options take hours: by default each pair of options is tried, with ``--all`` every combination."""

import importlib.metadata
import itertools
import os
from collections import Counter
from dataclasses import fields, is_dataclass

import pytest
from packaging.version import Version

ALL = "DS_SP_OVERLAP_TEST_ALL"  # in the environment, so that ranks and scripts of a test know too


def everything():
    """Return whether pytest was given ``--all`` (`tests/conftest.py`), for a test that draws its cases itself."""
    return ALL in os.environ


def examples(count):
    """Return how many examples hypothesis draws: ``count`` with ``--all``, else a fifth."""
    return count if everything() else count // 5


def since_transformers(version):
    """Skip a test with a transformers older than ``version``, for which it has no cases."""
    old = Version(importlib.metadata.version("transformers")) < Version(version)
    return pytest.mark.skipif(old, reason=f"its cases are written for transformers {version} and newer")


def full(*case):
    """Mark a case of ``parametrize`` that only ``--all`` runs."""
    return pytest.param(*case, marks=pytest.mark.full)


def _options(row):
    """Name the options of a case: of a tuple by place, of a dataclass by field, and in the same way inside them."""
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
    """Return all of ``rows`` with ``--all``, else few that hold every option."""
    rows = list(rows)
    left_out = set() if everything() else beyond(rows, together)
    return [row for at, row in enumerate(rows) if at not in left_out]


def pairs(rows):
    """Return all of ``rows`` with ``--all``, else few that hold every pair of options."""
    return singles(rows, 2)
