"""Tests that all ranks choose the same, and that trials don't change results; with scripted time (`harness.policies`)."""

import functools
import gc

import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.autotune.policy import Policy
from ds_sp_overlap.autotune.trial import OFF
from ds_sp_overlap.exchange.sp_group import SPGroup
from tests.harness import dropin, layers, models
from tests.harness.cases import full
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.policies import hooks, optimizer_step, scripted, two_replicas
from tests.harness.ranks import on_ranks
from tests.harness.transports import Recording

# On several ranks.


def trained_layers(rank, shapes, costs, steps):
    """Train layers without a model; return the groups of each layer and step, the candidates, and the messages.

    Counts the groups by the launched exchanges.
    """
    group, movers = torch.distributed.group.WORLD, [Recording() for _ in shapes]
    modules = torch.nn.ModuleList(layers.projections(shape) for shape in shapes)
    made = [layers.block(*each, group, mover) for *each, mover in zip(shapes, modules, movers)]
    sgd, groups = torch.optim.SGD(modules.parameters(), lr=0.0), [[] for _ in shapes]
    with listening(start_up=True) as said, scripted(costs[rank]) as ran:
        for _ in range(steps):
            for shape, attend, mover, of_layer in zip(shapes, made, movers, groups):
                mover.log.clear()
                x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
                layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
                of_layer.append(sum(what.startswith(">o") for what in mover.log))
            sgd.step()
    return groups, [candidate for _, candidate in ran], [line for line in said if "kept: " in line or "G by timing" in line]


EIGHT = Shape(heads=8, kv_heads=8)
DIFFERING = [{1: 3.0, 2: 2.0, 4: 1.8}, {1: 1.9, 2: 2.1, 4: 2.6}]


def choices_differ(rank):
    (groups,), _, _ = trained_layers(rank, [EIGHT], [{1: 1.0, 2: 1.4, 4: 1.3}, {1: 1.45, 2: 1.0, 4: 1.3}], 18)
    return [] if groups[-1] == 4 else [str(groups)]


def test_what_the_slowest_rank_measured_decides_and_is_said():
    """Guards the maximum over the ranks' times. By its own times, rank 0 would choose G = 4, and rank 1 G = 1."""
    ((first,), ran, said), ((second,), ran_too, _) = on_ranks(2, trained_layers, [EIGHT], DIFFERING, 20)
    assert first == second == ran == ran_too, "the candidates ran as the exchanges say"
    assert first[0] == 2 and first[1:16] == [1, 2, 4] * 5 and first[16:] == [2] * 4
    assert len(said) == 2 and "G = 1 6.00 ms, G = 2 4.20 ms, G = 4 5.20 ms" in said[1]


@pytest.mark.parametrize("config,groups", [({"head_groups": 1}, 1), ({"head_groups": 4}, 4), ({"policy": {"warmup_steps": 0}}, 2)])
def test_with_a_fixed_setting_nothing_is_tried(config, groups, rank):
    assert trained_layers(rank, [Shape(heads=8, kv_heads=8, config=config)], [{}, {}], 12) == ([[groups] * 12], [], [])


def test_layers_of_ones_own_choose_together_and_each_shape_is_told_once(rank):
    shapes = [EIGHT] * 3 + [Shape(heads=8, kv_heads=2)]
    groups, _, said = trained_layers(rank, shapes, [{1: 3.0, 2: 2.0, 4: 1.8}] * 2, 20)
    assert len({of_layer[-1] for of_layer in groups[:3]}) == 1
    for heads in ("8 query and 8 KV heads", "8 query and 2 KV heads"):
        begun, kept = (line for line in said if heads in line)
        assert begun.endswith(f"layers of one's own like it: {heads} over 2 ranks: G by timing in the first 16 steps")
        assert "kept: G = " in kept


# Models.


def trained(rank, stage, costs, checkpointing, accumulation=2, **more):
    """Train with "auto" and with stock; return the differences, the candidates that ran, and the number of hooks."""

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
    [
        full(0, None, 2),
        full(1, None, 4),
        full(2, None, OFF),
        full(3, None, 1),
        full(3, False, 2),
        (2, True, OFF),
        full(1, False, OFF),
    ],
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


def test_models_have_policies_of_their_own_and_disable_drops_their_hooks(rank):
    gc.collect()
    before = hooks()
    with models.sequence_parallel_model(2) as (model, group):
        other = models.tiny()
        report = ds_sp_overlap.enable(model, {})
        ds_sp_overlap.enable(other, {}, group)
        assert hooks() == before + 2 and "G by timing in the first 16 steps" in str(report)
        ds_sp_overlap.disable(model)
        assert hooks() == before + 1
        ds_sp_overlap.disable(other)
        assert hooks() == before


