"""Compares training through DeepSpeed with an ``sp_overlap`` section with the same training without the section.

Weights are drawn with a standard deviation of 0.2 instead of 0.02: at 0.02, the loss would hide a fault in attention.
"""

import base64
import copy
import functools
import json
import logging
import os
import types
from collections import Counter
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_sp_overlap
import ds_sp_overlap.attention.runtime.linear
import ds_sp_overlap.integrations.deepspeed.initialize
from ds_sp_overlap.attention.runtime import plan
from tests.harness.cases import everything, full
from tests.harness.listening import listening
from tests.harness.models import (
    batches,
    cut,
    ds_config,
    engine_of,
    forgetting,
    mean_loss,
    overlapped_layers,
    scaled_values,
    sequence_parallel,
    step,
    tiny,
    train_run,
    worst,
)  # fmt: skip
from tests.harness.own_layer import Layer
from tests.harness.ranks import on_ranks, refusal
from tests.harness.reference import attention, relative_error

WIDE = {"initializer_range": 0.2}

# With head groups and tiles, products are added in another order: a few roundings (6e-8 in fp32) over a few layers; measured:
# 1e-6. `test_the_fp32_tolerances_catch_a_fault_of_a_tenth_of_a_percent` proves that the tolerances are tight enough.
FP32 = {"gradients": 1e-5, "losses": 1e-6, "norms": 2e-6}
SECTIONS = [{"head_groups": 2}, {"head_groups": 2, "window": 1}, {"head_groups": 2, "window": 2}, {"head_groups": 1, "tiles": 5}]
SECTIONS = SECTIONS if everything() else SECTIONS[:2] + SECTIONS[3:]

ACCUMULATIONS = (1, 4) if everything() else (2,)

# In bf16, the limit is a multiple of stock's error: the distance of stock's gradients from those of the same weights in fp32. Two
# head groups round the output of o's projection once more (8 bits), which may add at most half of this error.
BF16 = 1.5


def in_bf16(model):
    return model.bfloat16().float()


def compared_with_stock_in_bf16(rank, stage, factor=1.0):
    """Train in bf16 with stock and with one and two head groups.

    Returns whether one group equals stock bit for bit, the errors of the gradients of stock and of two groups against fp32, and the
    distance of two groups from stock.
    """
    train = functools.partial(train_run, rank, 2, stage=stage, accumulation=ACCUMULATIONS[-1], **WIDE)
    exact = train(None, steps=1, prepare=in_bf16)
    stock, one = (train(section, dtype=torch.bfloat16) for section in (None, {"head_groups": 1}))
    with scaled_values(factor):
        two = train({"head_groups": 2}, dtype=torch.bfloat16)
    return one.equals(stock), stock.gradient_error(exact), two.gradient_error(exact), two.distance(stock)


@pytest.mark.parametrize("stage", [0, full(1), full(2), 3])
def test_training_in_fp32_equals_stock(stage, rank):
    """One head group must give exactly the gradients, losses, gradient norms and parameters of stock in five steps."""
    for accumulation in ACCUMULATIONS:
        train = functools.partial(train_run, rank, 2, stage=stage, accumulation=accumulation, **WIDE)
        stock = train(None)
        assert train({"head_groups": 1}).equals(stock), accumulation
        for section in SECTIONS:
            off = train(section).distance(stock)
            assert all(off[what] <= FP32[what] for what in FP32), f"accumulation {accumulation}, {section}: off by {off}"


@pytest.mark.parametrize("stage", [full(0), full(1), 2, full(3)])
def test_training_in_bf16_equals_stock(stage, rank):
    identical, stock, two, off = compared_with_stock_in_bf16(rank, stage)
    assert identical, "G = 1 is not stock's bit for bit"
    assert 0 < two <= BF16 * stock, f"G = 2 is off by {two}, stock by {stock}"
    assert off["losses"] <= 2**-8, off  # one rounding in bf16


def test_the_fp32_tolerances_catch_a_fault_of_a_tenth_of_a_percent(rank):
    stock = train_run(rank, 2, None, stage=1, **WIDE)
    with scaled_values(1.001):
        off = train_run(rank, 2, {"head_groups": 2}, stage=1, **WIDE).distance(stock)
    assert all(off[what] > 10 * FP32[what] for what in FP32), off


