"""Tests Megatron-DeepSpeed's attention layer, with a stand-in that has the same contract (`megatron_layers`): fp64, 1e-12.

test_megatron_training.py trains the real pretrain_gpt.py, if a checkout is given.
"""

import collections
import copy
import functools
import importlib
import os
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from torch import nn

import ds_sp_overlap
from ds_sp_overlap.exchange.transport import C10d
from ds_sp_overlap.integrations.deepspeed import initialize as integration
from ds_sp_overlap.integrations.megatron import bridge
from tests.harness import megatron_layers, uses
from tests.harness.guards import Watched, notices
from tests.harness.listening import listening
from tests.harness.megatron_layers import ParallelAttention, Shape
from tests.harness.ranks import assert_small, refusal
from tests.harness.reference import relative_error

ATTENTIONS = ("flash", "flash v1", "triton", "core")
GROUPED = [
    Shape(attention, heads, kv_heads, rope=rope, bias=bias, config={"head_groups": groups})
    for attention in ATTENTIONS
    for heads, kv_heads, rope, bias, groups in (
        (8, 8, True, True, 1), (8, 8, False, False, 2), (8, 4, True, True, 2), (8, 2, False, True, 1), (8, 1, True, False, 2)
    )
]  # fmt: skip
OTHERS = [Shape("core", 8, 2, config={switched_off: False}) for switched_off in ("projections", "wgrad")]
OTHERS += [Shape(config={switched_off: False, "head_groups": 1}) for switched_off in ("projections", "wgrad")]
OTHERS += [Shape("core", 8, 2, config={"check": True})]
OTHERS += [Shape(split=True), Shape("core", 8, 2, split=True)]  # separate projections, as of pull request 415


@pytest.mark.parametrize("size", [2, 4])
def test_every_attention_with_any_count_of_heads(size, rank):
    assert megatron_layers.faults_of_all(rank, GROUPED if size == 4 else GROUPED + OTHERS) == []


# Forks of Megatron with small differences.


class Clamped(ParallelAttention):
    def heads_of(self, hidden_states):
        return [x.clamp(-0.5, 0.5) for x in super().heads_of(hidden_states)]


