"""Forks of Megatron-DeepSpeed that nearly look the same: each is right or refused by name, none is wrong in silence.

On 2 gloo ranks in fp64, output and every gradient, against the fork itself on the whole sequence.
"""

import pytest

import ds_sp_overlap
from tests.harness import megatron_layers, megatron_zoo
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.megatron_layers import Shape
from tests.harness.megatron_zoo import ATTENTIONS, activated, judged, made, step
from tests.harness.ranks import on_ranks, refusal

GROUPS = {"head_groups": 2}


def attentions(rank, classes):
    found = {}
    for attention in classes:
        found[attention.__name__] = judged(rank, GROUPS, Shape(), attention)
    return found


def test_an_attention_of_a_fork_is_right_and_what_is_not_known_of_it_is_named():
    expected = {attention.__name__: ([], {lacks}) for attention, lacks in ATTENTIONS.items()}
    for found in on_ranks(2, attentions, list(ATTENTIONS)):
        assert {name: each[:2] for name, each in found.items()} == expected


# What is changed afterwards.


def refused(rank, change):
    """Return what a step with large weights says, behind one of small weights and a ``change``."""
    shape = Shape()
    model = made(shape, Patched)
    x, dy, mask, tables = megatron_layers.inputs(shape)
    cut = lambda t: t.chunk(2)[rank].contiguous()  # noqa: E731
    ds_sp_overlap.enable(model, GROUPS)
    step(model, cut(x), cut(dy), mask, tables)
    change()
    activated(model)
    return refusal(step, model, cut(x), cut(dy), mask, tables)


class Patched(megatron_layers.ParallelAttention):
    pass


def patch_forward():
    Patched.forward = megatron_zoo.capping(megatron_layers.ParallelAttention.forward)


def patch_method():
    Patched.heads_of = megatron_zoo.Clamped.heads_of


def patched(rank, patch):
    try:
        return refused(rank, patch)
    finally:
        for name in {"forward", "heads_of"} & vars(Patched).keys():
            delattr(Patched, name)


@pytest.mark.parametrize("patch, seen", [(patch_forward, "__class__.forward"), (patch_method, "__class__.heads_of")])
def test_a_class_that_is_patched_afterwards_is_refused_by_name(patch, seen):
    for kind, message in on_ranks(2, patched, patch):
        assert kind == "RuntimeError" and f"{seen} replaced, hooked or patched since" in message, message


# Guards.


def _of_forks(rank, attentions):
    """What is wrong with forks, or was not said of them."""
    found = []
    for attention in attentions:
        faults, lacks, _ = judged(rank, GROUPS, Shape(), attention)
        found += faults + [f"{attention.__name__}: {lacks}"] * (lacks != {ATTENTIONS[attention]})
    return found


def forked_exchange(rank):
    return _of_forks(rank, [megatron_zoo.ForkedExchange])


def clamped(rank):
    return _of_forks(rank, [megatron_zoo.Clamped])


def decorated(rank):
    return _of_forks(rank, [megatron_zoo.DecoratedToCap])


def hooked_exchange(rank):
    return _of_forks(rank, [megatron_zoo.HookedExchange])


WATCHED = [
    Watched(Guard("a fork's exchange stays its own", without="return False"), forked_exchange),
    Watched(Guard("known by its source", without="if False:"), clamped),
    Watched(Guard("what a decorator does is in no digest", without="pass"), decorated),
    Watched(
        Guard("a call of dist_attn that is hooked is made", without="pass"),
        hooked_exchange,
        raises=True,  # each call looks again
    ),
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