def test_the_bf16_tolerance_catches_a_fault(rank):
    """Plants a fault above the rounding of bf16 (0.4 %), which would hide a fault of 0.1 %."""
    _, stock, two, _ = compared_with_stock_in_bf16(rank, 1, 1.5)
    assert two > 10 * BF16 * stock


# ZeRO-3.


@pytest.mark.singles
@pytest.mark.parametrize("born_partitioned", [False, True])
@pytest.mark.parametrize("head_groups, window", [(1, None), (2, None), (1, 1), (2, 1), (2, 2)])
def test_zero3_reads_no_weight_while_it_is_partitioned_and_partitions_all_again(born_partitioned, head_groups, window, rank):
    """Checks the status of a weight each time that the package reads it, and the status of all parameters after backward."""
    section = {"head_groups": head_groups, "window": window}
    config = ds_config(3, optimizer="SGD", sp_overlap=section)
    reads, flat, phase = [], plan.flat, ["forward"]

    def reading(*compiled):
        run = flat(*compiled)

        def reads_weights(call, given):
            for weight in given:
                if isinstance(weight, torch.nn.Parameter):
                    reads.append((phase[0], weight.ds_status, weight.numel() == weight.ds_numel))
            return run(call, given)

        return reads_weights

    plan.pieces_of.cache_clear()
    with mock.patch.object(plan, "flat", reading):
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=born_partitioned):
            model = tiny(pad_token_id=None)  # else transformers would write to the padding row of a partitioned weight
        with engine_of(model, config) as (engine, group):
            for tokens in batches(3):
                phase[0] = "forward"
                loss = mean_loss(engine, cut(tokens, rank, 2), group)
                phase[0] = "backward"
                engine.backward(loss)
                assert {p.ds_status for p in engine.module.parameters()} == {ZeroParamStatus.NOT_AVAILABLE}
                engine.step()
            available = (ZeroParamStatus.AVAILABLE, True)
            # Two layers, three steps, four projections; each weight is read once, even if it is cut into parts.
            assert Counter(reads) == {("forward", *available): 2 * 3 * 4, ("backward", *available): 2 * 3 * 4}
            weight = engine.module.model.layers[0].self_attn.q_proj.weight
            reading([], [("x",)], [])(None, [weight])
            assert reads[-1] == ("backward", ZeroParamStatus.NOT_AVAILABLE, False), "the instrument sees a weight that is not there"
    plan.pieces_of.cache_clear()


# Checkpoints.


def test_a_checkpoint_saved_with_the_plugin_resumes_without_it_and_the_other_way_round(tmp_path, rank):
    """Losses must equal those of an uninterrupted run bit for bit, with either side saving or loading."""

    def made(section):
        more = {} if section is None else {"sp_overlap": section}
        return engine_of(tiny(**WIDE), ds_config(3, **more))

    def train(engine, group, tokens):
        return [step(engine, microbatch[None], rank, 2, group) for microbatch in tokens]

    tokens, plugin, losses, keys = batches(5), {"head_groups": 1}, {}, {}
    for saving in (None, plugin):
        name = str(tmp_path / ("plain" if saving is None else "overlapped"))
        with made(saving) as (trained, group):
            train(trained, group, tokens[:2])
            trained.save_checkpoint(name, tag="two")
            keys[saving is not None] = list(trained.module.state_dict())
            losses[f"{saving} on"] = train(trained, group, tokens[2:])
        for loading in (None, plugin):
            with made(loading) as (fresh, group):
                parameters = list(fresh.module.parameters())
                with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters):
                    for parameter in parameters:
                        parameter.zero_()  # so that a checkpoint that isn't loaded is noticed
                fresh.load_checkpoint(name, tag="two")
                losses[f"{saving} {loading}"] = train(fresh, group, tokens[2:])
    assert keys[False] == keys[True]
    assert len(losses) == 6 and len(set(losses["None on"])) == 3
    assert all(curve == losses["None on"] for curve in losses.values()), losses


# Places where the section is found.


