"""Forwards that nearly are known ones: driven and right, left to themselves, or refused by name; none is wrong in silence."""

import pytest

from ds_sp_overlap.integrations import accounting
from tests.harness import zoo
from tests.harness.zoo import OPERATIONS, PROGRAMS, judge, random_program

INSERTED = [name for name in PROGRAMS if name.endswith((", of q", ", of the residual"))]
SOME = [name for name in PROGRAMS if name not in INSERTED] + INSERTED[: len(OPERATIONS) : 3]
FINE = {"own", "refused", "whole"}


@pytest.mark.parametrize("name", SOME)
def test_a_program_is_right_or_refused(name):
    verdict, why = judge(PROGRAMS[name])
    assert verdict in FINE, why
    assert verdict == (PROGRAMS[name].expected or verdict), why


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in SOME])
def test_another_program_is_right_or_refused(name):
    verdict, why = judge(PROGRAMS[name])
    assert verdict in FINE, why


def test_there_are_many_programs():
    assert len(PROGRAMS) >= 240 and len(SOME) >= 110 and len(OPERATIONS) >= 80


@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_is_right_or_refused(seed):
    name, program = random_program(seed)
    verdict, why = judge(program)
    assert verdict in FINE, (name, why)


@pytest.mark.full
def test_none_of_many_random_programs_is_wrong_in_silence(capsys):
    found = zoo.main(["--programs", "2000", "--seed", "1000"])
    assert found["silent"] == found["probe"] == 0 and found["own"] > found["whole"] > 50, capsys.readouterr().out


def test_the_zoo_sees_a_reader_that_lets_an_operation_through(monkeypatch):
    monkeypatch.setattr(accounting, "MOVES", accounting.MOVES | {"detach"})
    verdict, why = judge(PROGRAMS["detached always, of q"])
    assert verdict == "probe" and "gradient of" in why
