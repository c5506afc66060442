"""Tests the overlap with DeepSpeed's other parallelisms, on 2 x 2 ranks: tensor, pipeline and expert parallelism.

Compares outputs, and each gradient on each rank, with the unsharded model; in fp64, except for gradients that ZeRO reduces.
"""

import functools
import os
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.module_inject.layers import LinearAllreduce, set_autotp_mode
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch import nn
from torch.nn.functional import cross_entropy

import ds_sp_overlap
from tests.harness.cases import full
from tests.harness.families import tiny_model
from tests.harness.guards import Watched, notices
from tests.harness.models import (
    EXACT,
    batches,
    cut,
    ds_config,
    forgetting,
    outcome,
    overlapped_layers,
    sequence_parallel,
    tiny,
)  # fmt: skip
from tests.harness.own_layer import WIDTH, Layer, linear
from tests.harness.ranks import assert_error, assert_small, refusal
from tests.harness.reference import relative_error

TOLERANCE = 1e-12
DROPS = "drops tokens that only one of them has"
# ZeRO reduces gradients in fp32, also of a model in fp64: a rounding of 6e-8 and a sum of two ranks.
OF_ZERO = 1e-6


def sp_groups(*pairs):
    """Make a group for each of ``pairs`` of ranks, on all ranks; return the group with this rank."""
    made = [(pair, torch.distributed.new_group(pair)) for pair in pairs]
    return next(group for pair, group in made if torch.distributed.get_rank() in pair)


def config_of(stage=0, **more):
    return ds_config(stage, optimizer="SGD", gradient_clipping=0.0, **more)


# AutoTP: ranks 0 and 1 are tensor parallel, and hold one half of the sequence; ranks 2 and 3 hold the other half.


def slice_like(x, whole, tp_rank):
    """Return the part of ``whole`` that AutoTP gave to one of two tensor-parallel ranks; the part has the shape of ``x``."""
    for dim, size in enumerate(x.shape):
        whole = whole.narrow(dim, tp_rank * (whole.shape[dim] - size), size)
    return whole


WHOLE, FUNCTION = "all eight exchanges", "attention function"


@pytest.mark.parametrize(
    "section, stage, frozen, tp, options, got",
    [
        ({}, 0, False, {}, {}, WHOLE),
        full({"head_groups": 1}, 0, True, {}, {}, WHOLE),
        full({"head_groups": 2}, 0, False, {"tp_overlap_comm": True}, {}, WHOLE),  # stock fails: view of a strided tensor
        full({}, 0, False, {}, {"heads": 3, "kv_heads": 3}, WHOLE),  # AutoTP gives 2 heads and 1; two sp ranks share the 1
        full({"head_groups": 2}, 0, False, {}, {"family": "qwen3"}, WHOLE),  # norms, whose gradients a hook sums
        full({"head_groups": 2}, 0, False, {}, {"family": "olmo", "clip_qkv": 0.5}, FUNCTION),
        *(full({}, stage, False, {}, {}, WHOLE) for stage in (1, 2, 3)),
    ],
)
@pytest.mark.ranks(4)
def test_beside_autotp_the_heads_are_those_of_a_tensor_parallel_rank(section, stage, frozen, tp, options, got, rank):
    sp_rank, tp_rank = divmod(rank, 2)
    options, tokens = {**EXACT, "heads": 8, "kv_heads": 4, **options}, batches(1)[0]
    group = sp_groups((0, 2), (1, 3))
    expected = outcome(tiny(**options), tokens, 0, 1, None)
    with forgetting():
        config = config_of(stage, tensor_parallel={"autotp_size": 2, **tp})
        engine, *_ = deepspeed.initialize(model=tiny(**options), config=config)
        model = engine.module
        for name, parameter in model.named_parameters():
            if frozen and "layers.0.self_attn" in name:
                parameter.requires_grad = False
                expected.pop(name)
        assert ds_sp_overlap.enable(model, section, group).layers[0].got.startswith(got)
        if stage:
            inputs = cut(tokens, sp_rank, 2)
            labels = inputs.pop("labels")
            logits = engine(**inputs, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            # DeepSpeed treats the sp ranks as replicas, and averages over them.
            engine.backward(2 * loss)
            found = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in model.named_parameters()}
            expected.pop("logits")
        else:
            found = outcome(model, tokens, sp_rank, 2, group)
        assert found.keys() == expected.keys()
        errors = [relative_error(x, slice_like(x, expected[name], tp_rank)) for name, x in found.items()]
        assert_small(errors, OF_ZERO if stage else TOLERANCE)
        ds_sp_overlap.disable(model)
        engine.destroy()


