"""Attacks the policy: runs programs that behave differently on some ranks, between the calls of layers.

The results of each call are compared with the reference on the whole sequence, whichever candidate ran. The candidates that ran
are compared between ranks. If a rank waits forever, or ranks exchange unequal sizes, `on_ranks` fails.
"""

import contextlib
import functools
import gc
import time
import weakref

import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.autotune import policy as policies
from ds_sp_overlap.autotune.policy import Policy
from ds_sp_overlap.exchange.sp_group import SPGroup
from tests.harness import layers
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.policies import optimizer_step, scripted, two_replicas
from tests.harness.ranks import on_ranks, refusal

COSTS = {1: 1.3, 2: 1.2, 4: 1.0}


class Planned(Exception):
    """The error that local attention raises, on all ranks in the same call."""


class Model:
    """A layer with its own policy, on one rank of an sp group; compares each forward and backward with the reference.

    faults      differences from the reference
    said        messages of the policy
    in_flight   forwards whose backward has not run
    """

    def __init__(self, group, policy=None, heads=8, seed=1):
        self.group, self.rank, self.size = group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self.heads, self.raising, self.faults, self.said, self.in_flight = heads, None, [], [], []
        shape = self.shape(1, 4)
        self.layer, self.whole = layers.projections(shape, seed), layers.projections(shape, seed)
        self.attend = layers.block(shape, self.layer, group, local_attention=self.local)
        if policy is not None:
            self.attend.layer.policy, self.attend.layer.index = policy, policy.join()
        self.policy = self.attend.layer.policy
        self.policy.inform = self.policy.warn = self.said.append
        self.sgd = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        self.beside = False  # whether there are other replicas, with which gradients are reduced

    def shape(self, batch, length):
        return Shape(heads=self.heads, kv_heads=self.heads, head_dim=4, batch=batch, lengths=(length,) * self.size, rope=False)

    def local(self, q, k, v):
        if self.raising == "forward":
            raise Planned
        o = layers.reference.attention(q, k, v)
        if self.raising == "backward" and o.requires_grad:
            o.register_hook(self._raise)
        return o

    def _raise(self, _):
        raise Planned

    def forward(self, batch=1, length=4, checkpoint=None, needs_gradient=True):
        """Run one forward in the caller's grad mode; put it in flight for `backward` if it has a graph."""
        shape = self.shape(batch, length)
        x, dy = layers.whole_inputs(shape)
        mine, my_dy = (layers.my_slice(shape, self.rank, t).clone() for t in (x, dy))
        mine.requires_grad_(needs_gradient)
        call = lambda x: layers.call_block(shape, self.attend, self.rank, x)  # noqa: E731
        with contextlib.suppress(Planned):
            y = call(mine) if checkpoint is None else torch.utils.checkpoint.checkpoint(call, mine, use_reentrant=checkpoint)
            with torch.enable_grad():
                x.requires_grad_()
                expected = layers.reference_layer(shape, self.whole, x)
            self.faults += layers.faults(1e-12, output=(y.detach(), layers.my_slice(shape, self.rank, expected.detach())))
            if y.requires_grad:
                self.in_flight.append((shape, mine, y, my_dy, x, expected, dy))

    def backward(self, which=0):
        """Run the backward of a forward in flight; ``which`` counts from the oldest."""
        if not self.in_flight:
            return
        shape, mine, y, my_dy, x, expected, dy = self.in_flight.pop(which)
        with contextlib.suppress(Planned):
            y.backward(my_dy)
            expected.backward(dy)
            if mine.requires_grad:
                self.faults += layers.faults(1e-12, dx=(mine.grad, layers.my_slice(shape, self.rank, x.grad)))

    def drop(self):
        """Drop all forwards in flight."""
        self.in_flight.clear()

    def step(self):
        if self.beside:
            gradient = torch.ones(1)
            torch.distributed.all_reduce(gradient)
            self.faults += [] if gradient.item() == torch.distributed.get_world_size() else ["gradients were reduced with others"]
        self.sgd.step()

    def train(self, **options):
        self.forward(**options)
        self.backward()
        self.step()

    def chosen(self):
        return [trial.chosen for trial in self.policy.trials.values()]


# Programs: functions of one step. Ranks may differ only by ``rank``.


