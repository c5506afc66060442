"""The policy: what is tried when, what is chosen, and that trying changes nothing.

Time is scripted: a clock that moves by what a candidate is said to cost, when it runs.
"""

import contextlib
import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ds_sp_overlap
from ds_sp_overlap.autotune import policy as policies
from ds_sp_overlap.autotune.policy import Policy
from ds_sp_overlap.autotune.trial import OFF, candidates_for, merged
from ds_sp_overlap.exchange.channel import Channel
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.profiling.steps import Listener
from ds_sp_overlap.profiling.timed import Run, Timed
from tests.helpers import dropin, layers, models
from tests.helpers.dropin import Case
from tests.helpers.guards import Guard, Watched, must_notice
from tests.helpers.layers import Shape
from tests.helpers.ranks import on_ranks
from tests.helpers.transports import Recording


class ScriptedClock:
    """Stands still but for what it is told."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def between_ms(self, begin, end):
        return end - begin


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, cost):
        ctx.clock, ctx.cost = clock, cost
        clock.now += cost
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.clock.now += ctx.cost
        return dy, None, None


@contextlib.contextmanager
def scripted(costs):
    """Run the body with every candidate costing ``costs[candidate]`` in forward and in backward, or as a function of the
    tokens of a call; yields what was run."""
    clock, follow, clock_of, ran = ScriptedClock(), Policy.follow, policies.clock_of, []

    def ticking(self, run, trial, candidate, tokens):
        ran.append((self.step, candidate))
        cost = costs[candidate](tokens) if callable(costs[candidate]) else costs[candidate]
        follow(self, run, trial, candidate, tokens)
        end = run.end
        run.end = lambda y: end(_Tick.apply(y, clock, cost))

    Policy.follow, policies.clock_of = ticking, lambda device: clock
    try:
        yield ran
    finally:
        Policy.follow, policies.clock_of = follow, clock_of


def followed(policy, trial, candidate, tokens, body, *inputs):
    """``body(*inputs)`` while the policy looks on."""
    run = Run(inputs)
    policy.follow(run, trial, candidate, tokens)
    return run.end(body(*run.inputs))


def optimizer_step():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


GEOMETRY = Geometry(sp_size=2, sp_rank=0, seq_lens=(8, 8), batch=1, heads=8, kv_heads=8, groups=2)


class Model:
    """Some layers that only consult the policy, on one rank."""

    def __init__(self, count, costs, warmup_steps=16):
        self.said = []
        self.policy = Policy(Channel(None), warmup_steps, say=self.said.append)
        self.indices, self.costs, self.clock = [self.policy.join() for _ in range(count)], costs, ScriptedClock()
        self.off = OFF in costs
        self.policy.clock = self.clock

    def step(self, x=None, geometry=GEOMETRY, grad=True):
        """One forward, backward and optimizer step; what each layer ran."""
        x, ran, tokens = torch.ones(2) if x is None else x, [], geometry.batch * sum(geometry.seq_lens)
        for index in self.indices:
            trial = self.policy.trial(geometry, x, self.off)
            ran.append(trial.candidate(index))
            with torch.set_grad_enabled(grad):
                y = followed(
                    self.policy,
                    trial,
                    ran[-1],
                    tokens,
                    lambda x: _Tick.apply(x, self.clock, self.costs[ran[-1]] * tokens / 16),
                    x.clone().requires_grad_(),
                )
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


def test_a_hopeless_candidate_is_not_tried_again_after_it_was_timed_once():
    model = Model(4, {**COSTS, OFF: 9.0, 4: 3.4})
    table = [model.step() for _ in range(20)]
    assert all(step.count(OFF) == 1 and step.count(4) == 1 for step in table[1:9])
    assert not any({OFF, 4} & set(step) for step in table[9:])
    assert model.chosen() == [2]


@pytest.mark.parametrize(
    "costs", [COSTS, {OFF: 6.0, 1: 4.0, 2: 2.0, 4: 2.2}, {1: 1.0, 2: 1.1, 4: 5.0}, {1: 1.0, 2: 2.5, 4: 2.5}], ids=str
)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_trying_costs_less_than_a_percent_of_a_thousand_steps(costs, count):
    """In at most 16 of them, and in time spent in the layers, by the scripted clock."""
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
    """Checkpointing: two forwards a backward cost two forwards."""
    model = Model(1, {1: 1.0, 2: 1.0})
    trial = model.policy.trial(GEOMETRY, torch.ones(2), False)
    trial.marks[1] = [(0, 2, 16), (0, 2, 16), (0, 4, 16), (0, 2, 16)], [(0, 10, 16), (0, 12, 16)]
    assert trial.milliseconds(model.clock)[0] == 2 * 2 + 11


def evaluations_decide():
    """What is kept where the fastest candidate had an evaluation that records graphs on its turns."""
    model = Model(1, {1: 2.0, 2: 2.2, 4: 1.8})
    for _ in range(20):
        (ran,) = model.step()
        for _ in range(3 * (ran == 4 and model.chosen() == [None])):
            trial = model.policy.trial(GEOMETRY, torch.ones(2), False)
            followed(model.policy, trial, 4, 16, lambda x: _Tick.apply(x, model.clock, 1.8), torch.ones(2, requires_grad=True))
    return [] if model.chosen() == [4] else [f"kept {model.chosen()}"]


def test_no_candidate_loses_by_forwards_without_a_backward_on_its_turns():
    """Guard: forwards a backward are counted over all candidates."""
    assert evaluations_decide() == []


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_layer_is_timed_whether_its_input_needs_a_gradient_or_not_and_computes_nothing_more(needs_gradient):
    """To the end of what follows the weight's gradient."""
    clock, told, weight = ScriptedClock(), [], torch.nn.Parameter(torch.ones(3, 3))

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(str(function))
            return function(*args, **(kwargs or {}))

    def body(x):
        return _Tick.apply(torch.nn.functional.linear(x, _Tick.apply(weight, clock, 2.0)), clock, 1.0)

    def timed(x):
        run = Run((x,))
        run.timed(Timed(clock, lambda a, b: told.append(b - a), lambda a, b: told.append(b - a)))
        return run.end(body(*run.inputs))

    counted = []
    for run in (body, timed):
        x, ran, weight.grad = torch.ones(2, 3, requires_grad=needs_gradient), [], None
        with Counted():
            run(x.clone()).sum().backward()
        counted.append([what for what in ran if "view" not in what])
        assert (x.grad is not None) == needs_gradient
    assert told == [3.0, 3.0] and counted[0] == counted[1]


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
        reports = [{"key": ("shape", times)} for times in every]
        trial._prune(merged([*reports, {}])["key"][1])

    drop([[1.0, none, 2.0], [none, none, none]])
    assert trial.left == [1, 2, 4] and trial.slowest_ms == {}
    drop([[9.0, none, 2.0], [3.0, 2.0, 3.5]])
    assert trial.left == [1, 2] and trial.slowest_ms == {1: 3.0, 2: 2.0, 4: 3.5}