def capping(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        output, bias = forward(self, *args, **kwargs)
        return output.clamp(-0.5, 0.5), bias

    return wrapper


class Decorated(ParallelAttention):
    forward = capping(ParallelAttention.forward)


class OwnCall(ParallelAttention):
    def __call__(self, *args, **kwargs):
        output, bias = super().__call__(*args, **kwargs)
        return output.clamp(-0.5, 0.5), bias


class ClampedExchange(megatron_layers.DistributedAttention):
    def forward(self, query, *args, **kwargs):
        return super().forward(query.clamp(-0.5, 0.5), *args, **kwargs)


def of_class(kind, layer):
    layer.__class__ = kind


def forked_exchange(layer):
    layer.dist_attn.__class__ = ClampedExchange


# Changes of a layer between two of its calls.


def replace_by_copy(name, layer):
    setattr(layer, name, copy.deepcopy(getattr(layer, name)))


def hook_dist_attn(layer):
    layer.dist_attn.register_forward_hook(lambda module, given, o: 2 * o)


def patch_dist_attn(layer):
    forward = layer.dist_attn.forward
    layer.dist_attn.forward = lambda *args, **more: 2 * forward(*args, **more)


LATER = [  # (change, its name in the refusal)
    (functools.partial(replace_by_copy, "query_key_value"), "query_key_value"),
    (functools.partial(replace_by_copy, "dense"), "dense"),
    (hook_dist_attn, "dist_attn"),
    (patch_dist_attn, "dist_attn"),
    (functools.partial(of_class, Decorated), "__class__.forward"),
    (functools.partial(of_class, Clamped), "__class__.heads_of"),
]


@pytest.mark.parametrize("change, name", LATER)
def test_what_changes_after_enable_is_refused_by_name(change, name, rank):
    shape = Shape(config={"head_groups": 2})
    outputs = []
    for ours in (True, False):
        layer, given = mine(rank, shape)
        if ours:
            ds_sp_overlap.enable(layer, shape.config)
            layer(*given)
        change(layer.self_attention)
        with torch.no_grad():
            layer.self_attention.dense.weight.mul_(2)
        if ours:
            _, said = refusal(layer, *given)
            since = "replaced, hooked or patched since ds_sp_overlap.enable; call ds_sp_overlap.enable again"
            assert said == f"self_attention: {name} {since}"
            ds_sp_overlap.enable(layer, shape.config)
        outputs.append(layer(*given))
    assert relative_error(*outputs) < 1e-12


def mine(rank, shape=Shape(), change=None):
    """Return a layer, changed by ``change``, and its arguments on this rank."""
    model = megatron_layers.layer(shape, torch.distributed.group.WORLD)
    if change is not None:
        change(model.self_attention)
    x, _, mask, tables = megatron_layers.inputs(shape)
    return model, (x.chunk(torch.distributed.get_world_size())[rank].contiguous(), mask, tables)


@pytest.mark.parametrize(
    "use", [uses.without_grad, uses.reentrant, uses.non_reentrant, uses.accumulation], ids=lambda f: f.__name__
)
def test_in_every_use(use, rank):
    assert megatron_layers.faults_of_all(rank, [Shape(), Shape("core", 8, 2)], use) == []


# The stand-in without the package: it is right where HEAD of Megatron-DeepSpeed is.


def test_the_stand_in_alone_is_right_where_head_is(rank):
    assert megatron_layers.layer_faults(rank, Shape("flash"), overlap=False) == []


# Effects on the model.


@pytest.mark.parametrize("size, kv_heads", [(2, 2), (2, 1), (4, 4), (4, 2)])
def test_kv_heads_travel_before_they_are_repeated(size, kv_heads, rank):
    """Counts the bytes of q, k, v and o that this rank sends to all ranks, with its own part."""
    shape, sent, launch = Shape("flash v1", 8, kv_heads), collections.Counter(), C10d.launch

    def counting(self, send, *args):
        sent[args[-1].split()[-1].rstrip("0123456789")] += send.numel() * send.element_size()
        return launch(self, send, *args)

    with mock.patch.object(C10d, "launch", counting):
        assert megatron_layers.layer_faults(rank, shape) == []
    one = shape.seq // size * shape.batch * shape.head_dim * 8  # bytes of one head on one rank
    kv = max(kv_heads, size)  # a head is sent to each rank that needs it
    assert sent == {f"{d}{kind}": heads * one for d in ("", "d") for kind, heads in zip("qkvo", (8, kv, kv, 8))}


def test_only_forward_is_rebound_and_the_layer_is_listed_once(rank):
    group = torch.distributed.group.WORLD
    model = megatron_layers.layer(Shape(), group)
    names, state = [name for name, _ in model.named_modules()], list(model.state_dict())
    report = str(ds_sp_overlap.enable(model, {"head_groups": 2}))
    assert names == [name for name, _ in model.named_modules()] and state == list(model.state_dict())
    assert "forward" in vars(model.self_attention) and "forward" not in vars(model.self_attention.dist_attn)
    ds_sp_overlap.disable(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []
    assert report.count("\n") == 2, report
    assert report.endswith("    overlapped: all eight exchanges, G = 2, query_key_value, dense under them"), report


class Hidden(nn.Linear):
    """A projection of another library."""


def cross_attention(attention):
    attention.key_value = attention.query_key_value
    del attention.query_key_value


def tensor_parallel(attention):
    attention.num_attention_heads_per_partition = 2


def megatron_sequence_parallel(attention):
    attention.sequence_parallel = True


def somebody_elses_projection(attention):
    attention.dense = Hidden(32, 32)


def another_version(attention):
    class Later(ParallelAttention):
        def forward(self, hidden_states, attention_mask, packed_sequences=None):
            pass

    attention.__class__ = Later


def adapted(attention):
    class LoRA(megatron_layers.RowParallelLinear):
        def forward(self, input_):
            return super().forward(input_)

    attention.dense.__class__ = LoRA


def forked(attention):
    """Give ``dense`` a class of the same name with another forward, as in a fork."""

    class RowParallelLinear(megatron_layers.RowParallelLinear):
        def forward(self, input_):
            y, bias = self.compute(input_)
            return y.clamp(-0.5, 0.5), bias

    RowParallelLinear.forward.__qualname__ = "RowParallelLinear.forward"
    RowParallelLinear.__qualname__ = "RowParallelLinear"
    attention.dense.__class__ = RowParallelLinear


UNKNOWN, TENSOR_PARALLEL = "the source of its forward is not known here", "tensor parallelism; the projections belong to it"
EXCHANGES = ["self_attention.dist_attn"]
RUNNING = [
    (tensor_parallel, TENSOR_PARALLEL, EXCHANGES),
    (megatron_sequence_parallel, TENSOR_PARALLEL, EXCHANGES),
    (adapted, "called whole: dense (LoRA)", ["self_attention"]),
    (forked, "called whole: dense (RowParallelLinear)", ["self_attention"]),
    (functools.partial(of_class, Clamped), UNKNOWN, EXCHANGES),
    (functools.partial(of_class, Decorated), UNKNOWN, EXCHANGES),
    (functools.partial(of_class, OwnCall), "it has a __call__ of its own", EXCHANGES),
    (hook_dist_attn, "dist_attn has a hook of its own", EXCHANGES),
    (forked_exchange, "dist_attn (ClampedExchange): its forward is not DeepSpeed's", []),
]
STOPPED = [  # changes with which the stand-in can't run
    (cross_attention, "cross attention", []),
    (somebody_elses_projection, "its projections are not Megatron's", EXCHANGES),
    (another_version, UNKNOWN, EXCHANGES),
]


@pytest.mark.parametrize("changes, reason, bound", RUNNING + STOPPED)
def test_what_is_not_driven_says_why(changes, reason, bound, rank):
    model, _ = mine(rank, change=changes)
    with listening() as messages:
        report = ds_sp_overlap.enable(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module) and name] == bound
    (layer,) = report.layers
    assert layer.lacks == reason
    assert (layer.got == "") == (bound == []) == any("left as it is" in message for message in messages)


def unlike_itself(rank, changes, shape=Shape(config={"head_groups": 2})):
    """Return the largest relative difference between a changed layer with the overlap and without."""
    outputs = []
    for ours in (True, False):
        model, (x, dy, mask, tables) = megatron_layers.layer(shape, torch.distributed.group.WORLD), megatron_layers.inputs(shape)
        changes(model.self_attention)
        if ours:
            ds_sp_overlap.enable(model, shape.config)
        x = x.chunk(2)[rank].contiguous().requires_grad_()
        y = model(x, mask, tables)
        y.backward(dy.chunk(2)[rank])
        outputs.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    return max(relative_error(*pair) for pair in zip(*outputs, strict=True))


@pytest.mark.parametrize("changes", [changes for changes, *_ in RUNNING])
def test_what_is_not_driven_whole_is_right(changes, rank):
    assert_small(unlike_itself(rank, changes), 1e-12)


# Calls of the layer.


def test_the_layer_is_called_once(rank):
    (model, given), calls = mine(rank), []
    model.self_attention.register_forward_pre_hook(lambda module, args: calls.append(1))
    model(*given)
    assert len(calls) == 2
    ds_sp_overlap.enable(model)
    model(*given)
    assert len(calls) == 2 + 1


def test_a_type_error_in_attention_is_not_taken_for_an_unknown_argument(rank):
    (model, given), calls = mine(rank), []

    def faulty(q, k, v):
        calls.append(1)
        raise TypeError("unsupported operand")

    model.self_attention.dist_attn.local_attn.flash_attn_func = faulty
    ds_sp_overlap.enable(model)
    assert refusal(model, *given) == ("RuntimeError", "self_attention: unsupported operand") and calls == [1]


@pytest.mark.ranks(4)
def test_query_heads_that_ranks_would_share_are_refused_by_name(rank):
    model, given = mine(rank, Shape(heads=2, kv_heads=2))
    said = [refusal(ds_sp_overlap.enable, model), refusal(ds_sp_overlap.enable, mine(rank)[0], {"shares": 2})]
    model.self_attention.forward = functools.partial(ParallelAttention.forward, model.self_attention)
    ds_sp_overlap.enable(model)
    for kind, message in said:
        assert kind == "ValueError"
        assert "self_attention: Megatron-DeepSpeed's local attention takes as many queries as keys" in message
    dropped_in = refusal(model, *given)
    assert dropped_in[0] == "ValueError" and "Flash has no parameter queries=" in dropped_in[1]


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize(
    "attention, changes, message",
    [
        ("flash", {"inference_params": object()}, "generation with a KV cache does not work on a sequence that is split"),
        ("flash", {"rotary_pos_emb": torch.ones(12, 1, 1, 8)}, "rotary_pos_emb must be (cos, sin) of the whole sequence"),
        ("flash", {"rotary_pos_emb": (torch.ones(6, 1, 1, 8),) * 2}, "rotary_pos_emb has 6 positions, the whole sequence 12"),
        ("core", {"attention_mask": torch.ones(1, 1, 6, 6) > 0}, "attention_mask must cover the whole sequence"),
    ],
)
def test_refused_on_every_rank(attention, changes, message, only, rank):
    """``changes`` are changed arguments of a call, on the rank ``only``, or on every rank if it is None."""
    model, (x, mask, tables) = mine(rank, Shape(attention))
    arguments = {"attention_mask": mask, "rotary_pos_emb": tables, **(changes if only in (None, rank) else {})}
    ds_sp_overlap.enable(model)
    kind, text = refusal(model.self_attention, x, **arguments)
    assert kind == "ValueError" and message in text and "self_attention" in text


def test_a_sequence_that_is_shorter_than_its_tables(rank):
    """The tables are a list, as HEAD of Megatron-DeepSpeed passes them if a curriculum shortens the sequence."""
    shape = Shape()
    x, dy, mask, tables = megatron_layers.inputs(shape)
    model = megatron_layers.layer(shape, torch.distributed.group.WORLD)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    ds_sp_overlap.enable(model)
    expected = megatron_layers.reference_layer(shape, weights, x[:8], mask[..., :8, :8], tuple(t[:8] for t in tables))
    assert (model(x[:8].chunk(2)[rank], mask, list(tables)) - expected.chunk(2)[rank]).abs().max() < 1e-12


# Ways to enable the overlap.


def test_flags_of_pull_request_415_stand_for_the_section():
    flags = types.SimpleNamespace(ds_sequence_parallel_overlap_comm=True, split_qkv_linear=True)
    assert integration._section({"train_batch_size": 1}, flags) == {"enabled": True}
    assert integration._section({"sp_overlap": {"wgrad": False}}, flags) == {"wgrad": False}
    unset = types.SimpleNamespace(ds_sequence_parallel_overlap_comm=False)
    assert integration._section({"train_batch_size": 1}, unset) is None


def in_a_new_process(code):
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}  # else DeepSpeed warns on stdout that it found no accelerator
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    return done.stdout.strip().splitlines()[-1:], done.stderr


