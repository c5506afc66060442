"""Tests programs of `tests.harness.zoo` in a model on two ranks: they must give the results of stock Ulysses, or be refused."""

import pytest

from tests.harness.ranks import on_ranks
from tests.harness.zoo_on_ranks import MODES, names, verdicts

OF_ATTENTION = [
    "clamp, of q", "temperature, of q", "scaling of an attribute", "a wrapper that scales", "by length, of q", "k and v shared by a dict",
    "a norm of heads with a call of its own", "a forward that is patched",
]  # fmt: skip
WHOLE = {"as it is", "scaling of an attribute"}


def all_fine(chosen, mode):
    found = on_ranks(2, verdicts, chosen, MODES[mode], timeout_s=300)
    for name in chosen:
        (verdict, why), other = (of_rank[name] for of_rank in found)
        assert verdict != "wrong" and verdict == other[0], (name, verdict, why, other)
    return {name: verdict for name, (verdict, _) in found[0].items()}


def test_some_programs_are_what_stock_makes_of_them_or_refused_on_both_ranks():
    found = all_fine(["as it is", *OF_ATTENTION], "layer")
    assert all(found[name] == "right" for name in WHOLE.intersection(found))


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_every_program_is_what_stock_makes_of_it_or_refused_on_both_ranks(mode):
    """Runs each program in one of the modes."""
    chosen = names()[list(MODES).index(mode) :: len(MODES)]
    for first in range(0, len(chosen), 20):
        all_fine(chosen[first : first + 20], mode)