@pytest.mark.ranks(4)
def test_what_cannot_be_beside_autotp_is_refused_on_all_ranks(rank):
    """Checks sp ranks that are also tensor-parallel ranks, and a tensor-parallel rank without heads."""
    config, model, headless = config_of(tensor_parallel={"autotp_size": 2}), tiny(), tiny(kv_heads=1)
    with forgetting():
        mpu = sequence_parallel(model, 2)
        shared = refusal(deepspeed.initialize, model=model, config={**config, "sp_overlap": {}}, mpu=mpu)
    with forgetting():
        deepspeed.initialize(model=headless, config=config)
        none = refusal(ds_sp_overlap.enable, headless, {}, sp_groups((0, 2), (1, 3)))
    assert overlapped_layers(model) == overlapped_layers(headless) == []
    pair = "[0, 1]" if rank < 2 else "[2, 3]"
    assert f"is cut by AutoTP over ranks {pair}, which hold the same tokens, but the sp group has ranks {pair}" in shared[1]
    assert "AutoTP gave 0 query and 0 KV heads to tensor-parallel rank 1 of 2: it has nothing to attend with" in none[1]


@pytest.mark.ranks(4)
def test_a_delta_net_that_autotp_cut_is_refused(rank):
    model = tiny_model("qwen3_next", linear_num_value_heads=4, linear_num_key_heads=2)
    delta_net = next(module for name, module in model.named_modules() if name.endswith("linear_attn"))
    set_autotp_mode(training=True)
    delta_net.out_proj = LinearAllreduce(delta_net.out_proj, sp_groups((0, 1), (2, 3)), name="out_proj")
    said = refusal(ds_sp_overlap.enable, model, {}, sp_groups((0, 2), (1, 3)))
    assert "linear_attn (Qwen3NextGatedDeltaNet): AutoTP cut its projections" in said[1]


# A user's layers, for pipelines and experts. Weights are scaled up, so that a fault in attention changes the results.

SEQ, BATCH, VOCABULARY, EXPERTS = 12, 2, 16, 4


def seeded(seed, make, *args):
    torch.manual_seed(seed)
    module = make(*args)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    return module


# PipelineModule: ranks 0 and 1 hold the first stage, ranks 2 and 3 the second. DeepSpeed's data-parallel ranks are the sp ranks.

MICROBATCHES = 3


class Spec(LayerSpec):
    """Builds a layer on the stage that holds the layer; ``seed`` decides its weights."""

    def __init__(self, seed, make, *args):
        super().__init__(nn.Module)
        self.make = (seed, make, *args)

    def build(self, log=False):
        return seeded(*self.make)

    def __repr__(self):
        return "Spec"


class Recording(torch.optim.SGD):
    """Keeps copies of the gradients of a step, since DeepSpeed clears them afterwards."""

    def step(self, closure=None):
        self.given = {p: p.grad.clone() for group in self.param_groups for p in group["params"]}
        return super().step(closure)


def loss_of(y, labels):
    return cross_entropy(y.flatten(0, 1), labels.flatten())


def layers_of(kind, group):
    embedding = lambda: nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)  # noqa: E731
    layers = [(embedding,), (Layer, kind, group), (Layer, kind, group), (linear, WIDTH, WIDTH), (linear, WIDTH, VOCABULARY)]
    return [(100 + at, *layer) for at, layer in enumerate(layers)]


def pipeline(kind, group, section, parts, interval):
    model = PipelineModule(
        [Spec(*layer) for layer in layers_of(kind, group)], num_stages=2, loss_fn=loss_of, partition_method=parts,
        activation_checkpoint_interval=interval,
    )  # fmt: skip
    # With reentrant checkpoints, DeepSpeed's default, the embedding gets no gradient, also without the package.
    config = config_of(gradient_accumulation_steps=MICROBATCHES, pipeline={"use_reentrant": False}, **section)
    del config["optimizer"]
    optimizer = Recording(model.parameters(), lr=0.0)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0], optimizer


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "kind, section, parts, interval",
    [
        ("drop-in", None, "parameters", 0),
        ("block", None, "uniform", 0),
        ("stock", {"head_groups": 2}, "uniform", 0),  # both layers are in the first stage, none in the second
        full("block", None, "parameters", 1),
        full("stock", {}, "parameters", 1),
    ],
)
def test_stages_of_a_pipeline_give_the_gradients_of_the_whole_model(kind, section, parts, interval, rank):
    stage, sp_rank = divmod(rank, 2)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(VOCABULARY, (MICROBATCHES, BATCH, SEQ), generator=generator) for _ in range(2))
    whole = nn.Sequential(*(seeded(*layer) for layer in layers_of("whole", None)))
    expected = sum(loss_of(whole(x), y) for x, y in zip(tokens, labels)) / MICROBATCHES
    expected.backward()
    group = sp_groups((0, 1), (2, 3))
    with forgetting():
        engine, optimizer = pipeline(kind, group, {} if section is None else {"sp_overlap": section}, parts, interval)
        bound = {"uniform": (2, 0), "parameters": (1, 1)}[parts][stage]
        assert len(overlapped_layers(engine.module)) == (0 if section is None else bound)
        engine.pipeline_enable_backward_allreduce = False  # since it reduces in fp32
        mine = [tuple(x.chunk(2, 1)[sp_rank].contiguous() for x in pair) for pair in zip(tokens, labels)]
        loss = engine.train_batch(iter(mine)).item()
        assert stage == 0 or abs(loss / expected.item() - 1) < TOLERANCE  # the first stage gets the loss in fp32
        of_whole, count = dict(whole.named_parameters()), torch.tensor(len(list(engine.module.parameters())))
        for name, parameter in engine.module.named_parameters():
            gradient = optimizer.given[parameter] / 2  # train_batch averages over the sp ranks
            torch.distributed.all_reduce(gradient, group=group)
            assert relative_error(gradient, of_whole[name].grad) < TOLERANCE, name
        ds_sp_overlap.disable(engine.module)
        engine.destroy()
    torch.distributed.all_reduce(count)
    assert count == 2 * (1 + 2 * 6 + 2), "parameters of both stages, on two ranks each"


