"""Compares an overlapped self-attention layer, run on each rank of a test, with the same layer on the whole sequence."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

import ds_sp_overlap
from ds_sp_overlap.schedule import by_head_groups
from tests.harness import reference

HEADS = [(4, 4), (8, 8), (8, 4), (8, 2), (4, 1), (6, 3), (7, 7)]


def groups_for(heads, size):
    return [g for g in (1, 2, 4) if g <= heads // size]


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    batch: int = 2
    lengths: tuple = (6, 6)  # local sequence of each rank
    batch_first: bool = True
    rope: bool = True
    rotary: bool = True  # pass rope as a `ds_sp_overlap.Rotary`, so that the projections are one autograd node; else as a function
    bias: bool = False
    fused: bool = False
    dtype: torch.dtype = torch.float64
    attends: dict = field(default_factory=dict, hash=False)  # options of `reference.attention`
    config: dict = field(default_factory=dict, hash=False)
    schedule: Callable = field(default=by_head_groups, hash=False, repr=False)

    @property
    def width(self):
        return self.heads * self.head_dim


def projections(shape, seed=1):
    """Make the projections of the layer, with equal weights on every rank."""
    torch.manual_seed(seed)
    linear = lambda n, m: nn.Linear(n, m, bias=shape.bias, dtype=shape.dtype)  # noqa: E731
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = nn.ModuleDict({"o_proj": linear(q, shape.width)})
    if shape.fused:
        layer["qkv_proj"] = linear(shape.width, q + 2 * kv)
    else:
        layer.update({f"{kind}_proj": linear(shape.width, rows) for kind, rows in zip("qkv", (q, kv, kv))})
    return layer


def whole_inputs(shape, seed=2):
    """Draw hidden states [b, s, m] and a cotangent for the output, of the whole sequence."""
    torch.manual_seed(seed)
    size = (shape.batch, sum(shape.lengths), shape.width)
    return torch.randn(size, dtype=shape.dtype), torch.randn(size, dtype=shape.dtype)


def reference_layer(shape, layer, x):
    """Return the output [b, s, m] of the layer on the whole sequence."""
    split = (shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2)
    if shape.fused:
        q, k, v = layer["qkv_proj"](x).split(split, -1)
    else:
        q, k, v = (layer[f"{kind}_proj"](x) for kind in "qkv")
    q, k, v = (t.unflatten(-1, (-1, shape.head_dim)) for t in (q, k, v))
    if shape.rope:
        tables = reference.rope_tables(torch.arange(x.shape[1]), shape.head_dim, shape.dtype)
        q, k = reference.rope(q, *tables), reference.rope(k, *tables)
    attend = getattr(layer, "attend", lambda attention: attention)(functools.partial(reference.attention, **shape.attends))
    return layer["o_proj"](attend(q, k, v).flatten(2))


def laid_out(attention, batch_first):
    """Return ``attention``, a function of batch-first q, k, v, as a function of q, k, v in the layout of a layer."""
    if batch_first:
        return attention
    return lambda *heads: attention(*(x.transpose(0, 1) for x in heads)).transpose(0, 1)


def block(shape, layer, group, transport=None, local_attention=None, heads_alike=True):
    """Make a `SelfAttention` from the modules of the layer."""
    local = reference.attention if shape.batch_first else reference.sequence_first_attention
    if shape.attends:
        local = functools.partial(local, **shape.attends)
    local = getattr(layer, "attend", lambda attention: attention)(local)

    def heads_last(tables):
        return tuple(table[:, None] if shape.batch_first else table[:, None, None] for table in tables)

    def rope(x, tables):
        x = x if shape.batch_first else x.transpose(0, 1)
        x = reference.rope(x, *tables)
        return x if shape.batch_first else x.transpose(0, 1)

    return ds_sp_overlap.SelfAttention(
        local_attention=local_attention or local,
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        rope=(ds_sp_overlap.Rotary(heads_last) if shape.rotary else rope) if shape.rope else None, sequence_process_group=group,
        **({} if shape.batch_first else {"batch_first": False}),  # batch-first is the default
        config=shape.config, schedule=shape.schedule, transport=transport, name="layer", heads_alike=heads_alike, **layer,
    )  # fmt: skip


def my_slice(shape, rank, x, batch_first=None):
    """Return this rank's part [.., s_r, ..] of a whole tensor [b, s, ...], in the layout of the shape."""
    start = sum(shape.lengths[:rank])
    x = x[:, start : start + shape.lengths[rank]]
    return (x if shape.batch_first else x.transpose(0, 1)).contiguous()


