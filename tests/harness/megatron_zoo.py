"""Forks of Megatron-DeepSpeed's attention and its layer that nearly look the same, for `frameworks/test_megatron_zoo.py`.

An edit does nothing to the small numbers of a first step, or with the parameters that it is made
with; then it is `activated`. Judged is each step against the fork itself on the whole sequence.
"""

import functools
import types

import torch
import torch.nn.functional as F
from torch import nn

import ds_sp_overlap
from tests.harness import megatron_layers, megatron_models, reference
from tests.harness.layers import faults
from tests.harness.listening import listening
from tests.harness.megatron_layers import ParallelAttention
from tests.harness.megatron_models import Model, ParallelTransformerLayer

BLOCK = {"scope": "block", "token_chunks": 2, "head_groups": 1}


def _ones(module, name, width):
    """A parameter of ones, alike for edited layers that are made and such that are changed into one."""
    module.register_parameter(name, nn.Parameter(torch.ones(width, dtype=torch.float64)))


# Of the attention.


class Clamped(ParallelAttention):
    def heads_of(self, hidden_states):
        return [x.clamp(-8, 8) for x in super().heads_of(hidden_states)]


class Scaled(ParallelAttention):
    def prepare(self):
        _ones(self, "scale", self.hidden_size_per_attention_head)

    def heads_of(self, hidden_states):
        q, k, v = super().heads_of(hidden_states)
        return q * self.scale, k, v


class Gated(ParallelAttention):
    def prepare(self):
        self.gate = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def attend(self, q, k, v, attention_mask, rotary_pos_emb):
        output, bias = super().attend(q, k, v, attention_mask, rotary_pos_emb)
        return output + self.gate, bias


class Normed(ParallelAttention):
    def prepare(self):
        self.q_norm = nn.RMSNorm(self.hidden_size_per_attention_head, dtype=torch.float64)

    def heads_of(self, hidden_states):
        q, k, v = super().heads_of(hidden_states)
        return self.q_norm(q), k, v


class Interleaved(ParallelAttention):
    """Rows [q, k, v of head 0 | q, k, v of head 1 | ..], as Megatron-LM has them."""

    def heads_of(self, hidden_states):
        y = self.query_key_value(hidden_states)[0]
        return y.unflatten(-1, (self.num_attention_heads, 3, -1)).unbind(3)


class KeysFirst(ParallelAttention):
    def heads_of(self, hidden_states):
        q, k, v = super().heads_of(hidden_states)
        return k, q, v


class Swapped(ParallelAttention):
    """Gives its projection the two halves of the hidden states in another order."""

    def heads_of(self, hidden_states):
        first, last = hidden_states.chunk(2, -1)
        return super().heads_of(torch.cat((last, first), -1))


class Relu(ParallelAttention):
    def heads_of(self, hidden_states):
        q, k, v = super().heads_of(hidden_states)
        return F.relu(q), k, v


class ByLength(ParallelAttention):
    """Scales a longer sequence than that of the first step."""

    def heads_of(self, hidden_states):
        q, k, v = super().heads_of(hidden_states)
        return (q * 0.5 if hidden_states.shape[0] > 12 else q), k, v


@torch.jit.script
def capped(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-8.0, 8.0)


class Scripted(ParallelAttention):
    def heads_of(self, hidden_states):
        q, k, v = super().heads_of(hidden_states)
        return capped(q), k, v


