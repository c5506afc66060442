"""A forward that nearly is a known one must not be taken for it: forwards of attention and its norms, each a line or two off a known one.

A reader of forwards that looks at what they make of some numbers takes a clamp, a temperature of one or a gate of zeros for nothing,
and the layer is wrong in silence once they act. So every program here is made twice: as it is at first, where its line does nothing,
and *active*, as after some steps of training, or with larger numbers, longer sequences, other flags. `judge` says what became of it:

    whole      the layer is driven, and what the driver makes of it is what its own forward makes, at first and active
    own        its own forward runs, for a reason
    refused    an error by name, at the latest once it is active
    probe      an error by name, which the comparison on real numbers raised and the reading should have
    silent     the layer is driven, and is wrong: the one thing that may not be

`PROGRAMS` are written by hand. `random_program` inserts an operation at a random place. By command, so many of them:

    python -m tests.harness.zoo --programs 2000 --seed 0
"""

import argparse
import collections
import functools
import itertools
import linecache
import math
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from ds_sp_overlap.config import SpOverlapConfig
from ds_sp_overlap.exchange.sp_group import SPGroup
from ds_sp_overlap.integrations.inspect.accounting import Unknown
from ds_sp_overlap.integrations.inspect.attention import Reader
from ds_sp_overlap.integrations.layers import OverlapSettings
from ds_sp_overlap.integrations.transformers.driven import Driven
from ds_sp_overlap.integrations.transformers.forward import Forwards
from ds_sp_overlap.integrations.transformers.probe import difference

ATTENTION = """
def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
    x = hidden_states
    shape = (*x.shape[:-1], -1, self.head_dim)
    q = self.q_proj(x).view(shape)
    k = self.k_proj(x).view(shape)
    v = self.v_proj(x).view(shape)
    q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    cos, sin = position_embeddings
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    o, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    o = o.reshape(*x.shape[:-1], -1)
    y = self.o_proj(o)
    return y, weights
"""
NORM = """
def forward(self, x):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    y = self.weight * y
    return y
"""
MADE_UP = "transformers.models.zoo"  # code of one's own is not read
SOURCES = {"attention": ATTENTION, "q norm": NORM}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


@dataclass(frozen=True)
class Program:
    """A known forward with some lines changed.

    of         whose forward: a key of `SOURCES`
    changes    pairs of what stands in its source, and what stands there instead
    setup      gives the module what the lines need, so that they do nothing
    activate   has them do something
    around     takes the place of the forward, or the class; given the class and the names that its source sees
    given      further arguments, once it is active
    expected   what `judge` is to say, where that is certain
    """

    of: str
    changes: tuple[tuple[str, str], ...] = ()
    setup: Callable = lambda module: None
    activate: Callable = lambda module: None
    around: Callable = lambda kind, names: None
    given: dict = field(default_factory=dict)
    expected: str = ""


