"""Compares overlapped models under FSDP2 (`fully_shard`), without DeepSpeed's engine, with the whole sequence: all gradients.

In fp64, with large weights (`EXACT`). Only roundings (1e-16) of sums in another order differ; `EQUAL` is far above them.
"""

import contextlib
import functools
import types
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.functional import cross_entropy

import ds_sp_overlap
from ds_sp_overlap.attention.runtime.sharded import is_gathered, look_for_units
from ds_sp_overlap.exchange.transport import C10d
from tests.harness.cases import full
from tests.harness.models import EXACT, batches, cut, tiny, worst
from tests.harness.reference import relative_error

EQUAL, LAYERS, MICROBATCHES = 1e-12, 3, 2


def units_of(model, units):
    """Return the modules, or lists of modules, to give to `fully_shard`, inner modules first."""
    if units == "pairs":
        first, second, *rest = model.model.layers
        return [[first, second], *rest, model]
    inside = {
        "root": lambda layer: [],
        "layers": lambda layer: [layer],
        "mlps": lambda layer: [layer.mlp, layer],
        "attentions": lambda layer: [layer.self_attn, layer],
        "linears": lambda layer: [module for module in layer.modules() if isinstance(module, torch.nn.Linear)],
    }[units]
    return [unit for layer in model.model.layers for unit in inside(layer)] + [model]


def shard(model, units, **options):
    for unit in units_of(model, units):
        fully_shard(unit, **options)


def share(model, inputs):
    """Return the sum of the losses of this rank's tokens."""
    logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).to(inputs.get("dtype", logits.dtype)), inputs["labels"].flatten(), reduction="sum")


@functools.cache
def tokens_of(replica):
    return batches(MICROBATCHES, seed=5 + replica)


