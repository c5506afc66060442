"""Tests overlapped models that are copied, saved, cast, wrapped, given adapters, or deleted."""

import contextlib
import copy
import gc
import io
import warnings
import weakref

import deepspeed
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import prune

import ds_sp_overlap
from tests.harness import dropin, layers, models, reference
from tests.harness.dropin import Case
from tests.harness.layers import Shape
from tests.harness.ranks import refusal


def loss_of(model, rank, size):
    inputs = models.cut(models.batches(1)[0], rank, size)
    return models.mean_loss(model, inputs, torch.distributed.group.WORLD)


def test_an_overlapped_model_dies_with_its_last_reference(rank):
    """Guards undo: it gets the module as an argument, and does not hold it."""
    model = models.tiny()
    ds_sp_overlap.enable(model, {"head_groups": 2}, torch.distributed.group.WORLD)
    layer = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert layer() is None


def test_a_compiled_model_runs_its_attention_layers_as_they_are(rank):
    with models.sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        gradients = []
        for run in (model, torch.compile(model, backend="eager")):
            model.zero_grad()
            loss_of(run, rank, 2).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        ds_sp_overlap.disable(model)
    assert all(torch.equal(*pair) for pair in zip(*gradients))


def test_enabled_false_switches_an_overlapped_model_off(rank):
    with models.sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model, {"head_groups": 2})
        ds_sp_overlap.enable(model, {"enabled": False})
        assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


def test_ranks_that_disagree_about_gradients_are_refused_before_they_hang_in_backward(rank):
    layer, attend, x, _ = layers.mine(rank, Shape())
    layer.requires_grad_(False)
    kind, message = refusal(layers.call_block, Shape(), attend, rank, x.requires_grad_(rank == 0))
    assert kind == "ValueError"
    assert "about to exchange different things" in message and "[True, True, True]" in message


# Models of transformers in fp64, against the same model on the whole sequence.

EXACT = dict(dtype=torch.float64, initializer_range=0.2)
CUT = {"head_groups": 2}


def one_weight_in_two_projections(model):
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight
        layer.self_attn.o_proj.weight = layer.self_attn.q_proj.weight


def orthogonal(model):
    torch.nn.utils.parametrizations.orthogonal(model.model.layers[0].self_attn.q_proj)


def old_weight_norm(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model.model.layers[0].self_attn.q_proj)


def pruned(model):
    prune.ln_structured(model.model.layers[0].self_attn.q_proj, "weight", amount=0.5, n=1, dim=0)


def hooked_weights(model):
    """Add hooks to parameters; such hooks must see whole gradients."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.register_hook(lambda grad: 2 * grad)
        layer.self_attn.o_proj.weight.register_hook(lambda grad: grad.flip(0))


def adapted(model):
    torch.manual_seed(3)
    get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False)).double()


def compiled_projections(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj.compile(backend="eager")
        layer.self_attn.o_proj.compile(backend="eager")


def whole_loss(model):
    return models.mean_loss(model, models.cut(models.batches(1)[0], 0, 1), None)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def summed(gradients):
    for grad in filter(lambda grad: grad is not None, gradients.values()):
        torch.distributed.all_reduce(grad)
    return gradients


def scale_parameters(model, factor):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def whole_gradients(change=None, scale=1, **options):
    """Return the gradients of the model on the whole sequence in one process."""
    model = models.tiny(**EXACT, **options)
    if change is not None:
        change(model)
    scale_parameters(model, scale)
    return gradients_of(model, whole_loss(model))


PROJECTIONS = [
    one_weight_in_two_projections, orthogonal, old_weight_norm, pruned, hooked_weights, adapted,
    compiled_projections,
]  # fmt: skip


@pytest.mark.parametrize("change", PROJECTIONS, ids=lambda change: change.__name__)
def test_gradients_are_right_for_projections_that_are(change, rank):
    """The tolerance is 1e-9; a fault gives more than 1e-3. RoPE's tables are fp32 in both models, so they add no difference."""
    expected = [whole_gradients(change, scale) for scale in (1, 1.05)]
    for order in ("before", "after"):
        model = models.tiny(**EXACT)
        if order == "before":
            change(model)
        ds_sp_overlap.enable(model, CUT, torch.distributed.group.WORLD)
        if order == "after":
            change(model)
        for step in range(2):
            got = summed(gradients_of(model, loss_of(model, rank, 2)))
            assert layers.faults(1e-9, **{name: (got[name], grad) for name, grad in expected[step].items()}) == [], (order, step)
            scale_parameters(model, 1.05)  # values cached in the first step are wrong in the second
        ds_sp_overlap.disable(model)