def changing_lengths(model, step, rank):
    model.train(batch=1 + step % 2, length=(3, 9)[step // 2 % 2])


def evaluation(model, step, rank):
    model.forward(length=4)
    with torch.no_grad():
        model.forward(length=4 + step % 2)
    model.backward()
    with torch.inference_mode(step % 2 == 0):
        with torch.no_grad():
            model.forward(length=9)
    model.step()
    model.forward()  # an evaluation with a graph that is not used
    model.drop()


def helper_of_one_rank(model, step, rank, which=0):
    def helper(place):
        if rank == which and (step >> place) % 2:
            optimizer_step()

    for microbatch in range(2):
        helper(0)
        model.forward()
        helper(1)
        model.backward()
        with torch.no_grad():
            helper(2)
            model.forward()
            helper(3)
            model.forward()
    model.step()
    with torch.no_grad():
        model.forward()
        helper(4)
        model.forward()


def exceptions(model, step, rank):
    model.raising = (None, None, "forward", None, "backward")[step % 5]
    model.forward()
    model.backward()
    model.raising = None
    model.train()


def accumulation(model, step, rank):
    for microbatch in range(3):
        model.forward(checkpoint=(None, True, False)[(step + microbatch) % 3])
    for which in (1, 0, 0):
        model.backward(which)
    model.train(checkpoint=False)


def its_input_needs_no_gradient(model, step, rank):
    model.train(needs_gradient=False)


def another_optimizer_before_backward(model, step, rank):
    """Step another optimizer between forward and backward, as for a discriminator beside a generator."""
    model.forward(checkpoint=False)
    optimizer_step()
    model.backward()
    model.step()


PROGRAMS = [
    changing_lengths, evaluation, helper_of_one_rank, exceptions, accumulation, its_input_needs_no_gradient,
    another_optimizer_before_backward,
]  # fmt: skip


def attacked(rank, program, steps):
    with scripted(COSTS) as ran:
        model = Model(torch.distributed.group.WORLD)
        for step in range(steps):
            program(model, step, rank)
    return model.faults, ran, model.chosen(), model.said


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_two_ranks_try_and_choose_alike(program):
    every = on_ranks(2, attacked, program, 20 if program is not changing_lengths else 72)
    (faults, ran, chosen, said), *others = every
    assert faults == [] and all(other == ([], ran, chosen, said) for other in others)
    trained = 4 if program is changing_lengths else 1
    assert chosen.count(4) == trained == len(said) and {candidate for _, candidate in ran} == set(COSTS), (chosen, said)


def rank_0_steps_alone(model, step, rank):
    model.forward()
    model.backward()
    if rank == 0:
        model.step()


def test_with_an_optimizer_stepped_on_one_rank_only_the_default_runs(rank):
    faults, ran, chosen, _ = attacked(rank, rank_0_steps_alone, 20)
    assert faults == [] and {candidate for _, candidate in ran} == {2} and chosen == [None]


def off_on_one_rank(rank):
    model = Model(torch.distributed.group.WORLD)
    shape = model.shape(1, 4)
    for _ in range(3):
        x = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0]).clone().requires_grad_()
        model.attend(x, **({"baseline": lambda x: x} if rank else {})).sum().backward()
        model.step()


def test_ranks_that_would_try_different_things_are_told_so_before_they_do(rank):
    kind, message = refusal(off_on_one_rank, rank)
    assert kind == "RuntimeError" and 'sp_overlap.head_groups "auto": the ranks' in message, message


# With data parallelism: two replicas of two ranks, which reduce gradients together.


def beside_replicas(group, heads):
    """Make a model with its own policy, as `enable` does; without `enable`, layers over one group share a policy."""
    policy = Policy.of(ds_sp_overlap.SpOverlapConfig(), SPGroup(group), torch.distributed.group.WORLD)
    model = Model(group, policy, heads)
    model.beside = True
    return model


@contextlib.contextmanager
def replica_models(rank, *heads):
    with two_replicas(rank) as group:
        yield [beside_replicas(group, each) for each in heads]


def differing_replicas(rank, steps):
    """Train replicas with different lengths, evaluations and exceptions on one replica, and extra optimizer steps on rank 0."""
    replica = rank // 2
    with replica_models(rank, 8) as (model,), scripted(COSTS) as ran:

        def evaluate(place):
            if replica == (step + place) % 2:
                with torch.no_grad():
                    model.forward(length=11)
            if rank == 0 and (step >> place) % 2:
                optimizer_step()

        for step in range(steps):
            for microbatch in range(2):
                evaluate(0)
                model.forward(length=3 + replica + step % 2, checkpoint=(None, True, False)[step % 3])
                evaluate(1)
                if microbatch == replica == step % 2:
                    model.raising = "forward"
                    model.forward()
                    model.raising = None
                model.backward()
            evaluate(2)
            model.step()
            evaluate(0)
        trained = {step: {candidate for s, candidate in ran if s == step} for step in range(steps)}
    return model.faults, trained, model.chosen(), model.said


