"""Random programs (`programs`) do on 2 to 4 ranks what they do on the whole sequence, and find what is planted.

60 of them, with ``--all`` 1000. Many more: ``python -m tests.harness.programs --programs 20000``. A program that fails is printed, with the command that runs it again.
"""

import time
from collections import Counter
from unittest import mock

import pytest

from tests.harness import programs
from tests.harness.cases import everything
from tests.harness.guards import SEEN_BY_PROGRAMS, removed
from tests.harness.programs import Backward, Call, ChangeInput, Hook, InPlace, Mix, Raises, Step

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


def layers_with(**wanted):
    return lambda program: any(all(getattr(spec, k) == v for k, v in wanted.items()) for spec in program.layers)


def layer(test):
    return lambda program: any(test(spec, program) for spec in program.layers)


def statement(kind, test=lambda s: True):
    return lambda program: any(isinstance(s, kind) and test(s) for s in program.statements)


def configured(key, *values):
    return layer(lambda spec, _: dict(spec.config).get(key) in values)


def term(test):
    return statement(Backward, lambda s: any(map(test, s.terms)))


def called(program):
    return Counter(index for s in program.statements if isinstance(s, Call) for index in s.layers)


FEATURES = {
    "two ranks": lambda program: program.ranks == 2,
    "three ranks": lambda program: program.ranks == 3,
    "four ranks": lambda program: program.ranks == 4,
    "a block": layers_with(block=True),
    "a drop-in": layers_with(block=False),
    "several layers": lambda program: len(program.layers) > 1,
    "fewer KV heads": layer(lambda spec, _: spec.kv_heads < spec.heads),
    "fewer KV heads than ranks": layer(lambda spec, program: spec.kv_heads < program.ranks),
    "fewer heads than ranks": layer(lambda spec, program: spec.heads < program.ranks),
    "ranks that share heads": configured("shares", 2, 3, 4),
    "k and v once to each node": configured("kv_once_per_node", True),
    "ranks that share heads, in groups": layer(
        lambda spec, _: dict(spec.config).get("shares", 1) > 1 and dict(spec.config)["head_groups"] == 2
    ),
    "ranks that share heads, in a window": layer(
        lambda spec, _: dict(spec.config).get("shares", 1) > 1 and "window" in dict(spec.config)
    ),
    "heads that the ranks don't divide": layer(lambda spec, program: spec.heads % program.ranks),
    "an odd head dim": layer(lambda spec, _: spec.head_dim % 2),
    "another head dim of the value": layer(lambda spec, _: spec.head_dim != spec.value_dim),
    "unequal lengths": lambda program: any(len(set(lengths)) > 1 for lengths in program.shapes.values()),
    "no token on a rank": lambda program: any(0 in lengths for lengths in program.shapes.values()),
    "batches of two sizes": lambda program: len(program.shapes) > 1,
    "batch 1": lambda program: 1 in program.shapes,
    "batch 3": lambda program: 3 in program.shapes,
    "sequence first": layers_with(batch_first=False),
    "batch first": layers_with(batch_first=True),
    "a transposed view": layers_with(batch_first=False, view=True),
    "one group": configured("head_groups", 1),
    "two groups": configured("head_groups", 2),
    "three groups or four": configured("head_groups", 3, 4),
    "automatic groups": configured("head_groups", "auto"),
    "a window of one group": configured("window", 1),
    "a window of more groups": configured("window", 2, 3),
    "projections called whole": configured("projections", False),
    "wgrad in place": configured("wgrad", False),
    "check": configured("check", True),
    "a norm of q alone": layers_with(block=True, norms="q"),
    "norms of q and k": layers_with(block=True, norms="qk"),
    "Rotary": layers_with(rope="Rotary"),
    "RoPE as a function": layers_with(rope="function"),
    "RoPE of the drop-in": layers_with(rope="tables"),
    "partial RoPE": layer(lambda spec, _: 0 < spec.rotary_dims < spec.head_dim),
    "learned tables": layers_with(rope="Rotary", learned=True),
    "positions by row": layers_with(by_row=True),
    "biases": layers_with(block=True, bias=True),
    "a fused projection": layers_with(block=True, fused=True),
    "full attention": layers_with(causal=False),
    "a learned argument of attention": layers_with(gain="learned"),
    "flat attention output": layers_with(output="flat"),
    "attention output of another memory order": layers_with(output="strided"),
    "one module for key and value": layers_with(block=True, same=True),
    "one tensor for key and value": layers_with(block=False, same=True),
    "a query used elsewhere": layers_with(query="elsewhere"),
    "a query changed afterwards": layers_with(query="changed"),
    "attention that changes its query": layers_with(in_place="query"),
    "a drop-in's output changed": layers_with(in_place="output"),
    "an input changed afterwards": statement(ChangeInput),
    "heads known to be alike": layers_with(alike=True),
    "heads not known to be alike": layers_with(alike=False),
    **{
        f"wrapped: {how}": layer(lambda spec, _, how=how: how in dict(spec.wrapped).values())
        for how in ("LoRA", "subclass", "weight_norm")
    },
    **{
        f"a hook that {how}": layer(lambda spec, _, how=how: how in dict(spec.hooks).values())
        for how in ("sees output", "sees gradient", "scales output", "scales input", "deepspeed's")
    },
    "a hook on the drop-in": layer(lambda spec, _: "attention" in dict(spec.hooks)),
    "frozen projections": layer(lambda spec, _: spec.block and "q_proj" in spec.frozen),
    "everything frozen": layers_with(frozen=("",)),
    "modules of two layers": layer(lambda spec, _: "modules" in spec.shares),
    "weights of two layers": layer(lambda spec, _: "weights" in spec.shares),
    "an input without a gradient": lambda program: any(getattr(s, "trains", True) is False for s in program.statements),
    "a layer called twice": lambda program: max(called(program).values()) > 1,
    "layers in a row": statement(Call, lambda s: len(s.layers) > 1),
    **{
        f"a call that is {how}": statement(Call, lambda s, how=how: s.how == how)
        for how in ("plain", "reentrant", "non-reentrant", "saved", "no_grad", "inference")
    },
    "a gate": statement(Mix, lambda s: s.how == "gate"),
    "a detached value": statement(Mix, lambda s: s.how == "detach"),
    "an output changed in place": statement(InPlace),
    **{f"a tensor hook that {how}": statement(Hook, lambda s, how=how: s.how == how) for how in ("halves", "sees", "retains")},
    "attention that raises": statement(Raises, lambda s: s.where == "attention"),
    "attention that raises in its second group": statement(Raises, lambda s: s.where == "attention" and s.group),
    "a backward that raises": statement(Raises, lambda s: s.where == "backward"),
    "an optimizer step": statement(Step),
    "accumulation": lambda program: sum(isinstance(s, Backward) for s in program.statements) > 1,
    "a kept graph": statement(Backward, lambda s: s.retain),
    "a backward that is repeated": lambda program: any(
        isinstance(a, Backward) and isinstance(b, Backward) and a.terms == b.terms
        for a, b in zip(program.statements, program.statements[1:])
    ),
    "autograd.grad of a subset": statement(Backward, lambda s: s.via == "grad"),
    "backward to a subset": statement(Backward, lambda s: s.via == "inputs"),
    **{
        f"a loss that is a {form}": term(lambda t, form=form: t.form == form)
        for form in ("dot", "slice", "sum", "square", "direct", "strided")
    },
    "no loss on one rank": term(lambda t: sum(start < stop for start, stop in t.windows) == len(t.windows) - 1),
    "a loss on one rank only": term(lambda t: sum(start < stop for start, stop in t.windows) == 1),
    "no loss at all": term(lambda t: all(start == stop for start, stop in t.windows)),
    "late transport": lambda program: program.transport == "late",
    "delayed transport": lambda program: program.transport == "delayed",
    "rank-major projections": lambda program: program.rank_major,
    "rotation in the kernels": lambda program: program.folds and layers_with(rope="Rotary")(program),
    "fp64 under autocast": lambda program: program.autocast and not program.half,
    "bf16": lambda program: program.half,
    "counted deliveries": lambda program: program.counts,
}


def test_all_that_can_be_drawn_is_drawn():
    drawn = [programs.draw(seed) for seed in SEEDS]
    rare = {name: count for name, has in FEATURES.items() if (count := sum(map(bool, map(has, drawn)))) < 10}
    assert not rare


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
