"""Defines uses of a layer, and changes of its projections and attention; tests run each on the overlapped layer and the reference.

See ``use`` and ``change`` of `layers.block_faults`, and ``use`` of `dropin.dropin_faults`.
"""

import functools
import inspect

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.harness import layers
from tests.harness.layers import Shape

SHAPES = [
    Shape(kv_heads=2),
    Shape(kv_heads=2, config={"head_groups": 1}),
    Shape(fused=True, bias=True, batch_first=False),
    Shape(bias=True, rotary=False),
]
GROUPS = [Shape(heads=8, kv_heads=4, batch_first=False, rope=False, config={"head_groups": groups}) for groups in (1, 2, 4)]

# Uses of a layer, other than one forward and one backward.


def without_grad(call, layer, x, dy):
    with torch.no_grad():
        y = call(x)
    with torch.inference_mode():
        inferred = call(x).clone()
    assert not y.requires_grad
    return {"inferred": torch.tensor(inferred.tolist(), dtype=y.dtype), "no_grad": y, **layers.backward(call, layer, x, dy)}


def without_gradient_of_the_input(call, layer, x, dy):
    y = call(x.detach())
    if y.requires_grad:
        y.backward(dy)
    return {"output": y}


def evaluation(call, layer, x, dy):
    layer.eval()
    y = call(x)
    with torch.no_grad():
        again = call(x)
    y.backward(dy)
    return {"output": y, "again": again, "dx": x.grad}


def reentrant(call, layer, x, dy):
    return layers.backward(lambda x: checkpoint(call, x, use_reentrant=True), layer, x, dy)


def non_reentrant(call, layer, x, dy):
    return layers.backward(lambda x: checkpoint(call, x, use_reentrant=False), layer, x, dy)


def checkpointed_by_deepspeed(call, layer, x, dy):
    deepspeed.checkpointing.configure(None, partition_activations=False)
    return layers.backward(lambda x: deepspeed.checkpointing.checkpoint(call, x), layer, x, dy)


def selective(call, layer, x, dy):
    """Checkpoint the layer; save matrix products, and recompute everything else."""
    kept = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}

    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return layers.backward(lambda x: checkpoint(call, x, use_reentrant=False, context_fn=contexts), layer, x, dy)


def saved_on_cpu(call, layer, x, dy):
    with torch.autograd.graph.save_on_cpu():
        y = call(x)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def in_anomaly_mode(call, layer, x, dy):
    with torch.autograd.detect_anomaly(check_nan=True):
        return layers.backward(call, layer, x, dy)


def twice_before_backward(call, layer, x, dy):
    first, second = call(x), call(x * x)
    (first * second * dy).sum().backward()
    return {"first": first, "second": second, "dx": x.grad}


def fed_with_its_own_output(call, layer, x, dy):
    return layers.backward(lambda x: call(call(x)), layer, x, dy)


def accumulation(call, layer, x, dy):
    """Run two steps of gradient accumulation."""
    call(x).backward(dy)
    y = call(2 * x)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def second_backward(call, layer, x, dy):
    y = call(x)
    y.backward(dy, retain_graph=True)
    y.backward(dy * dy)
    return {"output": y, "dx": x.grad}


def grad_of_input_then_backward(call, layer, x, dy):
    """Run a backward to the input alone, then a full backward; only the second may add to the gradients of weights."""
    y = call(x)
    (only,) = torch.autograd.grad(y, x, dy * dy, retain_graph=True)
    y.backward(dy)
    return {"only": only, "dx": x.grad}


def grad_of_one_weight_then_backward(call, layer, x, dy):
    y = call(x)
    for parameter in filter(lambda parameter: parameter.requires_grad, layer.parameters()):
        (grad,) = torch.autograd.grad(y, parameter, dy, retain_graph=True)
        parameter.grad = 2 * grad
    y.backward(dy * dy)
    return {"output": y, "dx": x.grad}


def frozen_between(call, layer, x, dy):
    """Freeze the projection of v between forward and backward, and unfreeze it after backward."""
    y, trained = call(x), [p for p in layer["v_proj"].parameters() if p.requires_grad] if "v_proj" in layer else []
    for parameter in trained:
        parameter.requires_grad_(False)
    y.backward(dy)
    for parameter in trained:
        parameter.requires_grad_(True)
    return {"output": y, "dx": x.grad}


def refused_second_derivatives(call, layer, x, dy):
    y = call(x)
    try:
        torch.autograd.grad(y, x, dy, create_graph=True)
    except RuntimeError as error:
        assert "create_graph=True" in str(error)
    return layers.backward(call, layer, x, dy)


def updated_in_place(call, layer, x, dy):
    """Change the output in place, as a residual or a dropout may."""
    y = call(x)
    y += 2
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def backward_abandoned_halfway(call, layer, x, dy):
    """Call the layer, drop the output, and then run another call with its backward."""
    call(3 * x)
    return layers.backward(call, layer, x, dy)


# Changes of the projections.


def frozen_query(layer):
    layer["q_proj"].requires_grad_(False)


def only_query_trains(layer):
    layer.requires_grad_(False)
    layer["q_proj"].requires_grad_(True)


def only_input_trains(layer):
    layer.requires_grad_(False)


def frozen_key_and_value(layer):
    layer["k_proj"].requires_grad_(False)
    layer["v_proj"].requires_grad_(False)


def frozen_output(layer):
    layer["o_proj"].requires_grad_(False)