@pytest.mark.parametrize(
    "what,expected",
    [
        ("plain", {OFF, 1, 2}),
        ("unknown forward", {OFF, 1, 2}),
        ("packed", {1, 2}),
        ("window", {1, 2}),
        ("uneven", {1, 2}),
        ("not registered", {1, 2}),
        ("beside a window", {2, 4}),  # candidates that need no more memory than the first step
    ],
)
def test_off_is_tried_only_where_stock_computes_the_same(what, expected, rank):
    options, positions, section = {"heads": 4, "kv_heads": 2}, None, {}
    if what == "beside a window":
        options, section = {"heads": 8, "kv_heads": 2}, {"window": 1, "head_groups": "auto"}
    if what == "window":
        options = {"family": "mistral", "sliding_window": 8, **options}
    if what == "packed":
        positions = torch.cat([torch.arange(20), torch.arange(12)]).expand(models.BATCH, -1)
    if what == "unknown forward":
        options = {"family": "bitnet", **options}
    tokens, losses = models.batches(1)[0], []
    inputs = models.cut(tokens, rank, 2, positions)
    if what == "uneven":
        inputs = {key: x[:, :12] if rank == 0 else x[:, 12:] for key, x in models.cut(tokens, 0, 1).items()}
    with models.sequence_parallel_model(2, **options) as (model, group):
        if what == "not registered":
            models.forget_sequence_parallel()
            model.set_attn_implementation("sdpa")
        ds_sp_overlap.enable(model, section, torch.distributed.group.WORLD)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        with scripted({OFF: 1.0, 1: 1.0, 2: 1.0, 4: 1.0}) as ran:
            for _ in range(7):
                loss = models.mean_loss(model, inputs, torch.distributed.group.WORLD)
                loss.backward()
                sgd.step()
                losses.append(loss.item())
        ds_sp_overlap.disable(model)
    assert {candidate for _, candidate in ran} == expected
    assert max(losses) - min(losses) <= 2e-6  # a few roundings of a loss of 4 in fp32


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sequence_lengths", [False, True])
def test_deepspeeds_own_module_runs_as_it_is_where_it_does_the_same(batch_first, sequence_lengths, rank):
    from deepspeed.sequence.layer import DistributedAttention

    case = Case(batch_first=batch_first)
    stock = DistributedAttention(dropin.local_attention(case), torch.distributed.group.WORLD, 2, 1 if batch_first else 0)
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
    assert {candidate for _, candidate in ran} == ({1, 2} if sequence_lengths else {OFF, 1, 2})
    assert max((x - outputs[0]).abs().max().item() for x in outputs) < 1e-12


# With data parallelism: two replicas of two ranks.


@pytest.mark.ranks(4)
def test_replicas_choose_only_where_all_that_reduce_gradients_together_are_known_and_are_the_world(rank):
    with two_replicas(rank) as group:
        config, world = ds_sp_overlap.SpOverlapConfig(), torch.distributed.group.WORLD
        made = [Policy.of(config, SPGroup(group)), Policy.of(config, SPGroup(group), group)]
        made += [Policy.of(config, SPGroup(group), world), Policy.of(config, SPGroup(world))]
    assert [policy and policy.replicas for policy in made] == [None, None, True, False]


STEPS = 24


def replica_runs(rank, calls, costs, off=False, said=None):
    """Return the candidates that the layers of a replica run in each of `STEPS` steps: {step: [(heads, candidate)]}.

    calls   ``calls(replica, step)`` -> the calls of a step: (heads of the layer, batch, local length)
    costs   for each replica, {candidate: time}
    off     whether replica 0 could run stock's forward

    After each step, replica 0 evaluates alone, with another length. The other replica waits.
    """
    replica, sp_rank = divmod(rank, 2)
    world, runs, blocks = torch.distributed.group.WORLD, {}, {}
    with two_replicas(rank) as group, scripted(costs[replica]) as ran:
        policy = Policy.of(ds_sp_overlap.SpOverlapConfig(), SPGroup(group), world)
        policy.inform = said.append if said is not None else lambda line: None
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
    """Return two calls of a step, with batches and lengths that vary between steps, and always differ between replicas."""
    return [(8, 1 + step % 2, (5, 9, 33)[step % 3] + replica), (8, 1, 12 + 8 * replica)]