IMPORT = "from deepspeed.compression.compress import init_compression as f"


@pytest.mark.full
def test_what_head_imports_is_there_for_megatron_alone():
    import deepspeed.compression

    if importlib.machinery.PathFinder.find_spec("deepspeed.compression.compress", deepspeed.compression.__path__):
        pytest.skip("this DeepSpeed has deepspeed.compression.compress")
    uses = "import sys, types, ds_sp_overlap; sys.modules['megatron'] = types.ModuleType('megatron'); "
    said, error = in_a_new_process(f"{uses}{IMPORT}\ntry: f(1, 2)\nexcept RuntimeError as error: print(error)")
    assert "init_compression: DeepSpeed" in said[0] and "take" in said[0], error
    said, error = in_a_new_process(f"import ds_sp_overlap\n{IMPORT}")
    assert said == [] and "ModuleNotFoundError: No module named 'deepspeed.compression.compress'" in error


def test_a_deepspeed_that_has_it_keeps_it():
    finders = [finder for finder in sys.meta_path if isinstance(finder, bridge._Compression)]
    assert len(finders) == 1 and sys.meta_path.index(importlib.machinery.PathFinder) < sys.meta_path.index(finders[0])


def test_core_attention_is_left_as_it_was(rank):
    model, given = mine(rank, Shape("core"))
    core = model.self_attention.dist_attn.local_attn
    assert core.hidden_size_per_partition == 16
    ds_sp_overlap.enable(model, {"head_groups": 2})
    model(*given)
    assert core.hidden_size_per_partition == 16


