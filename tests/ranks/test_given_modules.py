"""Tests the modules of a layer: with hooks or a forward of their own they are called whole; calls leave them unchanged."""

import functools

import pytest
import torch
from torch import nn

from ds_sp_overlap.attention.runtime.linear import can_split, parameter_of
from tests.harness import layers
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import refusal
from tests.harness.transports import Recording
from tests.harness.uses import SHAPES, Adapted, Deliberate, Halved, Scaled


class Calling(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def changed(change):
    linear = nn.Linear(2, 2)
    change(linear)
    return linear


WHOLE = {  # projections that can't be computed in parts
    "a forward of its class": Scaled(2, 2),
    "a wrapper": Adapted(nn.Linear(2, 2)),
    "a property of its class": Halved(2, 2),
    "a call of its class": Calling(2, 2),
    "a forward hook": changed(lambda linear: linear.register_forward_hook(lambda *_: None)),
    "a backward hook": changed(lambda linear: linear.register_full_backward_hook(lambda *_: None)),
    "a forward of its own": changed(lambda linear: setattr(linear, "forward", lambda x: 2 * x)),
}


@pytest.mark.parametrize("what", WHOLE)
def test_a_replaced_forward_is_called_whole(what):
    assert not can_split(WHOLE[what]) and can_split(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", "qo")
def test_a_hook_on_a_projection_sees_its_whole_output(kind, rank):
    shape, seen = Shape(), []

    def hook(module, args, output):
        seen.append(list(output.shape) if isinstance(output, torch.Tensor) else f"a {type(output).__name__} of parts")

    def change(layer):
        layer[f"{kind}_proj"].register_forward_hook(hook)

    assert layers.block_faults(rank, shape, change=change) == []
    assert seen == [[2, 12, 32], [2, 6, 32]], "the reference's call, then the block's"
    layer, attend, *_ = layers.mine(rank, shape, change=change)
    assert {id(m) for m in attend.split_projections()} == {id(layer[f"{other}_proj"]) for other in ("o" if kind == "q" else "qkv")}


EVERY_MODULE = {
    "forward": nn.modules.module.register_module_forward_hook,
    "forward pre": nn.modules.module.register_module_forward_pre_hook,
    "backward": nn.modules.module.register_module_full_backward_hook,
    "backward pre": nn.modules.module.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", EVERY_MODULE)
def test_hooks_of_all_modules_see_whole_projections(kind, rank):
    """The hooks must see the same shapes as with the reference."""
    shape, seen, every = Shape(kv_heads=2, config={"head_groups": 2}), {}, []

    def hook(module, *args):
        shapes = [list(t.shape) for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        seen.setdefault(module, []).append(shapes)

    def use(call, layer, x, dy):
        handle = EVERY_MODULE[kind](hook)
        try:
            result = layers.backward(call, layer, x, dy)
        finally:
            handle.remove()
        every.append([seen.pop(module, None) for module in layer.values()])
        return result

    assert layers.block_faults(rank, shape, use) == []
    whole, mine = (str(shapes).replace("12, ", "6, ") for shapes in every)
    assert mine == whole


def test_hooks_of_all_modules_count_in_the_call_they_are_there_for(rank):
    shape, seen = Shape(), []
    _, attend, x, _ = layers.mine(rank, shape)
    for hooks in (0, 1, 0):
        handles = [EVERY_MODULE["forward"](lambda module, args, output: seen.append(list(output.shape))) for _ in range(hooks)]
        layers.call_block(shape, attend, rank, x)
        assert len(attend.split_projections()) == (0 if hooks else 4)
        for handle in handles:
            handle.remove()
    assert seen == [[2, 6, 32]] * 4


@pytest.mark.parametrize("shape", SHAPES, ids=["separate", "one group", "fused", "node by node"])
def test_the_modules_are_as_they_were(shape, rank):
    layer, attend, x, dy = layers.mine(rank, shape)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    seen = {name: sorted(vars(module)) for name, module in layer.named_modules()}
    addresses = [p.data_ptr() for p in layer.parameters()]
    layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
    after = layer.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert seen == {name: sorted(vars(module)) for name, module in layer.named_modules()}, "an attribute was left behind"
    assert addresses == [p.data_ptr() for p in layer.parameters()], "a parameter was moved or replaced"


@pytest.mark.parametrize("place", ["attention", "rope", "k_proj", "o_proj"])
def test_an_exception_halfway_leaves_modules_and_process_group_usable(place, rank):
    """Guards `call_through`: it removes the replaced forward even if a hook raises before this forward runs.

    The modules must be unchanged, and the next call must be right.
    """

    def broken(*args):
        raise Deliberate(place)

    shape = Shape()
    layer, attend, x, _ = layers.mine(rank, shape)
    if place == "attention":
        attend.local_attention = broken
    elif place == "rope":
        attend.inputs.rope = broken
    else:
        broken.__module__ = "deepspeed.hook"  # with hooks of DeepSpeed, projections are still computed in parts
        layer[place].register_forward_pre_hook(broken)
    assert refusal(layers.call_block, shape, attend, rank, x.requires_grad_()) == ("Deliberate", place)
    assert [name for name, module in layer.named_modules() if "forward" in vars(module)] == []
    assert layers.block_faults(rank, shape) == []


def test_projections_have_their_own_forward_while_the_inside_runs(rank):
    """Guards `call_through`: it deletes the attribute ``forward`` of the module before other code runs."""
    shape, inside = Shape(), []

    def hook(*_):  # without a hook, projections are not called
        pass

    hook.__module__ = "deepspeed.hook"

    class Look(Recording):
        def launch(self, *args):
            inside.extend(name for name, module in layer.named_modules() if "forward" in vars(module))
            return super().launch(*args)

    layer, attend, x, _ = layers.mine(rank, shape, Look())
    for projection in layer.values():
        projection.register_forward_pre_hook(hook)
    layers.call_block(shape, attend, rank, x)
    assert inside == []


# Guards.


def test_a_tensor_in_the_place_of_a_parameter_is_what_is_read():
    """FSDP1 puts views in the place of parameters, and ``nn.Linear`` reads these views."""
    linear = torch.nn.Linear(2, 2)
    vars(linear)["weight"] = 2 * linear.weight.detach()
    x = torch.randn(3, 2)
    assert torch.equal(torch.nn.functional.linear(x, parameter_of(linear, "weight"), linear.bias), linear(x))


called_whole = test_a_replaced_forward_is_called_whole
test_the_suite_notices_without_the_guard = notices(
    Watched("a call of its own runs", "if False:", functools.partial(called_whole, what="a call of its class")),
    Watched(
        "given back after a raise",
        "pass",
        functools.partial(test_an_exception_halfway_leaves_modules_and_process_group_usable, place="o_proj"),
    ),
    Watched("given back at once", "pass", test_projections_have_their_own_forward_while_the_inside_runs),
    Watched("only harmless hooks", "if False:", functools.partial(test_a_hook_on_a_projection_sees_its_whole_output, kind="q")),
    Watched(
        "a replaced forward runs",
        "if module._compiled_call_impl is not None:",
        functools.partial(called_whole, what="a forward of its own"),
    ),
    Watched("no forward of its own", "if False:", functools.partial(called_whole, what="a forward of its class")),
    Watched("what the forward would read", "if False:", functools.partial(called_whole, what="a property of its class")),
    Watched(
        "hooks of all modules", "if False:", functools.partial(test_hooks_of_all_modules_see_whole_projections, kind="forward")
    ),
)