def frozen_and_thawed(model, loss):
    """Change requires_grad between steps, and between two forwards of one backward; return the gradients by name."""

    def freeze(names, frozen=True):
        for layer in model.model.layers:
            for name in names:
                layer.self_attn.get_submodule(name).requires_grad_(not frozen)

    found = {}
    for names in (["q_proj"], ["o_proj"], ["k_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]):
        for frozen in (True, False):
            freeze(names, frozen)
            found |= {f"{name}, {names} frozen: {frozen}": grad for name, grad in gradients_of(model, loss()).items()}
    first = loss()
    freeze(["q_proj", "o_proj"])
    second = loss()
    freeze(["q_proj", "o_proj"], False)
    return found | gradients_of(model, first + 2 * second)


def test_gradients_are_right_while_parameters_are_frozen_and_thawed(rank):
    ours, whole = (models.tiny(**EXACT) for _ in range(2))
    ds_sp_overlap.enable(ours, CUT, torch.distributed.group.WORLD)
    got = summed(frozen_and_thawed(ours, lambda: loss_of(ours, rank, 2)))
    expected = frozen_and_thawed(whole, lambda: whole_loss(whole))
    ds_sp_overlap.disable(ours)
    assert layers.faults(1e-9, **{name: (got[name], grad) for name, grad in expected.items()}) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_may_be_cast_after_it_was_overlapped(dtype, rank):
    """The error of the gradients may be 1.5 times that of stock, since both round in different orders."""
    errors, expected = [], whole_gradients()
    for overlap in (True, False):
        with models.sequence_parallel_model(2, **EXACT) as (model, _):
            if overlap:
                ds_sp_overlap.enable(model, CUT)
                loss_of(model, rank, 2).backward()  # in fp64 first
            model.to(dtype)
            got = summed(gradients_of(model, loss_of(model, rank, 2)))
            off = sum((got[name].double() - grad).square().sum() for name, grad in expected.items())
            errors.append((off / sum(grad.square().sum() for grad in expected.values())).sqrt().item())
    ours, stock = errors
    assert 0 < stock < 0.5 and ours < 1.5 * stock + 1e-6, (ours, stock)


# Wrappers that own the parameters.


def wrapped(rank, wrap):
    """Wrap an overlapped model by ``wrap``, and run two steps; list the faults of the gradients."""
    model, found = models.tiny(**EXACT), []
    ds_sp_overlap.enable(model, CUT, torch.distributed.group.WORLD)
    owner, expected = wrap(model), {name: grad / 2 for name, grad in whole_gradients().items()}  # both wrappers average
    for step in range(2):
        owner.zero_grad()
        loss_of(owner, rank, 2).backward()
        gathered = (
            FullyShardedDataParallel.summon_full_params(owner, with_grads=True) if wrap is in_fsdp1 else contextlib.nullcontext()
        )
        with gathered:
            got = {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}
        found += layers.faults(1e-9, **{f"{name} {step}": (got[name], grad) for name, grad in expected.items()})
    ds_sp_overlap.disable(model)
    return found


def in_fsdp1(model):
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("wrap", [torch.nn.parallel.DistributedDataParallel, in_fsdp1], ids=lambda wrap: wrap.__name__)
def test_gradients_are_right_in(wrap, rank):
    assert wrapped(rank, wrap) == []


# The drop-in and the block themselves.


class Owner(torch.nn.Module):
    """A user's layer that holds its projections, and the block as another attribute."""

    def __init__(self, shape, group):
        super().__init__()
        self.layer = layers.projections(shape)
        self.block = layers.block(shape, self.layer, group)

    def forward(self, x, tables):
        return self.block(x, position_embeddings=tables)


def run(module, kind, rank):
    """Run a forward and a backward; return the output and all gradients."""
    if kind == "drop-in":
        inputs = [dropin.my_slice(Case(), rank, t).requires_grad_() for t in dropin.whole_inputs(Case())[:3]]
        y, leaves = module(*inputs, 0), inputs
    else:
        shape = Shape()
        x = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0]).requires_grad_()
        tables = reference.rope_tables(torch.arange(6 * rank, 6 * rank + 6), shape.head_dim, shape.dtype)
        module.zero_grad()
        y, leaves = module(x, tables), [x, *module.parameters()]
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def made(kind):
    group = torch.distributed.group.WORLD
    if kind == "drop-in":
        return ds_sp_overlap.DistributedAttention(reference.attention, group, gather_idx=1)
    return Owner(Shape(rope=False), group)  # RoPE of `layers.block` is a local function, which can't be pickled


