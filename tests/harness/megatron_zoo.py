"""Forks of Megatron-DeepSpeed's attention that nearly look the same, for `frameworks/test_megatron_zoo.py`.

An edit does nothing to the small numbers of a first step, or with the parameters that it is made
with; then it is `activated`. Judged is each step against the fork itself on the whole sequence.
"""

import functools
import types

import torch
import torch.nn.functional as F
from torch import nn

import ds_sp_overlap
from tests.harness import megatron_layers, reference
from tests.harness.layers import faults
from tests.harness.listening import listening
from tests.harness.megatron_layers import ParallelAttention, Shape


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


core = types.ModuleType("core")
core.capped = lambda x: x.clamp(-8, 8)


class OfAPackage(ParallelAttention):
    """Calls a function of another module of Megatron's."""

    def heads_of(self, hidden_states):
        q, k, v = super().heads_of(hidden_states)
        return core.capped(q), k, v


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
    Scripted: dict(lacks="its forward uses the global capped"),
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
    OfAPackage: dict(lacks="its forward uses the global core.capped"),
    Unused: dict(lacks="its forward does nothing that is known here with spare"),
}


# Judge.


def made(shape, attention):
    """A layer of the fork, of random weights, alike on every rank."""
    layer = megatron_layers.layer(shape, torch.distributed.group.WORLD)
    layer.self_attention.__class__ = attention
    getattr(layer.self_attention, "prepare", lambda: None)()
    return layer


def activated(layer):
    """Make edits do something: large weights, other parameters."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 2:
                parameter *= 30
            elif name.endswith(("scale", "gate", "q_norm.weight")):
                parameter += torch.rand_like(parameter)


def alone(layer):
    """Have the attention attend by itself, on the whole sequence."""
    exchange = layer.self_attention.dist_attn
    vars(exchange)["forward"] = functools.partial(_attend, exchange)
    return layer


def _attend(exchange, q, k, v, batch_dim_idx, rotary_pos_emb=None):
    if isinstance(exchange, ClampedExchange):
        q = q.clamp(-8, 8)
    if rotary_pos_emb is not None:
        cos, sin = (table[:, 0, 0] for table in rotary_pos_emb)
        q, k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
    return exchange.local_attn(q, k, v)


def step(layer, x, dy, mask, tables):
    """Output, dx and the parameters' gradients of a step."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x, mask, tables)
    y.backward(dy)
    return {"output": y.detach(), "dx": x.grad, **{f"d {name}": p.grad for name, p in layer.named_parameters()}}


def judged(rank, section, shape, attention):
    """Faults of a first step, and of one with the fork's edits at work; what the table says, and what was said.

    A step that was refused has no faults but its name.
    """
    size = torch.distributed.get_world_size()
    cut = lambda t: t.chunk(size)[rank].contiguous()  # noqa: E731
    model, whole = made(shape, attention), alone(made(shape, attention))
    found = []
    with listening() as messages:
        report = ds_sp_overlap.enable(model, section)
        for change in (lambda model: None, activated):
            for each in (model, whole):
                change(each)
            x, dy, mask, tables = megatron_layers.inputs(shape)
            if change is activated:  # longer, too
                longer = Shape(**{**vars(shape), "seq": 4 * shape.seq})
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
