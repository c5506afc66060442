"""Tests the choice of cases for `make test`: no option is left out, and with ``pairs`` no pair of options."""

import itertools
from dataclasses import dataclass

import pytest

from tests.harness import cases


@dataclass(frozen=True)
class Shape:
    heads: int
    config: dict


ROWS = {
    "tuples": list(itertools.product("abc", range(4), (True, False), "xy")),
    "dicts": [dict(heads=heads, stage=stage, bias=bias) for heads in (1, 2) for stage in range(4) for bias in (True, False)],
    "dataclasses": [
        (Shape(heads, config), way) for heads in (1, 2) for config in ({}, {"a": 1}, {"a": 2, "b": 1}) for way in "pqr"
    ],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("together", [1, 2])
def test_whatever_options_are_together_in_a_row_are_so_in_one_that_is_kept(rows, together):
    def held(row):
        return set(itertools.combinations(sorted(cases._options(row).items()), together))

    left_out = cases.beyond(rows, together)
    kept = [row for at, row in enumerate(rows) if at not in left_out]
    assert left_out and set().union(*map(held, kept)) == set().union(*map(held, rows))


def test_every_option_is_used_about_as_often():
    left_out = cases.beyond(ROWS["dicts"], 1)
    kept = [row for at, row in enumerate(ROWS["dicts"]) if at not in left_out]
    assert sorted(row["heads"] for row in kept) == [1, 1, 2, 2] and sorted(row["stage"] for row in kept) == [0, 1, 2, 3]


def test_with_all_nothing_is_left_out(monkeypatch):
    monkeypatch.setenv(cases.ALL, "1")
    assert cases.singles(ROWS["tuples"]) == cases.pairs(ROWS["tuples"]) == ROWS["tuples"]
    monkeypatch.delenv(cases.ALL)
    assert 0 < len(cases.singles(ROWS["tuples"])) < len(cases.pairs(ROWS["tuples"])) < len(ROWS["tuples"])