class Alibi(nn.Module):
    """Attention that adds a slope for each head; it must be called with all heads of its rank."""

    def __init__(self, heads):
        super().__init__()
        self.flash_attn_func, self.slopes = megatron_layers.flash_attn_varlen_func, 2.0 ** -torch.arange(heads).double()

    def forward(self, q, k, v):
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        slopes = self.slopes.chunk(size)[rank][: q.shape[2], None, None]
        at = torch.arange(q.shape[1])
        bias = (slopes * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def with_alibi(layer):
    layer.dist_attn.local_attn = Alibi(8)


def test_local_attention_that_knows_its_heads_runs_in_one_head_group(rank):
    assert_small(unlike_itself(rank, with_alibi, Shape(heads=8, kv_heads=8, rope=False, config={"head_groups": 2})), 1e-12)


@pytest.mark.parametrize("batch", [2, 4])
def test_a_mask_of_as_many_samples_as_a_rank_has_heads_costs_no_head_group(batch, rank):
    (model, (x, mask, tables)), widths = mine(rank, Shape("core", 8, 8, batch=batch)), []
    ds_sp_overlap.enable(model, {"head_groups": 2})
    model(x, mask, tables)
    core = model.self_attention.dist_attn.local_attn
    with core.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[2])):
        model(x, mask.expand(batch, -1, -1, -1), tables)
    assert widths == [2, 2]


# Guards.


def unlike(changes):
    return functools.partial(unlike_itself, changes=changes)


NAMED = 'if type(linear).__name__ != "RowParallelLinear":'
test_the_suite_notices_without_the_guard = notices(
    Watched("linear by its source", NAMED, unlike(forked)),
    Watched("a fork's exchange stays its own", "return False", unlike(forked_exchange)),
    Watched("known by its source", "if False:", unlike(functools.partial(of_class, Clamped))),
    Watched("what a decorator does is in no digest", "pass", unlike(functools.partial(of_class, Decorated))),
    # Each call checks the layer again.
    Watched("a call of dist_attn that is hooked is made", "pass", unlike(hook_dist_attn), raises=True),
)
