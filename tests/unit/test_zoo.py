"""Tests forwards that differ little from known forwards: each must be overlapped with right results, left as it is, or refused."""

import functools
from unittest import mock

import pytest

from ds_sp_overlap.attention.self_attention import SelfAttention
from ds_sp_overlap.integrations.inspect import accounting
from tests.harness import zoo
from tests.harness.cases import since_transformers
from tests.harness.guards import Watched, notices
from tests.harness.zoo import PROGRAMS, judge, random_program

pytestmark = since_transformers("5.1")  # `get_interface`
FINE = {"own", "refused", "whole"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right_or_refused(name):
    verdict, why = judge(PROGRAMS[name])
    assert verdict in FINE, why
    assert verdict == (PROGRAMS[name].expected or verdict), why


@pytest.mark.parametrize("seed", range(6))
def test_a_random_program_is_right_or_refused(seed):
    name, program = random_program(seed)
    verdict, why = judge(program)
    assert verdict in FINE, (name, why)


@pytest.mark.full
def test_none_of_many_random_programs_is_wrong_in_silence(capsys):
    found = zoo.main(["--programs", "2000", "--seed", "1000"])
    assert found["silent"] == found["probe"] == 0 and found["own"] > found["whole"] > 50, capsys.readouterr().out


def test_the_zoo_sees_a_reader_that_lets_an_operation_through():
    with mock.patch.object(accounting, "MOVES", accounting.MOVES | {"abs"}):
        verdict, why = judge(PROGRAMS["abs, of q"])
    assert verdict == "probe" and "q differs by" in why


def test_the_comparison_on_real_numbers_sees_a_wrong_gradient(monkeypatch):
    project_locally = SelfAttention.project_locally

    def doubled(self, *given):
        made = project_locally(self, *given)
        for heads in made:
            heads.register_hook(lambda gradient: 2 * gradient)
        return made

    monkeypatch.setattr(SelfAttention, "project_locally", doubled)
    verdict, why = judge(PROGRAMS["as it is"])
    assert verdict == "probe" and why.startswith("gradient of the hidden states differs by")


# Guards.


def unless(name):
    return functools.partial(test_a_program_is_right_or_refused, name)


NEVER = "if False:"
test_the_suite_notices_without_the_guard = notices(
    Watched("only known operations", NEVER, unless("detached always, of q")),
    Watched("nothing goes by a size", "return True", unless("a window by length")),
    Watched("torch is asked nothing", NEVER, unless("scaling by gradients")),
    Watched("sizes are no numbers", NEVER, unless("a rotation by the length that is tried")),
    Watched("read again where something changed", "if False and (changes := []):", unless("scaling of an attribute")),
    Watched("in every case", NEVER, unless("causal unless there is a mask")),
    Watched("keywords are passed on", NEVER, unless("a keyword that is dropped")),
    Watched("all that learns is known", NEVER, unless("a parameter that waits")),
    Watched("joined dims too", "if count not in self.sizes:", unless("by joined dims, of q")),
    Watched("more than rounding", "return ''", test_the_zoo_sees_a_reader_that_lets_an_operation_through),
)  # fmt: skip