def test_the_section_is_read_from_wherever_deepspeed_reads_its_config(tmp_path, rank):
    plain, path = ds_config(0, sp_overlap={"head_groups": 1}), str(tmp_path / f"rank{rank}.json")
    Path(path).write_text(json.dumps(plain))
    encoded = base64.urlsafe_b64encode(json.dumps(plain).encode()).decode()
    ways = {
        "dict": {"config": plain},
        "path": {"config": path},
        "base64": {"config": encoded},
        "args": {"args": types.SimpleNamespace(deepspeed_config=path)},
        "args, old name": {"args": types.SimpleNamespace(deepscale_config=path)},
        "config_params": {"config_params": plain},
    }
    for way, given in ways.items():
        model = tiny()
        with forgetting():
            engine, *_ = deepspeed.initialize(model=model, mpu=sequence_parallel(model, 2), **copy.deepcopy(given))
            assert overlapped_layers(engine.module) == ["model.layers.0.self_attn", "model.layers.1.self_attn"], way
            ds_sp_overlap.disable(engine.module)
            assert overlapped_layers(engine.module) == [], way
            engine.destroy()


@pytest.mark.parametrize("section, count", [(None, 0), ({"enabled": False, "head_groups": 2}, 0), ({}, 4)], ids=str)
def test_without_the_section_or_with_enabled_false_nothing_changes(section, count, rank):
    """Checks, as a control, that an empty section means the defaults: the forwards of two layers and two models change."""
    model, initialize, functions = tiny(), deepspeed.initialize, []
    forwards = [module.forward for module in model.modules()]

    def looking(**arguments):
        functions.append(ALL_ATTENTION_FUNCTIONS["sdpa"])
        return initialize(**arguments)

    config = ds_config(0) if section is None else ds_config(0, sp_overlap=section)
    with mock.patch.object(deepspeed, "initialize", looking), engine_of(model, config):
        assert sum(module.forward != forward for module, forward in zip(model.modules(), forwards)) == count
        assert functions == [ALL_ATTENTION_FUNCTIONS["sdpa"]]


NOBODY = 'nobody reads "{}"; the section is called "sp_overlap"'
REFUSED = [
    ({"sp_overlap": {"head_group": 2}}, "did you mean 'head_groups'"),
    ({"sp_overlaps": {}}, NOBODY.format("sp_overlaps")),
    ({"sp-overlap": {}}, NOBODY.format("sp-overlap")),
    ({"spOverlap": {}, "sp_overlap": {}}, NOBODY.format("spOverlap")),
    ({"sequence_parallel_overlap": {}}, NOBODY.format("sequence_parallel_overlap")),
    ({"scheduler": {"sp_overlap": {}}}, NOBODY.format("scheduler.sp_overlap")),
    ({"activation_checkpointing": {"sp_overlaps": {}}}, NOBODY.format("activation_checkpointing.sp_overlaps")),
    # DeepSpeed itself refuses this key, since it knows all keys of zero_optimization.
    ({"zero_optimization": {"stage": 0, "sp_overlap": {}}}, "sp_overlap"),
]


@pytest.mark.parametrize("config, message", REFUSED, ids=str)
def test_a_section_that_is_invalid_or_at_another_place_is_refused_before_the_engine_is_begun(config, message, rank):
    model, begin = tiny(), DeepSpeedEngine._configure_with_arguments
    spied = mock.patch.object(DeepSpeedEngine, "_configure_with_arguments", autospec=True, side_effect=begin)
    with forgetting(), spied as begun:
        kind, said = refusal(deepspeed.initialize, model=model, config=ds_config(0, **config), mpu=sequence_parallel(model, 2))
        assert not begun.called and overlapped_layers(model) == []
    assert kind == ("ValidationError" if "zero_optimization" in config else "ValueError") and message in said


def test_keys_of_others_and_keys_that_are_commented_out_are_no_misplaced_sections():
    others = ["sp_overlap", "my_sp", "sp_size", "tp_overlap", "pp_overlap", "tsp_overlap", "overlap_comm", "sequence_parallel_size"]
    config = {
        **dict.fromkeys([*others, "_sp_overlap", "#sp_overlap", "//sp_overlap"], {}),
        "zero_optimization": {"overlap_comm": True},
    }
    assert list(ds_sp_overlap.integrations.deepspeed.initialize._misplaced(config)) == []