class Scale(torch.autograd.Function):
    """Nothing in forward; a factor in backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor[0], None


class Times(nn.Module):
    """A layer scale."""

    def __init__(self, size=()):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.scale


class OwnCall(nn.Linear):
    factor = 1.0

    def __call__(self, x):
        return super().__call__(x) * self.factor


STATE = types.SimpleNamespace(scale=1.0)
_numbers = itertools.count()


def namespace():
    return dict(
        torch=torch, nn=nn, F=nn.functional, math=math, ALL_ATTENTION_FUNCTIONS=ALL_ATTENTION_FUNCTIONS,
        apply_rotary_pos_emb=apply_rotary_pos_emb, eager_attention_forward=eager_attention_forward, __name__=MADE_UP,
        Scale=Scale, STATE=STATE, functools=functools,
    )  # fmt: skip


def compiled(source, changes, names):
    for old, new in changes:
        assert source.count(old) == 1, (old, source)
        source = source.replace(old, new)
    file = f"<zoo {next(_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), names)
    return names["forward"]


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6


class Attention(nn.Module):
    def __init__(self, config, norm):
        super().__init__()
        self.config, self.head_dim, self.layer_idx = config, HEAD_DIM, 0
        self.scaling, self.attention_dropout, self.is_causal = HEAD_DIM**-0.5, 0.0, True
        self.num_key_value_groups = HEADS // KV_HEADS
        for kind, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.add_module(f"{kind}_proj", nn.Linear(HIDDEN, heads * HEAD_DIM, bias=kind == "q"))
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm, self.k_norm = norm(HEAD_DIM), norm(HEAD_DIM)


class Decoder(nn.Module):
    def __init__(self, config, attention, norm, mlp):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norm(HIDDEN), norm(HIDDEN)

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def config():
    made = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        num_hidden_layers=2, vocab_size=64, max_position_embeddings=256,
    )  # fmt: skip
    made._attn_implementation = "sdpa"
    return made


def build(program, own_config=None):
    """A decoder layer with the program in it, in fp64, and the module whose forward it is."""
    names, cfg = namespace(), own_config or config()

    def kind(of, base):
        changed = program.of == of
        made = type(base.__name__, (base,), {"__module__": MADE_UP})
        made.forward = compiled(SOURCES[of], program.changes if changed else (), names if changed else namespace())
        if changed:
            program.around(made, names)
        return made

    norm = kind("q norm", Norm) if program.of == "q norm" else LlamaRMSNorm
    attention = kind("attention", Attention)(cfg, norm)
    layer = Decoder(cfg, attention, LlamaRMSNorm, LlamaMLP(cfg))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() < 2 else 0.0, 0.3)
    module = attention
    if program.of == "q norm":
        module = attention.q_norm
        program.setup(attention.k_norm)
    program.setup(module)
    return layer.double(), module


def hidden(seq, scale=1.0, batch=2):
    generator = torch.Generator().manual_seed(3)
    return scale * torch.randn(batch, seq, HIDDEN, generator=generator, dtype=torch.float64)


def tables(x):
    positions = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    return LlamaRotaryEmbedding(config())(x, positions)


def judge(program):
    """What becomes of a program, and why."""
    layer, module = build(program)
    attention = layer.self_attn
    try:
        reader = Reader("layers.0.self_attn", attention)
    except Unknown as error:
        return "own", str(error)
    overlap = OverlapSettings(SPGroup(None), SpOverlapConfig(), None)
    driven = Driven("layers.0.self_attn", attention, reader, Forwards(overlap.sp_group, overlap.config), overlap)

    def apart(more, seq=6, scale=1.0, batch=2):
        x = hidden(seq, scale, batch)
        given = {"hidden_states": x, "position_embeddings": tables(x), "attention_mask": None, **more}
        return difference(driven, attention.forward, given, reader.options(attention))

    if found := apart({}):
        return "probe", found
    with torch.no_grad():
        program.activate(module)
    try:
        for training in (True, False):
            attention.train(training)
            for sizes in (dict(), dict(seq=40, scale=30.0), dict(batch=1)):
                if found := apart(program.given, **sizes):
                    return "silent", found
    except RuntimeError as error:
        return "refused", str(error)
    return "whole", ""


# Operations that do nothing at first, by a line that is inserted: {x} is what they are applied to.


def parameter(name, value, shape=()):
    return lambda module: setattr(module, name, nn.Parameter(torch.full(shape, float(value), dtype=torch.float64)))


def put(name, value):
    return lambda module: setattr(module, name, value() if callable(value) else value)


def fill(name, value):
    return lambda module: getattr(module, name).fill_(value)


def inside(name, key, value):
    def change(module):
        holder = getattr(module, name)
        if isinstance(holder, (dict, list)):
            holder[key] = value
        else:
            setattr(holder, key, value)

    return change


def of_names(key, value):
    """Changes a global of the program's source."""

    def change(module):
        type(module).forward.__globals__[key] = value

    return change


def state(value):
    return lambda module: setattr(STATE, "scale", value)


def several(*changes):
    def change(module):
        for each in changes:
            each(module)

    return change