def test_one_shape_is_asked_for_once_and_a_new_one_anew():
    model = Model(2, COSTS)
    for _ in range(18):
        model.step()
    near = Geometry(2, 0, (9, 9), 1, 8, 8, 2)  # as many bits
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


def an_optimizer_of_one_rank(rank):
    """Groups that are run where one rank steps an optimizer of its own between forward and backward, as of a probe."""
    shape = Shape(heads=8, kv_heads=8)
    layer, mover = layers.projections(shape), Recording()
    attend = layers.block(shape, layer, torch.distributed.group.WORLD, mover)
    attend.layer.policy.say = lambda line: None
    sgd, groups = torch.optim.SGD(layer.parameters(), lr=0.0), []
    with scripted({1: 1.0, 2: 1.0, 4: 1.0}):
        for _ in range(6):
            mover.log.clear()
            x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
            y = layers.call_block(shape, attend, rank, x.requires_grad_())
            if rank == 0:
                optimizer_step()
            y.backward(dy)
            sgd.step()
            groups.append(sum(what.startswith(">o") for what in mover.log))
    return groups


def test_an_optimizer_of_one_rank_makes_nobody_wait():
    """Guard: in one sp group times are compared at a layer's call, where all ranks are."""
    assert on_ranks(2, an_optimizer_of_one_rank) == [[2, 1, 2, 4, 1, 2]] * 2


