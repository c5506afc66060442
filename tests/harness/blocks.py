"""A model of three pre-norm layers with a gated MLP, run as one chain on its share of a sequence, and on all of it by itself."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ds_sp_overlap.chain.block_layer import BlockLayer
from ds_sp_overlap.chain.chain import Chain
from tests.harness import layers, reference
from tests.harness.layers import Shape

LAYERS = 3


@dataclass(frozen=True)
class Blocks(Shape):
    chunks: int = 2
    norms: bool = False  # of q and k, per head
    recompute: str = "none"


class MLP(nn.Module):
    def __init__(self, width, bias, dtype):
        super().__init__()
        linear = functools.partial(nn.Linear, bias=bias, dtype=dtype)
        self.gate, self.up, self.down = linear(width, 2 * width), linear(width, 2 * width), linear(2 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def norm(width, dtype):
    made = nn.RMSNorm(width, eps=1e-6, dtype=dtype)
    nn.init.normal_(made.weight, 1.0, 0.3)
    return made


class Layer(nn.Module):
    """``run`` is what it does: its own arithmetic on the whole sequence, or what a test puts in its place."""

    def __init__(self, shape, seed):
        super().__init__()
        self.shape = shape
        self.attention = layers.projections(shape, seed)
        if shape.norms:
            self.attention.update({"q_norm": norm(shape.head_dim, shape.dtype), "k_norm": norm(shape.head_dim, shape.dtype)})
        self.norm_in, self.norm_mid = norm(shape.width, shape.dtype), norm(shape.width, shape.dtype)
        self.mlp = MLP(shape.width, shape.bias, shape.dtype)
        self.run = None

    def forward(self, h):
        if self.run is not None:
            return self.run(h)
        r = h + self.attend(self.norm_in(h))
        return r + self.mlp(self.norm_mid(r))

    def attend(self, x):
        """Attention on the whole sequence, [b, s, m]."""
        at, dim = self.attention, self.shape.head_dim
        if self.shape.fused:
            q, k, v = at["qkv_proj"](x).split([n * dim for n in (self.shape.heads, *[self.shape.kv_heads] * 2)], -1)
        else:
            q, k, v = (at[f"{kind}_proj"](x) for kind in "qkv")
        q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
        if self.shape.norms:
            q, k = at["q_norm"](q), at["k_norm"](k)
        if self.shape.rope:
            tables = reference.rope_tables(torch.arange(x.shape[1]), dim, self.shape.dtype)
            q, k = reference.rope(q, *tables), reference.rope(k, *tables)
        return at["o_proj"](reference.attention(q, k, v).flatten(2))


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(shape, seed) for seed in range(LAYERS))
        self.chain = lambda: None  # called where a forward begins

    def forward(self, h):
        self.chain()
        for layer in self.layers:
            h = layer(h)
        return h


def block_layers(model, shape, group, transport=None):
    return [
        BlockLayer(layers.block(shape, layer.attention, group, transport), layer.norm_in, layer.norm_mid, layer.mlp)
        for layer in model.layers
    ]


def positions(shape, rank):
    if not shape.rope:
        return None
    start = sum(shape.lengths[:rank])
    return reference.rope_tables(torch.arange(start, start + shape.lengths[rank]), shape.head_dim, shape.dtype)


def enchain(model, shape, rank, group, transport=None, successors=None):
    """Have the model's layers run as one chain, each the successor of the one before; returns a list that has the last chain."""
    blocks, chains, tables = block_layers(model, shape, group, transport), [None], positions(shape, rank)
    following = (
        {layer: after for layer, after in zip(model.layers, [*blocks[1:], None])} if successors is None else successors(blocks)
    )
    lengths = shape.lengths if len(set(shape.lengths)) > 1 else None

    def begin():
        chains[0] = Chain(shape.chunks)

    def run(layer, block, h):
        if chains[0] is None:
            begin()
        return chains[0].run(
            block, following[layer], h, position_embeddings=tables, sequence_lengths=lengths, recompute=shape.recompute
        )

    model.chain = begin
    for layer, block in zip(model.layers, blocks):
        layer.run = functools.partial(run, layer, block)
    return chains


def backward(model, x, dy):
    y = model(x)
    y.backward(dy)
    return {"output": y, "dx": x.grad}


def faults(rank, shape, use=backward, change=None, transport=None, tolerance=1e-12, successors=None):
    """What the chain computes on this rank that the model on the whole sequence does not: what ``use`` returns, by name, and all
    weights' gradients, summed over the ranks.

    fp64 gives up to 3e-14 here; one wrong token, head or factor gives more than 1e-3.
    """
    mine, whole = Model(shape), Model(shape)
    for model in (mine, whole) if change else ():
        change(model)
    x, dy = layers.whole_inputs(shape)
    expected = use(whole, x.clone().requires_grad_(), dy)
    enchain(mine, shape, rank, torch.distributed.group.WORLD, transport, successors)
    local_x, local_dy = (layers.my_slice(shape, rank, t) for t in (x, dy))
    with torch.no_grad():
        mine(local_x)  # nothing is started ahead of a layer that was never called
    got = use(mine, local_x.requires_grad_(), local_dy)
    pairs = {}
    for name, tensor in expected.items():
        if tensor is None:
            pairs[name] = got[name], None
        else:
            pairs[name] = got[name].detach(), layers.my_slice(shape, rank, tensor.detach())
    for name, parameter in mine.named_parameters():
        total = None if parameter.grad is None else parameter.grad.clone()
        if total is not None:
            torch.distributed.all_reduce(total)
        pairs["d " + name] = total, whole.get_parameter(name).grad
    assert whole.layers[0].mlp.gate.weight.grad is None or whole.layers[0].mlp.gate.weight.grad.abs().max() > 1e-3
    return layers.faults(tolerance, **{name.replace(".", " "): pair for name, pair in pairs.items()})


def faults_of_all(rank, shapes, *args, **kwargs):
    return [f"{shape}: {fault}" for shape in shapes for fault in faults(rank, shape, *args, **kwargs)]