def test_replicas_try_and_choose_alike_whatever_one_of_them_does_beside():
    every = on_ranks(4, differing_replicas, 19)
    faults, trained, chosen, said = every[0]
    assert faults == [] and chosen == [4] and len(said) == 1
    assert all(other == ([], trained, [4], said) for other in every[1:])
    assert [trained[step] for step in range(18)] == [{2}, *[{1}, {2}, {4}] * 5, {4}, {4}]


def dropped_in_mid_trial(rank):
    """Train two models with their own policies, and delete the second one before an optimizer step of the first.

    Only ranks 0 and 3 collect the second model at once. Returns the faults, the candidates that ran, and the choices.
    """
    gc.disable()
    try:
        with replica_models(rank, 8, 16) as models, scripted(COSTS) as ran:
            model, other = models
            models.clear()
            for step in range(24):
                model.forward(length=4 + rank // 2)
                if step < 10:
                    other.forward()
                    other.backward()
                model.backward()
                if step == 9:
                    faults, gone = other.faults, weakref.ref(other.policy)
                    other.itself = other
                    del other
                    if rank in (0, 3):
                        gc.collect()
                    assert (gone() is None) == (rank in (0, 3))
                model.step()
                if step % 3 == 0 and step < 9:
                    other.step()
        return model.faults + faults, ran, model.chosen()
    finally:
        gc.enable()


def test_beside_replicas_a_model_may_go_in_mid_trial_and_be_collected_on_some_ranks_only():
    first, *others = on_ranks(4, dropped_in_mid_trial)
    assert first[0] == [] and first[2] == [4] and others == [first] * 3


def stepping(rank, steps_its_optimizer, late=()):
    """Train replicas whose optimizers step only on the ranks ``steps_its_optimizer`` from step 5 on.

    The ranks ``late`` step only after the other ranks have given up waiting.
    """
    wait = policies.WAIT_S
    try:
        with replica_models(rank, 8) as (model,), scripted(COSTS) as ran:
            for step in range(12):
                policies.WAIT_S = wait if step < 6 else 0.5
                model.forward()
                model.backward()
                if step < 5:
                    model.step()
                    continue
                if step == 5 and rank in late:
                    time.sleep(1.5)
                if rank in steps_its_optimizer:
                    model.sgd.step()
            return model.faults, [candidate for _, candidate in ran], model.chosen(), model.said
    finally:
        policies.WAIT_S = wait


@pytest.mark.ranks(4)
def test_what_one_replica_gives_up_the_late_one_gives_up_too(rank):
    faults, ran, chosen, said = stepping(rank, range(4), [2, 3])
    assert faults == [] and set(ran[6:]) == {2} and chosen == [2] and len(said) == 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stepped, waiting", [((2, 3), (0, 1)), ((0, 1), (2, 3))])
def test_replicas_whose_optimizers_do_not_step_are_not_waited_for(stepped, waiting, rank):
    """The replica whose optimizers step gives up for all replicas, and warns."""
    faults, ran, chosen, said = stepping(rank, stepped)
    assert faults == [] and ran[:6] == [2, 1, 2, 4, 1, 2] and len(said) == (rank in stepped)
    if rank in stepped:
        assert chosen == [2] and set(ran[6:]) == {2} and f"no optimizer of ranks {list(waiting)} has stepped" in said[0]


@pytest.mark.ranks(4)
def test_beside_replicas_an_optimizer_stepped_on_one_rank_only_makes_nobody_wait(rank):
    assert stepping(rank, [0]) == ([], [2, 1, 2, 4, 1] + [2] * 7, [None], [])


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched(
        "stays for its backward",
        "if not self._due or self.over:",
        functools.partial(attacked, program=another_optimizer_before_backward, steps=8),
        raises=True,  # the checkpoint recomputes another graph than that of forward
        says="([], ",
    ),
    Watched(
        "also for frozen inputs",
        "if trial.timed and run.inputs[0].requires_grad and torch.is_grad_enabled():",
        functools.partial(attacked, program=its_input_needs_no_gradient, steps=18),
        says="], [4], [",  # 4 is the choice
    ),
)