OPERATIONS = {
    "clamp": ("{x} = {x}.clamp(-self.bound, self.bound)", put("bound", 1e6), put("bound", 0.5)),
    "abs": ("{x} = {x}.abs()", put("one", 1), put("one", 1)),
    "temperature": ("{x} = {x} * self.temperature", parameter("temperature", 1), fill("temperature", 1.5)),
    "scale of the process": ("{x} = {x} * STATE.scale", state(1.0), state(2.0)),
    "branch by a keyword": ("{x} = {x} * 2 if 'factor' in kwargs else {x}", put("one", 1), put("one", 1)),
    "an identity that is replaced": ("{x} = self.times({x})", put("times", nn.Identity), put("times", lambda: Times().double())),
    "where": ("{x} = torch.where({x} > self.cap, 0., {x})", put("cap", 1e12), put("cap", 0.5)),
    "by length": ("{x} = {x} * 2 if {x}.shape[1] > self.long else {x}", put("long", 10**6), put("long", 3)),
    "by joined dims": ("{x} = {x} * 2 if {x}.flatten().shape[0] > 2000 else {x}", put("long", 1), put("long", 1)),
    "by evaluation": ("{x} = {x} if self.training else {x} * 2", put("flag", False), put("flag", True)),
    "by dtype": ("{x} = {x} * 2 if {x}.dtype == torch.float64 else {x}", put("flag", False), put("flag", True)),
    "a factor in backward": ("{x} = Scale.apply({x}, self.factors)", put("factors", lambda: [1.0]), inside("factors", 0, 2.0)),
    "a hook": ("{x}.register_hook(lambda dy: dy * self.factor) if {x}.requires_grad else None", put("factor", 1.0), put("factor", 2.0)),
    "detached": ("{x} = {x}.detach() if self.flag else {x}", put("flag", False), put("flag", True)),
    "detached always": ("{x} = {x}.detach()", put("flag", False), put("flag", True)),
    "data": ("{x} = {x} + ({x}.data - {x}) * self.factor", put("factor", 0.0), put("factor", 1.0)),
    "without gradients": ("with torch.set_grad_enabled(not self.flag): {x} = {x}.clone()", put("flag", False), put("flag", True)),
    "autocast off": ("with torch.autocast('cpu', enabled=False): {x} = {x} * 1", put("flag", False), put("flag", True)),
    "cut and joined by length": ("n = {x}.shape[1] // 20; {x} = torch.cat(({x}[:, n:], {x}[:, :n]), 1)", put("shift", 0), put("shift", 1)),
    "by an index": ("{x} = {x}[..., self.order]", lambda m: m.register_buffer("order", torch.arange(HEAD_DIM)), lambda m: m.order.copy_(torch.arange(HEAD_DIM).flip(0))),
    "of aten": ("{x} = torch.ops.aten.mul({x}, self.factor)", put("factor", 1.0), put("factor", 2.0)),
    "einsum": ("{x} = torch.einsum('...d,de->...e', {x}, self.turn)", lambda m: m.register_buffer("turn", torch.eye(HEAD_DIM).double()), lambda m: m.turn.copy_(torch.eye(HEAD_DIM).flip(0))),
    "dropout": ("{x} = self.drop({x})", put("drop", lambda: nn.Dropout(0.0)), inside("drop", "p", 0.5)),
    "a function that is replaced": ("{x} = helper({x})", of_names("helper", lambda x: x), of_names("helper", lambda x: x * 2)),
    "a partial": ("{x} = self.function({x})", put("function", lambda: functools.partial(torch.mul, other=1.0)), put("function", lambda: functools.partial(torch.mul, other=2.0))),
    "a method": ("{x} = self.scaled({x})", put("scaled", lambda: (lambda x: x)), put("scaled", lambda: (lambda x: x * 2))),
    "counted": ("self.steps = getattr(self, 'steps', 0) + 1; {x} = {x} * 2 if self.steps > 40 else {x}", put("flag", False), put("steps", 100)),
    "remembered": ("{x} = {x} + self.shared.get('x', 0) * 0; self.shared['x'] = {x}", put("shared", dict), inside("shared", "y", 1)),
    "a list of the process": ("{x} = {x} * SHARED[0]", of_names("SHARED", [1.0]), lambda m: type(m).forward.__globals__["SHARED"].__setitem__(0, 2.0)),
    "type": ("{x} = {x} * type(self).factor", lambda m: setattr(type(m), "factor", 1.0), lambda m: setattr(type(m), "factor", 2.0)),
    "cumulated": ("{x} = {x} + {x}.cumsum(1) * self.factor", put("factor", 0.0), put("factor", 0.5)),
    "out=": ("torch.mul({x}, self.factor, out={x})", put("factor", 1.0), put("factor", 2.0)),
    "rounded": ("{x} = {x}.to(self.kind).to(torch.float64)", put("kind", torch.float64), put("kind", torch.bfloat16)),
    "a position": ("{x} = {x} * (1 + self.factor * torch.arange({x}.shape[1])[:, None])", put("factor", 0.0), put("factor", 1.0)),
    "sorted by a flag of a list": ("{x} = {x}.sort(1).values if self.flags[0] else {x}", put("flags", lambda: [False]), inside("flags", 0, True)),
    "sorted by a global": ("{x} = {x}.sort(1).values if FLAG else {x}", of_names("FLAG", False), of_names("FLAG", True)),
}  # fmt: skip

