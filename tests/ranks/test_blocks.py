"""Layers in a chain equal the same layers on the whole sequence, in whatever use: three pre-norm layers with an MLP, fp64, 1e-12.

Each use is run on the chain and on the model by itself (`harness.blocks`).
"""

import dataclasses
import functools
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_sp_overlap.chain.chain import Chain
from ds_sp_overlap.schedule import by_chunks, order, without_o
from tests.harness import blocks, layers, transports
from tests.harness.blocks import LAYERS, Blocks
from tests.harness.cases import pairs, singles
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.ranks import no_faults, on_ranks, refusal
from tests.harness.transports import Recording
from tests.harness.uses import Adapted

SHAPES = [
    Blocks(heads, kv_heads, 4, batch, lengths, batch_first, fused=fused, bias=fused, norms=norms, chunks=chunks, config={"head_groups": groups})
    for heads, kv_heads in ((4, 4), (8, 2))
    for groups in (1, 2)
    for chunks, batch, lengths, batch_first, fused, norms in (
        (1, 1, (6, 6), True, False, False),
        (2, 3, (5, 3), True, True, False),
        (4, 1, (8, 8), False, False, True),
        (4, 3, (3, 6), True, False, True),
    )
]  # fmt: skip
RERUNS = "none", "all", "but attention"
FEW = [SHAPES[2], SHAPES[5], Blocks(2, 2, 8, 1, (6, 6), chunks=3, rope=False, config={"head_groups": 1})]


def rerun_too(shapes, reruns=RERUNS):
    return [dataclasses.replace(shape, recompute=recompute) for recompute in reruns for shape in shapes]


OF_CHAINS = pairs(rerun_too(SHAPES))


@pytest.mark.parametrize("recompute", RERUNS)
def test_a_chain_equals_the_whole_sequence(recompute):
    no_faults(2, blocks.faults_of_all, [shape for shape in OF_CHAINS if shape.recompute == recompute])


def test_so_it_does_on_four_ranks():
    """With KV heads that ranks share, ranks with other counts of heads, with fewer tokens than chunks, and without tokens."""
    shapes = [
        Blocks(9, 3, 4, 2, (2, 1, 2, 3), chunks=2),
        Blocks(8, 2, 4, 1, (4, 4, 4, 4), chunks=4, config={"head_groups": 2}),
        Blocks(4, 1, 4, 3, (1, 2, 5, 1), False, chunks=3),
        Blocks(4, 4, 4, 2, (5, 0, 4, 2), chunks=2, config={"head_groups": 1}),
    ]
    no_faults(4, blocks.faults_of_all, singles(rerun_too(shapes)))


def spoiled(rank, shapes, transport):
    found = []
    with transports.spoiled_buffers():
        for shape in shapes:
            mover = transport()
            found += [f"{shape}: {fault}" for fault in blocks.faults(rank, shape, transport=mover) + mover.faults]
            found += mover.unfinished() if transport is transports.Late else []
    return found