class OfKnownGroup(PipelineModule):
    """A pipeline whose mpu gives the sp group, so that a stage without attention knows the group, too."""

    def mpu(self):
        grid = super().mpu()
        grid.get_sequence_parallel_group = grid.get_sequence_data_parallel_group = grid.get_data_parallel_group
        grid.get_sequence_parallel_world_size = grid.get_sequence_data_parallel_world_size = lambda: 2
        return grid


@pytest.mark.ranks(4)
def test_a_stage_without_attention_is_left_alone_where_its_grid_knows_the_sp_group(rank):
    group = sp_groups((0, 1), (2, 3))
    with forgetting():
        with mock.patch(f"{__name__}.PipelineModule", OfKnownGroup):
            engine, _ = pipeline("stock", group, {"sp_overlap": {"head_groups": 2}}, "uniform", 0)
        assert len(overlapped_layers(engine.module)) == (2 if rank < 2 else 0)
        ds_sp_overlap.disable(engine.module)
        engine.destroy()


def refused_pipeline(rank, kind, section, variables=("",) * 4):
    group = sp_groups((0, 1), (2, 3))
    with forgetting(), mock.patch.dict(os.environ, {"DS_SP_OVERLAP": variables[rank]}):
        return refusal(pipeline, kind, group, section, "uniform", 0)


@pytest.mark.ranks(4)
def test_a_pipeline_is_refused_on_the_ranks_of_all_stages(rank):
    """Only the ranks of the first stage hold the refused layer."""
    assert_error(refused_pipeline(rank, "stock", {"sp_overlap": {"kernels": "compiled"}}), "(in the pipeline stage of rank 0)")
    assert_error(refused_pipeline(rank, "block", {"sp_overlap": {}}), "no sequence-parallel group")


@pytest.mark.ranks(4)
def test_a_variable_that_did_not_reach_the_other_stage_is_refused_on_the_ranks_of_all_stages(rank):
    said = refused_pipeline(rank, "stock", {}, ("1", "1", "", ""))
    assert_error(said, "sp_overlap: the ranks ask for different things (rank 0: ")
    assert_error(said, "; rank 2: nothing)")


# DeepSpeed's MoE: two replicas of two sp ranks, and two expert groups of two ranks: the sp groups, or across the sp groups.


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 24, dtype=torch.float64), nn.GELU(), nn.Linear(24, WIDTH, dtype=torch.float64))


def gate(at):
    return torch.randn(EXPERTS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(40 + at))


class Whole(nn.Module):
    """The unsharded model: every token goes to the expert with the largest gate."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(seeded(at, Layer, "whole", None) for at in range(2))
        self.gates = nn.ParameterList(gate(at) for at in range(2))
        self.experts = nn.ModuleList(
            nn.ModuleList(seeded(60 + 10 * at + each, expert) for each in range(EXPERTS)) for at in range(2)
        )

    def forward(self, x):
        for layer, weight, experts in zip(self.attention, self.gates, self.experts):
            x = layer(x)
            gates, chosen = (x @ weight.T).softmax(-1).max(-1, keepdim=True)
            x = x + sum(torch.where(chosen == each, gates, 0.0) * experts[each](x) for each in range(EXPERTS))
        return x


class Mixture(nn.Module):
    """The model of `Whole` with DeepSpeed's MoE, with the experts of one rank of an expert group."""

    def __init__(self, kind, group, ep_rank):
        super().__init__()
        self.attention = nn.ModuleList(seeded(at, Layer, kind, group) for at in range(2))
        self.moe = nn.ModuleList()
        for at in range(2):
            # The capacity is the number of tokens, so that no token is dropped.
            moe = MoE(WIDTH, expert(), EXPERTS, ep_size=2, capacity_factor=EXPERTS, min_capacity=1, use_rts=False).double()
            with torch.no_grad():
                moe.deepspeed_moe.gate.wg.weight.copy_(gate(at))
            for each, mine in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
                mine.load_state_dict(seeded(60 + 10 * at + 2 * ep_rank + each, expert).state_dict())
            self.moe.append(moe)

    def forward(self, x):
        for layer, moe in zip(self.attention, self.moe):
            x = layer(x)
            x = x + moe(x)[0]
        return x