# Where a line may be inserted: behind which line of a source, for which names.
PLACES = {
    "attention": {
        "x = hidden_states": "x",
        "q = self.q_proj(x).view(shape)": "q",
        "v = self.v_proj(x).view(shape)": "qkv",
        "q, k = self.q_norm(q), self.k_norm(k)": "qkv",
        "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)": "qkv",
        "q, k = apply_rotary_pos_emb(q, k, cos, sin)": "qkv",
        "scaling=self.scaling, **kwargs)": "o",
        "o = o.reshape(*x.shape[:-1], -1)": "o",
        "y = self.o_proj(o)": "y",
    },
    "q norm": {"y = self.weight * y": "y"},
}


def inserted(of, place, x, operation):
    line, setup, activate = OPERATIONS[operation]
    line = line.format(x=x)
    change = place, f"{place}\n    {line.strip()}" if "\n" not in line else f"{place}{line}"
    given = {"factor": 3.0} if "kwargs" in line else {}
    return Program(of, (change,), setup, activate, given=given)


def random_program(seed):
    """An operation of `OPERATIONS` at a random place; and its name."""
    draw = random.Random(seed)
    of = draw.choice(("attention", "attention", "attention", "q norm"))
    place = draw.choice(list(PLACES[of]))
    x, operation = draw.choice(PLACES[of][place]), draw.choice(list(OPERATIONS))
    return f"{operation}, of {x} in {of} behind {place}", inserted(of, place, x, operation)


# Programs that no inserted line makes.


def wrapping(change):
    """Decorates the forward with ``change(forward)``, as `functools.wraps` hides it."""

    def around(kind, names):
        kind.forward = change(kind.forward)

    return around


def scaling(forward):
    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        y, *more = forward(self, *args, **kwargs)
        return y * getattr(self, "factor", 1.0), *more

    return wrapped


def own_call(kind, names):
    def call(self, *args, **kwargs):
        y = nn.Module.__call__(self, *args, **kwargs)
        factor = getattr(self, "factor", 1.0)
        return (y[0] * factor, *y[1:]) if isinstance(y, tuple) else y * factor

    kind.__call__ = call


def linear_with_a_call(name):
    def setup(module):
        old = getattr(module, name)
        setattr(module, name, new := OwnCall(old.in_features, old.out_features, old.bias is not None))
        new.load_state_dict(old.state_dict())

    return setup


def patched(factor):
    def activate(module):
        kind = type(module)
        kind.forward = scaling(kind.forward)
        module.factor = factor

    return activate


def fused(heads):
    """One projection in place of three."""

    def setup(module):
        module.qkv = nn.Linear(HIDDEN, heads * HEAD_DIM)
        del module.q_proj, module.k_proj, module.v_proj

    return setup


def fusing(line):
    """Changes that make q, k and v of one projection."""
    return (
        ("    q = self.q_proj(x).view(shape)", f"    {line}"),
        ("    k = self.k_proj(x).view(shape)\n", ""),
        ("    v = self.v_proj(x).view(shape)\n", ""),
    )