def replicas_differ(rank, off=False, said=None):
    """List differences between the replicas' candidates, with times by which replica 0 would choose G = 4, and replica 1 G = 1."""
    costs = [{OFF: 1.0, **per_token(each)} for each in ({1: 1.0, 2: 0.7, 4: 0.6}, {1: 0.6, 2: 0.7, 4: 0.85})]
    runs = replica_runs(rank, differing_lengths, costs, off, said)
    every = [None] * 4
    torch.distributed.all_gather_object(every, runs)
    found = [f"step {step} is another" for step in runs if any(each[step] != runs[step] for each in every)]
    tried = {candidate for step in runs.values() for _, candidate in step}
    found += [] if tried == {1, 2, 4} else [f"tried {tried}"]
    return found + ([] if runs[STEPS - 1] == [(8, 2)] * 2 else [f"kept {runs[STEPS - 1]}"])


@pytest.mark.ranks(4)
def test_replicas_with_batches_of_their_own_run_the_same_in_every_step_and_keep_the_same(rank):
    """Guards that all ranks that reduce gradients together choose together, and that shapes have no lengths for this."""
    assert replicas_differ(rank, said=(said := [])) == []
    (line,) = said
    assert line.startswith("sp_overlap: 8 query and 8 KV heads over 2 ranks, float64: G = 1")
    assert line.endswith("kept: G = 2")


@pytest.mark.ranks(4)
def test_beside_replicas_stock_is_no_candidate(rank):
    """Guards that "off" is a candidate only if there is a single sp group."""
    assert replicas_differ(rank, True) == []


def met_later(replica, step):
    """Return the calls of a step, with layers that the replicas call in different steps:

    - 4 heads: replica 1 from step 5 on, replica 0 from step 22 on;
    - 16 heads: replica 1, once during the trials, and once after all choices;
    - 32 heads: replica 0, after all choices.
    """
    more = [(4, 1, 6)] * 2 if (replica == 1 and step >= 5) or step >= 22 else []
    more += [(16, 1, 6)] if (replica, step) in ((1, 4), (1, 23)) else [(32, 1, 6)] if (replica, step) == (0, 23) else []
    return [(8, 1, 6), *more]


def test_a_layer_that_one_replica_meets_later_keeps_the_replicas_together():
    first, first_too, second, second_too = on_ranks(4, replica_runs, met_later, [{1: 1.2, 2: 1.3, 4: 1.0}] * 2)
    assert first == first_too and second == second_too
    for step, ran in second.items():
        assert [each for each in first[step] if each[0] == 8] == [each for each in ran if each[0] == 8]
    assert [ran[1:] for ran in second.values()][5:9] == [[(4, 2)] * 2, [(4, 2)] * 2, [(4, 1)] * 2, [(4, 2)] * 2]
    assert second[22] == first[22] == [(8, 4), (4, 1), (4, 1)]
    assert second[23] == [*first[22], (16, 2)], "what was not timed keeps the default"
    assert first[23] == first[22], "what is met when all is over has the default, without asking"


def trained_beside_replicas(rank, stage, checkpointing):
    """Run `trained` on replicas with different lengths and times."""
    costs = [{1: 1.0, 2: 1.3, 4: 1.45}, {1: 1.45, 2: 1.3, 4: 1.0}][rank // 2]
    return trained(rank, stage, costs, checkpointing, accumulation=2 if stage == 2 else 1, family="qwen3")


@pytest.mark.parametrize("stage,checkpointing", [full(1, None), full(2, True), (3, False)])
def test_training_beside_replicas_stays_what_it_was_while_candidates_change(stage, checkpointing):
    """Checks Qwen3: with G = 1, its norms get their gradients in another order than with more groups."""
    every = on_ranks(4, trained_beside_replicas, stage, checkpointing)
    for off, ran, _ in every:
        assert off["losses"] <= 1e-5 and off["norms"] <= 1e-4 and off["gradients"] <= 1e-4, off  # 18 steps in fp32
        assert {candidate for _, candidate in ran} == {1, 2, 4} and len({c for s, c in ran if s == 1}) == 2
        assert ran == every[0][1] and ran[-1][1] == 2, "every rank runs the same"


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched("the slowest rank counts", "slowest = [min(times) for times in zip(*complete)]", choices_differ),
    Watched("replicas choose together", "if False:", replicas_differ, 4),
    Watched("their lengths differ", "if True:", replicas_differ, 4),
    Watched("no stock", "candidates = candidates_for(most, off, least)", functools.partial(replicas_differ, off=True), 4),
)