def hooks():
    """Listeners to optimizer steps, which have one hook together."""
    assert (Listener._hook is not None) == bool(Listener._all)
    return len(Listener._all)


def test_the_hook_goes_with_the_policy():
    gc.collect()
    before = hooks()
    closed, dropped = Policy(Channel(None), 16), Policy(Channel(None), 16)
    assert hooks() == before + 2
    closed.close()
    assert hooks() == before + 1
    del dropped
    gc.collect()
    assert hooks() == before


# On several ranks.


def trained_block(rank, size, costs, steps, config):
    """What a block of its own ran in each step, by the exchanges it launched; and the lines that were said."""
    shape = Shape(heads=8, kv_heads=8, config=config)
    layer, mover, said = layers.projections(shape), Recording(), []
    attend = layers.block(shape, layer, torch.distributed.group.WORLD, mover)
    if attend.layer.policy is not None:
        attend.layer.policy.say = said.append
    sgd = torch.optim.SGD(layer.parameters(), lr=0.0)
    groups = []
    with scripted(costs[rank]) as ran:
        for _ in range(steps):
            mover.log.clear()
            x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
            layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
            sgd.step()
            groups.append(sum(what.startswith(">o") for what in mover.log))
    return groups, [candidate for _, candidate in ran], said


DIFFERING = [{1: 3.0, 2: 2.0, 4: 1.8}, {1: 1.9, 2: 2.1, 4: 2.6}]


def choices_differ(rank):
    groups, _, _ = trained_block(rank, 2, [{1: 1.0, 2: 1.4, 4: 1.3}, {1: 1.45, 2: 1.0, 4: 1.3}], 18, {})
    return [] if groups[-1] == 4 else [str(groups)]


def test_what_the_slowest_rank_measured_decides_and_sp_rank_0_says_it():
    """Each rank alone would choose otherwise: rank 0 G = 4, rank 1 G = 1. Guard: the largest of the ranks' times."""
    (first, ran, said), (second, ran_too, silent) = on_ranks(2, trained_block, 2, DIFFERING, 20, {})
    assert first == second == ran == ran_too, "the candidates ran as the exchanges say"
    assert first[0] == 2 and first[1:16] == [1, 2, 4] * 5 and first[16:] == [2] * 4
    assert silent == [] and len(said) == 1 and "G = 1 6.00 ms, G = 2 4.20 ms, G = 4 5.20 ms" in said[0]


@pytest.mark.parametrize("config,groups", [({"head_groups": 1}, 1), ({"head_groups": 4}, 4), ({"policy": {"warmup_steps": 0}}, 2)])
def test_with_a_fixed_setting_nothing_is_tried(config, groups):
    for ran, asked, said in on_ranks(2, trained_block, 2, [{}, {}], 12, config):
        assert ran == [groups] * 12 and asked == [] and said == []


def right_in_every_step(rank, use, config):
    """Faults of a block against the reference, in each of 20 steps in which the candidates take turns."""
    shape = Shape(heads=8, kv_heads=4, config=config)
    found, attend, layer = [], None, layers.projections(shape)
    attend = layers.block(shape, layer, torch.distributed.group.WORLD)
    attend.layer.policy.say = lambda line: None
    sgd, ran = torch.optim.SGD(layer.parameters(), lr=0.0), set()
    whole = layers.projections(shape)
    x, dy = layers.whole_inputs(shape)
    expected = use(lambda x: layers.reference_layer(shape, whole, x), whole, x.clone().requires_grad_(), dy)
    with scripted({1: 1.0, 2: 1.0, 4: 1.0}) as log:
        for _ in range(20):
            sgd.zero_grad()
            local_x, local_dy = (layers.my_slice(shape, rank, t) for t in (x, dy))
            got = use(lambda x: layers.call_block(shape, attend, rank, x), layer, local_x.requires_grad_(), local_dy)
            pairs = {name: (got[name].detach(), layers.my_slice(shape, rank, expected[name].detach())) for name in expected}
            found += layers.faults(1e-12, **pairs)
            sgd.step()
            ran.update(candidate for _, candidate in log)
    return found, ran


