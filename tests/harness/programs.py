"""Draws random programs that use a few layers, and compares each on 2 to 4 ranks with the whole sequence; finds untested uses.

    python -m tests.harness.programs --seed 123                       print one program and its faults
    python -m tests.harness.programs --programs 20000 --first 5000    run many programs

The seed of a program decides everything, including the number of ranks. A program runs in two kinds of `World`. In the world of a
rank, the package computes attention on the rank's tokens. In the world of the whole sequence, `reference` does, and no code of the
package runs. Both worlds record every output, every gradient (of parameters, the sum over the ranks), whether an output needs a
gradient, the tensors that hooks saw, and how often a parameter got its gradient. `faults` compares the records.
"""

import argparse
import contextlib
import dataclasses
import logging
import random
import sys
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_sp_overlap
from ds_sp_overlap.attention.runtime import operations
from ds_sp_overlap.exchange import sp_group
from ds_sp_overlap.exchange.geometry import shares_for
from ds_sp_overlap.exchange.relayed import Relayed
from ds_sp_overlap.relayout import ops
from tests.harness import reference, transports
from tests.harness.moving import always
from tests.harness.ranks import RankError, on_ranks
from tests.harness.relayout import REFERENCE
from tests.harness.uses import Adapted, Deliberate, RaisesInBackward, Scaled

BATCH = 25  # programs that the ranks run in one task
PATIENCE_S = 30  # time limit of a task, to which each program adds two seconds


class Written:
    """Makes each subclass a frozen dataclass that prints only the fields that differ from their defaults."""

    def __init_subclass__(cls):
        dataclass(frozen=True, repr=False)(cls)

    def __repr__(self):
        said = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(said)})"


class LayerSpec(Written):
    """Describes a layer.

    block        the layer is a `SelfAttention`; else the drop-in, with projections that the caller runs
    view         pass a transposed view instead of a transposed copy, for layers that take another layout
    norms        the kinds ("q", "k") with a norm over each head
    rope         how RoPE is passed: "Rotary" or "function" (block), or "tables" (drop-in); RoPE rotates ``rotary_dims`` dims
    learned      the tables of RoPE need a gradient
    by_row       positions differ between the batch elements
    gain         "constant" or "learned": attention takes a factor for each head as a further argument
    output       form of local attention's output: "4-D", "flat" or "strided"
    same         k and v are equal: one module makes both (block), or one tensor is both (drop-in)
    query        the drop-in's query is also used "elsewhere", or "changed" in place afterwards
    in_place     the tensor that is changed in place: the "query" inside local attention, or the drop-in's "output"
    frozen       prefixes of the names of frozen parameters
    wrapped      pairs (projection, kind of wrapper)
    hooks        pairs (projection or "attention", kind of hook)
    shares       (other layer, "modules" or "weights", names): uses the other layer's modules of these names, or their weights
    lengths      pass the lengths of the ranks even if all are equal
    alike        ``heads_alike``; if it is False, there is one head group
    """

    block: bool
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    batch_first: bool = True
    view: bool = False
    fused: bool = False
    bias: bool = False
    norms: str = ""
    rope: str = ""
    rotary_dims: int = 0
    learned: bool = False
    by_row: bool = False
    causal: bool = True
    gain: str = ""
    output: str = "4-D"
    same: bool = False
    query: str = ""
    in_place: str = ""
    frozen: tuple = ()
    wrapped: tuple = ()
    hooks: tuple = ()
    shares: tuple = ()
    lengths: bool = False
    alike: bool = False
    config: tuple = ()

    @property
    def projections(self):
        return ("qkv_proj",) if self.fused else ("q_proj", "k_proj", "v_proj")


class Program(Written):
    """Describes a program.

    shapes      {batch size: local lengths of the ranks}; every batch size occurs with only one sequence length
    transport   "plain": the package's; "late" or "delayed": from `transports`, with spoiled buffers
    autocast    run layers under autocast, which does not change fp64
    rank_major  projections write the send buffers wherever possible (`moving.always`)
    folds       rotate inside the operators that pack q and k
    counts      count how often each parameter gets its gradient
    """

    seed: int
    ranks: int
    width: int
    shapes: dict
    layers: tuple
    statements: tuple
    autocast: bool = False
    transport: str = "plain"
    rank_major: bool = False
    folds: bool = False
    counts: bool = False

    def __str__(self):
        head = dataclasses.replace(self, layers=(), statements=())
        lines = [repr(head), *(f"  layer {i}: {layer}" for i, layer in enumerate(self.layers))]
        return "\n".join([*lines, *(f"  {statement}" for statement in self.statements)])


# The statements of a program.


class Input(Written):
    out: str
    batch: int
    trains: bool = True

    def run(self, world):
        x = world.part(world.random(self.out, self.batch)).clone().requires_grad_(self.trains)
        world.values[self.out] = world.leaves[self.out] = x


class Call(Written):
    """Calls layers, one after another, on a value.

    how   "plain"; "reentrant" or "non-reentrant": in such a checkpoint; "saved": with hooks on saved tensors; "no_grad" or
          "inference": in such a mode
    """

    out: str
    x: str
    layers: tuple
    how: str = "plain"

    def run(self, world):
        x = world.values[self.x]

        def body(x):
            for index in self.layers:
                x = world.layers[index](x)
            return x

        within = {
            "no_grad": torch.no_grad(),
            "inference": torch.inference_mode(),
            "saved": torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
        }
        with world.autocast(), within.get(self.how, contextlib.nullcontext()):
            is_checkpoint = self.how.endswith("reentrant")
            y = checkpoint(body, x, use_reentrant=self.how == "reentrant") if is_checkpoint else body(x)
        world.note(f"output {self.out}", y)
        world.note(f"{self.out} needs a gradient", y.requires_grad)
        if self.how not in ("no_grad", "inference"):
            world.values[self.out] = y