# The environment variable.


def asked_for(monkeypatch, variable, section=None, command_line=None):
    """Return the config that the variable, the section and the command line ask for, and the messages."""
    monkeypatch.setenv("DS_SP_OVERLAP", variable)
    monkeypatch.setattr(ds_sp_overlap.integrations.deepspeed.initialize, "from_command_line", command_line or {})
    config = {} if section is None else {"sp_overlap": section}
    with listening(logging.WARNING) as messages:
        return ds_sp_overlap.integrations.deepspeed.initialize._asked_for(config), messages


Config = ds_sp_overlap.SpOverlapConfig
VARIABLES = {  # (variable, section, expected config)
    "not set": ("", None, None),
    "on": ("1", None, Config()),
    "off": ("0", None, Config(enabled=False)),
    "a section": ('{"head_groups": 2}', None, Config(head_groups=2)),
    "not set beside a section": (" ", {"head_groups": 4}, Config(head_groups=4)),
    "on beside a section": ("1", {"head_groups": 4, "enabled": False}, Config(head_groups=4)),
    "off beside a section": ("0", {"head_groups": 4}, Config(head_groups=4, enabled=False)),
    "its keys before the section's": ('{"head_groups": 2}', {"head_groups": 4, "wgrad": False}, Config(head_groups=2, wgrad=False)),
    "a section, beside one that is off": ('{"head_groups": 2}', {"enabled": False}, Config(head_groups=2)),
    "a section that is off": ('{"enabled": false}', {}, Config(enabled=False)),
}


@pytest.mark.parametrize("case", VARIABLES)
def test_the_environment_variable(case, monkeypatch):
    variable, section, expected = VARIABLES[case]
    config, messages = asked_for(monkeypatch, variable, section)
    assert config == expected
    both = variable.strip() and section is not None
    assert messages == (
        [f"sp_overlap: DS_SP_OVERLAP={variable} goes before the section of the DeepSpeed config, key by key"] if both else []
    )


def test_the_command_line_goes_before_the_environment_variable(monkeypatch):
    asked = {"timeline": {"path": "of the command"}}
    config, _ = asked_for(monkeypatch, '{"timeline": {"path": "of the variable"}, "head_groups": 2}', None, asked)
    assert (config.timeline.path, config.head_groups) == ("of the command", 2)
    with pytest.raises(ValueError, match="^run --timeline: .* no sp_overlap section; add one, or set DS_SP_OVERLAP=1$"):
        asked_for(monkeypatch, "", None, asked)


@pytest.mark.parametrize(
    "variable,section,message",
    [
        ("2", None, "environment variable DS_SP_OVERLAP must be 1, 0 or a section such as {\"head_groups\": 2}, got '2'"),
        ("{head_groups: 2}", None, "such as {\"head_groups\": 2}, got '{head_groups: 2}'"),
        ('{"head_group": 2}', None, "variable DS_SP_OVERLAP: sp_overlap.head_group: unknown key; did you mean 'head_groups'"),
        ("0", {"head_group": 2}, "sp_overlap.head_group: unknown key"),
        ("0", True, 'sp_overlap: expected a section such as {"enabled": true}, got True'),
    ],
)
def test_an_environment_variable_that_is_no_section_is_refused(variable, section, message, monkeypatch):
    with pytest.raises(ValueError) as refused:
        asked_for(monkeypatch, variable, section)
    assert message in str(refused.value)


def by_the_variable(rank, values):
    """Call `deepspeed.initialize` without a section, with this rank's variable; return the refusal and the overlapped layers."""
    model = tiny()
    with mock.patch.dict(os.environ, DS_SP_OVERLAP=values[rank]), listening(logging.INFO) as messages, forgetting():
        mpu = sequence_parallel(model, 2)
        said = refusal(lambda: deepspeed.initialize(model=model, config=ds_config(0), mpu=mpu)[0].destroy())
    off = ["sp_overlap: off (DS_SP_OVERLAP=0)"]
    assert (messages == off) == (values[rank] == "0" and rank == 0), messages
    bound = overlapped_layers(model)
    ds_sp_overlap.disable(model)
    return said, bound