def frozen_output_weight_under_a_bias(layer):
    layer["o_proj"].bias = nn.Parameter(torch.ones_like(layer["o_proj"].weight[:, 0]))
    layer["o_proj"].weight.requires_grad_(False)


def key_is_value(layer):
    layer["v_proj"] = layer["k_proj"]


class Adapted(nn.Module):
    """Wraps a linear layer as LoRA does."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        torch.manual_seed(7)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Linear):
    """Multiplies the output of a linear layer by 3."""

    def forward(self, x):
        return 3 * super().forward(x)


class Halved(nn.Linear):
    """A linear layer whose ``weight`` is computed: half of the parameter."""

    @property
    def weight(self):
        if "weight" not in self._parameters:  # in the constructor
            raise AttributeError("weight")
        return self._parameters["weight"] * 0.5


def halved_value_and_output(layer):
    layer["v_proj"].__class__ = layer["o_proj"].__class__ = Halved


def adapted_query_and_output(layer):
    layer["q_proj"], layer["o_proj"] = Adapted(layer["q_proj"]), Adapted(layer["o_proj"])


def adapted_key(layer):
    layer["k_proj"] = Adapted(layer["k_proj"])


def all_adapted(layer):
    for name in list(layer):
        layer[name] = Adapted(layer[name])


def subclasses(layer):
    for name in ("k_proj", "o_proj"):
        layer[name].__class__ = Scaled


def weight_normed(layer):
    torch.nn.utils.parametrizations.weight_norm(layer["v_proj"])


def hooked_key(layer):
    """Add a hook that scales the output of k; results are wrong if the hook runs twice or never."""
    layer["k_proj"].register_forward_hook(lambda module, args, y: 1.25 * y)


def hooked_value_in_backward(layer):
    layer["v_proj"].register_full_backward_hook(lambda module, dx, dy: tuple(None if g is None else 1.25 * g for g in dx))


def hooked_on_one_rank(layer):
    if torch.distributed.get_rank() == 0:
        layer["q_proj"].register_forward_hook(lambda module, args, y: None)
        layer["v_proj"].register_forward_hook(lambda module, args, y: None)


# Changes of attention: they set ``layer.attend``, and `layers.block` uses ``layer.attend(attention)`` instead of ``attention``.


class Learning(nn.Module):
    def __init__(self, attention, gain):
        super().__init__()
        self.attention, self.gain = attention, gain

    def forward(self, q, k, v):
        return self.attention(q * self.gain, k, v)


def with_gain(layer, attend):
    layer.gain = nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))
    layer.attend = attend


def attention_that_learns(layer):
    with_gain(layer, lambda attention: Learning(attention, layer.gain))


def attention_that_learns_in_a_closure(layer):
    with_gain(layer, lambda attention: lambda q, k, v: attention(q * (2 * layer.gain), k, v))


def attention_that_changes_the_query_in_place(layer):
    with_gain(layer, lambda attention: lambda q, k, v: attention(q.mul_(0.5) * layer.gain, k, v))


class Deliberate(ArithmeticError):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        raise Deliberate("planted")


# Uses of the drop-in.


def key_is_value_tensor(call, q, k, v, do):
    o = call(q, k, k)
    o.backward(do)
    return {"output": o, "dq": q.grad, "dk": k.grad}


def all_one_tensor(call, q, k, v, do):
    o = call(q, q, q)
    o.backward(do)
    return {"output": o, "dq": q.grad}


def query_in_an_auxiliary_loss(call, q, k, v, do):
    projected = 2 * q
    loss = (call(projected, k, v) * do).sum() + (projected**3).sum()
    loss.backward()
    return {"dq": q.grad, "dk": k.grad, "dv": v.grad}


def projections_first_then_both_calls(call, q, k, v, do):
    """Compute q, k and v of two calls first, then call the drop-in twice."""
    first, second = [t * 1.5 for t in (q, k, v)], [t * 0.5 for t in (q, k, v)]
    ((call(*first) + call(*second) ** 2) * do).sum().backward()
    return {"dq": q.grad, "dk": k.grad, "dv": v.grad}


def frozen_key(call, q, k, v, do):
    o = call(q, k.detach(), v)
    o.backward(do)
    return {"output": o, "dq": q.grad, "dv": v.grad}


def backward_again(call, q, k, v, do):
    o = call(q, k, v)
    o.backward(do, retain_graph=True)
    o.backward(do)
    return {"dq": q.grad, "dk": k.grad, "dv": v.grad}


def strided_inputs_and_cotangent(call, q, k, v, do):
    """Pass tensors that are not contiguous, which `InFlight` must make contiguous before it sends them."""
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in (q, k, v)]
    o = call(*strided)
    o.backward(do.transpose(1, 3).contiguous().transpose(1, 3))
    return {"output": o, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def taking(*names):
    """Return the functions of this file whose arguments have exactly these ``names``."""
    functions = filter(inspect.isfunction, list(globals().values()))
    return [function for function in functions if (*inspect.signature(function).parameters,) == names]


USES, DROPIN_USES = taking("call", "layer", "x", "dy"), taking("call", "q", "k", "v", "do")
OTHER_CHANGES = [  # only for layers without a window and without shared heads
    hooked_on_one_rank,
    attention_that_learns,
    attention_that_learns_in_a_closure,
    attention_that_changes_the_query_in_place,
]
CHANGES = [change for change in taking("layer") if change not in OTHER_CHANGES]
