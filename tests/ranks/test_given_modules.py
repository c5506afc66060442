"""Modules that a layer was given: hooked, patched or with a forward of their own they are called whole, and they stay as they were."""

import functools

import pytest
import torch
from torch import nn

from ds_sp_overlap.attention.runtime.linear import can_split, parameter_of
from tests.harness import layers
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import no_faults, on_ranks, refusal
from tests.harness.transports import Recording
from tests.harness.uses import SHAPES, Adapted, Deliberate, Halved, Scaled


class Calling(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def changed(change):
    linear = nn.Linear(2, 2)
    change(linear)
    return linear


WHOLE = {  # what can't be computed in parts
    "a forward of its class": Scaled(2, 2),
    "a wrapper": Adapted(nn.Linear(2, 2)),
    "a property of its class": Halved(2, 2),
    "a call of its class": Calling(2, 2),
    "a forward hook": changed(lambda linear: linear.register_forward_hook(lambda *_: None)),
    "a backward hook": changed(lambda linear: linear.register_full_backward_hook(lambda *_: None)),
    "a forward of its own": changed(lambda linear: setattr(linear, "forward", lambda x: 2 * x)),
}


def taken_apart(what):
    return [f"{what}: taken apart"] * can_split(WHOLE[what])


@pytest.mark.parametrize("what", WHOLE)
def test_a_replaced_forward_is_called_whole(what):
    assert taken_apart(what) == [] and can_split(nn.Linear(2, 2))


def hooked(rank, kind):
    """What is wrong with a layer one of whose projections is hooked, or with what the hook saw."""
    shape, seen = Shape(), []

    def hook(module, args, output):
        seen.append(list(output.shape) if isinstance(output, torch.Tensor) else f"a {type(output).__name__} of parts")

    def change(layer):
        layer[f"{kind}_proj"].register_forward_hook(hook)

    found = layers.block_faults(rank, shape, change=change)
    layer, attend, *_ = layers.mine(rank, shape, change=change)
    if {id(m) for m in attend.split_projections()} != {id(layer[f"{other}_proj"]) for other in ("o" if kind == "q" else "qkv")}:
        found.append("taken apart although hooked, or not although not")
    whole_and_mine = [[2, 12, 32], [2, 6, 32]]  # the reference's call, then the block's
    return found + [f"hook saw {seen}"] * (seen != whole_and_mine)


@pytest.mark.parametrize("kind", "qo")
def test_a_hook_on_a_projection_sees_its_whole_output(kind):
    no_faults(2, hooked, kind)


EVERY_MODULE = {
    "forward": nn.modules.module.register_module_forward_hook,
    "forward pre": nn.modules.module.register_module_forward_pre_hook,
    "backward": nn.modules.module.register_module_full_backward_hook,
    "backward pre": nn.modules.module.register_module_full_backward_pre_hook,
}


def hooked_everywhere(rank, kind):
    """Faults of a layer while every module is hooked, what the hook saw of it, and what it saw of the reference."""
    shape, seen = Shape(kv_heads=2, config={"head_groups": 2}), {}

    def hook(module, *args):
        shapes = [list(t.shape) for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        seen.setdefault(module, []).append(shapes)

    def use(call, layer, x, dy):
        handle = EVERY_MODULE[kind](hook)
        try:
            result = layers.backward(call, layer, x, dy)
        finally:
            handle.remove()
        of_layer = [seen.pop(module, None) for module in layer.values()]
        every.append(of_layer)
        return result

    every = []
    found = layers.block_faults(rank, shape, use)
    whole, mine = (str(shapes).replace("12, ", "6, ") for shapes in every)
    return found + [f"{kind} hooks of all modules saw {mine} instead of {whole}"] * (mine != whole)


@pytest.mark.parametrize("kind", EVERY_MODULE)
def test_hooks_of_all_modules_see_whole_projections(kind):
    no_faults(2, hooked_everywhere, kind)


def hooked_between_calls(rank):
    """A hook of all modules that comes after the first call and goes again."""
    shape, seen, counts = Shape(), [], []
    _, attend, x, _ = layers.mine(rank, shape)
    for hooked in (False, True, False):
        handle = EVERY_MODULE["forward"](lambda module, args, output: seen.append(list(output.shape))) if hooked else None
        layers.call_block(shape, attend, rank, x)
        counts.append(len(attend.split_projections()))
        if hooked:
            handle.remove()
    return counts, seen


def test_hooks_of_all_modules_count_in_the_call_they_are_there_for():
    for counts, seen in on_ranks(2, hooked_between_calls):
        assert counts == [4, 0, 4] and seen == [[2, 6, 32]] * 4


def traces(rank, shape):
    """What a forward and backward change in the modules that were given."""
    layer, attend, x, dy = layers.mine(rank, shape)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    seen = {name: sorted(vars(module)) for name, module in layer.named_modules()}
    addresses = [p.data_ptr() for p in layer.parameters()]
    layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
    found, after = [], layer.state_dict()
    if list(after) != list(before) or not all(torch.equal(after[name], before[name]) for name in before):
        found.append("the state changed")
    if seen != {name: sorted(vars(module)) for name, module in layer.named_modules()}:
        found.append("an attribute was left behind")
    if addresses != [p.data_ptr() for p in layer.parameters()]:
        found.append("a parameter was moved or replaced")
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=["separate", "one group", "fused", "node by node"])
def test_the_modules_are_as_they_were(shape):
    no_faults(2, traces, shape)


def fails_between_start_and_finish(rank, shape, place):
    """An exception in the middle of a call: nothing left on the modules, and the next call is right."""

    def broken(*args):
        raise Deliberate(place)

    layer, attend, x, _ = layers.mine(rank, shape)
    if place == "attention":
        attend.local_attention = broken
    elif place == "rope":
        attend.inputs.rope = broken
    else:
        broken.__module__ = "deepspeed.hook"  # one that doesn't keep a projection from being taken apart
        layer[place].register_forward_pre_hook(broken)
    refused = refusal(layers.call_block, shape, attend, rank, x.requires_grad_())
    found = [] if refused == ("Deliberate", place) else [f"raised {refused}"]
    found += [f"{name} kept its forward" for name, module in layer.named_modules() if "forward" in vars(module)]
    return found + layers.block_faults(rank, shape)


@pytest.mark.parametrize("place", ["attention", "rope", "k_proj", "o_proj"])
def test_an_exception_halfway_leaves_modules_and_process_group_usable(place):
    """Guard: `call_through` takes the forward away again where a hook raises before it is reached."""
    no_faults(2, fails_between_start_and_finish, Shape(), place)


def forwards_inside(rank, shape):
    """Whether a projection has its own forward back while the layer's inside runs."""
    inside = []

    def hook(*_):  # without one there is no call to go through
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
    return inside


def test_projections_have_their_own_forward_while_the_inside_runs():
    """Guard: `call_through` deletes the attribute before anything else runs."""
    no_faults(2, forwards_inside, Shape())


# Guards.


def test_a_tensor_in_the_place_of_a_parameter_is_what_is_read():
    """FSDP1 leaves views there, which ``nn.Linear`` reads, too."""
    linear = torch.nn.Linear(2, 2)
    vars(linear)["weight"] = 2 * linear.weight.detach()
    x = torch.randn(3, 2)
    assert torch.equal(torch.nn.functional.linear(x, parameter_of(linear, "weight"), linear.bias), linear(x))


WATCHED = [
    Watched("a call of its own runs", "if False:", functools.partial(taken_apart, "a call of its class")),
    Watched("given back after a raise", "pass", functools.partial(fails_between_start_and_finish, shape=Shape(), place="o_proj")),
    Watched("given back at once", "pass", functools.partial(forwards_inside, shape=Shape())),
    Watched("only harmless hooks", "if False:", functools.partial(hooked, kind="q")),
    Watched(
        "a replaced forward runs",
        "if module._compiled_call_impl is not None:",
        functools.partial(taken_apart, "a forward of its own"),
    ),
    Watched("no forward of its own", "if False:", functools.partial(taken_apart, "a forward of its class")),
    Watched("what the forward would read", "if False:", functools.partial(taken_apart, "a property of its class")),
    Watched("hooks of all modules", "if False:", functools.partial(hooked_everywhere, kind="forward")),
]


test_the_suite_notices_without_the_guard = notices(WATCHED)