def test_the_environment_variable_switches_it_on_where_there_is_no_section():
    layers = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert on_ranks(2, by_the_variable, ['{"head_groups": 2}'] * 2) == [(None, layers)] * 2
    assert on_ranks(2, by_the_variable, ["0"] * 2) == [(None, [])] * 2


@pytest.mark.parametrize("values", [("1", ""), ("1", '{"head_groups": 2}')], ids=str)
def test_a_variable_that_did_not_reach_every_rank_is_refused_on_every_rank(values):
    first, second = on_ranks(2, by_the_variable, values, timeout_s=40)
    assert first == second and first[1] == []
    assert first[0][0] == "ValueError" and "sp_overlap: the ranks ask for different things (rank 0: " in first[0][1]
    assert "; rank 1: " in first[0][1] and ".deepspeed_env" in first[0][1]


# Accelerate's YAML.


def test_a_section_in_accelerates_yaml_is_refused_with_what_works(monkeypatch):
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,sp_overlap,gradient_clipping")
    for section in (None, {}):
        with pytest.raises(
            ValueError, match='^Accelerate YAML: "deepspeed_config.sp_overlap" goes no .* DS_SP_OVERLAP .* deepspeed_config_file$'
        ):
            asked_for(monkeypatch, "", section)
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,gradient_clipping,mixed_precision")
    assert asked_for(monkeypatch, "", None)[0] is None


# Warnings if nothing is overlapped.


def engine_for_own_model():
    model = torch.nn.Sequential(Layer("stock", torch.distributed.group.WORLD))
    deepspeed.initialize(model=model, config=ds_config(0, optimizer="SGD", gradient_clipping=0.0))[0].destroy()


def engine_for(overlapped=False, size=2, config=None, **more):
    model = tiny()
    if overlapped:
        ds_sp_overlap.enable(model, {"head_groups": 1}, torch.distributed.group.WORLD)
    with engine_of(model, config or ds_config(0, **more), size):
        pass


# {case: (function that makes an engine, whether a warning says that nothing is overlapped)}.
ENGINES = {
    "without a section": (engine_for, True),
    "of a model of one's own, of which DeepSpeed was not told": (engine_for_own_model, True),
    "of a model that is overlapped already": (functools.partial(engine_for, overlapped=True), False),
    "with a section": (functools.partial(engine_for, sp_overlap={"enabled": False}), False),
    "without sequence parallelism": (functools.partial(engine_for, size=1), False),
}


@pytest.mark.parametrize("which, size", [(which, 1 if "without sequence" in which else 2) for which in ENGINES])
def test_sequence_parallelism_without_a_section_is_said_once_on_rank_0(which, size, rank):
    made, is_said = ENGINES[which]
    with listening(logging.WARNING) as messages:
        made(), made()
    said = [message for message in messages if "nothing is overlapped" in message]
    assert len(said) == (is_said and rank == 0)
    words = "is on (sp size 2) and ds_sp_overlap imported, but the DeepSpeed config has no"
    assert all(f'{words} "sp_overlap" section: nothing is overlapped' in message for message in said)


ON = {"head_groups": 1}


@pytest.mark.parametrize(
    "stage, zero, section, caller, is_said",
    [
        (3, {}, ON, "train", True),
        (3, {"reduce_scatter": True}, None, "train", True),
        (3, {}, ON, "accelerate.accelerator", True),
        (3, {"reduce_scatter": False}, ON, "train", False),
        (2, {}, ON, "train", False),
        (3, {}, ON, "transformers.trainer", False),
    ],
)
def test_zero3_with_reduce_scatter_in_a_loop_of_ones_own_is_said_once_to_scale_gradients(
    stage, zero, section, caller, is_said, rank
):
    """``caller`` is the name of the module that makes the engine."""
    config = ds_config(stage, **({} if section is None else {"sp_overlap": section}))
    del config["zero_optimization"]["reduce_scatter"]
    config["zero_optimization"].update(zero)
    with listening(logging.WARNING) as messages:
        eval("make(config)", {"__name__": caller, "self": 0, "make": lambda config: engine_for(config=config), "config": config})
    said = [message for message in messages if "reduce_scatter" in message]
    assert len(said) == (is_said and rank == 0)
    assert all("(2) once too often" in message and '"reduce_scatter": false' in message for message in said)