def float_but_double(x):
    """Replace ``Tensor.float``, with which DeepSpeed's gate casts to fp32; leave fp64 tensors as they are."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def flat_gather(output, given, group=None):
    """Gather flat tensors, as ``all_gather_into_tensor`` does with NCCL; gloo requires equal shapes."""
    return torch.distributed.all_gather_into_tensor(output.view(-1), given.contiguous().view(-1), group=group)


def beside_experts(rank, kind, section, across, by_mpu=False):
    """Run a model with DeepSpeed's MoE; return the largest error of output and gradients, or the message of a refusal.

    across   whether expert groups lie across the sp groups
    by_mpu   whether DeepSpeed gets the sp group as an mpu, so that MoE takes sp ranks for tensor-parallel ranks
    """
    replica, sp_rank = divmod(rank, 2)
    ep_rank = replica if across else sp_rank
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(2, BATCH, SEQ, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    group, mpu = sp_groups((0, 1), (2, 3)), None
    config = config_of(use_data_before_expert_parallelism=across)
    if section is not None:
        config["sp_overlap"] = section
    with (
        mock.patch.object(torch.Tensor, "float", float_but_double),
        mock.patch.object(deepspeed.comm, "all_gather_into_tensor", flat_gather),
        mock.patch.dict(groups._EXPERT_PARALLEL_GROUP),
        mock.patch.dict(groups._EXPERT_DATA_PARALLEL_GROUP),
        forgetting(),
    ):
        whole = Whole()
        ys = [whole(each) for each in x]
        sum((y * weight).sum() for y, weight in zip(ys, weights)).backward()
        if by_mpu:
            parallel_state_sp.initialize_sequence_parallel(2)
            mpu = parallel_state_sp
        else:
            config |= {"sequence_parallel_size": 2, "data_parallel_size": 2}
        model = Mixture(kind, group, ep_rank)
        try:
            engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        except ValueError as error:
            return str(error)
        ranks = [rank % 2, rank % 2 + 2] if across else [2 * replica, 2 * replica + 1]
        assert list(groups._get_expert_parallel_group_ranks("ep_size_2")) == ranks
        y = engine.module(x[replica].chunk(2, 1)[sp_rank].contiguous())
        (y * weights[replica].chunk(2, 1)[sp_rank]).sum().backward()
        errors, expected = [relative_error(y, ys[replica].chunk(2, 1)[sp_rank])], dict(whole.named_parameters())
        alike = groups._get_expert_data_parallel_group("ep_size_2")  # the ranks with the same experts
        for name, parameter in model.named_parameters():
            part, at, *rest = name.split(".")
            gradient, other = parameter.grad.clone(), name
            if "gate" in rest:
                other = f"gates.{at}"
            elif part == "moe":
                other = f"experts.{at}.{2 * ep_rank + int(rest[-3])}.{'.'.join(rest[-2:])}"
            torch.distributed.all_reduce(gradient, group=alike if other.startswith("experts") else None)
            errors.append(relative_error(gradient, expected[other].grad))
        ds_sp_overlap.disable(model)
        engine.destroy()
        return max(errors)


@pytest.mark.parametrize(
    "kind, section, across",
    [
        ("stock", {}, True),
        full("stock", {"head_groups": 2}, False),
        full("drop-in", None, False),
        full("block", None, True),
    ],
)
@pytest.mark.ranks(4)
def test_exchanges_of_experts_and_of_heads_do_not_meet(kind, section, across, rank):
    assert_small(beside_experts(rank, kind, section, across), TOLERANCE)


@pytest.mark.ranks(4)
def test_an_moe_that_takes_sp_ranks_for_tensor_parallel_ranks_is_refused(rank):
    """Stock (DeepSpeed 0.19.8) gives wrong results here. If this error becomes small, DeepSpeed has fixed it."""
    assert beside_experts(rank, "stock", None, False, True) > 0.1
    assert DROPS in beside_experts(rank, "stock", {}, False, True)


# A model that stock computes wrongly: an MoE that takes sp ranks for tensor-parallel ranks.
dropping = functools.partial(beside_experts, kind="stock", section={}, across=False, by_mpu=True)
test_the_suite_notices_without_the_guard = notices(Watched("no MoE drops sp ranks' tokens", "if False:", dropping, 4, says=DROPS))