@functools.cache
def whole_gradients(replicas, microbatches):
    model = tiny(**EXACT, layers=LAYERS)
    for replica in range(replicas):
        for tokens in tokens_of(replica)[:microbatches]:
            share(model, cut(tokens, 0, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gradients(model, size, scale):
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert all(p.grad.to_local().numel() < p.grad.numel() for p in model.parameters())
    return {name: gradient.cpu() * scale for name, gradient in found.items()}


class Case(NamedTuple):
    """Describes a model under FSDP2.

    order    the first call: "enable" or "fully_shard"
    units    the sharded units, see `units_of`
    way      a key of `WAYS`: the section, and whether layers are checkpointed
    policy   a key of `POLICIES`: options of FSDP; or "alone" for no FSDP
    """

    order: str
    units: str
    way: str
    policy: str


WAYS = {
    "layer": ({"head_groups": 2}, False),
    "window": ({"head_groups": 2, "window": 1}, False),
    "kept": ({"head_groups": 2, "checkpointing": "keep"}, True),
    "recomputed": ({"head_groups": 2, "checkpointing": "recompute"}, True),
}
POLICIES = {
    "plain": {},
    "stays": {"reshard_after_forward": False},
    "on the host": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "accumulates": {},
}
CASES = [
    Case(order, units, way, policy)
    for order in ("enable", "fully_shard")
    for units in ("root", "layers", "pairs", "mlps", "attentions", "linears")
    for way in WAYS
    for policy in POLICIES
]


@contextlib.contextmanager
def overlapped_and_sharded(case, group, model=None):
    """Yield the model of a case, and the report of `enable`."""
    model, (section, checkpointed) = model or tiny(**EXACT, layers=LAYERS), WAYS[case.way]
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if case.order == "fully_shard" and case.policy != "alone":
        shard(model, case.units, **POLICIES[case.policy])
    report = ds_sp_overlap.enable(model, section, group)
    if case.order == "enable" and case.policy != "alone":
        shard(model, case.units, **POLICIES[case.policy])
    yield model, report
    ds_sp_overlap.disable(model)


@contextlib.contextmanager
def recorded():
    """Yield a log of FSDP's gathers (``G layers.0``) and reductions (``R layers.0``), and of exchanges (``>q0``, ``<q0``)."""
    log = []

    def noting(letter, function):
        def noted(parameters, *args, **kwargs):
            log.append(f"{letter} {'.'.join(parameters[0]._param_fqn.split('.')[1:3])}")
            return function(parameters, *args, **kwargs)

        return noted

    def launching(mover, *args):
        what = args[-1].split()[-1]
        log.append(">" + what)
        handle = launch(mover, *args)
        return types.SimpleNamespace(wait=lambda: (log.append("<" + what), handle.wait()))

    launch, fsdp = C10d.launch, _fsdp_param_group
    gather, reduce = noting("G", fsdp.foreach_all_gather), noting("R", fsdp.foreach_reduce)
    with mock.patch.multiple(fsdp, foreach_all_gather=gather, foreach_reduce=reduce), mock.patch.object(C10d, "launch", launching):
        yield log


def assert_right(rank, case, size=2):
    """Assert that the gradients of two steps are right, that layers are overlapped, and that FSDP gathers no more often."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "sp"))
    replica, rank = divmod(rank, size)
    microbatches = MICROBATCHES if case.policy == "accumulates" else 1
    expected = whole_gradients(world // size, microbatches)
    with overlapped_and_sharded(case, mesh["sp"].get_group()) as (model, report):
        for _ in range(2):
            model.zero_grad()
            with recorded() as log:
                for at, tokens in enumerate(tokens_of(replica)[:microbatches]):
                    model.set_requires_gradient_sync(at == microbatches - 1)
                    share(model, cut(tokens, rank, size)).backward()
            assert worst(gradients(model, size, world), expected) < EQUAL
    sharded_before = "FSDP" * (case.order == "fully_shard" and case.units == "mlps")  # FSDP2 names the class of a unit so
    assert case.way != "window" or f"in tiles: {sharded_before}LlamaMLP (3), LlamaRMSNorm (7)" in str(report)
    assert all(layer.lacks == "" and layer.got.endswith("q_proj, k_proj, v_proj, o_proj under them") for layer in report.layers)
    # Every unit is gathered as often as without the overlap: once in forward and once in backward, and the root only once.
    if case.policy == "plain" and case.units in ("root", "layers"):
        layers = [f"G layers.{at}" for at in range(LAYERS)] if case.units == "layers" else []
        assert [entry for entry in log if entry[0] == "G"] == ["G embed_tokens.weight", *layers, *layers[::-1]]
        reduced = [entry.replace("G", "R") for entry in (*layers[::-1], "G embed_tokens.weight")]
        assert [entry for entry in log if entry[0] == "R"] == reduced


@pytest.mark.singles
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_gradient_equals_the_whole_sequences(case, rank):
    assert_right(rank, case)


ON_A_MESH = [case for case in CASES if case.units == "layers" and case.policy != "stays"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "case", [case if case == ("enable", "layers", "layer", "accumulates") else full(case) for case in ON_A_MESH], ids="-".join
)
def test_on_a_mesh_of_replicas_and_sp_ranks_every_gradient_equals_the_whole_sequences(case, rank):
    assert_right(rank, case)


# The order of exchanges and FSDP's collectives.


@pytest.mark.parametrize("first", ["enable", full("fully_shard")])
@pytest.mark.parametrize("way", ["layer", full("window")])
def test_exchanges_stay_where_they_are_drawn_and_weights_are_gathered_beside_them(way, first, rank):
    """Compares the logs of a second step with and without FSDP."""
    logs = []
    for policy in ("alone", "plain"):
        with overlapped_and_sharded(Case(first, "layers", way, policy), dist.group.WORLD) as (model, _):
            for _ in range(2):
                with recorded() as log:
                    share(model, cut(tokens_of(0)[0], rank, 2)).backward()
        logs.append(log)
    without, log = logs
    assert [entry for entry in log if entry[0] in "<>"] == without
    assert sum(entry.startswith("G layers") for entry in log) == 2 * LAYERS


# Changes of a model between two layers, and of its layers.


@contextlib.contextmanager
def scaled(model):
    """Scale the output of layer 1 before layer 2 gets it."""
    handle = model.model.layers[1].register_forward_hook(lambda module, given, output: output * 1.5)
    yield
    handle.remove()


@contextlib.contextmanager
def other_layers(model, *places):
    before = model.model.layers
    model.model.layers = torch.nn.ModuleList([before[place] for place in places])
    yield
    model.model.layers = before


def frozen(model):
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    return contextlib.nullcontext()


def at_its_own_pace(model):
    """Let FSDP prefetch no weights in backward."""
    for layer in model.model.layers:
        if isinstance(layer, FSDPModule):
            layer.set_modules_to_backward_prefetch([layer])
    return contextlib.nullcontext()


CHANGES = {
    "at its own pace": at_its_own_pace,
    "scaled": scaled,
    "left out": lambda model: other_layers(model, 0, 2),
    "twice": lambda model: other_layers(model, 0, 1, 1),
    "reversed": lambda model: other_layers(model, 2, 1, 0),
    "frozen": frozen,
}


@pytest.mark.singles
@pytest.mark.parametrize("way", ["layer", "recomputed"])
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_the_model_does_with_its_layers_every_gradient_is_right(change, evaluates, way, rank):
    whole, tokens = tiny(**EXACT, layers=LAYERS), tokens_of(0)[0]
    with CHANGES[change](whole):
        share(whole, cut(tokens, 0, 1)).backward()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    model = tiny(**EXACT, layers=LAYERS)
    if change == "frozen":
        frozen(model)
    with overlapped_and_sharded(Case("enable", "layers", way, "plain"), dist.group.WORLD, model=model):
        for _ in range(4):
            model.zero_grad()
            with CHANGES[change](model):
                if evaluates:
                    with torch.no_grad():
                        share(model, cut(tokens, rank, 2))
                share(model, cut(tokens, rank, 2)).backward()
            found = {name: 2 * p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
            assert worst(found, expected) < EQUAL


# Mixed precision, clipping, divide factors, checkpoints.


def test_under_mixed_precision_gradients_are_those_of_the_layers_in_bf16_summed_in_fp32(rank):
    summed = {}
    for sharded in (False, True):
        model = tiny(layers=LAYERS, dtype=torch.float32 if sharded else torch.bfloat16, initializer_range=0.2)
        ds_sp_overlap.enable(model, {"head_groups": 2}, dist.group.WORLD)
        if sharded:
            shard(model, "layers", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for _ in range(2):
            model.zero_grad()
            share(model, {**cut(tokens_of(0)[0], rank, 2), "dtype": torch.float32}).backward()
        for name, parameter in model.named_parameters():
            if not sharded:
                summed[name] = parameter.grad.float()
                dist.all_reduce(summed[name])
            else:
                assert torch.equal(2 * parameter.grad.full_tensor(), summed[name]), name
        ds_sp_overlap.disable(model)


def test_weights_that_two_layers_share_and_units_that_are_made_later_are_gathered(rank):
    alike = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    alike[1].weight = alike[0].weight
    fully_shard(alike)
    look_for_units(alike)
    later, plain = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    fully_shard(later)
    assert [is_gathered(layer) for layer in (*alike, later, plain)] == [True, True, True, False]


def test_a_clipped_step_is_the_whole_sequences_and_checkpoints_are_those_of_the_plain_model(tmp_path, rank):
    """The tolerance is 1e-5, since clipping adds 1e-6 to the norm, which is far above 1."""
    expected, tokens = whole_gradients(1, 1), tokens_of(0)[0]
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    model = tiny(**EXACT, layers=LAYERS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with overlapped_and_sharded(Case("fully_shard", "layers", "layer", "plain"), dist.group.WORLD) as (model, _):
        for unit in units_of(model, "layers"):
            unit.set_gradient_divide_factor(1)
            unit.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
        share(model, cut(tokens, rank, 2)).backward()
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(model, state["model"])
        resumed = {name: p.full_tensor() for name, p in model.named_parameters()}
    plain = tiny(**EXACT, layers=LAYERS, seed=1)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(plain, state["model"])
    after = {name: p - 0.1 * expected[name] / norm for name, p in before.items()}
    loaded = dict(plain.named_parameters())
    assert worst(loaded, after) < 1e-5 and relative_error(found.full_tensor(), norm) < EQUAL
    assert all(torch.equal(resumed[name], parameter) for name, parameter in loaded.items())
    assert list(state["model"]) == list(tiny(**EXACT, layers=LAYERS).state_dict())