def test_no_line_of_the_report_is_longer_than_100_columns_and_it_counts_the_layers_that_are_overlapped():
    layer = ds_sp_overlap.integrations.layers.FoundLayer
    none = ds_sp_overlap.Report([layer("a", None, "", "unknown"), layer("b", None, "", "unknown")], 2)
    assert "sp_overlap over sp size 2: 0 of 2 layers overlapped" in str(none)
    many = [layer(f"model.layers.{i}.self_attn", None, "all eight exchanges, " * 9, "unknown " * 40) for i in range(99)]
    lines = str(ds_sp_overlap.Report(many, 2)).splitlines()
    assert (
        len(lines) > 8
        and max(map(len, lines)) <= 100
        and lines[1] == "  model.layers.0.self_attn ... model.layers.98.self_attn (99 layers)"
    )


@pytest.mark.parametrize("version", ["0.19.6", "0.18.2", "0.19.6+cu128"])
def test_a_deepspeed_with_wrong_gradients_is_refused_with_the_reason(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(ImportError, match=f"needs DeepSpeed >= 0.19.7, found {version.replace('+', '.')}.*gradients.*wrong"):
        ds_sp_overlap.integrations.deepspeed.initialize.install()


@pytest.mark.parametrize("version", ["0.19.7", "0.19.8+unknown", "0.20.0.dev1"])
def test_a_right_deepspeed_is_accepted_and_wrapped(monkeypatch, version):
    before = DeepSpeedEngine.__init__
    monkeypatch.setattr(deepspeed, "__version__", version)
    monkeypatch.setattr(DeepSpeedEngine, "__init__", before)
    monkeypatch.setattr(ds_sp_overlap.integrations.transformers.registration, "install", lambda: None)
    ds_sp_overlap.integrations.deepspeed.initialize.install()
    assert DeepSpeedEngine.__init__.__wrapped__ is before


# The sp group from DeepSpeed's own mesh.


def whole_gradients(tokens):
    """Return the gradients of a model on the whole sequence, in one process without sequence parallelism."""
    model = tiny(**WIDE)
    mean_loss(model, cut(tokens, 0, 1), None).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [full(0), 2])