def checkpointed(reentrant):
    def use(call, layer, x, dy):
        y = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=reentrant)
        y.backward(dy)
        return {"output": y, "dx": x.grad}

    return use


def accumulated(call, layer, x, dy):
    """Two graphs in flight."""
    first, second = call(x), call(2 * x)
    second.backward(dy)
    first.backward(dy)
    return {"output": first, "second": second, "dx": x.grad}


USES = {"plain": layers.backward, "reentrant": checkpointed(True), "non-reentrant": checkpointed(False), "accumulated": accumulated}


def right(rank, name):
    return right_in_every_step(rank, USES[name], {})


def another_optimizer_before_backward(rank):
    """As of a discriminator beside a generator: its optimizer steps while the other's graph is in flight."""

    def use(call, layer, x, dy):
        y = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
        optimizer_step()
        y.backward(dy)
        return {"output": y, "dx": x.grad}

    try:
        return right_in_every_step(rank, use, {})[0]
    except torch.utils.checkpoint.CheckpointError as error:
        return [str(error)]


def test_a_candidate_stays_for_its_backward_though_another_optimizer_stepped():
    """Guard: the count of steps doesn't move during backward."""
    assert on_ranks(2, another_optimizer_before_backward) == [[], []]


@pytest.mark.parametrize("name", USES)
def test_results_are_right_in_every_step_whatever_is_tried(name):
    for faults, ran in on_ranks(2, right, name):
        assert faults == [] and ran == {1, 2, 4}


# Models.


def trained(rank, stage, costs, checkpointing, accumulation=2, **more):
    """How far training with ``auto`` is from stock, and what ran in each step."""

    def prepare(model):
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        return model

    options = dict(steps=18, accumulation=accumulation, stage=stage, initializer_range=0.2, heads=8, kv_heads=8, layers=2, **more)
    stock = models.train_run(rank, 2, None, prepare=prepare, **options)
    with scripted(costs) as ran:
        ours = models.train_run(rank, 2, {"on_unsupported": "error"}, prepare=prepare, **options)
    return ours.distance(stock), ran, hooks()


@pytest.mark.parametrize(
    "stage,checkpointing,best",
    [(0, None, 2), (1, None, 4), (2, None, OFF), (3, None, 1), (3, False, 2), (2, True, OFF), (1, False, OFF)],
)
def test_steps_are_counted_under_every_zero_stage_and_training_stays_what_it_was(stage, checkpointing, best, capfd):
    costs = {OFF: 1.2, 1: 1.1, 2: 1.3, 4: 1.25, best: 1.0}
    both = on_ranks(2, trained, stage, costs, checkpointing)
    for off, ran, _ in both:
        assert off["losses"] <= 1e-5 and off["norms"] <= 1e-4 and off["gradients"] <= 1e-4, off  # 18 steps in fp32
        steps = {step: {candidate for s, candidate in ran if s == step} for step, _ in ran}
        assert set(steps) == set(range(18)), "one step of the optimizer is one step of the policy"
        assert steps[0] == {2} and steps[17] == {best}
        assert all(len(steps[step]) == 2 for step in range(1, 17)), "two layers, two candidates"
        assert set().union(*steps.values()) == set(costs)
    assert both[0][1] == both[1][1], "the ranks run the same"


def disabled(rank):
    gc.collect()
    before = hooks()
    with models.sequence_parallel_model(2) as (model, group):
        other = models.tiny()
        report = ds_sp_overlap.enable(model, {})
        ds_sp_overlap.enable(other, {}, group)
        while_on = hooks() - before
        ds_sp_overlap.disable(model)
        without_one = hooks() - before
        ds_sp_overlap.disable(other)
        return while_on, without_one, hooks() - before, str(report)


def test_models_have_policies_of_their_own_and_disable_drops_their_hooks():
    for while_on, without_one, after, report in on_ranks(2, disabled):
        assert (while_on, without_one, after) == (2, 1, 0)
        assert "G by timing in the first 16 steps" in report


