"""Tests the policy on one rank, by a scripted clock (`harness.policies`): the candidates of each step, and the choice."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sp_overlap.autotune.policy import Policy
from ds_sp_overlap.autotune.trial import OFF, candidates_for, merged
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.sp_group import SPGroup
from ds_sp_overlap.profiling.timed import TimedCall
from tests.harness.guards import Watched, notices
from tests.harness.policies import ScriptedClock, Tick, followed, hooks, optimizer_step

GEOMETRY = Geometry(sp_size=2, sp_rank=0, seq_lens=(8, 8), batch=1, heads=8, kv_heads=8, groups=2)


class Model:
    """Stands for a model on one rank: its layers only ask the policy for a candidate, and let the clock advance."""

    def __init__(self, count, costs, warmup_steps=16):
        self.said = []
        self.policy = Policy(SPGroup(None), warmup_steps)
        self.policy.inform = self.said.append
        self.indices, self.costs, self.clock = [self.policy.join() for _ in range(count)], costs, ScriptedClock()
        self.off = OFF in costs
        self.policy.clock = self.clock

    def step(self, x=None, geometry=GEOMETRY, grad=True):
        """Run one forward, backward and optimizer step; return the candidate that each layer ran."""
        x, ran, tokens = torch.ones(2) if x is None else x, [], geometry.batch * sum(geometry.seq_lens)
        for index in self.indices:
            trial = self.policy.trial(geometry, x, self.off)
            ran.append(trial.candidate(index))
            with torch.set_grad_enabled(grad):
                cost = self.costs[ran[-1]] * tokens / 16
                run = lambda x: Tick.apply(x, self.clock, cost)
                y = followed(self.policy, trial, ran[-1], tokens, run, x.clone().requires_grad_())
            if grad:
                y.sum().backward()
        optimizer_step()
        return ran

    def chosen(self):
        return [trial.chosen for trial in self.policy.trials.values()]


COSTS = {OFF: 3.0, 1: 2.5, 2: 2.2, 4: 2.4}


@pytest.mark.parametrize(
    "groups,off,expected",
    [(1, False, (1,)), (1, True, (OFF, 1)), (2, False, (1, 2)), (3, True, (OFF, 1, 2)), (9, False, (1, 2, 4))],
)
def test_candidates_go_as_far_as_the_heads(groups, off, expected):
    assert candidates_for(groups, off) == expected


def test_every_layer_runs_every_candidate_equally_often_and_each_step_all_of_them():
    model = Model(4, COSTS)
    table = [model.step() for _ in range(20)]
    assert table[0] == [2] * 4, "before the first optimizer step: the default"
    for step in table[1:17]:
        assert sorted(map(str, step)) == sorted(map(str, COSTS))
    for layer in zip(*table[1:17]):
        assert {candidate: layer.count(candidate) for candidate in COSTS} == dict.fromkeys(COSTS, 4)
    assert table[17:] == [[2] * 4] * 3 and model.chosen() == [2]


@pytest.mark.parametrize("best", COSTS)
def test_the_fastest_is_kept_and_one_line_says_so(best):
    model = Model(3, {**COSTS, best: 1.9})
    for _ in range(30):
        model.step()
    assert model.chosen() == [best]
    (line,) = model.said
    assert "8 query and 8 KV heads, batch 1, about 16 tokens over 2 ranks, float32: off" in line
    name = best if best == OFF else f"G = {best}"
    assert f"{name} 3.80 ms" in line  # forward and backward
    assert line.endswith("kept: " + ("off, stock is fastest here" if best == OFF else name))


def test_the_first_round_is_not_timed():
    model = Model(4, COSTS)
    for _ in range(5):
        model.step()
        assert not any(forwards for c in model.policy.trials.values() for forwards, _ in c.marks.values())
    model.step()
    assert all(len(forwards) == 1 for c in model.policy.trials.values() for forwards, _ in c.marks.values())


def test_a_candidate_that_is_far_behind_is_timed_once_and_pruned():
    model = Model(4, {**COSTS, OFF: 9.0, 4: 3.4})
    table = [model.step() for _ in range(20)]
    assert all(step.count(OFF) == 1 and step.count(4) == 1 for step in table[1:9])
    assert not any({OFF, 4} & set(step) for step in table[9:])
    assert model.chosen() == [2]


@pytest.mark.parametrize(
    "costs", [COSTS, {OFF: 6.0, 1: 4.0, 2: 2.0, 4: 2.2}, {1: 1.0, 2: 1.1, 4: 5.0}, {1: 1.0, 2: 2.5, 4: 2.5}], ids=str
)
def test_trying_costs_less_than_a_percent_of_a_thousand_steps(costs):
    """Counts the time in layers, by the scripted clock; from step 17 on, all layers must run the best candidate."""
    count = 3
    model = Model(count, costs)
    table = [model.step() for _ in range(1000)]
    best = min(costs, key=costs.get)
    assert model.chosen() == [best]
    assert all(step == [best] * count for step in table[17:])
    assert model.clock.now < 1.01 * 2000 * count * costs[best]


def test_after_the_choice_nothing_is_watched_or_timed():
    model = Model(2, COSTS)
    for _ in range(18):
        model.step()
    (trial,), marks = model.policy.trials.values(), []
    model.clock.mark = lambda: marks.append(1) or 0.0
    seen, x = [], torch.ones(2, requires_grad=True)
    y = followed(model.policy, trial, trial.candidate(0), 16, lambda x: seen.append(x) or x * 2, x)
    y.sum().backward()
    assert seen[0] is x and not y._backward_hooks and not x._backward_hooks and marks == []


def test_nothing_is_tried_in_calls_without_a_backward():
    model = Model(3, COSTS)
    assert [model.step(grad=False) for _ in range(20)] == [[2] * 3] * 20
    assert model.chosen() == [None] and model.said == []
    assert sorted(map(str, [*model.step(), *model.step()])) == sorted(map(str, [2, 2, 2, OFF, 1, 2])), "it goes on with training"


def test_a_forward_that_is_computed_again_counts_as_often_as_it_is():
    """With checkpointing, two forwards run for each backward, and both count."""
    model = Model(1, {1: 1.0, 2: 1.0})
    trial = model.policy.trial(GEOMETRY, torch.ones(2), False)
    trial.marks[1] = [(0, 2, 16), (0, 2, 16), (0, 4, 16), (0, 2, 16)], [(0, 10, 16), (0, 12, 16)]
    assert trial.milliseconds(model.clock)[0] == 2 * 2 + 11


def test_no_candidate_loses_by_forwards_without_a_backward_on_its_turns():
    """Guards the ratio of forwards to backwards, which is counted over all candidates.

    Here, an evaluation with gradients always runs in the steps of the fastest candidate.
    """
    model = Model(1, {1: 2.0, 2: 2.2, 4: 1.8})
    for _ in range(20):
        (ran,) = model.step()
        for _ in range(3 * (ran == 4 and model.chosen() == [None])):
            trial = model.policy.trial(GEOMETRY, torch.ones(2), False)
            followed(model.policy, trial, 4, 16, lambda x: Tick.apply(x, model.clock, 1.8), torch.ones(2, requires_grad=True))
    assert model.chosen() == [4]


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_layer_is_timed_whether_its_input_needs_a_gradient_or_not_and_computes_nothing_more(needs_gradient):
    """The timed backward includes the operations after the weight's gradient."""
    clock, marks, weight = ScriptedClock(), ([], []), torch.nn.Parameter(torch.ones(3, 3))

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(str(function))
            return function(*args, **(kwargs or {}))

    def body(x):
        return Tick.apply(torch.nn.functional.linear(x, Tick.apply(weight, clock, 2.0)), clock, 1.0)

    def timed(x):
        run = TimedCall((x,))
        run.time(clock, marks, tokens=2)
        return run.end(body(*run.inputs))

    counted = []
    for run in (body, timed):
        x, ran, weight.grad = torch.ones(2, 3, requires_grad=needs_gradient), [], None
        with Counted():
            run(x.clone()).sum().backward()
        counted.append([what for what in ran if "view" not in what])
        assert (x.grad is not None) == needs_gradient
    (forward,), (backward,) = marks
    assert forward[1] - forward[0] == backward[1] - backward[0] == 3.0 and counted[0] == counted[1]