class Mix(Written):
    """Combines two values of one shape ("add", "gate"), or detaches the first ("detach")."""

    out: str
    x: str
    y: str
    how: str

    def run(self, world):
        x, y = world.values[self.x], world.values[self.y]
        world.values[self.out] = x + y if self.how == "add" else x * y.tanh() if self.how == "gate" else x.detach()


class InPlace(Written):
    """Changes a layer's output in place."""

    x: str
    how: str

    def run(self, world):
        x = world.values[self.x]
        x.mul_(1.5) if self.how == "mul_" else x.add_(1)


class ChangeInput(Written):
    """Changes a layer's input in place after the call."""

    x: str

    def run(self, world):
        with torch.no_grad():
            world.values[self.x].mul_(2)


class Hook(Written):
    """Registers a hook that "halves" or "sees" a value's gradient, or "retains" the gradient."""

    x: str
    how: str

    def run(self, world):
        x = world.values[self.x]
        if not x.requires_grad:
            return
        if self.how == "retains":
            x.retain_grad()
            world.retained[self.x] = x
        elif self.how == "halves":
            x.register_hook(lambda grad: grad * 0.5)
        else:
            x.register_hook(lambda grad: world.note(f"gradient of {self.x} seen", grad))


class Term(Written):
    """A term of a loss, computed on each rank from the tokens ``windows[rank]`` of a value.

    form   "dot": the scalar product of the value with a random cotangent, other tokens masked out; "slice": as "dot", with other
           tokens cut off; "sum": the sum of the value; "square": as "dot", with squared values; "direct": backward gets the
           cotangent, without a loss; "strided": as "direct", with a cotangent in another memory order
    """

    value: str
    windows: tuple
    form: str = "dot"

    def ends(self, world, index):
        """Return (tensor from which backward starts, gradient of this tensor); None if the value needs no gradient."""
        y = world.values[self.value]
        if not y.requires_grad:
            return None
        lengths = world.program.shapes[len(y)]
        mask = [torch.zeros(length).index_fill(0, torch.arange(*window), 1) for length, window in zip(lengths, self.windows)]
        mask = torch.cat(mask)[None, :, None].expand(len(y), -1, -1)
        cotangent = world.random(f"cotangent {index}", len(y))
        mask, cotangent = (world.part(t).to(y.dtype) for t in (mask, cotangent))
        if self.form == "direct":
            return y, cotangent * mask
        if self.form == "strided":
            return y, (cotangent * mask).transpose(1, 2).contiguous().transpose(1, 2)
        if self.form in ("slice", "sum") and not world.whole:
            start, stop = self.windows[world.rank]
            y, cotangent, mask = (t[:, start:stop] for t in (y, cotangent, mask))
        if self.form == "sum":
            return (y.sum() if not world.whole else (y * mask).sum()), None
        return ((y * y if self.form == "square" else y) * cotangent * mask).sum(), None


class Backward(Written):
    """Runs one backward from several terms.

    via    "backward"; "inputs": to a subset of values and parameters; "grad": `torch.autograd.grad` of such a subset
    pick   the seed that draws the subset
    """

    terms: tuple
    via: str = "backward"
    pick: int = 0
    retain: bool = False

    def run(self, world):
        ends = [end for i, term in enumerate(self.terms) if (end := term.ends(world, i)) is not None]
        if not ends:
            return
        (tensors, grads), wanted = zip(*ends), None if self.via == "backward" else world.subset(self.pick)
        if wanted == {}:
            return
        world.in_backward = True
        if self.via == "grad":
            found = torch.autograd.grad(tensors, [*wanted.values()], grads, retain_graph=self.retain, allow_unused=True)
            for name, grad in zip(wanted, found):
                world.note(f"grad of {name}", grad, name in world.values)
        else:
            torch.autograd.backward(tensors, grads, retain_graph=self.retain, inputs=wanted and [*wanted.values()])
        world.in_backward = False


class Raises(Written):
    """Makes local attention raise on all ranks, in head group ``group`` or in backward; clears all gradients."""

    x: str
    layer: int
    where: str
    group: int = 0

    def run(self, world):
        layer, x = world.layers[self.layer], world.values[self.x].detach()
        kept, faults = dict(world.records), len(world.mover.faults) if world.mover else 0
        layer.raises, layer.first = (self.where, 0 if world.whole else self.group), None
        try:
            with world.autocast():
                y = layer(x.requires_grad_(world.values[self.x].requires_grad))
            if y.requires_grad:
                y.sum().backward()
            raised = False
        except Deliberate:
            raised = True
        layer.raises = None
        world.settle()
        if world.mover:  # ignore faults of abandoned exchanges, whose buffers c10d itself would keep alive
            del world.mover.faults[faults:]
        world.clear()
        world.records = kept
        world.note(f"raised in {self.where}", raised)