def test_a_mesh_of_two_replicas_of_two_ranks_needs_no_mpu(stage, rank):
    """The group must be found, and the gradients must equal those of stock bit for bit.

    With a mesh, DeepSpeed (0.19.8) sums gradients over the replicas, without averaging, and does not sum over the sp group; also
    without the package. If ``as_left`` becomes small, DeepSpeed has fixed this: then change docs/configuration.md.
    """
    tokens, (replica, sp_rank), found = batches(2), divmod(rank, 2), {}
    first, second = (whole_gradients(microbatch) for microbatch in tokens)
    expected = {name: first[name] + second[name] for name in first}
    for overlap in (False, True):
        config = ds_config(stage, optimizer="SGD", sequence_parallel_size=2, data_parallel_size=2)
        if overlap:
            config["sp_overlap"] = {"head_groups": 1}
        model = tiny(**WIDE)
        with forgetting():
            if not overlap:
                sequence_parallel(model, 2)  # don't pass its mpu: DeepSpeed gets the mesh
            with listening(logging.WARNING) as messages:
                engine, *_ = deepspeed.initialize(model=model, config=config)
            warned = [message for message in messages if "does not sum gradients over the sp group (size 2)" in message]
            assert len(warned) == (rank == 0), messages
            group = deepspeed.utils.groups._get_sequence_parallel_group()
            assert torch.distributed.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
            engine.backward(mean_loss(engine, cut(tokens[replica], sp_rank, 2), group))
            found[overlap] = {name: deepspeed.utils.safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
            assert len(overlapped_layers(engine.module)) == (2 if overlap else 0)
            ds_sp_overlap.disable(engine.module)
            engine.destroy()
    assert all(torch.equal(found[True][name], x) for name, x in found[False].items())
    as_left = worst(found[True], expected)
    assert as_left > 0.1
    for gradient in found[True].values():
        torch.distributed.all_reduce(gradient, group=torch.distributed.new_subgroups(2)[0])
    assert worst(found[True], expected) < FP32["gradients"]


# DeepSpeed's own DistributedAttention.


@pytest.mark.parametrize("kind", ["stock", "drop-in"])
@pytest.mark.parametrize("head_groups", [1, 2])
def test_a_distributed_attention_of_deepspeeds_or_ours_is_overlapped_in_any_model_and_given_back(head_groups, kind, rank):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(Layer(kind, torch.distributed.group.WORLD) for _ in range(2)))
    whole = torch.randn(2, 12, 32, dtype=torch.float64)

    def outcome():
        model.zero_grad()
        x = whole.chunk(2, 1)[rank].clone().requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]

    keys = list(model.state_dict())
    stock = outcome()
    report = " ".join(str(ds_sp_overlap.enable(model, {"head_groups": head_groups})).split())
    bound, overlapped = overlapped_layers(model), outcome()
    same_keys = list(model.state_dict()) == keys
    ds_sp_overlap.disable(model)
    restored = all(torch.equal(a, b) for a, b in zip(stock, outcome()))
    clean = "forward" not in vars(model[0].attend) and not overlapped_layers(model)
    assert bound == ["0.attend", "1.attend"]
    assert "the projections belong to its caller" in report and "(2 layers)" in report
    assert max(map(relative_error, overlapped, stock)) < 1e-12  # fp64, sums in another order
    assert same_keys and restored and clean


def initialized(rank, kind, section, **options):
    """Train a user's model without an mpu.

    Returns the losses, the loss after `disable`, the heads of each call of attention, the messages, and the overlapped layers.
    """
    heads = []

    def attend(q, k, v):
        heads.append(q.shape[2])
        return attention(q, k, v)

    ds_sp_overlap.attention_function(attend, heads_alike=True)
    torch.manual_seed(3)
    layers = (Layer(kind, torch.distributed.group.WORLD, attend, **options) for _ in range(2))
    model = torch.nn.Sequential(*layers).float()  # DeepSpeed can't reduce gradients in fp64
    more = {} if section is None else {"sp_overlap": section}
    config = {**ds_config(0, optimizer="SGD", **more), "gradient_clipping": 0.0}
    with listening(logging.WARNING) as messages:
        engine, *_ = deepspeed.initialize(model=model, config=config)
    x, losses = torch.randn(2, 12, 32).chunk(2, 1)[rank], []
    for _ in range(3):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    bound = overlapped_layers(engine.module)
    ds_sp_overlap.disable(engine.module)
    after = engine(x).square().mean().item()
    engine.destroy()
    return losses, after, heads, messages, bound


def test_our_class_in_place_of_deepspeeds_trains_alike_with_the_section_and_without_an_mpu(rank):
    """Its group is found like that of DeepSpeed's class. The section applies, unless the layer was made with a config."""
    stock = initialized(rank, "stock", None)
    found = {
        "section": initialized(rank, "drop-in", {"head_groups": 2}),
        "own config": initialized(rank, "drop-in", {"head_groups": 2}, config={"head_groups": 1}),
        "no section": initialized(rank, "drop-in", None, config={"head_groups": 1}),
    }
    for case, (losses, after, heads, messages, bound) in found.items():
        assert len(set(losses)) == 3
        for loss, expected in zip((*losses, after), (*stock[0], stock[1]), strict=True):
            assert abs(loss / expected - 1) < FP32["losses"], case
        assert not messages, case
        assert bound == ([] if case == "no section" else ["0.attend", "1.attend"]), case
    # Each rank has two heads, so calls with one head come from two head groups. Other calls are the probe of the shape, and those
    # after `disable`.
    calls = {case: found[case][2] for case in found}
    assert calls["section"].count(1) > 2 * 2 * 3 and calls["own config"].count(1) == calls["no section"].count(1) == 0