def test_no_candidate_gains_by_short_batches_on_its_turns():
    model = Model(1, {1: 2.0, 2: 2.2, 4: 2.5})
    short, long = (Geometry(2, 0, (n, n), 1, 8, 8, 2) for n in (8, 15))
    for step in range(20):
        (ran,) = model.step(geometry=short if step > 0 and step % 3 == 0 else long)
        assert step % 3 or step == 0 or step > 15 or ran == 4
    assert model.chosen() == [1] and "G = 1 6.33 ms" in model.said[0], "2 x 2.0 ms for 16 tokens, at 76 / 3 tokens a call"


def test_ranks_that_have_not_timed_all_that_are_left_compare_nothing():
    trial = Model(1, {1: 1.0, 2: 1.0}).policy.trial(GEOMETRY, torch.ones(2), False)
    none = float("inf")

    def drop(every):
        reports = [{"shape": times} for times in every]
        trial.steps, trial.place = 0, len(trial.left) - 1  # the last step of a round
        trial.next_step(merged([*reports, {}])["shape"])

    drop([[1.0, none, 2.0], [none, none, none]])
    assert trial.left == [1, 2, 4] and trial.slowest_ms == {}
    drop([[9.0, none, 2.0], [3.0, 2.0, 3.5]])
    assert trial.left == [1, 2] and trial.slowest_ms == {1: 3.0, 2: 2.0, 4: 3.5}