class Step(Written):
    """Takes a step of gradient descent, and drops all autograd graphs."""

    def run(self, world):
        world.note_gradients()
        parameters = [parameter for _, parameter in world.parameters() if parameter.requires_grad]
        totals = world.total([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        with torch.no_grad():
            for parameter, total in zip(parameters, totals):
                if parameter.grad is not None:
                    parameter -= 0.1 * total / (1 + total.abs().max())
        world.clear()
        for held in (world.values, world.leaves, world.retained):
            held.clear()


# The two worlds.


class Vector(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.float64))


def modules_of(spec, width, others):
    """Make the modules of a layer with random weights; take shared modules from ``others``, those of earlier layers."""
    made = nn.ModuleDict()
    sizes = {
        "q_proj": spec.heads * spec.head_dim,
        "k_proj": spec.kv_heads * spec.head_dim,
        "v_proj": spec.kv_heads * spec.value_dim,
    }
    if spec.fused:
        sizes = {"qkv_proj": sum(sizes.values())}
    for name, rows in sizes.items():
        made[name] = nn.Linear(width, rows, spec.bias, dtype=torch.float64)
    made["o_proj"] = nn.Linear(spec.heads * spec.value_dim, width, spec.bias, dtype=torch.float64)
    for parameter in made.parameters():  # large enough that attention isn't nearly uniform
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for kind in spec.norms:
        made[f"{kind}_norm"] = nn.RMSNorm(spec.head_dim, eps=1e-6, dtype=torch.float64)
        nn.init.normal_(made[f"{kind}_norm"].weight, mean=1, std=0.3)
    if spec.learned:
        made["turn"] = Vector(spec.rotary_dims)
    if spec.gain:
        made["gain"] = Vector(spec.heads).requires_grad_(spec.gain == "learned")
    if spec.same and spec.block:
        made["v_proj"] = made["k_proj"]
    if spec.same and not spec.block:
        del made["v_proj"]
    for name, how in spec.wrapped:
        if how == "LoRA":
            made[name] = Adapted(made[name])
        elif how == "subclass":
            made[name].__class__ = Scaled
        else:
            nn.utils.parametrizations.weight_norm(made[name])
    if spec.shares:
        other, what, names = spec.shares
        for name in names:
            if what == "modules":
                made[name] = others[other][name]
            else:
                made[name].weight = others[other][name].weight
    for name, parameter in made.named_parameters():
        if name.startswith(spec.frozen or ("none",)):
            parameter.requires_grad_(False)
    return made


class Layer:
    """Runs a layer of a program in one of the worlds: [b, s, width] -> [b, s, width]."""

    def __init__(self, world, index, spec, modules):
        self.world, self.index, self.spec, self.modules = world, index, spec, modules
        self.raises = self.first = None
        given = dict(config=dict(spec.config), transport=world.mover, name=f"layer {index}", heads_alike=spec.alike)
        if world.whole:
            self.attend = Whole(self)
        elif spec.block:
            self.attend = ds_sp_overlap.SelfAttention(
                local_attention=self.local_attention, num_heads=spec.heads, num_kv_heads=spec.kv_heads, head_dim=spec.head_dim,
                rope={"": None, "Rotary": ds_sp_overlap.Rotary(self.tables_of, partial=True), "function": self.rope}[spec.rope],
                sequence_process_group=dist.group.WORLD, batch_first=spec.batch_first, **given,
                **{name: module for name, module in modules.items() if name.endswith(("_proj", "_norm"))},
            )  # fmt: skip
        else:
            self.attend = ds_sp_overlap.DistributedAttention(
                self.local_attention, dist.group.WORLD, gather_idx=1 if spec.batch_first else 0, **given
            )
        for name, kind in spec.hooks:
            self.hook(name, kind)

    def hook(self, name, kind):
        module = self.attend if name == "attention" else self.modules[name]
        what = f"{name} of layer {self.index}"

        def note(say, tensor):
            if not self.world.whole and not self.spec.batch_first and (self.spec.block or name == "attention"):
                tensor = tensor.transpose(0, 1)
            self.world.note(f"{what} {say}", tensor)

        def sees(module, args, output):
            if not self.world.in_backward:  # leave out recomputation, which differs between the worlds
                note("gave", output.flatten(2)) if kind == "sees output" else self.world.note(f"{what} called", True)

        if kind in ("sees output", "deepspeed's"):
            sees.__module__ = __name__ if kind == "sees output" else "deepspeed.hooks"
            module.register_forward_hook(sees)
        elif kind == "scales output":
            module.register_forward_hook(lambda module, args, output: 1.25 * output)
        elif kind == "scales input":
            module.register_forward_pre_hook(lambda module, args: (1.25 * args[0], *args[1:]))
        else:
            module.register_full_backward_hook(lambda module, dx, dy: note("was given", dy[0].flatten(2)))

    # Called by the program.

    def __call__(self, x):
        world, spec = self.world, self.spec
        if world.whole or not spec.block:
            return self.outside(x, self.attend if world.whole else self.drop_in)
        extra = (self.gain(),) if spec.gain else ()
        given = x if spec.batch_first else x.transpose(0, 1)
        y = self.attend(
            given if spec.view else given.contiguous(), *extra,
            position_embeddings=self.tables(len(x)) if spec.rope else None, sequence_lengths=self.lengths(len(x)),
        )  # fmt: skip
        return y if spec.batch_first else y.transpose(0, 1)

    def outside(self, x, attend):
        """Run the projections and norms of the caller, and ``attend`` between them."""
        spec, modules = self.spec, self.modules
        if spec.fused:
            sizes = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim
            q, k, v = modules["qkv_proj"](x).split(sizes, -1)
        else:
            q, k = modules["q_proj"](x), modules["k_proj"](x)
            v = modules["v_proj"](x) if "v_proj" in modules else k
        q, k, v = (t.unflatten(-1, (n, -1)) for t, n in zip((q, k, v), (spec.heads, spec.kv_heads, spec.kv_heads)))
        q, k = (modules[f"{kind}_norm"](t) if f"{kind}_norm" in modules else t for kind, t in zip("qk", (q, k)))
        if spec.same and not spec.block:
            v = k
        o = attend(q, k, v)
        if spec.in_place == "output":
            o.mul_(1.5)
        y = modules["o_proj"](o.flatten(2))
        if spec.query == "elsewhere":
            y = y + q.sum((2, 3))[..., None]
        if spec.query == "changed":
            q.mul_(3)
        return y

    def drop_in(self, q, k, v):
        spec = self.spec
        extra = (self.gain(),) if spec.gain else ()
        tables, lengths = None, self.lengths(len(q))
        if spec.rope:
            tables = tuple(table[0][:, None, None] for table in self.whole_tables(len(q)))
        if not spec.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        if not spec.view:
            q, k, v = q.contiguous(), k.contiguous(), v if v is k else v.contiguous()
        o = self.attend(q, k, v, 0 if spec.batch_first else 1, tables, *extra, sequence_lengths=lengths)
        o = o.unflatten(2, (spec.heads, -1)) if spec.output == "flat" else o
        return o if spec.batch_first else o.transpose(0, 1)

    # Attention.

    def attention(self, q, k, v):
        """Attend on the whole sequence."""
        if self.spec.query == "changed" or self.spec.in_place == "query":
            q = q.clone()
        if self.spec.rope:
            cos, sin = self.whole_tables(len(q))
            q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        return self.attended(q, k, v, self.modules["gain"].weight if self.spec.gain else None)

    def local_attention(self, q, k, v, gain=None, queries=None):
        if not self.spec.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        o = self.attended(q, k, v, gain, queries)
        if self.spec.output == "strided":
            o = o.transpose(0, 1).contiguous().transpose(0, 1)
        o = o if self.spec.batch_first else o.transpose(0, 1)
        return o.flatten(2) if self.spec.output == "flat" else o

    def attended(self, q, k, v, gain, queries=None):
        if self.raises:
            where, after = self.raises
            self.first = self.first or queries
            # If ranks share heads, a rank may attend a group in several calls, one for each range of queries. Count a group at its
            # first range. The first call may be a probe, with one range on all ranks. If it raises, the next call raises, too.
            if after < 0 or queries == self.first:
                self.raises = where, after - 1
                if where == "attention" and after <= 0:
                    raise Deliberate
        if self.spec.in_place == "query":
            q.mul_(1.5)
        o = reference.attention(q, k, v, self.spec.causal, queries)
        o = o if gain is None else o * gain[:, None]
        return RaisesInBackward.apply(o) if self.raises and self.raises[0] == "backward" else o

    def gain(self):
        """Return the gain of this rank's heads; if the heads don't divide by the ranks, the first ranks have one head more."""
        ranks, spec = self.world.program.ranks, self.spec
        shares = dict(spec.config).get("shares", shares_for(ranks, spec.heads, spec.kv_heads))
        part = self.world.rank // shares
        small, larger = divmod(spec.heads, ranks // shares)
        start = part * small + min(part, larger)
        return self.modules["gain"].weight[start : start + small + (part < larger)]

    def lengths(self, batch):
        lengths = self.world.program.shapes[batch]
        return lengths if self.spec.lengths or len(set(lengths)) > 1 else None

    # RoPE.

    def whole_tables(self, batch):
        """Return cos and sin [b or 1, s, rotary dims] of all tokens."""
        rows = []
        for row in range(batch if self.spec.by_row else 1):
            positions = torch.arange(sum(self.world.program.shapes[batch])) + 3 * row
            rows.append(reference.rope_tables(positions, self.spec.rotary_dims, torch.float64))
        tables = (torch.stack(each) for each in zip(*rows))
        return [table * self.modules["turn"].weight if self.spec.learned else table for table in tables]

    def tables(self, batch):
        return [self.world.part(table, batch) for table in self.whole_tables(batch)]

    def tables_of(self, tables):
        return tuple((t if self.spec.batch_first else t.transpose(0, 1)).unsqueeze(-2) for t in tables)

    def turned(self, x, cos, sin):
        rows = [reference.rope(x[i : i + 1], cos[i % len(cos)], sin[i % len(sin)]) for i in range(len(x))]
        return torch.cat(rows)

    def rope(self, x, tables):
        x = x if self.spec.batch_first else x.transpose(0, 1)
        x = self.turned(x, *tables)
        return x if self.spec.batch_first else x.transpose(0, 1)


class Whole(nn.Module):
    """Replaces the drop-in in the world of the whole sequence; a module, so that hooks can be registered."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, q, k, v):
        return self.layer.attention(q, k, v)


class World:
    """Runs a program on the whole sequence (``rank`` None), or on a rank's tokens with the package.

    values    {name: value of the program [b, s, width]}
    records   {name: (tensor or flag, whether a tensor has tokens [b, s, ..])}, the results to compare
    """

    def __init__(self, program, rank=None, mover=None, nudged=None):
        self.program, self.rank, self.whole, self.mover = program, rank, rank is None, mover
        self.values, self.leaves, self.retained, self.records = {}, {}, {}, {}
        self.in_backward = False
        torch.manual_seed(program.seed)
        made = []
        for spec in program.layers:
            made.append(modules_of(spec, program.width, made))
        self.made = nn.ModuleList(made)
        if nudged is not None:
            torch.manual_seed(nudged)
            for parameter in self.made.parameters():
                parameter.data *= 1 + 2.0**-50 * torch.randn_like(parameter)
        self.layers = [Layer(self, i, spec, modules) for i, (spec, modules) in enumerate(zip(program.layers, made))]
        if program.counts:
            for name, parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.note(f"{name} delivered", True))

    def run(self):
        for statement in self.program.statements:
            statement.run(self)
        self.note_gradients()
        return self.records

    def random(self, name, batch):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.program.seed} {name}".encode()))
        size = batch, sum(self.program.shapes[batch]), self.program.width
        return torch.randn(size, dtype=torch.float64, generator=generator)

    def part(self, x, batch=None):
        """Return this rank's tokens of ``x`` [b, s, ..]."""
        lengths = self.program.shapes[batch or len(x)]
        return x if self.whole else x.narrow(1, sum(lengths[: self.rank]), lengths[self.rank])

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=self.program.autocast)

    def parameters(self):
        return list(self.made.named_parameters())

    def subset(self, pick):
        """Draw some of the values and parameters that need a gradient, by the seed ``pick``; return {name: tensor}."""
        everything = [(name, x) for name, x in self.values.items() if x.requires_grad]
        everything += [(name, parameter) for name, parameter in self.parameters() if parameter.requires_grad]
        chosen = random.Random(pick)
        share = chosen.choice((0.2, 0.5, 0.8))
        return {name: x for name, x in everything if chosen.random() < share}

    def note(self, name, what, tokens=True):
        count = sum(other == name or other.startswith(name + " #") for other in self.records)
        what = what.detach().clone() if isinstance(what, torch.Tensor) else what
        self.records[f"{name} #{count}" if count else name] = what, tokens

    def note_gradients(self):
        for name, x in self.leaves.items():
            self.note(f"gradient of {name}", x.grad)
        for name, x in self.retained.items():
            self.note(f"retained gradient of {name}", x.grad)
        for name, parameter in self.parameters():
            self.note(f"gradient of {name}", parameter.grad, tokens=False)

    def clear(self):
        for tensor in [*self.made.parameters(), *self.values.values()]:
            if tensor.is_leaf:
                tensor.grad = None
        self.in_backward = False

    def total(self, tensors):
        """Return the sum of each tensor over the ranks."""
        if self.whole or not tensors:
            return tensors
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors)]

    def settle(self):
        """Wait until the transport's thread has delivered all exchanges."""
        if isinstance(self.mover, transports.Delayed):
            self.mover.settle()


