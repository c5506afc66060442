"""Tests that a user's code doesn't see the trials of the package, nor the comparisons of ranks: all forwards look alike.

The user's code is: hooks on modules, on all modules, on parameters and on saved tensors; modes of dispatch and of functions;
selective checkpoints; norms of weights; and layers that record their calls.
"""

import contextlib
import functools
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import ds_sp_overlap
from ds_sp_overlap.attention.unobserved import unobserved
from ds_sp_overlap.integrations.inspect import probe
from tests.harness.guards import Watched, notices
from tests.harness.models import EXACT, FP64, batches, outcome, sequence_parallel_model, tiny, worst
from tests.harness.ranks import assert_small

# Weights are large, and many products have the same shape, so that a selective checkpoint could confuse them.
LLAMA = dict(dtype=torch.float64, initializer_range=0.3, kv_heads=4, intermediate_size=32)
SECTIONS = [{"head_groups": 1}, {"head_groups": 2, "check": True}]


class Operations(TorchDispatchMode):
    """Appends to ``seen`` the name of each operation that selective checkpoints count."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation not in SAC_IGNORED_OPS:
            self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Appends to ``seen`` the name of each function of torch that is called."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def observed(model):
    """Yield {kind of observer: list that collects what it sees while the body runs}."""
    seen = {kind: [] for kind in ("operations", "functions", "saved", "hooks", "every module", "parameters")}

    def note(kind, *words):
        seen[kind].append(" ".join(map(str, words)))

    def packed(x):
        note("saved", list(x.shape))
        return x

    def within(forward, *args, **kwargs):
        """Run a layer in modes. Around the whole model, the modes would see the exchange of positions, which differs at first."""
        with Operations(seen["operations"]), Functions(seen["functions"]):
            return forward(*args, **kwargs)

    handles = []
    for layer in model.model.layers:
        layer.forward = functools.partial(within, layer.forward)
    for name, part in model.named_modules():
        if name.endswith(("q_proj", "o_proj")):
            handles += [
                part.register_forward_pre_hook(
                    lambda _, args, name=name: note("hooks", name, float(args[0].detach().square().sum()))
                ),
                part.register_forward_hook(lambda _, args, y, name=name: note("hooks", name, float(y.detach().square().sum()))),
                part.register_full_backward_hook(lambda _, dx, dy, name=name: note("hooks", name, float(dy[0].square().sum()))),
            ]
    for name, p in model.named_parameters():
        handles.append(p.register_hook(lambda dw, name=name: note("parameters", name)))
        handles.append(p.register_post_accumulate_grad_hook(lambda p, name=name: note("parameters", name)))
    for kind in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
        register = getattr(nn_module, f"register_module_{kind}")
        handles.append(register(lambda part, *_, kind=kind: note("every module", kind, type(part).__name__)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
            yield seen
    finally:
        for layer in model.model.layers:
            del layer.forward
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_observers_see_of_the_first_forward_what_they_see_of_the_second(section, rank):
    tokens, found = batches(1)[0], []
    with sequence_parallel_model(2, **LLAMA) as (model, group), mock.patch.object(probe, "EVERY", 3):
        ds_sp_overlap.enable(model, section, group)
        for _ in range(3):
            torch.manual_seed(1)
            with observed(model) as seen:
                outcome(model, tokens, rank, 2, None)
            found.append({**seen, "random": torch.rand(2).tolist()})
    first, second, third = found
    assert all(second.values())
    for kind, expected in second.items():
        for seen in (first[kind], third[kind]):
            more = {str(word): n for word, n in (Counter(seen) - Counter(expected)).items()}
            assert seen == expected, f"{kind}: {len(seen)}, not {len(expected)}; {more}"


# State.


@pytest.mark.parametrize(
    "prepare", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["parametrized", "by a hook"]
)
def test_norms_of_weights_that_iterate_saw_the_forwards_alone(prepare, rank):
    def prepared(model):
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                torch.manual_seed(2)
                prepare(getattr(layer.self_attn, name))
        return model.train()

    tokens = batches(1)[0]
    whole = prepared(tiny(**LLAMA))
    expected = [outcome(whole, tokens, 0, 1, None) for _ in range(3)]
    with sequence_parallel_model(2, **LLAMA) as (model, group):
        ds_sp_overlap.enable(prepared(model), {"head_groups": 2}, group)
        assert_small([worst(outcome(model, tokens, rank, 2, group), of_whole) for of_whole in expected], FP64)
        buffers, expected = dict(model.named_buffers()), dict(whole.named_buffers())
        assert buffers.keys() == expected.keys()
        assert all((x - expected[name]).abs().max() < FP64 for name, x in buffers.items() if x.numel())


# Code of the user's own.

PLACES = ("q_proj", "o_proj", "q_norm", "")  # "" is the attention layer


def counting(place, own, calls):
    """Return a forward of the user that also records each call in ``calls``."""

    def of_projection(self, x):
        calls.append(place)
        return nn.functional.linear(x, self.weight, self.bias)

    def of_norm(self, x):
        calls.append(place)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def of_layer(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        calls.append(place)
        return own(self, hidden_states, position_embeddings, attention_mask, **kwargs)

    return {"q_norm": of_norm, "": of_layer}.get(place, of_projection)


@pytest.mark.parametrize("place", PLACES)
def test_whatever_counts_calls_counts_those_of_the_forward_alone(place, rank):
    tokens, calls = batches(1)[0], []
    options = dict(family="qwen3", layers=2, **EXACT)
    whole = outcome(tiny(**options), tokens, 0, 1, None)
    with sequence_parallel_model(2, **options) as (model, group):
        for layer in model.model.layers:
            part = layer.self_attn.get_submodule(place)
            own = type(part)
            part.__class__ = type("Counted", (own,), {"forward": counting(place, own.forward, calls), "__module__": "users"})
        ds_sp_overlap.enable(model, {"head_groups": 2}, group)
        assert calls == []
        for step in range(1, 4):
            assert worst(outcome(model, tokens, rank, 2, group), whole) < 1e-6  # the family's norms compute in fp32
            assert len(calls) == 2 * step


# Selective checkpoints.


def saves(operations, context, operation, *args, **kwargs):
    is_saved = operation in operations
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def selected(rank, section, operations, steps=12):
    """Run some steps in a checkpoint that saves the results of ``operations``; return the largest error.

    In the eighth step, ranks compare their calls.
    """
    tokens, errors = batches(1)[0], []
    policy = functools.partial(saves, [getattr(torch.ops.aten, name).default for name in operations])
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    whole = outcome(tiny(**LLAMA), tokens, 0, 1, None)
    with sequence_parallel_model(2, **LLAMA) as (model, group):
        ds_sp_overlap.enable(model, section, group)
        model.train().gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        for _ in range(steps):
            errors.append(worst(outcome(model, tokens, rank, 2, group), whole))
    return max(errors)


@pytest.mark.parametrize("operations", [[], ["mm"], ["mul", "silu", "add"], ["view", "copy_", "clone"]], ids="-".join)
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_selective_checkpoints_give_the_gradients_of_the_whole_sequence(section, operations, rank):
    assert_small(selected(rank, section, operations), FP64)


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_a_checkpoint_runs_in_backward_what_it_ran_in_forward(section, rank):
    """Forward and recomputation of a checkpointed layer must run the same operations, in each step."""
    tokens, seen = batches(1)[0], []

    def contexts():
        seen.append(([], []))
        return Operations(seen[-1][0]), Operations(seen[-1][1])

    with sequence_parallel_model(2, **LLAMA) as (model, group), set_checkpoint_early_stop(False):
        ds_sp_overlap.enable(model, section, group)
        model.train().gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        for _ in range(12):
            outcome(model, tokens, rank, 2, group)
    assert [f"{Counter(one) - Counter(two)}, {Counter(two) - Counter(one)}" for one, two in seen if one != two] == []


# Guards.


def takes_random_numbers():
    before = torch.get_rng_state()
    with unobserved(torch.device("cpu")):
        torch.rand(())
    return [] if torch.equal(before, torch.get_rng_state()) else ["the random state is another"]


one_step_of_views = functools.partial(selected, section={"head_groups": 2}, operations=["view", "copy_", "clone"], steps=1)
test_the_suite_notices_without_the_guard = notices(
    Watched("takes no random numbers", "pass", takes_random_numbers),
    Watched(
        "no mode sees it",
        "with contextlib.nullcontext():",
        functools.partial(test_a_checkpoint_runs_in_backward_what_it_ran_in_forward, section={"head_groups": 1}),
    ),
    Watched("buffers are written again", "return False", one_step_of_views, raises=True),
)