def tried(rank, what):
    """The candidates that a model's layers run while everything is tried."""
    options, positions = {"heads": 4, "kv_heads": 2}, None
    if what == "window":
        options = {"family": "mistral", "sliding_window": 8, **options}
    if what == "packed":
        positions = torch.cat([torch.arange(20), torch.arange(12)]).expand(models.BATCH, -1)
    if what == "unknown family":
        options = {"family": "gpt_neox", "heads": 4, "kv_heads": 4}
    with models.sequence_parallel_model(2, **options) as (model, group):
        if what == "not registered":
            models.forget_sequence_parallel()
            model.set_attn_implementation("sdpa")
        ds_sp_overlap.enable(model, {}, torch.distributed.group.WORLD)
        sgd, losses = torch.optim.SGD(model.parameters(), lr=0.0), []
        tokens = models.batches(1)[0]
        with scripted({OFF: 1.0, 1: 1.0, 2: 1.0}) as ran:
            for _ in range(7):
                inputs = models.cut(tokens, rank, 2, positions)
                if what == "uneven":
                    whole = {**inputs}
                    for key, value in models.cut(tokens, 0, 1).items():
                        whole[key] = value[:, :12] if rank == 0 else value[:, 12:]
                    inputs = whole
                loss = models.mean_loss(model, inputs, torch.distributed.group.WORLD)
                loss.backward()
                sgd.step()
                losses.append(loss.item())
        ds_sp_overlap.disable(model)
        return {candidate for _, candidate in ran}, max(losses) - min(losses)


@pytest.mark.parametrize(
    "what,expected",
    [
        ("plain", {OFF, 1, 2}),
        ("unknown family", {OFF, 1, 2}),
        ("packed", {1, 2}),
        ("window", {1, 2}),
        ("uneven", {1, 2}),
        ("not registered", {1, 2}),
    ],
)
def test_off_is_tried_only_where_stock_computes_the_same(what, expected):
    for ran, spread in on_ranks(2, tried, what):
        assert ran == expected
        assert spread <= 2e-6  # of a loss of 4 in fp32, a few roundings


def drop_in_tried(rank, case, sequence_lengths):
    """The candidates that DeepSpeed's own module runs once bound, and whether it computes the same in all of them."""
    from deepspeed.sequence.layer import DistributedAttention

    stock = DistributedAttention(dropin.local_attention(case), torch.distributed.group.WORLD, 2, 0 if not case.batch_first else 1)
    model = torch.nn.Sequential(stock)
    ds_sp_overlap.enable(model, {}, torch.distributed.group.WORLD)
    outputs, more = [], {"sequence_lengths": list(case.lengths)} if sequence_lengths else {}
    with scripted({OFF: 1.0, 1: 1.0, 2: 1.0}) as ran:
        for _ in range(7):
            q, k, v = (dropin.my_slice(case, rank, t).requires_grad_() for t in dropin.whole_inputs(case)[:3])
            y = stock(q, k, v, 0 if case.batch_first else 1, **more)
            outputs.append(torch.stack([y, *torch.autograd.grad(y.square().sum(), (q, k, v))]))
            optimizer_step()
    ds_sp_overlap.disable(model)
    return {candidate for _, candidate in ran}, max((x - outputs[0]).abs().max().item() for x in outputs)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sequence_lengths", [False, True])
def test_deepspeeds_own_module_runs_as_it_is_where_it_does_the_same(batch_first, sequence_lengths):
    for ran, off in on_ranks(2, drop_in_tried, Case(batch_first=batch_first), sequence_lengths):
        assert ran == ({1, 2} if sequence_lengths else {OFF, 1, 2})
        assert off < 1e-12


# Beside data parallelism: two replicas of two ranks.