def test_one_shape_is_asked_for_once_and_a_new_one_anew():
    model = Model(2, COSTS)
    for _ in range(18):
        model.step()
    near = Geometry(2, 0, (9, 9), 1, 8, 8, 2)  # the number of tokens has as many bits, so it counts as the same shape
    assert model.step(geometry=near) == [2, 2] and len(model.said) == 1
    for other, x in (
        (Geometry(2, 0, (16, 16), 1, 8, 8, 2), torch.ones(2)),
        (GEOMETRY, torch.ones(2, dtype=torch.float64)),
        (Geometry(2, 0, (8, 8), 1, 8, 4, 2), torch.ones(2)),
    ):
        before = len(model.said)
        model.step(x, other)
        assert len(set(map(str, model.step(x, other)))) == 2, "tried again"
        for _ in range(17):
            model.step(x, other)
        assert len(model.said) == before + 1
    assert model.chosen() == [2] * 4


def test_a_step_counts_once_however_often_optimizers_step_and_never_during_backward():
    model, seen = Model(1, COSTS), []

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            optimizer_step()
            model.policy.trial(GEOMETRY, torch.ones(2), True)
            seen.append(model.policy.step)
            return dy

    for _ in range(3):
        optimizer_step()
    model.step()
    assert model.policy.step == 0, "what stepped before the first backward doesn't count"
    for _ in range(3):
        optimizer_step()
    Recomputed.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [0]
    model.step()
    assert model.policy.step == 1


def test_the_hook_goes_with_the_policy():
    gc.collect()
    before = hooks()
    closed, dropped = Policy(SPGroup(None), 16), Policy(SPGroup(None), 16)
    assert hooks() == before + 2
    closed.close()
    assert hooks() == before + 1
    del dropped
    gc.collect()
    assert hooks() == before


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched(
        "evaluations favour none",
        "calls, gradients = len(own_forwards), len(own_backwards)",
        test_no_candidate_loses_by_forwards_without_a_backward_on_its_turns,
    )
)
