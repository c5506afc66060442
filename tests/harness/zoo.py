"""Checks that the package does not take a forward for a known forward if a line or two differ.

A program is such a changed forward, of attention or of a norm of q's heads. A changed line may have no effect at first, such as a
clamp at a large bound, a temperature of 1 or a gate of 0. If the package looked only at results, it would replace the forward, and
the layer would be wrong once the line has an effect. So every program is tried twice: at first, when the changed lines have no
effect; and *active*, as after some steps of training, or with larger numbers, longer sequences or other flags. `judge` returns one
of these verdicts:

    whole      the package replaces the layer's forward, and the results agree with the layer's own forward, at first and active
    own        the layer's own forward runs; the report says why
    refused    an error that names the layer, once the program is active
    probe      an error of the comparison on random numbers; the package should have found the change by reading the code
    silent     the package replaces the layer's forward, and the results are wrong; the only verdict that must not occur

`PROGRAMS` are written by hand. `random_program` inserts an operation at a random place. To judge many random programs:

    python -m tests.harness.zoo --programs 2000 --seed 0
"""

import argparse
import collections
import functools
import itertools
import linecache
import random
import types
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, eager_attention_forward
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3RMSNorm

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
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    y = self.weight * y
    return y
"""
MADE_UP = "transformers.models.zoo"  # the name of the programs' module; the package reads only code of transformers
SOURCES = {"attention": ATTENTION, "q norm": NORM}
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


@dataclass(frozen=True)
class Program:
    """Describes a known forward with some lines changed.

    changes    pairs of a text in the source, and the text that replaces it
    setup      statements that set attributes for the changed lines, such that the lines have no effect; see `change`
    activate   statements that give the changed lines an effect
    of         the forward that is changed: a key of `SOURCES`
    given      further arguments of the active forward
    expected   the verdict of `judge`, where it is certain
    """

    changes: tuple[tuple[str, str], ...] = ()
    setup: str = ""
    activate: str = ""
    of: str = "attention"
    given: dict = field(default_factory=dict)
    expected: str = ""


class Scale(torch.autograd.Function):
    """Returns its input; multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor[0], None


class Times(nn.Module):
    """Multiplies its input by a parameter."""

    def __init__(self, size=()):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.scale


def own_call(self, *args, **kwargs):
    y = nn.Module.__call__(self, *args, **kwargs)
    factor = getattr(self, "factor", 1.0)
    return (y[0] * factor, *y[1:]) if isinstance(y, tuple) else y * factor


class OwnCall(nn.Linear):
    __call__ = own_call


def scaling(forward):
    """Decorate a forward such that its output is multiplied; with `functools.wraps`, the function looks undecorated."""

    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        y, *more = forward(self, *args, **kwargs)
        return y * getattr(self, "factor", 1.0), *more

    return wrapped


STATE = types.SimpleNamespace(scale=1.0)
_numbers = itertools.count()


def namespace():
    return dict(
        torch=torch, nn=nn, F=nn.functional, ALL_ATTENTION_FUNCTIONS=ALL_ATTENTION_FUNCTIONS, Scale=Scale, STATE=STATE,
        apply_rotary_pos_emb=apply_rotary_pos_emb, eager_attention_forward=eager_attention_forward, __name__=MADE_UP,
    )  # fmt: skip


def compiled(source, changes, names):
    for old, new in changes:
        assert source.count(old) == 1, (old, source)
        source = source.replace(old, new)
    file = f"<zoo {next(_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), names)
    return names["forward"]


def change(module, statements):
    """Run statements, in which ``self`` is the module and ``names`` are the globals of its forward."""
    exec(statements, globals(), {"self": module, "names": type(module).forward.__globals__})


def config():
    made = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        num_hidden_layers=2, vocab_size=64, max_position_embeddings=256,
    )  # fmt: skip
    made._attn_implementation = "sdpa"
    return made


