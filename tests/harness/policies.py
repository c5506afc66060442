"""Runs policies with scripted times: when a candidate runs, the clock advances by the cost that the test gives."""

import contextlib
from unittest import mock

import torch

from ds_sp_overlap.autotune import policy as policies
from ds_sp_overlap.autotune.policy import Policy
from ds_sp_overlap.profiling.steps import listeners
from ds_sp_overlap.profiling.timed import TimedCall


class ScriptedClock:
    """A clock that advances only when `Tick` runs."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def between_ms(self, begin, end):
        return end - begin


class Tick(torch.autograd.Function):
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
    """Run the body with scripted times; yield a list that collects (step, candidate) of each run.

    ``costs[candidate]`` is the time of a forward, and also of a backward. It may be a function that returns this time for the
    number of tokens of a call.
    """
    clock, follow, ran = ScriptedClock(), Policy.follow, []

    def ticking(self, run, trial, candidate, tokens):
        ran.append((self.step, candidate))
        cost = costs[candidate](tokens) if callable(costs[candidate]) else costs[candidate]
        follow(self, run, trial, candidate, tokens)
        end = run.end
        run.end = lambda y: end(Tick.apply(y, clock, cost))

    with mock.patch.object(Policy, "follow", ticking), mock.patch.object(policies, "clock_of", lambda device: clock):
        yield ran


def followed(policy, trial, candidate, tokens, body, *inputs):
    """Return ``body(*inputs)``, run as a call that the policy times."""
    run = TimedCall(inputs)
    policy.follow(run, trial, candidate, tokens)
    return run.end(body(*run.inputs))


def optimizer_step():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def hooks():
    """Return the number of the package's listeners to optimizer steps; all listeners share one hook."""
    return len(listeners)


@contextlib.contextmanager
def two_replicas(rank):
    """Make two sp groups of two ranks; yield the group of this rank."""
    pairs = [torch.distributed.new_group(pair) for pair in ([0, 1], [2, 3])]
    try:
        yield pairs[rank // 2]
    finally:
        torch.distributed.destroy_process_group(pairs[rank // 2])