TRANSPORTS = transports.Late, transports.Delayed
OF_TRANSPORTS = singles(itertools.product(TRANSPORTS, rerun_too(FEW)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_results_do_not_depend_on_when_the_bytes_move(transport):
    no_faults(2, spoiled, [shape for by, shape in OF_TRANSPORTS if by == transport], transport)


# Uses.


def without_grad(model, x, dy):
    with torch.no_grad():
        y = model(x)
    with torch.inference_mode():
        inferred = model(x).clone()
    assert not y.requires_grad
    return {"output": y, "inferred": torch.tensor(inferred.tolist(), dtype=y.dtype)}


def evaluation(model, x, dy):
    model.eval()
    y = model(x)
    with torch.no_grad():
        again = model(x)
    y.backward(dy)
    return {"output": y, "again": again, "dx": x.grad}


def accumulation(model, x, dy):
    model(x).backward(dy)
    y = model(2 * x)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def second_backward(model, x, dy):
    y = model(x)
    y.backward(dy, retain_graph=True)
    y.backward(dy * dy)
    return {"output": y, "dx": x.grad}


def grad_of_input_then_backward(model, x, dy):
    y = model(x)
    (only,) = torch.autograd.grad(y, x, dy * dy, retain_graph=True)
    y.backward(dy)
    return {"only": only, "dx": x.grad}


def grad_of_one_weight_then_backward(model, x, dy):
    y = model(x)
    for parameter in model.layers[1].mlp.parameters():
        (parameter.grad,) = torch.autograd.grad(y, parameter, dy, retain_graph=True)
    y.backward(dy * dy)
    return {"output": y, "dx": x.grad}


def grad_of_everything(model, x, dy):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    y = model(x)
    (dx, *gradients) = torch.autograd.grad(y, [x, *parameters], dy)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    return {"output": y, "dx": dx}


def twice_before_backward(model, x, dy):
    first, second = model(x), model(x * x)
    (first * second * dy).sum().backward()
    return {"first": first, "second": second, "dx": x.grad}


def of_a_frozen_input(model, x, dy):
    y = model(x.detach())
    y.backward(dy)
    return {"output": y}


def early_exit(model, x, dy):
    """What was started for the last layer is of no use."""
    model.chain()
    y = model.layers[1](model.layers[0](x))
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def skipped_layer(model, x, dy):
    model.chain()
    y = model.layers[2](model.layers[0](x))
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def a_layer_twice(model, x, dy):
    model.chain()
    y = model.layers[1](model.layers[1](model.layers[0](x)))
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def a_layer_alone(model, x, dy):
    model.chain()
    y = model.layers[1](x)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def hidden_states_in_a_loss(model, x, dy):
    """A hook that reads, as that of ``output_hidden_states``."""
    seen = []
    hooks = [layer.register_forward_hook(lambda module, given, out: seen.append(out)) for layer in model.layers]
    y = model(x)
    sum((h**2 * dy).sum() for h in [*seen, y]).backward()
    for hook in hooks:
        hook.remove()
    return {"output": y, "dx": x.grad, **{f"hidden {at}": h for at, h in enumerate(seen)}}


def replaced_by(change, model, x, dy):
    hook = model.layers[0].register_forward_hook(lambda module, given, out: change(out))
    y = model(x)
    y.backward(dy)
    hook.remove()
    return {"output": y, "dx": x.grad}


class Reversed(torch.autograd.Function):
    """Does nothing to what it is given, and much to its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -2 * dy


hook_that_replaces = functools.partial(replaced_by, lambda out: out * 1.5)
hook_that_changes_in_place = functools.partial(replaced_by, lambda out: out.mul_(1.5))
hook_that_detaches = functools.partial(replaced_by, lambda out: out.detach())
hook_that_changes_the_gradient = functools.partial(replaced_by, Reversed.apply)


def gradient_hook_on_hidden_states(model, x, dy):
    def hook(module, given, out):
        out.register_hook(lambda gradient: 3 * gradient)

    handle = model.layers[1].register_forward_hook(hook)
    y = model(x)
    y.backward(dy)
    handle.remove()
    return {"output": y, "dx": x.grad}


def full_backward_hook(model, x, dy):
    seen = []
    hooks = [layer.register_full_backward_hook(lambda module, given, out: seen.append(out[0])) for layer in model.layers]
    y = model(x)
    y.backward(dy)
    for hook in hooks:
        hook.remove()
    return {"output": y, "dx": x.grad, **{f"gradient {at}": g for at, g in enumerate(seen)}}


def retained_gradient(model, x, dy):
    seen = []

    def hook(module, given, out):
        out.retain_grad()
        seen.append(out)

    hooks = [layer.register_forward_hook(hook) for layer in model.layers]
    y = model(x)
    y.backward(dy)
    for handle in hooks:
        handle.remove()
    return {"output": y, "dx": x.grad, **{f"gradient {at}": h.grad for at, h in enumerate(seen)}}


def checkpointed_as_a_whole(model, x, dy):
    y = checkpoint(model, x, use_reentrant=False)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def checkpointed_reentrant(model, x, dy):
    y = checkpoint(model, x, use_reentrant=True)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def backward_abandoned(model, x, dy):
    model(3 * x)
    return blocks.backward(model, x, dy)


USES = {
    "as ever": blocks.backward,
    "no_grad": without_grad,
    "evaluation": evaluation,
    "accumulation": accumulation,
    "second backward": second_backward,
    "grad of input, then backward": grad_of_input_then_backward,
    "grad of one weight, then backward": grad_of_one_weight_then_backward,
    "grad of everything": grad_of_everything,
    "twice before backward": twice_before_backward,
    "frozen input": of_a_frozen_input,
    "early exit": early_exit,
    "skipped layer": skipped_layer,
    "a layer twice": a_layer_twice,
    "a layer alone": a_layer_alone,
    "hidden states in a loss": hidden_states_in_a_loss,
    "hook that replaces": hook_that_replaces,
    "hook that changes in place": hook_that_changes_in_place,
    "hook that detaches": hook_that_detaches,
    "hook that changes the gradient": hook_that_changes_the_gradient,
    "gradient hook": gradient_hook_on_hidden_states,
    "full backward hook": full_backward_hook,
    "retained gradient": retained_gradient,
    "checkpointed": checkpointed_as_a_whole,
    "checkpointed, reentrant": checkpointed_reentrant,
    "abandoned": backward_abandoned,
}


OF_USES = singles(itertools.product(USES, rerun_too(FEW)))


def faults_of(rank, use, change="nothing", shapes=None):
    shapes = [shape for name, shape in OF_USES if name == use] if shapes is None else shapes
    return blocks.faults_of_all(rank, shapes, USES[use], CHANGES[change])


@pytest.mark.parametrize("use", USES)
def test_right_in_every_use(use):
    no_faults(2, faults_of, use)


def refilled(at, layer, tables, hidden):
    """Run a layer with the tables that all layers are given, filled anew."""
    for table in tables:
        table.mul_(0.9)
    return layer(hidden)


def under_its_own_autocast(at, layer, tables, hidden):
    with torch.autocast("cpu", torch.bfloat16, enabled=at % 2 == 0):
        return layer(hidden)


def ahead_and_not(rank, shape, between):
    """A chain whose q, k and v are started ahead, against one in which none are; ``between`` layers something changes."""
    model = blocks.Model(shape)
    each, tables = blocks.block_layers(model, shape, torch.distributed.group.WORLD), blocks.positions(shape, rank)
    x, outputs = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0]), []
    for ahead in (False, False, True):  # nothing is started ahead of a layer that was never called
        chain, hidden, given = Chain(shape.chunks), x, tuple(table.clone() for table in tables)
        for at, (layer, successor) in enumerate(zip(each, [*each[1:], None])):
            run = functools.partial(chain.run, layer, successor if ahead else None, position_embeddings=given)
            hidden = between(at, run, given, hidden)
        outputs.append(hidden.detach())
    return layers.faults(1e-12, output=(outputs[2], outputs[1]))


@pytest.mark.parametrize("between, dtype", [(refilled, torch.float64), (under_its_own_autocast, torch.float32)])
def test_q_k_and_v_that_were_started_ahead_are_used_only_if_nothing_changed_since(between, dtype):
    """Tables that are filled anew, or another state of autocast."""
    no_faults(2, ahead_and_not, Blocks(4, 4, 8, 1, (6, 6), dtype=dtype, config={"head_groups": 1}), between)


ASKING = "grad of input, then backward", "grad of one weight, then backward"


@pytest.mark.parametrize("use", ASKING)
def test_gradients_of_some_may_be_asked_for_in_one_chunk(use):
    """The gradient between two layers is then the one that waits for the MLP's weight gradients, which nobody asks for."""
    no_faults(2, faults_of, use, "nothing", rerun_too([dataclasses.replace(FEW[0], chunks=1)]))


# Parameters that don't train, or are dressed up.


def frozen(*names):
    def change(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))

    return change


def alone(*names):
    def change(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))

    return change