@pytest.mark.parametrize("kind", ["drop-in", "block"])
def test_a_copy_of_a_module_exchanges_over_the_same_group_and_a_pickle_is_refused(kind, rank):
    module = made(kind)
    expected = run(module, kind, rank)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    assert all(torch.equal(*pair) for pair in zip(run(other, kind, rank), expected, strict=True))
    refused = refusal(torch.save, module, io.BytesIO())
    assert refused[0] == "TypeError" and "an attention layer over a process group can't be pickled" in refused[1]


# AutoSP of DeepSpeed, which inserts its own exchanges.


def with_autosp(rank, wrapped, section):
    from deepspeed.sequence.autosp_vit import UlyssesSPViTAttention

    world, model = torch.distributed.group.WORLD, torch.nn.ModuleDict({"text": models.tiny()})
    inner = model["text"].model.layers[0].self_attn if wrapped == "text" else torch.nn.Linear(8, 8)
    if wrapped == "text":
        model["text"].model.layers[0].self_attn = UlyssesSPViTAttention(inner, world)
    else:
        model["vision"] = UlyssesSPViTAttention(inner, world)
    refused = refusal(ds_sp_overlap.enable, model, section, world)
    table = None if refused else str(ds_sp_overlap.enable(model, section, world))
    bound = models.overlapped_layers(model)
    ds_sp_overlap.disable(model)
    return refused, table, [name for name in bound if name.endswith("attn") or name == "vision"]


AUTOSP = "DeepSpeed's AutoSP exchanges around it"


def test_what_autosp_has_wrapped_is_left_to_it_and_named(rank):
    refused, table, bound = with_autosp(rank, "vision", {})
    assert refused is None and AUTOSP in table and bound == [f"text.model.layers.{i}.self_attn" for i in range(2)]
    refused, _, bound = with_autosp(rank, "vision", {"on_unsupported": "error"})
    assert refused[0] == "ValueError" and f"vision: {AUTOSP}" in refused[1] and bound == []


def test_a_layer_that_would_be_exchanged_twice_is_refused(rank):
    refused, _, bound = with_autosp(rank, "text", {})
    assert refused[0] == "ValueError" and bound == []
    assert "text.model.layers.0.self_attn.attn is part of text.model.layers.0.self_attn: " + AUTOSP in refused[1]


def test_autosps_compile_pass_is_refused_beside_the_section(rank):
    config = {"train_batch_size": 2, "sp_overlap": {}, "compile": {"deepcompile": True, "passes": ["autosp"]}}
    with pytest.raises(ValueError, match='sp_overlap: compile.passes has "autosp", which exchanges by itself'):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