def build(program, own_config=None):
    """Return a decoder layer in fp64 that contains the program, and the module whose forward is the program."""
    cfg = own_config or config()

    def kind(of, base):
        made = type(base.__name__, (base,), {"__module__": MADE_UP})
        made.forward = compiled(SOURCES[of], program.changes if program.of == of else (), namespace())
        return made

    layer = Qwen3DecoderLayer(cfg, 0)
    layer.self_attn = attention = kind("attention", Qwen3Attention)(cfg, 0)
    if program.of == "q norm":
        norm = kind("q norm", Qwen3RMSNorm)
        attention.q_norm, attention.k_norm = norm(HEAD_DIM), norm(HEAD_DIM)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() < 2 else 0.0, 0.3)
    for module in [attention] if program.of == "attention" else [attention.k_norm, attention.q_norm]:
        change(module, program.setup)
    return layer.double(), module


def judge(program):
    """Return the verdict on a program, and the reason."""
    layer, module = build(program)
    attention = layer.self_attn
    try:
        reader = Reader("layers.0.self_attn", attention, [])
    except Unknown as error:
        return "own", str(error)
    overlap = OverlapSettings(SPGroup(None), SpOverlapConfig(), None)
    driven = Driven("layers.0.self_attn", attention, reader, Forwards(overlap.sp_group, overlap.config), overlap)

    def apart(more, seq=6, scale=1.0, batch=2):
        x = scale * torch.randn(batch, seq, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        tables = LlamaRotaryEmbedding(config())(x, torch.arange(seq).expand(batch, -1))
        given = {"hidden_states": x, "position_embeddings": tables, "attention_mask": None, **more}
        return difference(driven, attention.forward, given, reader.options(attention))

    if found := apart({}):
        return "probe", found
    with torch.no_grad():
        change(module, program.activate)
    try:
        for training in (True, False):
            attention.train(training)
            for sizes in (dict(), dict(seq=40, scale=30.0), dict(batch=1)):
                if found := apart(program.given, **sizes):
                    return "silent", found
    except RuntimeError as error:
        return "refused", str(error)
    return "whole", ""


def parameter(value):
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


# {operation: (line to insert, in which {x} is the operand; setup; activation)}. Most operations have no effect at first.
OPERATIONS = {
    "clamp": ("{x} = {x}.clamp(-self.bound, self.bound)", "self.bound = 1e6", "self.bound = 0.5"),
    "abs": ("{x} = {x}.abs()", "", ""),
    "temperature": ("{x} = {x} * self.temperature", "self.temperature = parameter(1.0)", "self.temperature.fill_(1.5)"),
    "scale of the process": ("{x} = {x} * STATE.scale", "STATE.scale = 1.0", "STATE.scale = 2.0"),
    "branch by a keyword": ("{x} = {x} * 2 if 'factor' in kwargs else {x}", "", ""),
    "an identity that is replaced": ("{x} = self.times({x})", "self.times = nn.Identity()", "self.times = Times().double()"),
    "where": ("{x} = torch.where({x} > self.cap, 0., {x})", "self.cap = 1e12", "self.cap = 0.5"),
    "by length": ("{x} = {x} * 2 if {x}.shape[1] > self.long else {x}", "self.long = 10**6", "self.long = 3"),
    "by joined dims": ("{x} = {x} * 2 if {x}.flatten().shape[0] > 2000 else {x}", "", ""),
    "by evaluation": ("{x} = {x} if self.training else {x} * 2", "", ""),
    "by dtype": ("{x} = {x} * 2 if {x}.dtype == torch.float64 else {x}", "", ""),
    "a factor in backward": ("{x} = Scale.apply({x}, self.factors)", "self.factors = [1.0]", "self.factors[0] = 2.0"),
    "a hook": ("{x}.register_hook(lambda dy: dy * self.factor) if {x}.requires_grad else None", "self.factor = 1.0", "self.factor = 2.0"),
    "detached": ("{x} = {x}.detach() if self.flag else {x}", "self.flag = False", "self.flag = True"),
    "detached always": ("{x} = {x}.detach()", "", ""),
    "data": ("{x} = {x} + ({x}.data - {x}) * self.factor", "self.factor = 0.0", "self.factor = 1.0"),
    "without gradients": ("with torch.set_grad_enabled(not self.flag): {x} = {x}.clone()", "self.flag = False", "self.flag = True"),
    "autocast off": ("with torch.autocast('cpu', enabled=False): {x} = {x} * 1", "", ""),
    "cut and joined by length": ("n = {x}.shape[1] // 20; {x} = torch.cat(({x}[:, n:], {x}[:, :n]), 1)", "", ""),
    "by an index": ("{x} = {x}[..., self.order]", "self.register_buffer('order', torch.arange(HEAD_DIM))", "self.order.copy_(torch.arange(HEAD_DIM).flip(0))"),
    "of aten": ("{x} = torch.ops.aten.mul({x}, self.factor)", "self.factor = 1.0", "self.factor = 2.0"),
    "einsum": ("{x} = torch.einsum('...d,de->...e', {x}, self.turn)", "self.register_buffer('turn', torch.eye(HEAD_DIM).double())", "self.turn.copy_(torch.eye(HEAD_DIM).flip(0))"),
    "dropout": ("{x} = self.drop({x})", "self.drop = nn.Dropout(0.0)", "self.drop.p = 0.5"),
    "a function that is replaced": ("{x} = helper({x})", "names['helper'] = lambda x: x", "names['helper'] = lambda x: x * 2"),
    "a partial": ("{x} = self.function({x})", "self.function = functools.partial(torch.mul, other=1.0)", "self.function = functools.partial(torch.mul, other=2.0)"),
    "a method": ("{x} = self.scaled({x})", "self.scaled = lambda x: x", "self.scaled = lambda x: x * 2"),
    "counted": ("self.steps = getattr(self, 'steps', 0) + 1; {x} = {x} * 2 if self.steps > 40 else {x}", "", "self.steps = 100"),
    "remembered": ("{x} = {x} + self.shared.get('x', 0) * 0; self.shared['x'] = {x}", "self.shared = {}", "self.shared['y'] = 1"),
    "a list of the process": ("{x} = {x} * SHARED[0]", "names['SHARED'] = [1.0]", "names['SHARED'][0] = 2.0"),
    "type": ("{x} = {x} * type(self).factor", "type(self).factor = 1.0", "type(self).factor = 2.0"),
    "cumulated": ("{x} = {x} + {x}.cumsum(1) * self.factor", "self.factor = 0.0", "self.factor = 0.5"),
    "out=": ("torch.mul({x}, self.factor, out={x})", "self.factor = 1.0", "self.factor = 2.0"),
    "rounded": ("{x} = {x}.to(self.kind).to(torch.float64)", "self.kind = torch.float64", "self.kind = torch.bfloat16"),
    "a position": ("{x} = {x} * (1 + self.factor * torch.arange({x}.shape[1])[:, None])", "self.factor = 0.0", "self.factor = 1.0"),
    "sorted by a flag of a list": ("{x} = {x}.sort(1).values if self.flags[0] else {x}", "self.flags = [False]", "self.flags[0] = True"),
    "sorted by a global": ("{x} = {x}.sort(1).values if FLAG else {x}", "names['FLAG'] = False", "names['FLAG'] = True"),
}  # fmt: skip

# {source: {line after which an operation may be inserted: possible operands, a letter each}}.
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
    given = {"factor": 3.0} if "kwargs" in line else {}
    return Program(((place, f"{place}\n    {line.format(x=x)}"),), setup, activate, of, given)


def random_program(seed):
    """Insert a random operation of `OPERATIONS` at a random place; return a description and the program."""
    draw = random.Random(seed)
    of = draw.choice(("attention", "attention", "attention", "q norm"))
    place = draw.choice(list(PLACES[of]))
    x, operation = draw.choice(PLACES[of][place]), draw.choice(list(OPERATIONS))
    return f"{operation}, of {x} in {of} behind {place}", inserted(of, place, x, operation)


# Programs written by hand.


def before(place, line):
    return f"    {place}", f"    {line}\n    {place}"


def fusing(line):
    """Replace the three projections by ``line``, which computes q, k and v with one projection."""
    return (
        ("q = self.q_proj(x).view(shape)", line),
        ("    k = self.k_proj(x).view(shape)\n", ""),
        ("    v = self.v_proj(x).view(shape)\n", ""),
    )


def fused(heads):
    return f"self.qkv = nn.Linear(HIDDEN, {heads} * HEAD_DIM); del self.q_proj, self.k_proj, self.v_proj"


def ordered(kind, order):
    return (before("attend =", f"{kind} = torch.stack([{kind}[:, head] for head in {order}], 1)"),)


WRAP, OWN_CALL, FACTOR = "type(self).forward = scaling(type(self).forward)", "type(self).__call__ = own_call", "self.factor = 2.0"
ROTATE, SCALING = "apply_rotary_pos_emb(q, k, cos, sin)", "scaling=self.scaling"
ROTATES_IF_GIVEN = (
    f"    cos, sin = position_embeddings\n    q, k = {ROTATE}",
    f"    if position_embeddings is not None:\n        cos, sin = position_embeddings\n        q, k = {ROTATE}",
)


def rotating(q):
    """Make apply_rotary_pos_emb return another q; ``q`` is the expression of the new q from the rotated q."""
    named = "rotated_as_ever = apply_rotary_pos_emb\ndef apply_rotary_pos_emb(q, k, cos, sin):\n"
    return (("def forward", f"{named}    q, k = rotated_as_ever(q, k, cos, sin)\n    return {q}, k\n\ndef forward"),)


PROGRAMS = {
    "as it is": Program(expected="whole"),
    "a norm of heads as it is": Program(of="q norm", expected="whole"),
    "causal unless there is a mask": Program(((SCALING, f"{SCALING}, is_causal=attention_mask is None"),)),
    "scaling of a function": Program(((SCALING, "scaling=scale()"),), "names['scale'] = lambda: 1.0", "names['scale'] = lambda: 2.0"),
    "scaling of an attribute": Program((), "self.scaling = 0.5", "self.scaling = 0.25", expected="whole"),
    "a wrapper that scales": Program((), WRAP, FACTOR),
    "a call of its own": Program((), OWN_CALL, FACTOR),
    "a linear layer with a call of its own, q": Program((), "self.q_proj.__class__ = OwnCall", "self.q_proj.factor = 2.0"),
    "a norm of heads with a call of its own": Program((), OWN_CALL, FACTOR, of="q norm"),
    "a forward that is patched": Program(activate=f"{WRAP}; {FACTOR}"),
    "another projection": Program(activate="self.q_proj = self.o_proj", expected="whole"),
    "a parameter that waits": Program((), "self.waits = parameter(0.0)", expected="own"),
    "a child that waits": Program((), "self.waits = nn.Linear(2, 2)"),
    "k and v shared by a dict": Program((before("cos, sin =", "self.shared.setdefault('v', v)"),), "self.shared = {}"),
    "a window by length": Program(((SCALING, f"{SCALING}, sliding_window=None if x.shape[1] < 20 else 4"),)),
    "scaling by gradients": Program(((SCALING, f"{SCALING} if torch.is_grad_enabled() else 0.1"),), expected="own"),
    "a rotation that clamps": Program(rotating("q.clamp(-100, 100)")),
    "a rotation by the length that is tried": Program(rotating("q * q.shape[2] - q * 7 + q")),
    "a rotation that detaches": Program(rotating("q.detach()")),
    "a rotation by a flag": Program((("    q, k = " + ROTATE, "    if self.rotates:\n        q, k = " + ROTATE),), "self.rotates = True", "self.rotates = False"),
    "a gate on the output": Program((("self.o_proj(o)", "self.o_proj(o * torch.sigmoid(self.gate))"),), "self.gate = parameter(50.0)", "self.gate.fill_(0.0)"),
    "a LoRA by hand": Program(
        (("q = self.q_proj(x)", "q = (self.q_proj(x) + self.up(self.down(x)))"),),
        "self.up, self.down = nn.Linear(2, HEADS * HEAD_DIM, bias=False), nn.Linear(HIDDEN, 2); self.up.weight.data.zero_()", "self.up.weight.fill_(1.0)"),
    "a child's forward": Program((("self.q_proj(x)", "self.q_proj.forward(x)"),)),
    "values of the token before": Program(
        (before("cos, sin =", "v = v + self.mix * F.pad(v, (0, 0, 1, -1))"),), "self.mix = parameter(0.0)", "self.mix.fill_(1.0)"),
    "a list of projections": Program((("self.q_proj(x)", "self.all[0](x)"),), "self.all = nn.ModuleList([self.q_proj])"),
    "o rotated, not projected": Program(
        (("    q, k = " + ROTATE, ""), ("self.o_proj(o)", "apply_rotary_pos_emb(o, o, cos, sin)[1]")), "del self.o_proj", expected="own"),
    "rotated where there are tables": Program((ROTATES_IF_GIVEN,), given={"position_embeddings": None}, expected="whole"),
    "rotated at one length alone": Program((("    q, k = apply_rotary", "    if q.shape[2] > 8:\n        q, k = apply_rotary"),)),
    "scaled where there are no tables": Program(
        (ROTATES_IF_GIVEN, before("attend =", "q = q if position_embeddings is not None else q * 2")), given={"position_embeddings": None}),
    "keywords that are counted": Program((before("cos, sin =", "q = q * (2 if len(kwargs) > 1 else 1)"),), given={"a": 1, "b": 2}),
    "a keyword that is dropped": Program((before("cos, sin =", "kwargs.pop('factor', None)"),), given={"factor": 1}, expected="own"),
    "a mask that is looked at": Program((before("cos, sin =", "q = q * 2 if attention_mask is None and not self.training else q"),)),
    "a cache that is looked at": Program((before("cos, sin =", "q = q if past_key_values is None else q * 2"),), expected="whole"),
    "heads of q backwards": Program(ordered("q", (3, 2, 1, 0)), expected="whole"),
    "heads of q in disorder": Program(ordered("q", (2, 3, 1, 0)), expected="whole"),
    "heads of k and v backwards": Program(ordered("k", (1, 0)) + (before("cos, sin =", "v = torch.stack((v[:, 1], v[:, 0]), 1)"),), expected="whole"),
    "heads of k and v repeated": Program(
        (before("attend =", "k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)"),), "self.num_key_value_groups = 1", expected="whole"),
    "a fused projection, k is v": Program(fusing("q, v = self.qkv(x).view(shape).split((4, 2), -2); k = v"), fused(6), expected="whole"),
    "a fused projection with rows to spare": Program(fusing("q, k, v, _ = self.qkv(x).view(shape).split((4, 2, 2, 1), -2)"), fused(9), expected="own"),
    "a child of a class": Program((before("attend =", "q = q if isinstance(self.q_proj, nn.Linear) else q.flip(1)"),), expected="whole"),
    "a child that gets another class": Program(
        (before("attend =", "q = torch.cat((q[:, 2:], q[:, :2]), 1) if isinstance(self.q_norm, nn.RMSNorm) else q"),),
        activate="self.q_norm = nn.RMSNorm(HEAD_DIM, 1e-6).double()", expected="refused"),
    "returns o as well": Program((("return y, weights", "return y, weights, o"),)),
    "a norm of heads over heads at times": Program(
        (("self.weight * y", "self.weight * (y + self.mix * y.mean(1, keepdim=True))"),), "self.mix = 0.0", "self.mix = 1.0", of="q norm"),
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