def adapted(model):
    """As LoRA does it, in the middle layer's attention and in the last one's MLP."""
    at, mlp = model.layers[1].attention, model.layers[2].mlp
    for name in [name for name in at if name in ("q_proj", "qkv_proj", "o_proj")]:
        at[name] = Adapted(at[name])
    mlp.down, mlp.gate = Adapted(mlp.down), Adapted(mlp.gate)


def tied(model):
    """One weight in two layers, one linear layer in two places."""
    model.layers[2].mlp.up.weight = model.layers[0].mlp.up.weight
    model.layers[1].mlp.up = model.layers[1].mlp.gate


def weight_normed(model):
    torch.nn.utils.parametrizations.weight_norm(model.layers[1].mlp.up)


CHANGES = {
    "nothing": None,
    "q and k frozen": frozen("q_proj", "k_proj", "qkv_proj"),
    "MLP frozen": frozen("mlp"),
    "norms frozen": frozen("norm"),
    "first layer frozen": frozen("layers.0"),
    "last layer frozen": frozen("layers.2"),
    "all frozen": frozen(""),
    "one bias trains": alone("layers.1.mlp.down.bias", "layers.1.attention.o_proj.bias"),
    "norms train": alone("norm"),
    "adapted": adapted,
    "tied": tied,
    "weight norm": weight_normed,
}