def timed(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(ParallelAttention):
    forward = timed(ParallelAttention.forward)


def capping(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        output, bias = forward(self, *args, **kwargs)
        return output.clamp(-8, 8), bias

    return wrapper


class DecoratedToCap(ParallelAttention):
    forward = capping(ParallelAttention.forward)


class OwnCall(ParallelAttention):
    def __call__(self, *args, **kwargs):
        output, bias = super().__call__(*args, **kwargs)
        return output.clamp(-8, 8), bias


class Positionless(ParallelAttention):
    """Hands no positions on, and is right without them."""

    def attend(self, q, k, v, attention_mask, rotary_pos_emb):
        return super().attend(q, k, v, attention_mask, None)


class WithoutBias(ParallelAttention):
    def attend(self, q, k, v, attention_mask, rotary_pos_emb):
        return super().attend(q, k, v, attention_mask, rotary_pos_emb)[0], None


class Lifted(ParallelAttention):
    """Repeats KV heads, which HEAD would do but for an assertion."""

    def heads_of(self, hidden_states):
        y, d = self.query_key_value(hidden_states)[0], self.hidden_size_per_attention_head
        kv = self.num_key_value_heads * d
        q, k, v = y.split((self.num_attention_heads * d, kv, kv), -1)
        return [self.repeated(x.unflatten(-1, (-1, d))) for x in (q, k, v)]

    def repeated(self, heads):
        n = self.num_attention_heads // heads.shape[2]
        return heads if n == 1 else heads[:, :, :, None].expand(*heads.shape[:3], n, heads.shape[3]).flatten(2, 3)


class Tiled(Lifted):
    """Repeats KV heads one after another, so that a query head meets another one."""

    def repeated(self, heads):
        return heads.repeat(1, 1, self.num_attention_heads // heads.shape[2], 1)


class ClampedExchange(megatron_layers.DistributedAttention):
    def forward(self, query, *args, **kwargs):
        return super().forward(query.clamp(-8, 8), *args, **kwargs)


class ForkedExchange(ParallelAttention):
    def prepare(self):
        self.dist_attn.__class__ = ClampedExchange


class HookedExchange(ParallelAttention):
    def prepare(self):
        self.dist_attn.register_forward_hook(lambda module, args, y: y.clamp(-8, 8))


class Unused(ParallelAttention):
    """Holds a parameter that it does nothing with, so far."""

    def prepare(self):
        _ones(self, "spare", 3)


SAME = dict(lacks="")
UNKNOWN = "its forward computes what is not known here: "
ATTENTIONS = {
    Clamped: dict(lacks=UNKNOWN + "clamp"),
    Scaled: dict(lacks="its forward reads scale"),
    Gated: dict(lacks="its forward reads gate"),
    Normed: dict(lacks="its forward calls q_norm (RMSNorm)"),
    Interleaved: dict(lacks="its forward gives dist_attn another q than the rows of query_key_value, in order"),
    KeysFirst: dict(lacks="its forward gives dist_attn another q than the rows of query_key_value, in order"),
    Swapped: dict(lacks="its forward gives query_key_value something else than the hidden states as they are"),
    Relu: dict(lacks=UNKNOWN + "relu"),
    ByLength: dict(lacks="its forward computes with a size of its tensors"),
    Scripted: dict(lacks=UNKNOWN + "clamp"),
    Decorated: SAME,
    DecoratedToCap: dict(lacks=UNKNOWN + "clamp"),
    OwnCall: dict(lacks="it has a __call__ of its own"),
    Positionless: dict(lacks="its forward gives dist_attn another rotary_pos_emb"),
    WithoutBias: dict(lacks="its forward doesn't return (output, bias) of dense"),
    Lifted: dict(lacks="", shape=dict(heads=8, kv_heads=4)),
    Tiled: dict(
        lacks="its forward gives dist_attn another k than the rows of query_key_value, in order",
        shape=dict(heads=8, kv_heads=4),
    ),
    ForkedExchange: dict(lacks="dist_attn (ClampedExchange): its forward is not DeepSpeed's"),
    HookedExchange: dict(lacks="dist_attn has a hook of its own"),
    Unused: dict(lacks="its forward does nothing that is known here with spare"),
}


# Of the layer.


class ClampedLayer(ParallelTransformerLayer):
    def add(self, residual, output, bias):
        return super().add(residual, output, bias).clamp(-50, 50)


class ScaledLayer(ParallelTransformerLayer):
    """Scales residuals by a number, which is 1."""

    residual_scale = 1.0

    def add(self, residual, output, bias):
        return super().add(residual * self.residual_scale, output, bias)


class LearnedLayer(ParallelTransformerLayer):
    def prepare(self):
        _ones(self, "scale", self.input_layernorm.weight.shape)

    def add(self, residual, output, bias):
        return super().add(residual * self.scale, output, bias)


class LengthLayer(ParallelTransformerLayer):
    def add(self, residual, output, bias):
        return super().add(residual * (0.5 if residual.shape[0] > 12 else 1), output, bias)


@torch.jit.script
def scripted_add(residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return residual + output.clamp(-50, 50)


class ScriptedLayer(ParallelTransformerLayer):
    def add(self, residual, output, bias):
        return scripted_add(residual, output if bias is None else output + bias)


@torch.jit.script
def fused_add(residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return residual + output


class FusedLayer(ParallelTransformerLayer):
    """As HEAD, whose sums are scripted."""

    def add(self, residual, output, bias):
        return fused_add(residual, output if bias is None else output + bias)


class DecoratedLayer(ParallelTransformerLayer):
    forward = timed(ParallelTransformerLayer.forward)


class CappedLayer(ParallelTransformerLayer):
    forward = capping(ParallelTransformerLayer.forward)


class OwnCallLayer(ParallelTransformerLayer):
    def __call__(self, *args, **kwargs):
        output, loss = super().__call__(*args, **kwargs)
        return output.clamp(-50, 50), loss


class ShiftedLayer(ParallelTransformerLayer):
    """Adds a constant, which is 0."""

    def add(self, residual, output, bias):
        return super().add(residual + torch.tensor(self.shift, dtype=residual.dtype), output, bias)

    shift = 0.0


class AddingLayer(ShiftedLayer):
    """Adds a constant, which is none."""

    shift = 0.5


def make_viewless_tensor(inp, requires_grad, keep_graph):
    return inp.clamp(-50, 50)


core = types.ModuleType("core")
core.utils = types.ModuleType("core.utils")
core.utils.make_viewless_tensor = make_viewless_tensor


class ViewlessLayer(ParallelTransformerLayer):
    """As HEAD, but for what its function of that name does."""

    def add(self, residual, output, bias):
        y = super().add(residual, output, bias)
        return core.utils.make_viewless_tensor(inp=y, requires_grad=y.requires_grad, keep_graph=True)


LAYERS = {
    ClampedLayer: UNKNOWN + "clamp",
    ScaledLayer: "",
    LearnedLayer: "its forward reads scale",
    LengthLayer: "its forward computes with a size of its tensors",
    ScriptedLayer: UNKNOWN + "clamp",
    FusedLayer: "",
    DecoratedLayer: "",
    CappedLayer: UNKNOWN + "clamp",
    OwnCallLayer: "it has a __call__ of its own",
    ShiftedLayer: "",
    AddingLayer: "its forward makes a tensor",
    ViewlessLayer: "its forward uses the global core.utils.make_viewless_tensor",
}


# Judge.


def made(shape, attention=ParallelAttention, layer=ParallelTransformerLayer):
    """A model of the fork, of random weights, alike on every rank."""
    model = megatron_models.model(shape, torch.distributed.group.WORLD)
    for each in model.layers:
        each.__class__, each.self_attention.__class__ = layer, attention
        for part in (each, each.self_attention):
            getattr(part, "prepare", lambda: None)()
    return model


def activated(model):
    """Make edits do something: large weights, other parameters, other constants."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter *= 30
            elif name.endswith(("scale", "gate", "q_norm.weight")):
                parameter += torch.rand_like(parameter)
    for each in model.layers:
        if isinstance(each, ScaledLayer):
            each.residual_scale = 1.5
        if isinstance(each, ShiftedLayer):
            each.shift = 0.75


def alone(model):
    """Have each attention attend by itself, on the whole sequence."""
    for each in model.layers:
        vars(each.self_attention.dist_attn)["forward"] = functools.partial(_attend, each.self_attention.dist_attn)
    return model


def _attend(exchange, q, k, v, batch_dim_idx, rotary_pos_emb=None):
    if isinstance(exchange, ClampedExchange):
        q = q.clamp(-8, 8)
    if rotary_pos_emb is not None:
        cos, sin = (table[:, 0, 0] for table in rotary_pos_emb)
        q, k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
    return exchange.local_attn(q, k, v)


def step(model, x, dy, mask, tables):
    """Output, dx and the parameters' gradients of a step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y, _ = model(x, mask, tables)
    y.backward(dy)
    return {"output": y.detach(), "dx": x.grad, **{f"d {name}": p.grad for name, p in model.named_parameters()}}


def judged(rank, section, shape, attention=ParallelAttention, layer=ParallelTransformerLayer):
    """Faults of a first step, and of one with the fork's edits at work; what the table says, and what was said.

    A step that was refused has no faults but its name.
    """
    size = torch.distributed.get_world_size()
    cut = lambda t: t.chunk(size)[rank].contiguous()  # noqa: E731
    model, whole = made(shape, attention, layer), alone(made(shape, attention, layer))
    found = []
    with listening() as messages:
        report = ds_sp_overlap.enable(model, section)
        for change in (lambda model: None, activated):
            for each in (model, whole):
                change(each)
            x, dy, mask, tables = megatron_layers.inputs(shape)
            if change is activated:  # longer, too
                longer = Model(**{**vars(shape), "seq": 4 * shape.seq})
                x, dy, mask, tables = megatron_layers.inputs(longer)
            expected = step(whole, x, dy, mask, tables)
            try:
                got = step(model, cut(x), cut(dy), mask, tables)
            except RuntimeError as error:
                found.append(f"refused: {error}")
                continue
            pairs = {}
            for name, want in expected.items():
                if name.startswith("d ") and (mine := got[name]) is not None:
                    torch.distributed.all_reduce(mine)
                pairs[name] = got[name], want if name.startswith("d ") else cut(want)
            found += faults(1e-9, **pairs)
    return found, {layer.lacks for layer in report.layers}, messages