def ordered(kind, order):
    return (("    attend =", f"    {kind} = torch.stack([{kind}[:, head] for head in {order}], 1)\n    attend ="),)


FACTOR = put("factor", 2.0)
ROTATE = "apply_rotary_pos_emb(q, k, cos, sin)"
ROTATES_IF_GIVEN = (
    f"    cos, sin = position_embeddings\n    q, k = {ROTATE}",
    f"    if position_embeddings is not None:\n        cos, sin = position_embeddings\n        q, k = {ROTATE}",
)


def rotating(q):
    """apply_rotary_pos_emb with another ``q``, a line of code."""
    source = f"""
def apply_rotary_pos_emb(q, k, cos, sin):
    q, k = rotated_as_ever(q, k, cos, sin)
    return {q}, k
"""

    def around(kind, names):
        names.setdefault("FACTOR", 1.0)
        names["rotated_as_ever"] = names["apply_rotary_pos_emb"]
        exec(source, names)

    return around


PROGRAMS = {
    "as it is": Program("attention", expected="whole"),
    "a norm of heads as it is": Program("q norm", expected="whole"),
    "causal unless there is a mask": Program(
        "attention", (("scaling=self.scaling,", "scaling=self.scaling, is_causal=attention_mask is None,"),)),
    "scaling of a function": Program(
        "attention", (("scaling=self.scaling", "scaling=scale()"),), of_names("scale", lambda: 1.0), of_names("scale", lambda: 2.0)),
    "scaling of an attribute": Program("attention", (), put("scaling", 0.5), put("scaling", 0.25), expected="whole"),
    "a wrapper that scales": Program("attention", around=wrapping(scaling), activate=FACTOR),
    "a call of its own": Program("attention", around=own_call, activate=FACTOR),
    "a linear layer with a call of its own, q": Program("attention", (), linear_with_a_call("q_proj"), lambda m: setattr(m.q_proj, "factor", 2.0)),
    "a norm of heads with a call of its own": Program("q norm", around=own_call, activate=FACTOR),
    "a forward that is patched": Program("attention", activate=patched(2.0)),
    "another projection": Program("attention", activate=lambda m: setattr(m, "q_proj", m.o_proj), expected="whole"),
    "a parameter that waits": Program("attention", (), parameter("waits", 0)),
    "a child that waits": Program("attention", (), put("waits", lambda: nn.Linear(2, 2))),
    "k and v shared by a dict": Program(
        "attention", (("    cos, sin =", "    self.shared.setdefault('v', v)\n    cos, sin ="),), put("shared", dict)),
    "a window by length": Program("attention", (("scaling=self.scaling", "scaling=self.scaling, sliding_window=None if x.shape[1] < 20 else 4"),)),
    "scaling by gradients": Program(
        "attention", (("scaling=self.scaling", "scaling=self.scaling if torch.is_grad_enabled() else 0.1"),)),
    "a rotation that clamps": Program("attention", around=rotating("q.clamp(-100, 100)")),
    "a rotation by the length that is tried": Program("attention", around=rotating("q * q.shape[2] - q * 7 + q")),
    "a rotation that detaches": Program("attention", around=rotating("q.detach()")),
    "a rotation by a flag": Program("attention", (("    q, k = " + ROTATE, "    if self.rotates:\n        q, k = " + ROTATE),), put("rotates", True), put("rotates", False)),
    "a gate on the output": Program("attention", (("y = self.o_proj(o)", "y = self.o_proj(o * torch.sigmoid(self.gate))"),), parameter("gate", 50), fill("gate", 0.0)),
    "a LoRA by hand": Program(
        "attention", (("q = self.q_proj(x)", "q = (self.q_proj(x) + self.up(self.down(x)))"),),
        several(put("up", lambda: nn.Linear(2, HEADS * HEAD_DIM, bias=False)), put("down", lambda: nn.Linear(HIDDEN, 2)), lambda m: m.up.weight.data.zero_()),
        lambda m: m.up.weight.fill_(1.0)),
    "a child's forward": Program("attention", (("self.q_proj(x)", "self.q_proj.forward(x)"),)),
    "values of the token before": Program(
        "attention", (("    cos, sin =", "    v = v + self.mix * F.pad(v, (0, 0, 1, -1))\n    cos, sin ="),), parameter("mix", 0), fill("mix", 1.0)),
    "a list of projections": Program("attention", (("self.q_proj(x)", "self.all[0](x)"),), lambda m: setattr(m, "all", nn.ModuleList([m.q_proj]))),
    "rotated where there are tables": Program("attention", (ROTATES_IF_GIVEN,), given={"position_embeddings": None}, expected="whole"),
    "rotated at one length alone": Program("attention", (("    q, k = apply_rotary", "    if q.shape[2] > 8:\n        q, k = apply_rotary"),)),
    "scaled where there are no tables": Program("attention", (ROTATES_IF_GIVEN, ("    attend =", "    q = q if position_embeddings is not None else q * 2\n    attend =")), given={"position_embeddings": None}),
    "keywords that are counted": Program("attention", (("    cos, sin =", "    q = q * (2 if len(kwargs) > 1 else 1)\n    cos, sin ="),), given={"a": 1, "b": 2}),
    "a keyword that is dropped": Program("attention", (("    cos, sin =", "    kwargs.pop('factor', None)\n    cos, sin ="),), given={"factor": 1}),
    "a mask that is looked at": Program("attention", (("    cos, sin =", "    q = q * 2 if attention_mask is None and not self.training else q\n    cos, sin ="),)),
    "a cache that is looked at": Program("attention", (("    cos, sin =", "    q = q if past_key_values is None else q * 2\n    cos, sin ="),), expected="whole"),
    "heads of q backwards": Program("attention", ordered("q", (3, 2, 1, 0)), expected="whole"),
    "heads of q in disorder": Program("attention", ordered("q", (2, 3, 1, 0)), expected="whole"),
    "heads of k and v backwards": Program("attention", ordered("k", (1, 0)) + (("    cos, sin =", "    v = torch.stack((v[:, 1], v[:, 0]), 1)\n    cos, sin ="),), expected="whole"),
    "heads of k and v repeated": Program(
        "attention", (("    attend =", "    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)\n    attend ="),), put("num_key_value_groups", 1), expected="whole"),
    "a fused projection, k is v": Program("attention", fusing("q, v = self.qkv(x).view(shape).split((4, 2), -2); k = v"), fused(6), expected="whole"),
    "a fused projection with rows to spare": Program("attention", fusing("q, k, v, _ = self.qkv(x).view(shape).split((4, 2, 2, 1), -2)"), fused(9), expected="own"),
    "a child of a class": Program(
        "attention", (("    attend =", "    q = q if isinstance(self.q_proj, nn.Linear) else q.flip(1)\n    attend ="),), expected="whole"),
    "a child that gets another class": Program(
        "attention", (("    attend =", "    q = torch.cat((q[:, 2:], q[:, :2]), 1) if isinstance(self.q_norm, nn.RMSNorm) else q\n    attend ="),),
        activate=lambda m: setattr(m, "q_norm", nn.RMSNorm(HEAD_DIM, 1e-6).double()), expected="refused"),
    "returns o as well": Program("attention", (("return y, weights", "return y, weights, o"),)),
    "a norm of heads over heads at times": Program("q norm", (("y = self.weight * y", "y = self.weight * (y + self.mix * y.mean(1, keepdim=True))"),), put("mix", 0.0), put("mix", 1.0)),
}  # fmt: skip
PROGRAMS |= {
    f"{name}, of q": inserted("attention", "q, k = apply_rotary_pos_emb(q, k, cos, sin)", "q", name) for name in OPERATIONS
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = collections.Counter()
    for seed in range(given.seed, given.seed + given.programs):
        name, program = random_program(seed)
        verdict, why = judge(program)
        found[verdict] += 1
        if verdict in ("silent", "probe"):
            print(f"{seed}: {verdict}: {name}: {why}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in found.most_common()))
    return found


if __name__ == "__main__":
    raise SystemExit(bool(main()["silent"]))
