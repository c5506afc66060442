"""Random programs (`programs`) do on 2 to 4 ranks what they do on the whole sequence, and find what is planted.

60 of them, with ``--all`` 1000. Many more: ``python -m tests.harness.programs --programs 20000``. A program that fails is printed, with the command that runs it again.
"""

import time
from collections import Counter
from dataclasses import fields, is_dataclass
from unittest import mock

import pytest

from tests.harness import programs
from tests.harness.cases import everything
from tests.harness.guards import SEEN_BY_PROGRAMS, removed
from tests.harness.programs import ChangeInput, Raises, Step

SEEDS = range(1000)
RUN = SEEDS if everything() else SEEDS[:60]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_do_what_they_do_on_the_whole_sequence(size):
    seeds = [seed for seed in RUN if programs.ranks_of(seed) == size]
    reports, acted = programs.check(seeds)
    assert not reports, "\n\n".join(reports)
    for what in ("compared", "raised", "hooks", "transfers", "rank-major"):
        assert acted[what] > len(seeds) / 4, f"{what}: {dict(acted)}"  # a program that does nothing is right as well
    assert size == 2 or acted["two legs"], dict(acted)  # of two ranks, few programs have one KV head
    assert acted["magnifies"] <= len(seeds) / 30, "the tolerance is loosened for a few programs, not for all"


@pytest.mark.parametrize("seed", [294, 751])
def test_a_program_that_once_failed_is_right(seed):
    """Of 294 one rank alone raised behind a probe. In 751 check mode compares sums of three replicas, added in another order."""
    reports, _ = programs.check([seed])
    assert not reports, reports


FLAGS = (
    "autocast", "rank_major", "folds", "counts", "block", "batch_first", "view", "fused", "bias", "learned", "by_row", "causal",
    "same", "alike", "trains", "retain",
)  # fmt: skip
VALUES = {  # of what a program says of itself, its layers and its statements, each of which some programs have
    **dict.fromkeys(FLAGS, (True, False)), "ranks": (2, 3, 4), "transport": ("plain", "late", "delayed"), "batch": (1, 2, 3),
    "norms": ("", "q", "k", "qk"), "rope": ("", "Rotary", "function", "tables"), "gain": ("constant", "learned"),
    "output": ("4-D", "flat", "strided"), "query": ("elsewhere", "changed"), "in_place": ("query", "output"),
    "wrapped": ("LoRA", "subclass", "weight_norm"), "frozen": ("", "q_proj", "o_proj"), "shares": ("modules", "weights"),
    "hooks": ("attention", "sees output", "sees gradient", "scales output", "scales input", "deepspeed's"),
    "config": ("projections", "wgrad", "check", "kv_once_per_node", "window", "shares", "auto", 1, 2, 3, 4),
    "type": (Step, Raises, ChangeInput), "where": ("attention", "backward"), "via": ("backward", "grad", "inputs"),
    "how": ("plain", "reentrant", "non-reentrant", "saved", "no_grad", "inference", "gate", "detach", "mul_", "halves", "sees", "retains"),
    "form": ("dot", "slice", "sum", "square", "direct", "strided"),
}  # fmt: skip


def held(part, field=""):
    """What a program, or a part of it, says: pairs of a field and a value."""
    if is_dataclass(part):
        yield "type", type(part)
        for each in fields(part):
            yield from held(getattr(part, each.name), each.name)
    elif isinstance(part, tuple):
        for each in part:
            yield from held(each, field)
    elif isinstance(part, (str, int)):
        yield field, part


def test_all_that_can_be_drawn_is_drawn():
    said = Counter()
    for program in map(programs.draw, SEEDS):
        said.update(set(held(program)))
    expected = {(field, value) for field, values in VALUES.items() for value in values}
    rare = {each: said[each] for each in expected if said[each] < 10}
    assert not rare, f"fewer than 10 of {len(SEEDS)} programs have these: {rare}"


def test_a_seed_draws_the_same_program_again():
    for seed in SEEDS[:20]:
        assert str(programs.draw(seed)) == str(programs.draw(seed))


def run_without(rank, seeds, guard):
    with removed(guard):
        return programs.run(rank, seeds)


@pytest.mark.parametrize("guard", SEEN_BY_PROGRAMS.values(), ids=lambda guard: guard.marker)
def test_the_programs_notice_without_the_guard(guard, monkeypatch):
    """The negative control, within the programs of the first test."""
    monkeypatch.setattr(programs, "BATCH", 5)  # after the first batch with one that notices no other is run
    reports, _ = programs.check([seed for seed in SEEDS if programs.ranks_of(seed) == 2], run_without, guard, enough=1)
    assert reports, "nobody noticed"


def stuck(rank, seeds, at):
    """Rank 1 stays away from program ``at``."""
    before = [seed for seed in seeds if seed < at] if rank == 1 and at in seeds else seeds
    found = programs.run(rank, before)
    if before != seeds:
        time.sleep(3600)
    return found


@pytest.mark.full
def test_a_program_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(programs, "PATIENCE_S", 10)
    reports, _ = programs.check([2, 4], stuck, 2, enough=1)
    assert len(reports) == 1 and reports[0].startswith("seed 2 (python -m tests.harness.programs --seed 2)\nProgram(seed=2")
    assert "a hang in" in reports[0] and "in stuck" in reports[0]  # the end of each rank's stack


def off_by_a_little(rank, seeds):
    """Rank 0 hears a gradient that is wrong by 1e-10 in one element."""
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
