"""Forks of Megatron-DeepSpeed's attention that nearly look the same, for `frameworks/test_megatron_zoo.py`.

An edit does nothing to the small numbers of a first step; then it is `activated`. Judged is each step against the fork itself
on the whole sequence.
"""

import functools

import torch

import ds_sp_overlap
from tests.harness import megatron_layers, reference
from tests.harness.layers import faults
from tests.harness.listening import listening
from tests.harness.megatron_layers import ParallelAttention, Shape

# Of the attention.


class Clamped(ParallelAttention):
    def heads_of(self, hidden_states):
        return [x.clamp(-8, 8) for x in super().heads_of(hidden_states)]


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


class ClampedExchange(megatron_layers.DistributedAttention):
    def forward(self, query, *args, **kwargs):
        return super().forward(query.clamp(-8, 8), *args, **kwargs)


class ForkedExchange(ParallelAttention):
    def prepare(self):
        self.dist_attn.__class__ = ClampedExchange


class HookedExchange(ParallelAttention):
    def prepare(self):
        self.dist_attn.register_forward_hook(lambda module, args, y: y.clamp(-8, 8))


UNKNOWN = "the source of its forward is not known here"
ATTENTIONS = {
    ParallelAttention: "",
    Clamped: UNKNOWN,
    Decorated: UNKNOWN,
    DecoratedToCap: UNKNOWN,
    OwnCall: "it has a __call__ of its own",
    ForkedExchange: "dist_attn (ClampedExchange): its forward is not DeepSpeed's",
    HookedExchange: "dist_attn has a hook of its own",
}


# Judge.


def made(shape, attention):
    """A layer of the fork, of random weights, alike on every rank."""
    layer = megatron_layers.layer(shape, torch.distributed.group.WORLD)
    layer.self_attention.__class__ = attention
    getattr(layer.self_attention, "prepare", lambda: None)()
    return layer


def activated(layer):
    """Make edits do something, by large weights."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter *= 30


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