def mine(rank, shape, *args, change=None, **options):
    """Return the layer, its overlapped block, and the hidden states and cotangent of this rank.

    ``change(layer)`` is called before the block is made.
    """
    layer = projections(shape)
    if change:
        change(layer)
    x, dy = (my_slice(shape, rank, t) for t in whole_inputs(shape))
    return layer, block(shape, layer, torch.distributed.group.WORLD, *args, **options), x, dy


def call_block(shape, attend, rank, x):
    tables = None
    if shape.rope:
        start = sum(shape.lengths[:rank])
        tables = reference.rope_tables(torch.arange(start, start + shape.lengths[rank]), shape.head_dim, shape.dtype)
    lengths = shape.lengths if len(set(shape.lengths)) > 1 else None
    return attend(x, position_embeddings=tables, sequence_lengths=lengths)


def faults(tolerance, **pairs):
    """Return a line for each ``name=(got, expected)`` whose relative error exceeds the tolerance."""
    errors = {}
    for name, (got, expected) in pairs.items():
        if got is None or expected is None:
            errors[name] = 0.0 if got is expected else math.inf
        else:
            errors[name] = reference.relative_error(got, expected)
    return [f"{name} differs by {error:.3g}" for name, error in errors.items() if not error <= tolerance]


def unlike(shape, rank, mine, whole, got=None, expected=None, tolerance=1e-12):
    """List the gradients and tensors on this rank that differ from those of the whole sequence.

    mine, whole     the modules that ran on this rank, and on the whole sequence; gradients of ``mine`` are summed over the ranks
    got, expected   {name: tensor} of this rank's tokens, and of the whole sequence
    """
    pairs = {name: (got[name].detach(), my_slice(shape, rank, x.detach())) for name, x in (expected or {}).items()}
    return faults(tolerance, **pairs, **gradients(mine, dict(whole.named_parameters())))


def gradients(mine, of_whole):
    """Return {name: (gradient summed over the ranks, gradient of ``of_whole[name]``)} for the parameters of ``mine``."""
    pairs = {}
    for name, parameter in mine.named_parameters():
        total = None if parameter.grad is None else parameter.grad.clone()
        if total is not None and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        pairs["d " + name] = total, of_whole[name].grad
    return pairs


def backward(call, layer, x, dy):
    """Run one forward and one backward of a layer."""
    y = call(x)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def block_faults(rank, shape, use=backward, transport=None, tolerance=1e-12, change=None, local_attention=None):
    """List the results on this rank in which the block differs from the reference on the whole sequence.

    Compares the tensors that ``use`` returns, and the gradients of the weights, summed over the ranks.

    use      ``use(call, layer, x, dy)`` -> tensors along the sequence by name; runs with the block and with the reference
    change   ``change(layer)`` changes the projections before the block is made
    local_attention   replaces `reference.attention` in the block, and computes the same

    fp64 gives 1e-15 to 1e-14 for these sizes; the smallest mistake in a head, a token or a factor gives more than 1e-3.
    """
    mine, whole = projections(shape), projections(shape)
    for layer in (mine, whole) if change else ():
        change(layer)
    x, dy = whole_inputs(shape)
    expected = use(lambda x: reference_layer(shape, whole, x), whole, x.clone().requires_grad_(), dy)
    attend = block(shape, mine, torch.distributed.group.WORLD, transport, local_attention)
    local_x, local_dy = (my_slice(shape, rank, t) for t in (x, dy))
    got = use(lambda x: call_block(shape, attend, rank, x), mine, local_x.requires_grad_(), local_dy)
    return unlike(shape, rank, mine, whole, got, expected, tolerance)


def faults_of_all(rank, shapes, transport=None, of_one=block_faults):
    """List the faults of many shapes; each line begins with the shape. ``transport`` is a class, such as `Late`."""
    every = []
    for shape in shapes:
        mover = transport() if transport else None
        found = of_one(rank, shape, transport=mover) + (mover.faults if mover else [])
        every += [f"{shape}: {fault}" for fault in found]
    return every