def errors(world, got, expected):
    """Compare the records of this rank with those of the whole sequence.

    Returns {name: relative error}, with a text instead of the error for a record of another shape, or of another flag.
    """
    tensors = {name: what for name, (what, _) in expected.items() if isinstance(what, torch.Tensor)}
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise AssertionError("the reference isn't finite")
    # Without RoPE, the gradient of a key's bias is only rounding. So divide errors by at least 1e-3 of the largest number.
    least = 1e-3 * max((tensor.abs().max().item() for tensor in tensors.values() if tensor.numel()), default=0)
    sums = [name for name in tensors if not expected[name][1]]
    mine = [got.get(name, (None,))[0] for name in sums]
    mine = [tensors[n].new_zeros(tensors[n].shape) if t is None else t.double() for n, t in zip(sums, mine)]
    totals = dict(zip(sums, world.total(mine)))
    found = {name: "is no record of the whole sequence" for name in got.keys() - expected.keys()}
    for name, (wanted, tokens) in expected.items():
        what = got[name][0] if name in got else "nothing"
        what = totals.get(name, what) if isinstance(what, torch.Tensor) else what
        wanted = world.part(wanted) if name in tensors and tokens else wanted
        found[name] = difference(what, wanted, least)
    return found


def difference(what, wanted, least):
    if not isinstance(wanted, torch.Tensor) or not isinstance(what, torch.Tensor) or what.shape != wanted.shape:
        said = [f"a tensor {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in (what, wanted)]
        return 0.0 if said[0] == said[1] else f"is {said[0]} instead of {said[1]}"
    if not wanted.numel():
        return 0.0
    return (what - wanted).abs().max().item() / max(wanted.abs().max().item(), least, 1e-300)


def faults(rank, program, delayed, acted):
    """List the faults of a program on this rank; count in ``acted`` how often each feature of the program had an effect."""
    expected = World(program).run()
    tolerance = 1e-12
    mover = {"plain": None, "late": transports.Late(), "delayed": delayed}[program.transport]
    with contextlib.ExitStack() as stack:
        if mover is not None:
            stack.enter_context(transports.spoiled_buffers())
        if program.rank_major:
            stack.enter_context(always)
        if program.folds:
            stack.enter_context(mock.patch.object(ops, "_TORCH", REFERENCE._replace(folds=True)))
        stack.enter_context(mock.patch.object(sp_group, "hostname", lambda: f"node {rank // 2}"))
        by_rank = stack.enter_context(mock.patch.object(operations, "by_rank", side_effect=operations.by_rank))
        relay = stack.enter_context(mock.patch.object(Relayed, "_pass_on", autospec=True, side_effect=Relayed._pass_on))
        world = World(program, rank, mover)
        got = world.run()
        world.settle()
        acted.update({"two legs": relay.call_count, "rank-major": by_rank.call_count * program.rank_major})
    wrong = errors(world, got, expected)
    if any(isinstance(e, float) and e > tolerance for e in wrong.values()):
        # Some programs magnify rounding. Allow 4 times the error of the reference when its weights are rounded differently.
        worlds = [World(program, nudged=seed) for seed in range(3)]
        tolerance = max(
            tolerance, *(4 * e for world in worlds for e in errors(world, world.run(), expected).values() if isinstance(e, float))
        )
        acted["magnifies"] += 1
    said = {name: f"differs by {e:.3g}" if isinstance(e, float) else e for name, e in wrong.items()}
    found = [f"{name} {said[name]}" for name, e in wrong.items() if not isinstance(e, float) or not e <= tolerance]
    acted["raised"] += sum(what is True for name, (what, _) in got.items() if name.startswith("raised"))
    acted["hooks"] += sum(" gave" in name or " was given" in name or " seen" in name for name in got)
    acted["compared"] += len(expected)
    if mover is not None:
        acted["transfers"] += len(getattr(mover, "transfers", ()))
        found += mover.faults
        mover.faults.clear()
    acted["worst"] = max([acted["worst"], *(e for e in wrong.values() if isinstance(e, float))])
    return found


def run(rank, seeds):
    """Run the programs of ``seeds`` on this rank; return ``([(seed, fault)], acted)``."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    delayed, found, acted = transports.Delayed(longest_s=0.001), [], Counter()
    for seed in seeds:
        found += [(seed, fault) for fault in faults(rank, draw(seed), delayed, acted)]
    return found, acted


# Drawing.


def ranks_of(seed):
    return (2, 3, 2, 4)[seed % 4]


def draw(seed):
    return _Draw(seed).program


class _Draw:
    def __init__(self, seed):
        self.random, self.ranks = random.Random(seed), ranks_of(seed)
        self.windows = random.Random(-1 - seed)  # a separate generator, so that the other draws of a seed stay as they were
        self.sharing = random.Random(f"shares {seed}")
        self.chance(0.05)  # unused, kept so that the other draws of a seed stay as they were
        self.shapes = {self.some(1, 3): self.lengths() for _ in range(self.some(1, 2))}
        self.least = min(map(sum, self.shapes.values()))
        self.transport = self.pick("plain", "plain", "plain", "late", "delayed")
        self.layers = []
        for _ in range(self.pick(1, 1, 2, 2, 3)):
            self.layers.append(self.layer())
        self.reentrant = self.chance(0.3)
        self.statements, self.values, self.names = [], {}, 0
        for turn in range(self.pick(1, 1, 2)):
            if turn and self.chance(0.5):
                self.statements.append(Step())
                self.values = {}
            self.round()
        self.program = Program(
            seed=seed, ranks=self.ranks, width=self.some(2, 8), shapes=self.shapes, layers=tuple(self.layers),
            statements=tuple(self.with_retained()),
            autocast=self.chance(0.2),
            transport=self.transport, rank_major=self.chance(0.3), folds=self.chance(0.15), counts=self.chance(0.3),
        )  # fmt: skip

    def chance(self, share):
        return self.random.random() < share

    def pick(self, *choices):
        return self.random.choice(choices)

    def some(self, low, high):
        return self.random.randint(low, high)

    def lengths(self):
        lengths = tuple(self.pick(*([self.some(1, 4)] * 3), 0, 1, 2, 3) for _ in range(self.ranks))
        if self.chance(0.4):
            lengths = (self.some(1, 4),) * self.ranks
        return lengths if sum(lengths) else (1,) * self.ranks

    def layer(self):
        if self.layers and self.chance(0.3):
            return self.relative(self.some(0, len(self.layers) - 1))
        block, head_dim = self.chance(0.65), self.some(1, 7)
        heads = self.some(self.ranks, self.ranks + 5)
        kv_heads = self.pick(*(n for n in range(1, heads + 1) if heads % n == 0))
        value_dim = head_dim if block or self.chance(0.5) else self.some(1, 7)
        few = self.sharing.random() < 0.15 and self.least >= self.ranks
        if few:  # mostly fewer heads than ranks
            heads = self.sharing.randint(1, self.ranks)
            kv_heads = self.sharing.choice([n for n in range(1, heads + 1) if heads % n == 0])
        same = self.chance(0.12)
        value_dim = head_dim if same else value_dim
        fused = not same and self.chance(0.25)
        names = ("qkv_proj", "o_proj") if fused else ("q_proj", "k_proj", "v_proj", "o_proj")
        norms = self.pick("", "", "", "q", "k", "qk") if head_dim > 1 else ""
        rope = self.pick("", "Rotary", "Rotary", "function") if block else self.pick("", "tables")
        rope = rope if head_dim > 1 else ""
        hooks, wrapped, frozen = [], [], ()
        for name in names if block else ("attention",):
            if name == "v_proj" and same:
                continue
            if self.chance(0.08):
                kinds = ["scales output", "scales input"][: 1 + block]
                if not (same and name == "k_proj"):  # k_proj may be called once for both k and v
                    kinds += ["sees output", "sees gradient", "deepspeed's"]
                hooks.append((name, self.pick(*kinds)))
            elif block and self.chance(0.08):
                wrapped.append((name, self.pick("LoRA", "LoRA", "subclass", "weight_norm")))
        if self.chance(0.3):
            frozen = self.pick(
                ("q_proj",), ("k_proj", "v_proj"), ("o_proj",), names, names[:-1], ("qkv_proj", "q_proj.weight"),
                ("o_proj.weight",), ("",), ("q_norm", "k_norm", "turn"),
            )  # fmt: skip
        query = "" if block or fused or ("attention", "sees gradient") in hooks else self.pick("", "", "elsewhere", "changed")
        gain = self.pick(*[""] * 6, "constant", "learned")
        in_place = "query" if self.chance(0.1) and not few else ""
        if not block and ("attention", "sees gradient") not in hooks and self.chance(0.15):
            in_place = "output"
        return LayerSpec(
            block=block, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, same=same, fused=fused,
            norms=norms, rope=rope, rotary_dims=2 * self.some(1, head_dim // 2) if rope else 0,
            learned=bool(rope) and self.chance(0.15), by_row=rope in ("Rotary", "function") and self.chance(0.2),
            bias=self.chance(0.4), causal=self.chance(0.7), gain=gain, output=self.pick("4-D", "4-D", "flat", "strided"),
            query=query, in_place=in_place, hooks=tuple(hooks), wrapped=tuple(wrapped), frozen=frozen, **self.manner(heads, in_place),
        )  # fmt: skip

    def manner(self, heads, in_place):
        """Draw the options that may differ between two layers with the same modules."""
        config = {"head_groups": self.pick("auto", *range(1, heads // self.ranks + 1))}
        if self.chance(0.15):
            config["projections"] = False
        if self.chance(0.15):
            config["wgrad"] = False
        if self.chance(0.1):
            config["check"] = True
        if self.windows.random() < 0.35:
            config["window"] = self.windows.randint(1, 3)
        possible = [r for r in range(2, self.ranks + 1) if self.ranks % r == 0 and self.ranks // r <= heads]
        if self.least < self.ranks:  # shares without a token are refused
            config["shares"] = 1
        elif in_place == "query":  # with shares, the q of a call is a view that autograd does not let anyone change in place
            config["shares"] = 1
        elif self.sharing.random() < 0.3:
            config["shares"] = self.sharing.choice(possible)
        if self.sharing.random() < 0.25:  # as if every node had two ranks
            config["kv_once_per_node"] = True
        return dict(
            batch_first=self.chance(0.5),
            view=self.chance(0.4),
            lengths=self.chance(0.3),
            alike=self.chance(0.85),
            config=tuple(config.items()),
        )

    def relative(self, other):
        """Draw a layer that shares modules or weights with the layer ``other``."""
        spec = self.layers[other]
        names = (*(n for n in spec.projections if not (spec.same and n == "v_proj")), "o_proj")
        names = self.pick(names, names[-1:], names[:-1])
        what = "modules" if spec.wrapped else self.pick("modules", "weights")
        manner = self.manner(spec.heads, spec.in_place)
        return dataclasses.replace(spec, hooks=(), wrapped=(), frozen=(), shares=(other, what, names), **manner)

    # Statements.

    def new(self):
        self.names += 1
        return f"v{self.names}"

    def round(self):
        fresh = []
        for _ in range(self.pick(1, 1, 2)):
            name, batch = self.new(), self.pick(*self.shapes)
            self.statements.append(Input(name, batch, self.chance(0.8)))
            self.values[name] = batch
        for step in range(self.some(1, 5)):
            x = self.pick(*self.values)
            kind = "call" if step == 0 else self.pick(*["call"] * 7, "mix", "mix", "quiet", "raises", "raises", "backward")
            if kind == "call":
                fresh.append(self.call(x))
            elif kind == "mix":
                y = self.pick(*(other for other, batch in self.values.items() if batch == self.values[x]))
                out = self.new()
                self.statements.append(Mix(out, x, y, self.pick("add", "gate", "gate", "detach")))
                self.values[out] = self.values[x]
                fresh.append(out)
            elif kind == "quiet":
                layer = self.some(0, len(self.layers) - 1)
                self.statements.append(Call(self.new(), x, (layer,), self.pick("no_grad", "inference")))
            elif kind == "raises":
                layer = self.some(0, len(self.layers) - 1)
                groups = dict(self.layers[layer].config)["head_groups"]
                last = groups - 1 if self.layers[layer].alike and groups != "auto" and not self.layers[layer].gain else 0
                self.statements.append(Raises(x, layer, self.pick(*["attention"] * 2, "backward"), self.pick(0, last, last)))
            elif fresh:
                self.backward([self.pick(*fresh)])
        used = [value for value in fresh if self.chance(0.85)] or fresh[-1:]
        if self.chance(0.3):  # one backward for each value, through parts of the graph that the values share
            self.random.shuffle(used)
            for value in used:
                self.backward([value])
        else:
            self.backward(used)
        if self.chance(0.2):
            self.statements.append(self.statements[-1])

    def call(self, x):
        out, layers = self.new(), tuple(self.some(0, len(self.layers) - 1) for _ in range(self.pick(1, 1, 1, 2)))
        how = self.pick("plain", "plain", "plain", "plain", "saved", "non-reentrant", *["reentrant"] * 3 * self.reentrant)
        last = self.layers[layers[-1]]
        if how == "plain" and len(layers) == 1 and self.lets_input_go(last):
            given = self.new()
            self.statements += [Mix(given, x, x, "add"), Call(out, given, layers), ChangeInput(given)]
        else:
            self.statements.append(Call(out, x, layers, how))
        self.values[out] = self.values[x]
        if ("o_proj", "sees gradient") not in self.every_hook(layers[-1]) and how != "reentrant" and self.chance(0.2):
            if last.query != "elsewhere":
                self.statements.append(InPlace(out, self.pick("mul_", "add_")))
        if self.chance(0.2):
            self.statements.append(Hook(out, self.pick("halves", "sees", "retains")))
        return out

    def lets_input_go(self, spec):
        """Return whether backward does not need a layer's input."""
        is_read = spec.block and "window" in dict(spec.config)  # backward recomputes q, k and v from the input
        return set(spec.projections) <= set(spec.frozen) and not (spec.wrapped or spec.hooks or spec.shares or is_read)

    def every_hook(self, index):
        spec = self.layers[index]
        return spec.hooks + (self.every_hook(spec.shares[0]) if spec.shares else ())

    def backward(self, values):
        terms = []
        for value in values:
            lengths = self.shapes[self.values[value]]
            windows = [(0, length) for length in lengths]
            kind = self.pick("all", "all", "window", "not on one rank", "on one rank")
            if kind == "window":
                starts = [self.some(0, length) for length in lengths]
                windows = [(start, self.some(start, length)) for start, length in zip(starts, lengths)]
            one = self.some(0, self.ranks - 1)
            if kind.endswith("one rank"):
                windows = [w if (r == one) == (kind == "on one rank") else (0, 0) for r, w in enumerate(windows)]
            terms.append(Term(value, tuple(windows), self.pick("dot", "slice", "sum", "square", "direct", "strided")))
        via = "backward" if self.reentrant else self.pick("backward", "backward", "backward", "inputs", "grad")
        self.statements.append(Backward(tuple(terms), via, self.some(0, 999) if via != "backward" else 0))

    def with_retained(self):
        """Return the statements, with ``retain`` set in each backward if a later backward uses the same graph."""
        later, kept = set(), []
        for statement in reversed(self.statements):
            if isinstance(statement, Step):
                later = set()
            if isinstance(statement, Backward):
                through = set().union(*(self.all_ancestors(term.value) for term in statement.terms))
                if through & later or self.chance(0.1):
                    statement = dataclasses.replace(statement, retain=True)
                later |= through
            kept.append(statement)
        return reversed(kept)

    def all_ancestors(self, value):
        found = {value}
        for statement in self.statements:
            if getattr(statement, "out", None) == value and not isinstance(statement, Input):
                for source in {statement.x, getattr(statement, "y", statement.x)}:
                    found |= self.all_ancestors(source)
        return {name for name in found if not any(isinstance(s, Input) and s.out == name for s in self.statements)}


# Many programs.


def check(seeds, task=run, *args, enough=5):
    """Run the programs of ``seeds``; return reports of at most ``enough`` failed programs, and ``acted``.

    A program fails if it is wrong, raises or hangs.
    """
    reports, acted = [], Counter()
    for size in (2, 3, 4):
        mine = [seed for seed in seeds if ranks_of(seed) == size]
        for start in range(0, len(mine), BATCH):
            reports += reports_of(mine[start : start + BATCH], task, args, acted, enough)
            if len(reports) >= enough:
                return reports, acted
    return reports, acted


def reports_of(batch, task, args, acted, enough):
    """Run programs of one number of ranks; return the reports of failed programs.

    If a rank raises or hangs, run each program alone, to find the program that failed.
    """
    said = {seed: f"seed {seed} (python -m tests.harness.programs --seed {seed})\n{draw(seed)}" for seed in batch}
    reports = []
    try:
        results = on_ranks(ranks_of(batch[0]), task, batch, *args, timeout_s=PATIENCE_S + 2 * len(batch))
    except RankError as error:
        if len(batch) == 1:
            return [f"{said[batch[0]]}\n{error}"]
        for seed in batch:
            reports += reports_of([seed], task, args, acted, enough) if len(reports) < enough else []
        return reports or [f"seeds {batch}, together only:\n{error}"]
    for _, counts in results:
        acted["worst"] = max(acted["worst"], counts.pop("worst", 0))
        acted.update(counts)
    for seed in batch:
        lines = [f"  rank {rank}: {fault}" for rank, (found, _) in enumerate(results) for s, fault in found if s == seed]
        if lines:
            reports.append("\n".join([said[seed], *lines]))
    return reports


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        print(draw(arguments.seed))
        seeds = [arguments.seed]
    else:
        seeds = range(arguments.first, arguments.first + arguments.programs)
    reports, acted = check(seeds)
    print("\n\n".join(reports))
    print(f"{len(seeds)} programs, {len(reports)} wrong; {dict(acted)}")
    sys.exit(bool(reports))


if __name__ == "__main__":
    from tests.harness import programs  # the ranks import the module by this name

    programs.main()