OF_CHANGES = singles(itertools.product(CHANGES, rerun_too(FEW)))


@pytest.mark.parametrize("change", CHANGES)
def test_right_for_models_with(change):
    no_faults(2, faults_of, "as ever", change, [shape for name, shape in OF_CHANGES if name == change])


@pytest.mark.parametrize("change", ["q and k frozen", "first layer frozen", "norms train", "adapted", "one bias trains"])
def test_right_for_frozen_inputs_with(change):
    """One bias alone trains only where there is one."""
    shapes = [shape for name, shape in OF_CHANGES if name == change]
    no_faults(2, faults_of, "frozen input", change, [shape for shape in shapes if shape.bias or change != "one bias trains"])


# The order.


def recorded(rank, heads, groups, chunks, recompute):
    """Forward and backward of the second of three steps, as they were launched and finished."""
    config = {"head_groups": groups}
    shape, mover = Blocks(heads, 4, lengths=(8, 8), chunks=chunks, recompute=recompute, config=config), Recording()
    model = blocks.Model(shape)
    blocks.enchain(model, shape, rank, torch.distributed.group.WORLD, mover)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    with torch.no_grad():
        model(x)
    mover.log.clear()
    y = model(x.requires_grad_())
    forward, mover.log[:] = list(mover.log), []
    y.backward(dy)
    return forward, list(mover.log)


@pytest.mark.parametrize(
    "heads,kinds,chunks",
    [*((4, ("qkv",) * g, c) for g, c in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4))), (16, ("qkv", "q", "qkv", "q"), 2)],
)
@pytest.mark.parametrize("recompute", RERUNS)
def test_exchanges_start_and_finish_as_drawn(heads, kinds, chunks, recompute):
    """Four KV heads; of four groups every other one brings none. The backward of this attention reads no o."""
    chain = without_o(by_chunks(kinds, chunks, recompute)).chain(LAYERS)
    for seen in on_ranks(2, recorded, heads, len(kinds), chunks, recompute):
        assert seen == (order(chain, chain.forward), order(chain, chain.backward))


class Products(TorchDispatchMode):
    """Writes weight gradients of the MLPs and of the projections into a log, told by their shape."""

    def __init__(self, log, width):
        super().__init__()
        self.log, self.width = log, width

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            function in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
            and result.shape[0] * result.shape[1] % self.width**2 == 0
        ):
            self.log.append("dMLP" if max(result.shape) == 2 * self.width else "dW")
        return result


