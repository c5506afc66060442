"""Compares random programs (`programs`) on 2 to 4 ranks with the whole sequence; checks that they find planted faults.

Runs 60 programs, with ``--all`` 1000. For many more: ``python -m tests.harness.programs --programs 20000``. Prints each program
that fails, with the command that runs it again.
"""

from collections import defaultdict
from dataclasses import fields
from unittest import mock

import pytest

from tests.harness import programs
from tests.harness.cases import everything
from tests.harness.guards import Watched, removed

SEEDS = range(1000)
RUN = SEEDS if everything() else SEEDS[:60]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_do_what_they_do_on_the_whole_sequence(size):
    seeds = [seed for seed in RUN if programs.ranks_of(seed) == size]
    reports, acted = programs.check(seeds)
    assert not reports, "\n\n".join(reports)
    for what in ("compared", "raised", "hooks", "transfers", "rank-major"):
        assert acted[what] > len(seeds) / 4, f"{what}: {dict(acted)}"  # a program without such features proves little
    assert size == 2 or acted["two legs"], dict(acted)  # two legs need one KV head, which is rare on two ranks
    assert acted["magnifies"] <= len(seeds) / 30, "the tolerance is loosened for a few programs, not for all"


@pytest.mark.parametrize("seed", [294, 751])
def test_a_program_that_once_failed_is_right(seed):
    """In 294, one rank alone raised after a probe. In 751, check mode compares sums of three tensors in different orders."""
    reports, _ = programs.check([seed])
    assert not reports, reports


def test_whatever_can_differ_between_programs_does():
    """Checks every field of programs, layers and statements."""
    values = defaultdict(set)
    for program in map(programs.draw, SEEDS):
        for part in (program, *program.layers, *program.statements):
            for field in fields(part):
                values[type(part).__name__, field.name].add(repr(getattr(part, field.name)))
    alike = [each for each, seen in values.items() if len(seen) < 2]
    assert not alike, f"the same in all of {len(SEEDS)} programs: {alike}"
    assert {"Mix", "InPlace", "ChangeInput", "Hook", "Raises"} <= {name for name, _ in values}


def test_a_seed_draws_the_same_program_again():
    for seed in SEEDS[:20]:
        assert str(programs.draw(seed)) == str(programs.draw(seed))


def run_without(rank, seeds, watched):
    with removed(watched.marker, watched.without):
        return watched.check(rank, seeds)


WATCHED = [
    Watched("waits before it reads", "pass", programs.run),
    Watched("repeats are summed", "place = place.amax(run.repeats)", programs.run),
    Watched("shared rows are summed", "add = False", programs.run),
    Watched("lies as it travels", "if True:", programs.run),
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_programs_notice_without_the_guard(watched, monkeypatch):
    """Negative control: programs of the first test must find the removed guard."""
    monkeypatch.setattr(programs, "BATCH", 5)  # small batches: the check stops after the first batch with a report
    reports, _ = programs.check([seed for seed in SEEDS if programs.ranks_of(seed) == 2], run_without, watched, enough=1)
    assert reports, "nobody noticed"


def off_by_a_little(rank, seeds):
    """Run programs in which rank 0 records a gradient with an error of 1e-10 in one element."""
    note = programs.World.note

    def wrong(self, name, what, tokens=True):
        if self.rank == 0 and name == "gradient of 0.o_proj.weight" and what is not None:
            what = what.clone()
            what[0, 0] += 1e-10 * what.abs().max()
        note(self, name, what, tokens)

    with mock.patch.object(programs.World, "note", wrong):
        return programs.run(rank, seeds)


def test_a_program_that_is_wrong_says_where():
    reports, _ = programs.check([3, 2], off_by_a_little)
    assert [report.split(" (")[0] for report in reports] == ["seed 2", "seed 3"]
    assert all("rank 1: gradient of 0.o_proj.weight differs by" in report for report in reports)