@contextlib.contextmanager
def two_replicas(rank):
    """The sp group of this rank."""
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    try:
        yield pairs[rank // 2]
    finally:
        torch.distributed.destroy_process_group(pairs[rank // 2])


def policies_of_a_replica(rank):
    """Whether there is a policy: by which ranks are known to reduce gradients together."""
    with two_replicas(rank) as group:
        config, world = ds_sp_overlap.SpOverlapConfig(), torch.distributed.group.WORLD
        made = [Policy.of(config, Channel(group)), Policy.of(config, Channel(group), group)]
        made += [Policy.of(config, Channel(group), world), Policy.of(config, Channel(world))]
        return [policy and policy.replicas for policy in made]


def test_replicas_choose_only_where_all_that_reduce_gradients_together_are_known_and_are_the_world():
    assert on_ranks(4, policies_of_a_replica) == [[None, None, True, False]] * 4


STEPS = 24


def replica_runs(rank, calls, costs, off=False, said=None):
    """What the layers of a replica run in each of `STEPS` steps: {step: [(heads, candidate)]}.

    calls   ``calls(replica, step)`` -> the calls of a step: (heads of the layer, batch, local length)
    costs   of each replica, by candidate
    off     whether replica 0 could run stock's forward

    After each step replica 0 evaluates alone, on a length of its own, while the other waits for it.
    """
    replica, sp_rank = divmod(rank, 2)
    world, runs, blocks = torch.distributed.group.WORLD, {}, {}
    with two_replicas(rank) as group, scripted(costs[replica]) as ran:
        policy = Policy.of(ds_sp_overlap.SpOverlapConfig(), Channel(group), world)
        policy.say = said.append if said is not None else lambda line: None
        for heads in (8, 4, 16, 32):
            shape = Shape(heads=heads, kv_heads=heads, rope=False)
            blocks[heads] = attend = layers.block(shape, layers.projections(shape), group)
            attend.layer.policy, attend.layer.index = policy, policy.join()

        def call(heads, batch, length):
            shape = Shape(heads=heads, kv_heads=heads, batch=batch, lengths=(length, length))
            x, dy = (layers.my_slice(shape, sp_rank, t) for t in layers.whole_inputs(shape))
            more = {"baseline": lambda x, *_: x + 0} if off and replica == 0 else {}
            return blocks[heads](x.requires_grad_(), **more), dy

        for step in range(STEPS):
            ran.clear()
            asked = calls(replica, step)
            for heads, batch, length in asked:
                y, dy = call(heads, batch, length)
                y.backward(dy)
            runs[step] = [(heads, candidate) for (heads, _, _), (_, candidate) in zip(asked, ran)]
            optimizer_step()
            if replica == 0:
                with torch.no_grad():
                    call(8, 1, 40)
            torch.distributed.barrier()
    return runs


def per_token(costs):
    return {candidate: lambda tokens, cost=cost: cost * tokens / 100 for candidate, cost in costs.items()}


def differing_lengths(replica, step):
    """Two calls a step; batches and lengths vary, and replicas never have the same."""
    return [(8, 1 + step % 2, (5, 9, 33)[step % 3] + replica), (8, 1, 12 + 8 * replica)]


def replicas_differ(rank, off=False, said=None):
    """What the replicas run differently, where each alone would choose otherwise: replica 0 G = 4, replica 1 G = 1."""
    costs = [{OFF: 1.0, **per_token(each)} for each in ({1: 1.0, 2: 0.7, 4: 0.6}, {1: 0.6, 2: 0.7, 4: 0.85})]
    runs = replica_runs(rank, differing_lengths, costs, off, said)
    every = [None] * 4
    torch.distributed.all_gather_object(every, runs)
    found = [f"step {step} is another" for step in runs if any(each[step] != runs[step] for each in every)]
    tried = {candidate for step in runs.values() for _, candidate in step}
    found += [] if tried == {1, 2, 4} else [f"tried {tried}"]
    return found + ([] if runs[STEPS - 1] == [(8, 2)] * 2 else [f"kept {runs[STEPS - 1]}"])


def replicas_differ_where_one_could_run_stock(rank):
    return replicas_differ(rank, off=True)


def differing(rank):
    said = []
    return replicas_differ(rank, said=said), said


def test_replicas_with_batches_of_their_own_run_the_same_in_every_step_and_keep_the_same():
    """Guards: all that reduce gradients together are told; a shape has no lengths there."""
    (found, (line,)), *others = on_ranks(4, differing)
    assert found == [] and others == [([], [])] * 3
    assert line.startswith("sp_overlap: 8 query and 8 KV heads over 2 ranks, float64: G = 1")
    assert line.endswith("kept: G = 2")


def test_beside_replicas_stock_is_no_candidate():
    """Guard: "off" only in one sp group."""
    assert on_ranks(4, replicas_differ_where_one_could_run_stock) == [[]] * 4


def met_later(replica, step):
    """Layers of 4 heads: replica 1 from step 5 on, replica 0 at the very end; of 16: replica 1, once while things are tried and
    once when all is over; of 32: replica 0, when all is over."""
    more = [(4, 1, 6)] * 2 if (replica == 1 and step >= 5) or step >= 22 else []
    more += [(16, 1, 6)] if (replica, step) in ((1, 4), (1, 23)) else [(32, 1, 6)] if (replica, step) == (0, 23) else []
    return [(8, 1, 6), *more]


def later(rank):
    return replica_runs(rank, met_later, [{1: 1.2, 2: 1.3, 4: 1.0}] * 2)


def test_a_layer_that_one_replica_meets_later_keeps_the_replicas_together():
    first, first_too, second, second_too = on_ranks(4, later)
    assert first == first_too and second == second_too
    for step, ran in second.items():
        assert [each for each in first[step] if each[0] == 8] == [each for each in ran if each[0] == 8]
    assert [ran[1:] for ran in second.values()][5:9] == [[(4, 2)] * 2, [(4, 2)] * 2, [(4, 1)] * 2, [(4, 2)] * 2]
    assert second[22] == first[22] == [(8, 4), (4, 1), (4, 1)]
    assert second[23] == [*first[22], (16, 2)], "what was not timed keeps the default"
    assert first[23] == first[22], "what is met when all is over has the default, without asking"


def trained_beside_replicas(rank, stage, checkpointing):
    """How far training with ``auto`` is from stock, on replicas with lengths and times of their own; and what ran."""
    costs = [{1: 1.0, 2: 1.3, 4: 1.45}, {1: 1.45, 2: 1.3, 4: 1.0}][rank // 2]
    return trained(rank, stage, costs, checkpointing, accumulation=2 if stage == 2 else 1, family="qwen3")


@pytest.mark.parametrize("stage,checkpointing", [(1, None), (2, True), (3, False)])
def test_training_beside_replicas_stays_what_it_was_while_candidates_change(stage, checkpointing):
    """Qwen3, whose norms get their gradients in another order with G = 1 than with more."""
    every = on_ranks(4, trained_beside_replicas, stage, checkpointing)
    for off, ran, _ in every:
        assert off["losses"] <= 1e-5 and off["norms"] <= 1e-4 and off["gradients"] <= 1e-4, off  # 18 steps in fp32
        assert {candidate for _, candidate in ran} == {1, 2, 4} and len({c for s, c in ran if s == 1}) == 2
        assert ran == every[0][1] and ran[-1][1] == 2, "every rank runs the same"


# Guards.

WATCHED = {
    "a candidate stays for its backward": Watched(
        Guard("autotune.policy:Policy._look", "or in_backward()", ""),
        another_optimizer_before_backward,
    ),
    "the slowest rank counts": Watched(
        Guard("autotune.trial:merged", "[max(times) for times in zip(*every)]", "[min(times) for times in zip(*every)]"),
        choices_differ,
    ),
    "replicas choose together": Watched(
        Guard("autotune.policy:Policy._look", "if self.board is None else self.board.told(self.step)", ""),
        replicas_differ,
        4,
    ),
    "replicas tell no shapes apart by lengths": Watched(
        Guard("autotune.policy:Policy.trial", "() if self.replicas else (geometry.batch", "(geometry.batch"),
        replicas_differ,
        4,
    ),
    "replicas never run stock": Watched(
        Guard("autotune.policy:Policy.trial", "off and not self.replicas", "off"),
        replicas_differ_where_one_could_run_stock,
        4,
    ),
    "no candidate loses by evaluations on its turns": Watched(
        Guard("autotune.trial:Trial.milliseconds", "len(forwards) / len(backwards)", "len(each[0]) / len(each[1])"),
        evaluations_decide,
        0,
    ),
}


@pytest.mark.parametrize("name", WATCHED)
def test_the_suite_notices_without_the_guard_that(name):
    must_notice(WATCHED[name])