def wgrads_out_of_place(rank):
    """Where weight gradients are made that neither the last exchange of do nor the first of dq, dk, dv hides."""
    shape, mover = Blocks(4, 4, 8, 1, (9, 9), chunks=3, config={"head_groups": 1}), Recording()
    model = blocks.Model(shape)
    blocks.enchain(model, shape, rank, torch.distributed.group.WORLD, mover)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    with torch.no_grad():
        model(x)
    y = model(x.requires_grad_())
    mover.log.clear()
    with Products(mover.log, shape.width):
        y.backward(dy)
    log = " ".join(mover.log)
    under_do = [part.count("dW") for part in re.findall(r">do.0 ((?:d\w+ )*)<do.2", log)]
    under_dq = [part.count("dMLP") for part in re.findall(r">dqkv.0 ((?:d\w+ )*)<dqkv.2", log)]
    of_layer = 3 * 3  # three linear layers, three chunks
    if under_do == [3, 12, 12] and under_dq == [of_layer] * 3 and log.count("dMLP") == 3 * of_layer:
        return []
    return [log]


def test_weight_gradients_are_made_under_exchanges_that_nothing_else_hides():
    """The first layer's projections are not: theirs are made between the chunks that are waited for."""
    no_faults(2, wgrads_out_of_place)


# Hooks, and gradients that nobody may ask for.


def counted_hooks(rank, shape):
    """Calls of each module's hooks in a step, and of each parameter's; and the order in which gradients are delivered."""
    model = blocks.Model(shape)
    blocks.enchain(model, shape, rank, torch.distributed.group.WORLD)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    with torch.no_grad():
        model(x)
    forward, delivered = [], []

    def harmless(name):
        return lambda *_: forward.append(name)

    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleDict, nn.ModuleList)):
            hook = harmless(name)
            hook.__module__ = "deepspeed.runtime"
            module.register_forward_pre_hook(hook)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: delivered.append(name))
    model(x.requires_grad_()).backward(dy)
    found = [f"{name} called {forward.count(name)} times" for name in set(forward) if forward.count(name) != 1]
    found += [
        f"{name} delivered {delivered.count(name)} times" for name, _ in model.named_parameters() if delivered.count(name) != 1
    ]
    found += [f"{len(forward)} modules"] * (len(forward) != 1 + LAYERS * (11 + 2 * shape.norms))
    return found, delivered


@pytest.mark.parametrize("shape", FEW[::2], ids=str)
def test_every_module_is_called_once_and_every_gradient_delivered_once_in_one_order(shape):
    (found, delivered), (others, elsewhere) = on_ranks(2, counted_hooks, shape)
    assert found == others == [] and delivered == elsewhere


def refused(rank, ask, shape=FEW[0]):
    model, seen = blocks.Model(shape), []
    blocks.enchain(model, shape, rank, torch.distributed.group.WORLD)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    with torch.no_grad():
        model(x)
    model.layers[1].register_forward_hook(lambda module, given, out: seen.append(out))
    y = model(x.requires_grad_())
    return refusal(ASKED[ask], y, seen[0], dy, [x, *model.parameters()])


def asked_by_autograd(y, hidden, dy, others):
    torch.autograd.grad(y, hidden, dy)


def asked_beside_others(y, hidden, dy, others):
    torch.autograd.grad(y, [hidden, *others], dy)


def asked_in_a_loss_of_hidden_states(y, hidden, dy, others):
    torch.autograd.grad((y * dy).sum() + (hidden * dy).sum() + hidden.sin().sum(), [*others, hidden])


def asked_by_retain_grad(y, hidden, dy, others):
    hidden.retain_grad()
    y.backward(dy)


def asked_by_inputs(y, hidden, dy, others):
    y.backward(dy, inputs=[hidden, *others])


def asked_by_a_hook(y, hidden, dy, others):
    hidden.register_hook(lambda gradient: None)
    y.backward(dy)


def asked_for_second_derivatives(y, hidden, dy, others):
    y.backward(dy, create_graph=True)


ASKED = {
    "grad": asked_by_autograd,
    "beside others": asked_beside_others,
    "in a loss of hidden states": asked_in_a_loss_of_hidden_states,
    "inputs": asked_by_inputs,
    "retain_grad": asked_by_retain_grad,
    "hook": asked_by_a_hook,
    "twice": asked_for_second_derivatives,
}


@pytest.mark.parametrize("ask", ASKED)
def test_what_would_be_a_part_of_a_gradient_is_refused(ask):
    words = (
        "no second derivatives" if ask == "twice" else "somebody asks for the gradient of the hidden states in front of this layer"
    )
    for shape in rerun_too(FEW[:1]):
        for kind, message in on_ranks(2, refused, ask, shape):
            assert kind == "RuntimeError" and words in message


class AnotherInEachAccess(nn.Module):
    """A parametrization as spectral_norm's or dropout's, which computes another weight whenever it is asked."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return weight * (1 + self.count)


def evaluated_again(rank):
    """Weights that one forward and backward compute more than once, or in which the gradient is not that of the product."""
    faults = []

    def expect_once(name, parametrized, model, shape):
        step = AnotherInEachAccess()
        parametrize.register_parametrization(parametrized, "weight", step)
        x, dy = layers.whole_inputs(shape)
        for call in range(2):
            model.zero_grad()
            before = step.count
            y = run(layers.my_slice(shape, rank, x).requires_grad_())
            y.backward(layers.my_slice(shape, rank, dy))
            if step.count != before + 1:
                faults.append(f"{name}, call {call}: {step.count - before}")

    for name in ("q_proj", "o_proj"):
        for config in ({"head_groups": 1}, {"head_groups": 2}, {"head_groups": 2, "window": 1}):
            shape = layers.Shape(heads=4, kv_heads=4, config=config)
            modules = layers.projections(shape)
            attend = layers.block(shape, modules, torch.distributed.group.WORLD)
            run = functools.partial(layers.call_block, shape, attend, rank)
            expect_once(f"{name} {config}", modules[name], modules, shape)
    for name in ("mlp.up", "mlp.down", "attention.o_proj", "attention.q_proj"):
        shape = Blocks(4, 4, 8, 2, (6, 4), chunks=2, config={"head_groups": 2})
        run = blocks.Model(shape)
        module = run.layers[1].mlp if name.startswith("mlp") else run.layers[1].attention
        part = name.split(".")[1]
        parametrized = module[part] if isinstance(module, (dict, nn.ModuleDict)) else getattr(module, part)
        blocks.enchain(run, shape, rank, torch.distributed.group.WORLD)
        expect_once(name, parametrized, run, shape)
    return faults


def test_a_weight_that_is_computed_is_computed_once_a_call():
    no_faults(2, evaluated_again)


# Guards.


def unrefused(rank, ask):
    return [] if refused(rank, ask) else ["a part of the gradient passed for all of it"]


WATCHED = [
    Watched(
        Guard("of this backward alone", without="now = self.backward = torch._C._current_graph_task_id()\nif False:"),
        functools.partial(faults_of, use="grad of input, then backward"),
    ),
    Watched(Guard("no part of a gradient", without="if False:"), functools.partial(unrefused, ask="grad")),
    Watched(Guard("no part of a gradient beside others", without="if False:"), functools.partial(unrefused, ask="beside others")),
    Watched(
        Guard("only harmless nodes between", without="if False:"),
        functools.partial(faults_of, use="hook that changes the gradient"),
    ),
    Watched(
        Guard("hidden states as they were", without="return True"),
        functools.partial(faults_of, use="hook that changes in place", shapes=FEW),
    ),
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
